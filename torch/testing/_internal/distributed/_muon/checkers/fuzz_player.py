"""Plays a plan of the property-based tests on one rank, next to one process with whole matrices.

After each event, parameters and momentum must equal those of the one process.
"""

from __future__ import annotations

import functools
import re
import traceback
import warnings
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim._muon_engine import plan as engine_plan
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.checkers.fuzz_matrices import (
    control_group,
    device_mesh,
    renew_groups,
    Share,
)
from torch.testing._internal.distributed._muon.checkers.fuzz_plans import (
    Matrix,
    OTHER,
    Plan,
    STEP,
)
from torch.testing._internal.distributed._muon.checkers.fuzz_training import Training
from torch.testing._internal.distributed._muon.common_muon import local


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Player:
    """An action of a plan is the name of a method, and its arguments."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.training: Training
        # Whether some momentum starts at zero in this event.
        self.restarts = False

    def run(self) -> list[str]:
        """The problems of the first event that has some, on all ranks; none if all events are right."""
        limits = dict(self.plan.limits)
        is_late = limits.pop("late", None) == self.rank
        with (
            mock.patch.multiple(engine_plan, **limits),
            warnings.catch_warnings(record=True) as self.warned,
        ):
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", module=r"torch\.optim\._muon")
            self.make_meshes()
            self.training = Training(self.plan, self.rank, is_late)
            for event in self.events():
                problems = self.play(event)
                if problems:
                    return problems
        return []

    def make_meshes(self) -> None:
        """All ranks make all meshes."""
        matrices = list(self.plan.matrices)
        for added, _ in self.plan.actions_of("add"):
            matrices += added
        meshes = [self.plan.config.mesh]
        meshes += [matrix.mesh for matrix in matrices]
        meshes += [mesh for _, mesh, *_ in self.plan.actions_of("replace")]
        for mesh in dict.fromkeys(meshes):
            if mesh is not None:
                device_mesh(mesh)

    def events(self) -> Iterator[Callable[[], None]]:
        yield self.training.build
        for name, *arguments in self.plan.actions:
            action = getattr(self, name)
            yield functools.partial(action, *arguments)

    def play(self, event: Callable[[], None]) -> list[str]:
        """Problems of an event, on all ranks if there is one on any of them."""
        problems: list[str] = []
        self.restarts = False
        if self.training.held:
            try:
                event()
                problems += self.wrong_warnings()
                problems += self.training.problems()
            except Exception:
                problems.append(traceback.format_exc())
        self.warned.clear()
        count = torch.tensor(len(problems))
        dist.all_reduce(count, group=control_group())
        if not count:
            return []
        by_rank = common_muon.everyone(problems, control_group())
        renew_groups()
        found = []
        for rank, texts in enumerate(by_rank):
            found += [f"{event}, rank {rank}: {text}" for text in texts]
        return found

    def wrong_warnings(self) -> list[str]:
        """The engine's warnings for which the plan is no reason."""
        present = [held.matrix for held in self.training.order()]
        has_dtensors = any(matrix.mesh for matrix in present)
        reasons = {
            "starts at zero": self.restarts,
            "has had a gradient": self.training.idle_steps >= 3,
            "placements count": self.plan.config.mesh is not None and has_dtensors,
        }
        expected = [words for words, is_reason in reasons.items() if is_reason]
        found = []
        for warning in self.warned:
            text = str(warning.message)
            if not any(words in text for words in expected):
                found.append(text)
        return found

    # The actions.

    def step(self, gradients: Any = STEP[1]) -> None:
        self.training.set_gradients(gradients)
        self.training.step()

    def mismatch(self, kind: str, number: int, culprit: int) -> None:
        """The ranks that share a matrix, and those that share others with these, learn that ``culprit`` differs.
        Nothing moves, and the same step works afterwards.

        It has no gradient, one that does not fit, or another value of the option ``kind``.
        """
        training = self.training
        matrix = training.matrices[number]
        hearing = self.plan.hear(matrix, culprit, training.matrices)
        if self.rank not in hearing or not self.is_noticed(matrix, culprit):
            self.step()
            return
        training.set_gradients(())
        mend = None
        if self.rank == culprit:
            mend = self.spoil(kind, number)
        try:
            training.optimizer.step()
        except RuntimeError as error:
            if not re.search(self.told(kind, number, culprit), str(error)):
                raise
        else:
            raise AssertionError("no error")
        problems = training.problems()
        if problems:
            raise AssertionError(f"something moved: {problems}")
        if mend is not None:
            mend()
        training.step()

    def is_noticed(self, matrix: Matrix, culprit: int) -> bool:
        """Whether other ranks can know of a gradient that ``culprit`` lacks."""
        if matrix.frozen:
            return False
        own = Share(self.plan, matrix, culprit).holds_of_gradients()
        others = set(self.plan.sharing(matrix, culprit)) - {culprit}
        for rank in others:
            its = Share(self.plan, matrix, rank).holds_of_gradients()
            # A shard without elements needs no gradient, and a matrix of one rank has no other opinion.
            for holds_here, holds_there in zip(own, its):
                if holds_here and holds_there:
                    return True
        return False

    def spoil(self, kind: str, number: int) -> Callable[[], None]:
        """Gives this rank the mismatch ``kind``. Returns what mends it."""
        training = self.training
        held = training.held[number]
        if kind in OTHER:
            options = training.optimizer.param_groups[training.group_of(held)]
            own = {key: options[key] for key in OTHER}
            other = OTHER[kind]
            options[kind] = other if own[kind] != other else "gram"
            return functools.partial(options.update, own)
        gradient = held.param.grad
        if kind == "none":
            held.param.grad = None
        elif kind == "misshapen" and held.matrix.mesh is not None:
            # torch compares the shapes of whole tensors only, so a plain one cannot have such a gradient.
            rows, *others = local(held.param).shape
            longer = torch.ones(rows + 1, *others, dtype=held.grad_dtype)
            placements = held.matrix.placements
            held.param.grad = held.wrap(longer, held.matrix.shape, placements)
        else:
            ones = torch.ones(held.param.shape, dtype=held.grad_dtype)
            held.param._grad = ones.to_sparse()
        return functools.partial(setattr, held.param, "grad", gradient)

    def told(self, kind: str, number: int, culprit: int) -> str:
        """The pattern of this rank's error."""
        held = self.training.held.get(number)
        elsewhere = "Their error says how"
        if held is None or culprit not in held.sharing:
            # An option differs for all matrices of a group.
            return f"hyperparameters|{elsewhere}" if kind in OTHER else elsewhere
        if kind in OTHER:
            # It may differ for more matrices than are listed.
            return "hyperparameters"
        # A rank names its own parameter, and the others the expert.
        is_own = kind != "none" and self.rank == culprit
        where = "expert"
        if is_own or not held.matrix.expert:
            index = self.training.order().index(held)
            where = rf"parameter {index}\b"
        if is_own:
            text = "sparse|here has shape"
        elif kind == "none":
            text = "some have none"
        else:
            text = "cannot use"
        return f"(?=.*({text})).*{where}"

    def freeze(self, number: int, frozen: bool) -> None:
        self.training.change(number, frozen=frozen)
        held = self.training.held.get(number)
        if held is not None:
            held.param.requires_grad_(not frozen)
            held.param.grad = held.single.grad = None

    def reverse(self, number: int) -> None:
        training = self.training
        training.groups[number].reverse()
        for optimizer in (training.single, training.optimizer):
            group = optimizer.param_groups[number]
            group["params"].reverse()
            if "param_names" in group:
                group["param_names"].reverse()
        self.step()

    def rest(self, number: int) -> None:
        """A parameter leaves its group for a step, and keeps its momentum."""
        training = self.training
        held = training.held.get(number)
        if held is None:
            # A later group may be of all ranks, which must be in the same step then.
            self.step()
            self.step()
            return
        number = training.group_of(held)
        position = training.groups[number].index(held)
        lists = [training.groups[number]]
        for optimizer in (training.single, training.optimizer):
            group = optimizer.param_groups[number]
            lists += [group[key] for key in ("params", "param_names") if key in group]
        gone = [entries.pop(position) for entries in lists]
        saved = training.optimizer.state_dict()["state"]
        if len(saved) > len(training.order()):
            raise AssertionError(f"the momentum of another is saved: {saved.keys()}")
        self.step()
        for entries, entry in zip(lists, gone, strict=True):
            entries.insert(position, entry)
        self.step()

    def change_options(self, number: int, options: Any) -> None:
        for optimizer in (self.training.single, self.training.optimizer):
            optimizer.param_groups[number].update(options)

    def add(self, matrices: tuple[Matrix, ...], options: Any) -> None:
        training = self.training
        number = len(training.groups)
        new = training.hold(matrices)
        training.groups.append(new)
        for optimizer, which, own in (
            (training.optimizer, "param", {}),
            (training.single, "single", {"foreach": False}),
        ):
            group = {**training.options_of(number), **own}
            group |= training.params_of(new, which)
            if new or self.plan.config.mesh is not None:
                optimizer.add_param_group(group)
            else:
                # A rank that holds none of them makes no call, but counts groups in the same way.
                optimizer.param_groups.append({**optimizer.param_groups[0], **group})

    def reload(self, into: str, placements: Any = ()) -> None:
        """The state into the "same" optimizer, into a "new" one, or the "whole" matrices of one process.

        ``placements`` are those that the momentum of a matrix on some mesh has in the state.
        """
        training = self.training
        state = training.optimizer.state_dict()
        whole = training.single.state_dict()["state"]
        moved = dict(placements)
        for index, held in enumerate(training.order()):
            other = moved.get(held.number)
            if held.matrix.mesh is None or index not in whole:
                continue
            if into != "whole" and other is None:
                continue
            held.is_new = True
            momentum = whole[index]["momentum_buffer"].clone()
            if into != "whole":
                piece = held.piece(momentum, other)
                momentum = held.wrap(piece, momentum.shape, other)
            state["state"][index] = {"momentum_buffer": momentum}
        if into == "new":
            training.build_optimizer()
        self.load(state)

    def load(self, state: dict[str, Any]) -> None:
        """Loads ``state`` into the optimizer."""
        training = self.training
        training.optimizer.load_state_dict(state)
        is_rounded = False
        for held in training.order():
            if held.grad_dtype != held.dtype:
                held.is_new = is_rounded = True
        if is_rounded:
            # torch rounds momentum to the dtype of the parameter, in one process as well.
            training.single.load_state_dict(training.single.state_dict())

    def replace(
        self,
        number: int,
        mesh: Any,
        placements: Any,
        fresh: bool,
        renamed: bool,
        saved: str | None,
    ) -> None:
        """Another parameter in the place of one, otherwise placed, on some mesh of the same ranks. Before the next
        step, its state may be ``saved``, and loaded.
        """
        training = self.training
        training.change(number, mesh=mesh, placements=placements)
        held = training.held.get(number)
        if held is None:
            self.step()
            return
        former, former_single = held.param, held.single
        values = former_single.detach().clone()
        if fresh:
            held.seed += 500
            values = held.values(0)
        held.set_params(values)
        group = training.group_of(held)
        position = training.groups[group].index(held)
        training.single.param_groups[group]["params"][position] = held.single
        training.optimizer.param_groups[group]["params"][position] = held.param
        # Without names, a parameter of the same placement is another layer, and starts at zero.
        inherits = common_muon.placed(held.param) != common_muon.placed(former)
        if self.plan.named:
            inherits = not renamed
            if renamed:
                names = training.optimizer.param_groups[group]["param_names"]
                names[position] = f"{names[position]} renamed"
        momentum = training.optimizer.state.get(former, {}).get("momentum_buffer")
        self.restarts = momentum is not None and not inherits
        state = training.single.state.pop(former_single, None)
        if state is not None and inherits:
            training.single.state[held.single] = state
            # A checkpoint has the momentum as it was placed before.
            held.is_new = saved is not None or not held.param.requires_grad
        if saved is not None:
            self.check_saved(
                held, momentum if inherits else None, saved == "and loaded"
            )
        self.step()

    def check_saved(self, held: Any, momentum: Any, is_loaded: bool) -> None:
        """A checkpoint has ``momentum`` for the parameter that has replaced another one."""
        kept = self.training.optimizer.state_dict()
        index = self.training.order().index(held)
        entry = kept["state"].get(index, {})
        if entry.get("momentum_buffer") is not momentum:
            raise AssertionError(f"saved {entry} instead of {momentum}")
        if is_loaded:
            self.load(kept)
