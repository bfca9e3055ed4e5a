"""Plays a plan of the property-based tests on one rank, next to one process with whole matrices.

After each event, parameters and momentum must equal those of the one process.
"""

from __future__ import annotations

import copy
import functools
import re
import traceback
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim._muon_engine import plan as engine_plan
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.checkers.fuzz_plans import (
    device_mesh,
    Event,
    has,
    Matrix,
    Plan,
    TIMEOUT,
    WORLD,
)
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_config import NewtonSchulzCalls
from torch.testing._internal.distributed._muon.common_muon import (
    Cut,
    local,
    Spec,
    Strategy,
    Twins,
)
from torch.testing._internal.distributed._muon.common_parity import too_much


EXPECTED_WARNINGS = "starts at zero|has had a gradient|placements count"


@functools.cache
def control_group() -> dist.ProcessGroup:
    """The one over which ranks tell each other of problems. It outlives broken ones."""
    return dist.new_group(timeout=3 * TIMEOUT)


def set_local(tensor: torch.Tensor, piece: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        tensor._local_tensor = piece
    else:
        tensor.data = piece


def turn(tensor: torch.Tensor) -> None:
    """Gives this rank's part of ``tensor`` the strides of a transpose."""
    set_local(tensor, local(tensor.detach()).mT.contiguous().mT)


class DrawnTwins(Twins):
    """The matrices of a plan, by number, that this rank holds."""

    def __init__(self, plan: Plan, held: dict[int, Matrix]) -> None:
        self.plan, self.rank = plan, dist.get_rank()
        # Groups are in one order on all ranks, whichever of their matrices a rank holds.
        in_order = [each.options for each in (*plan.matrices, *held.values())]
        self.numbers = sorted(held, key=lambda n: in_order.index(held[n].options))
        self.matrices = [held[number] for number in self.numbers]
        groups: list[tuple[list[int], dict[str, Any]]] = []
        for index, matrix in enumerate(self.matrices):
            options = dict(matrix.options)
            if not groups or groups[-1][1] != options:
                groups.append(([], options))
            groups[-1][0].append(index)
        self.strategy = None
        if plan.config.mesh is not None:
            self.strategy = Strategy(device_mesh(plan.config.mesh), *plan.config.kinds)
        super().__init__(
            [self.spec_of(matrix) for matrix in self.matrices],
            self.make_config(),
            groups,
            seeds=list(map(self.seed_of, self.numbers, self.matrices)),
            grad_dtype=plan.grad_dtype,
            is_named=plan.is_named,
            allow_batched_matrices=plan.takes_stacks,
        )

    def new_param(self, whole: torch.Tensor, spec: Spec | Cut) -> torch.nn.Parameter:
        param = super().new_param(whole, spec)
        if self.matrices[len(self.params)].is_turned:
            turn(param)
        return param

    def spec_of(self, matrix: Matrix) -> Spec | Cut:
        if matrix.mesh is not None:
            mesh, gradients = device_mesh(matrix.mesh), matrix.gradients
            return Spec(matrix.shape, mesh, matrix.placements, matrix.dtype, gradients)
        cut = Cut(matrix.shape)
        if self.strategy is not None:
            cut = self.strategy.cut(matrix.shape, matrix.tp_dim, matrix.how)
        return cut._replace(dtype=matrix.dtype)

    def place_along(self, kind: str) -> int:
        return self.strategy.group(kind).rank()

    def seed_of(self, number: int, matrix: Matrix) -> int:
        if matrix.is_expert:
            return number + 100 * (1 + self.place_along("ep"))
        is_own = matrix.mesh is None and self.strategy is None
        return number + 1000 * self.rank if is_own else number

    def make_config(self) -> Any:
        config = self.plan.config
        if self.strategy is None:
            made = create_dtensor_config(config.is_async, config.prefetch)
        else:
            options: dict[str, Any] = {"tp_dim_per_param": {}, "expert_assignments": {}}
            for index, matrix in enumerate(self.matrices):
                if matrix.tp_dim is not None:
                    options["tp_dim_per_param"][index] = matrix.tp_dim
                if matrix.is_expert:
                    options["expert_assignments"][index] = self.place_along("ep")
            if "pp" in config.kinds:
                options["pp_stage_id"] = self.place_along("pp")
            options["async_gpu_parallelism"] = config.is_async
            made = self.strategy.config(prefetch_count=config.prefetch, **options)
        if config.functions == "wrapped":
            common_muon.wrap_functions(made, "gather_fn", "redistribute_fn")
        return made

    def set_gradients(self, missing: Any = ()) -> None:
        frozen = [i for i, p in enumerate(self.params) if not p.requires_grad]
        super().set_gradients([*missing, *frozen])
        for index, (number, spec) in enumerate(zip(self.numbers, self.specs)):
            param, single = self.params[index], self.singles[index]
            kind = (number + self.steps) % 4
            if param.grad is None or spec.of_gradient() != spec:
                continue
            if kind == 0 and not local(param).numel() and self.rank % 2:
                # Ranks with an empty shard may have none.
                param.grad = None
            elif kind == 1 or self.matrices[index].is_turned:
                turn(param.grad)
            elif kind == 2:
                # The sum of a layer's results has such a gradient.
                piece = local(param.grad)
                set_local(param.grad, piece.new_tensor(0.5).expand(piece.shape))
                single.grad = torch.full_like(single.grad, 0.5)

    def step(self, missing: Any = ()) -> None:
        self.set_gradients(missing)
        before = [param._version for param in self.params]
        with Recorder() as recorder, NewtonSchulzCalls() as calls:
            self.optimizer.step()
        problems = list(recorder.problems)
        for param, version in zip(self.params, before):
            if param.grad is not None and local(param).numel():
                if param._version == version:
                    problems.append("autograd does not learn that a parameter changed")
        if self.plan.config.functions != "wrapped" and all(
            single.grad is not None for single in self.singles
        ):
            owners = [*self.optimizer.matrix_owners.values()]
            if len(calls.shapes) != owners.count(self.rank):
                problems.append(f"{calls.shapes} are orthogonalized on this rank")
            if len(owners) == len(self.params) and not self.plan.takes_stacks:
                problems += too_much(self, recorder)
        if problems:
            raise AssertionError(f"{problems}")
        with NewtonSchulzCalls():
            self.single.step()

    # Between steps:

    def replace(self, index: int, matrix: Matrix) -> None:
        """The same values in another parameter, as ``matrix`` says, as if a framework had placed it."""
        former, single = self.params[index], self.singles[index]
        self.matrices[index], self.specs[index] = matrix, self.spec_of(matrix)
        param = super().new_param(single.detach(), self.specs[index])
        self.params[index] = param
        if matrix.is_turned:
            turn(param)
        if self.grad_dtype is not None:
            param.grad_dtype = self.grad_dtype
        for group in self.optimizer.param_groups:
            for place, other in enumerate(group["params"]):
                if other is former:
                    group["params"][place] = param
        is_placed_alike = common_muon.placed(param) == common_muon.placed(former)
        if is_placed_alike and not self.plan.is_named:
            # It is another layer.
            self.single.state.pop(single, None)

    def add(self, more: DrawnTwins) -> None:
        for name in ("numbers", "matrices", "specs", "params", "singles", "seeds"):
            getattr(self, name).extend(getattr(more, name))
        self.starts.update(more.starts)
        for own, its in (
            (self.single, more.single),
            (self.optimizer, more.optimizer),
        ):
            for group in its.param_groups:
                own.add_param_group(group)

    def reload(self, into: str) -> None:
        """The state into the "same" optimizer or into a "new" one; or the "whole" matrices of one process."""
        state = self.optimizer.state_dict()
        if into == "whole":
            for index, its_state in self.single.state_dict()["state"].items():
                is_plain = self.matrices[index].mesh is None
                if not is_plain and self.params[index].requires_grad:
                    state["state"][index] = copy.deepcopy(its_state)
        if into == "new":
            self.optimizer = Muon(
                [dict(group) for group in self.optimizer.param_groups],
                distributed_config=self.make_config(),
                allow_batched_matrices=self.plan.takes_stacks,
            )
        self.optimizer.load_state_dict(state)
        # torch rounds momentum to the dtype of the parameter, in one process as well.
        self.single.load_state_dict(self.single.state_dict())


class Player:
    """An event of a plan is the name of a method. A step follows."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.matrices: list[Matrix] = []
        # None if this rank holds no matrix.
        self.twins: DrawnTwins | None = None

    def run(self) -> list[str]:
        """The problems of the first event that has some, on all ranks; none if all events are right."""
        limits = dict(self.plan.limits)
        with mock.patch.dict(vars(engine_plan), limits):
            control_group()
            for event in (Event("add", self.plan.matrices), *self.plan.events):
                problems = self.play(event)
                if problems:
                    return problems
        return []

    def play(self, event: Event) -> list[str]:
        """Problems of an event, on all ranks if there is one on any of them."""
        problems: list[str] = []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", module=r"torch\.optim\._muon")
            try:
                getattr(self, event.action)(event)
                if self.twins is not None:
                    numbers = enumerate(self.twins.numbers)
                    self.twins.step([i for i, n in numbers if has(event.missing, n)])
                    problems += self.twins.problems()
            except Exception:
                problems.append(traceback.format_exc())
        texts = [str(warning.message) for warning in warned]
        problems += [text for text in texts if not re.search(EXPECTED_WARNINGS, text)]
        count = torch.tensor(len(problems))
        dist.all_reduce(count, group=control_group())
        if not count:
            return []
        by_rank = common_muon.everyone(problems, control_group())
        found = []
        for rank, texts in enumerate(by_rank):
            found += [f"{event}, rank {rank}: {text}" for text in texts]
        return found

    def chosen(self, event: Event) -> list[int]:
        """The matrices that an event changes. Every rank with matrices changes some: if one of them did not, all matrices
        change.
        """
        numbers = list(range(len(self.matrices)))
        some = [number for number in numbers if has(event.changed, number)]
        return some if self.holders(some) == self.holders(numbers) else numbers

    def holders(self, numbers: Any) -> set[int]:
        """The ranks that hold some of these."""
        found = set()
        for rank in range(WORLD):
            if any(self.plan.holds(self.matrices[n], rank) for n in numbers):
                found.add(rank)
        return found

    def places(self, event: Event) -> list[tuple[int, int]]:
        """The index on this rank, and the number, of each matrix that an event changes."""
        held = [] if self.twins is None else self.twins.numbers
        return [(held.index(n), n) for n in self.chosen(event) if n in held]

    # The events.

    def train(self, event: Event) -> None:
        """Nothing else happens."""

    def freeze(self, event: Event) -> None:
        for index, _ in self.places(event):
            param = self.twins.params[index]
            param.requires_grad_(not param.requires_grad)

    def replace(self, event: Event) -> None:
        """Parameters in the places of others, on a mesh of the same ranks."""
        mesh, placements = event.argument
        for number in self.chosen(event):
            matrix = self.matrices[number]
            if matrix.mesh is not None and matrix.mesh.ascends:
                own = matrix.mesh
                if set(mesh.ranks) == set(own.ranks):
                    own = mesh
                of_mesh = placements[: len(own.sizes)]
                matrix = matrix._replace(mesh=own, placements=of_mesh, gradients=None)
                self.matrices[number] = matrix
        for index, number in self.places(event):
            self.twins.replace(index, self.matrices[number])

    def change_options(self, event: Event) -> None:
        if self.twins is not None:
            for optimizer in (self.twins.single, self.twins.optimizer):
                for group in optimizer.param_groups:
                    group.update(event.argument)

    def add(self, event: Event) -> None:
        """The first matrices, or a group of more of them if the ranks that hold them have the optimizer."""
        before = self.holders(range(len(self.matrices)))
        first = len(self.matrices)
        self.matrices += event.argument
        new = range(first, len(self.matrices))
        if first and self.holders(new) != before:
            del self.matrices[first:]
            return
        held = {}
        for number in new:
            if self.plan.holds(self.matrices[number], self.rank):
                held[number] = self.matrices[number]
        if held:
            more = DrawnTwins(self.plan, held)
            if self.twins is None:
                self.twins = more
            else:
                self.twins.add(more)

    def reload(self, event: Event) -> None:
        if self.twins is not None:
            self.twins.reload(event.argument)
