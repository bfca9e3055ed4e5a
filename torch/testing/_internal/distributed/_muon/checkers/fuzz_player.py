"""Plays a plan of the property-based tests on one rank, next to one process with whole matrices.

After each event, parameters and momentum must equal those of the one process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
import traceback
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim import Muon
from torch.optim._muon_engine.schedule import buckets, packs
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.distributed._muon import common_config, common_muon
from torch.testing._internal.distributed._muon.checkers.fuzz_matrices import (
    control_group,
    device_mesh,
    Held,
    renew_groups,
    Share,
)
from torch.testing._internal.distributed._muon.checkers.fuzz_plans import (
    Matrix,
    OTHER,
    Plan,
    STEP,
)
from torch.testing._internal.distributed._muon.checkers.recorder import Call, Recorder
from torch.testing._internal.distributed._muon.common_muon import local


def received_bytes(call: Call, rank: int) -> int:
    """The bytes of an exchange that ``rank`` received from other ranks."""
    if call.name == "all_to_all_single":
        _, sizes = call.splits
        return (sum(sizes) - sizes[call.comm.ranks.index(rank)]) * call.itemsize
    return call.nbytes * (call.name == "broadcast" and call.source != rank)


class Late(Recorder):
    """A rank behind a slow wire comes to each collective late."""

    def launched(self, call: Any) -> None:
        time.sleep(0.003)
        super().launched(call)


class Player:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.step_number = self.idle = 0
        # By number in the plan, and in the optimizer's order, group by group.
        self.held: dict[int, Held] = {}
        # What the ranks hold after the events so far. Each rank knows the matrices of all.
        self.matrices: list[Matrix] = []
        self.groups: list[list[Held]] = []

    def run(self) -> list[str]:
        limits = {"MAX_PEERS": 512, **dict(self.plan.limits)}
        self.is_late = limits.pop("late", None) == self.rank
        patches = [
            mock.patch.object(packs, "RELAY_BYTES", limits.pop("RELAY_BYTES", 2**20)),
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(limits.pop("node", 4))),
            mock.patch.multiple(buckets, **limits),
        ]
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            self.said = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", module=r"torch\.optim\._muon")
            for event in self.events():
                problems = self.play(event)
                if problems:
                    return problems
        return []

    def events(self):
        # All ranks make all meshes.
        matrices = list(self.plan.matrices)
        for new, _ in self.plan.actions_of("add"):
            matrices += new
        meshes = [self.plan.config.mesh, *(matrix.mesh for matrix in matrices)]
        meshes += [mesh for _, mesh, *_ in self.plan.actions_of("replace")]
        for mesh in dict.fromkeys(meshes):
            if mesh is not None:
                device_mesh(mesh)
        self.hold(self.plan.matrices)
        self.groups = [
            [h for h in self.held.values() if h.matrix.group == number]
            for number in range(len(self.plan.options))
        ]
        yield self.build
        for name, *given in self.plan.actions:
            yield functools.partial(getattr(self, name), *given)

    def play(self, event) -> list[str]:
        """Problems of an event, on all ranks if there is one on any of them."""
        problems: list[str] = []
        self.restarts = False
        if self.held:
            try:
                event()
                texts = [str(warning.message) for warning in self.said]
                problems += [text for text in texts if not self.may_warn(text)]
                problems += self.problems()
            except Exception:
                problems.append(traceback.format_exc())
        self.said.clear()
        told = torch.tensor(len(problems))
        dist.all_reduce(told, group=control_group())
        if not told:
            return []
        found = list(enumerate(common_muon.everyone(problems, control_group())))
        renew_groups()
        return [f"{event}, rank {r}: {text}" for r, texts in found for text in texts]

    def problems(self) -> list[str]:
        """How the parameters and momentum differ from those of one process."""
        order, both = self.order(), (self.optimizer, self.single)
        return [text for held in order for text in held.problems(*both)]

    def may_warn(self, text: str) -> bool:
        """Whether the plan is a reason for a warning of the engine's."""
        present = [held.matrix for held in self.order()]
        is_both = self.plan.config.mesh is not None and any(m.mesh for m in present)
        reasons = {
            "starts at zero": self.restarts,
            "has had a gradient": self.idle >= 3,
            "placements count": is_both,
        }
        return any(part in text and reason for part, reason in reasons.items())

    def hold(self, matrices) -> list[Held]:
        first = len(self.matrices)
        self.matrices += matrices
        new = {
            number: Held(self.plan, matrix, number, self.rank)
            for number, matrix in enumerate(matrices, first)
            if self.plan.sharing(matrix, self.rank)
        }
        self.held.update(new)
        return list(new.values())

    def order(self) -> list[Held]:
        return [held for group in self.groups for held in group]

    def build(self):
        self.single = self.muon("single", {"foreach": False})
        self.build_optimizer()

    def build_optimizer(self):
        self.optimizer = self.muon("param", {}, distributed_config=self.new_config())

    def muon(self, which, own, **options):
        groups = [
            {**self.params_of(group, which), **self.options_of(number), **own}
            for number, group in enumerate(self.groups)
        ]
        return Muon(groups, allow_batched_matrices=self.plan.batched, **options)

    def params_of(self, group, which):
        params = [getattr(held, which) for held in group]
        if not self.plan.named:
            return {"params": params}
        # torch takes the names of all groups, also of those without parameters.
        pairs = [(f"w{held.number}", p) for held, p in zip(group, params)]
        return {"params": pairs} if group else {"params": [], "param_names": []}

    def options_of(self, number: int) -> dict[str, Any]:
        added = [options for _, options in self.plan.actions_of("add")]
        options = dict([*self.plan.options, *added][number])
        if isinstance(options.get("lr"), tuple):
            options["lr"] = torch.tensor(*options["lr"])
        return options

    def new_config(self):
        config = self.plan.config
        if config.kind == "auto":
            return "auto"
        if config.kind == "dtensor":
            made = create_dtensor_config(config.asynchronous, config.prefetch)
        else:
            made = self.new_group_config()
        if config.functions == "assigned":
            made.assign_fn = self.assign
        elif config.functions == "wrapped":
            common_muon.wrap_functions(made, "gather_fn", "redistribute_fn")
        return made

    def new_group_config(self):
        config = self.plan.config
        mesh = device_mesh(config.mesh)
        groups = {
            f"{kind}_process_group": mesh.get_group(dim)
            for dim, kind in enumerate(config.kinds)
            if kind is not None
        }
        dims = {i: held.matrix.tp_dim for i, held in enumerate(self.order())}
        of_each = {i: dim for i, dim in dims.items() if dim is not None}
        experts = {i: held.expert for i, held in enumerate(self.order())}
        return create_auto_config(
            **groups,
            tp_dim_per_param=of_each if config.tp_dim is None else config.tp_dim,
            expert_assignments={i: e for i, e in experts.items() if e is not None},
            async_gpu_parallelism=config.asynchronous,
            prefetch_count=config.prefetch,
        )

    def assign(self, params, state):
        assignments: dict[int, list[int]] = {}
        for index, held in enumerate(self.order()):
            owner = held.sharing[held.number % len(held.sharing)]
            assignments.setdefault(owner, []).append(index)
        return assignments

    def set_gradients(self, gradients):
        self.step_number += 1
        kinds = dict(gradients)
        for held in self.order():
            held.set_gradient(self.step_number, kinds.get(held.number, "full"))
        is_idle = all(held.param.grad is None for held in self.order())
        self.idle = (self.idle + 1) * is_idle

    def step(self, gradients=STEP[1]):
        self.set_gradients(gradients)
        self.step_both()

    def step_both(self):
        """Both optimizers take a step with the gradients that are set."""
        before = list(self.versions())
        seen = Late() if self.is_late else Recorder()
        with seen, common_config.NewtonSchulzCalls() as calls:
            self.optimizer.step()
        problems = seen.problems + self.unexpected(seen, len(calls.shapes))
        for held, tensor, version in before:
            if (held.single.grad is not None) != (tensor._version > version):
                problems.append(f"{held.number} was written, or not, without a reason")
        if problems:
            raise AssertionError(f"{problems}")
        self.single.step()
        for held in self.order():
            held.steps += 1
            held.is_new = held.is_new and not held.param.requires_grad

    def versions(self):
        """The counters by which autograd learns of a step's writes, of tensors that have elements here."""
        for held in self.order():
            state = self.optimizer.state.get(held.param, {})
            # A checkpoint's momentum may have another placement, and makes room for a new tensor.
            kept = () if held.is_new else state.values()
            for tensor in (held.param, *kept):
                if local(tensor).numel():
                    yield held, tensor, tensor._version

    def unexpected(self, seen, count):
        """Matrices that this rank orthogonalizes and bytes that it receives, beyond the lower bound."""
        if self.plan.config.functions == "wrapped":
            return []
        owners, least, most, expected = self.optimizer.matrix_owners, 0, 0, 0
        for index, held in enumerate(self.order()):
            if not held.param.requires_grad:
                continue
            has_grad = held.single.grad is not None
            elements, knows = held.elements_here(), held.holds_of_gradients()
            for sub, here in enumerate(elements):
                owner, own = owners.get((index, sub)), int(here.sum())
                if owner == self.rank:
                    least += has_grad
                    # With an empty shard, it cannot know that a gradient is missing.
                    most += has_grad or not knows[sub * len(knows) // len(elements)]
                    # Each element once, and the update once to each holder; in bfloat16.
                    expected += 2 * (here.numel() - own)
                else:
                    expected += 2 * own
        found = []
        if not least <= count <= most:
            found.append(f"{count} matrices instead of {least} to {most}")
        # In two levels, others' bytes pass through this rank.
        if dict(self.plan.limits).get("MAX_PEERS", 512) == 512:
            received = sum(received_bytes(call, self.rank) for call in seen.calls)
            if received != expected:
                found.append(f"{received} bytes instead of {expected}")
        return found

    def group_of(self, held: Held) -> int:
        return next(i for i, group in enumerate(self.groups) if held in group)

    def mismatch(self, kind, number, culprit):
        """The ranks that share a matrix, and those that share others with these, learn that ``culprit`` differs.
        Nothing moves, and the same step works afterwards.

        It has no gradient, one that does not fit, or another value of the option ``kind``.
        """
        matrix = self.matrices[number]
        hearing = self.plan.hear(matrix, culprit, self.matrices)
        if self.rank not in hearing or not self.is_noticed(matrix, culprit):
            self.step()
            return
        self.set_gradients(())
        mend = (lambda: None) if self.rank != culprit else self.spoil(kind, number)
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if not re.search(self.told(kind, number, culprit), str(error)):
                raise
        else:
            raise AssertionError("no error")
        problems = self.problems()
        if problems:
            raise AssertionError(f"something moved: {problems}")
        mend()
        self.step_both()

    def is_noticed(self, matrix, culprit):
        """Whether other ranks can know of a gradient that ``culprit`` lacks."""
        if matrix.frozen:
            return False
        others = set(self.plan.sharing(matrix, culprit)) - {culprit}
        shares = [Share(self.plan, matrix, rank) for rank in (culprit, *others)]
        holds = [share.holds_of_gradients() for share in shares]
        # A shard without elements needs no gradient, and a matrix of one rank has no other opinion.
        return any(own and any(rest) for own, *rest in zip(*holds))

    def spoil(self, kind, number):
        """Gives this rank the mismatch ``kind``. Returns what mends it."""
        held = self.held[number]
        if kind in OTHER:
            options = self.optimizer.param_groups[self.group_of(held)]
            own = {key: options[key] for key in OTHER}
            options[kind] = OTHER[kind] if own[kind] != OTHER[kind] else "gram"
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

    def told(self, kind, number, culprit):
        """The pattern of this rank's error."""
        held, elsewhere = self.held.get(number), "Their error says how"
        if held is None or culprit not in held.sharing:
            # An option differs for all matrices of a group.
            return f"hyperparameters|{elsewhere}" if kind in OTHER else elsewhere
        if kind in OTHER:
            # It may differ for more matrices than are listed.
            return "hyperparameters"
        # A rank names its own parameter, and the others the expert.
        is_own = kind != "none" and self.rank == culprit
        index = self.order().index(held)
        is_expert = held.matrix.expert and not is_own
        where = "expert" if is_expert else rf"parameter {index}\b"
        text = "some have none" if kind == "none" else "cannot use"
        if is_own:
            text = "sparse|here has shape"
        return f"(?=.*({text})).*{where}"

    def change(self, number, **fields):
        """Notes what all ranks know of a matrix that this one may not hold."""
        self.matrices[number] = self.matrices[number]._replace(**fields)
        if number in self.held:
            self.held[number].matrix = self.matrices[number]

    def freeze(self, number, frozen):
        self.change(number, frozen=frozen)
        held = self.held.get(number)
        if held is not None:
            held.param.requires_grad_(not frozen)
            held.param.grad = held.single.grad = None

    def reverse(self, number):
        self.groups[number].reverse()
        for optimizer in (self.single, self.optimizer):
            for key in ("params", "param_names"):
                optimizer.param_groups[number].get(key, []).reverse()
        self.step()

    def rest(self, number):
        """A parameter leaves its group for a step, and keeps its momentum."""
        held = self.held.get(number)
        if held is None:
            # A later group may be of all ranks, which must be in the same step then.
            self.step()
            return self.step()
        number = self.group_of(held)
        at = self.groups[number].index(held)
        lists = [self.groups[number]]
        for optimizer in (self.single, self.optimizer):
            group = optimizer.param_groups[number]
            lists += [group[key] for key in ("params", "param_names") if key in group]
        gone = [each.pop(at) for each in lists]
        saved = self.optimizer.state_dict()["state"]
        if len(saved) > len(self.order()):
            raise AssertionError(f"the momentum of another is saved: {saved.keys()}")
        self.step()
        for each, one in zip(lists, gone):
            each.insert(at, one)
        self.step()

    def change_options(self, group, options):
        for optimizer in (self.single, self.optimizer):
            optimizer.param_groups[group].update(options)

    def add(self, matrices, options):
        number = len(self.groups)
        new = self.hold(matrices)
        self.groups.append(new)
        for optimizer, which, own in (
            (self.optimizer, "param", {}),
            (self.single, "single", {"foreach": False}),
        ):
            group = {**self.options_of(number), **own, **self.params_of(new, which)}
            if new or self.plan.config.mesh is not None:
                optimizer.add_param_group(group)
            else:
                # A rank that holds none of them makes no call, but counts groups in the same way.
                optimizer.param_groups.append({**optimizer.param_groups[0], **group})

    def reload(self, into, placements=None):
        """The state into the same optimizer, into a "new" one, or the "whole" matrices of one process.

        ``placements`` are those that the momentum of a matrix on some mesh has in the state.
        """
        state = self.optimizer.state_dict()
        whole = self.single.state_dict()["state"]
        for index, held in enumerate(self.order()):
            other = dict(placements or ()).get(held.number)
            if held.matrix.mesh is None or index not in whole:
                continue
            if into == "whole" or other is not None:
                held.is_new = True
                value = whole[index]["momentum_buffer"].clone()
                if into != "whole":
                    value = held.wrap(held.piece(value, other), value.shape, other)
                state["state"][index] = {"momentum_buffer": value}
        if into == "new":
            self.build_optimizer()
        self.load(state)

    def load(self, state):
        """Loads ``state`` into the optimizer."""
        self.optimizer.load_state_dict(state)
        of_other_dtype = [h for h in self.order() if h.grad_dtype != h.dtype]
        if of_other_dtype:
            # torch rounds momentum to the dtype of the parameter, in one process as well.
            self.single.load_state_dict(self.single.state_dict())
        for held in of_other_dtype:
            held.is_new = True

    def replace(self, number, mesh, placements, fresh, renamed, saved):
        """Another parameter in the place of one, otherwise placed, on some mesh of the same ranks. Before the next
        step, its state may be ``saved``, and loaded.
        """
        self.change(number, mesh=mesh, placements=placements)
        held = self.held.get(number)
        if held is None:
            return self.step()
        number = self.group_of(held)
        at = self.groups[number].index(held)
        old, former = held.single, held.param
        held.seed += 500 * fresh
        held.set_params(held.values(0) if fresh else old.detach().clone())
        self.single.param_groups[number]["params"][at] = held.single
        self.optimizer.param_groups[number]["params"][at] = held.param
        state = self.single.state.pop(old, None)
        # Without names, a parameter of the same placement is another layer, and starts at zero.
        inherits = common_muon.placed(held.param) != common_muon.placed(former)
        if self.plan.named:
            inherits = not renamed
            if renamed:
                names = self.optimizer.param_groups[number]["param_names"]
                names[at] = f"{names[at]} renamed"
        momentum = self.optimizer.state.get(former, {}).get("momentum_buffer")
        self.restarts = momentum is not None and not inherits
        if state is not None and inherits:
            self.single.state[held.single] = state
            # A checkpoint has the momentum as it was placed before.
            held.is_new = saved is not None or not held.param.requires_grad
        if saved is not None:
            kept = self.optimizer.state_dict()
            entry = kept["state"].get(self.order().index(held), {})
            expected = momentum if inherits else None
            if entry.get("momentum_buffer") is not expected:
                raise AssertionError(f"saved {entry} instead of {expected}")
            if saved == "and loaded":
                self.load(kept)
        self.step()
