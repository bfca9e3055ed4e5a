"""The two optimizers of a plan on one rank: the distributed one, and that of one process with whole matrices."""

from __future__ import annotations

import time
from typing import Any, TYPE_CHECKING

import torch
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.distributed._muon import common_config, common_muon
from torch.testing._internal.distributed._muon.checkers.fuzz_matrices import (
    device_mesh,
    HeldMatrix,
)
from torch.testing._internal.distributed._muon.checkers.recorder import Call, Recorder
from torch.testing._internal.distributed._muon.common_muon import local


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.testing._internal.distributed._muon.checkers.fuzz_plans import (
        Matrix,
        Plan,
    )


def received_bytes(call: Call, rank: int) -> int:
    """The bytes of an exchange that ``rank`` received from other ranks."""
    if call.name == "all_to_all_single":
        _, sizes = call.splits
        own = sizes[call.comm.ranks.index(rank)]
        return (sum(sizes) - own) * call.itemsize
    if call.name == "broadcast" and call.source != rank:
        return call.nbytes
    return 0


class Late(Recorder):
    """A rank behind a slow wire comes to each collective late."""

    def launched(self, call: Any, given: Any) -> None:
        time.sleep(0.003)
        super().launched(call, given)


class Training:
    """Trains the matrices of a plan that this rank holds, and their twins.

    Args:
        is_late: whether this rank comes late to each collective.
    """

    def __init__(self, plan: Plan, rank: int, is_late: bool) -> None:
        self.plan, self.rank, self.is_late = plan, rank, is_late
        self.step_number = 0
        # The steps since some matrix had a gradient.
        self.idle_steps = 0
        # By number in the plan, and in the optimizer's order, group by group.
        self.held: dict[int, HeldMatrix] = {}
        # What the ranks hold after the events so far. Each rank knows the matrices of all.
        self.matrices: list[Matrix] = []
        self.groups: list[list[HeldMatrix]] = []
        self.hold(plan.matrices)
        for number in range(len(plan.options)):
            group = [held for held in self.held.values() if held.matrix.group == number]
            self.groups.append(group)

    def hold(self, matrices: Sequence[Matrix]) -> list[HeldMatrix]:
        """Takes note of further matrices. Returns those that this rank holds."""
        first = len(self.matrices)
        self.matrices += matrices
        new = []
        for number, matrix in enumerate(matrices, first):
            if self.plan.sharing(matrix, self.rank):
                held = HeldMatrix(self.plan, matrix, number, self.rank)
                self.held[number] = held
                new.append(held)
        return new

    def order(self) -> list[HeldMatrix]:
        """The matrices as the optimizer counts them."""
        return [held for group in self.groups for held in group]

    def group_of(self, held: HeldMatrix) -> int:
        for number, group in enumerate(self.groups):
            if held in group:
                return number
        raise AssertionError(f"{held.number} is in no group")

    def change(self, number: int, **fields: Any) -> None:
        """Notes what all ranks know of a matrix that this one may not hold."""
        changed = self.matrices[number]._replace(**fields)
        self.matrices[number] = changed
        if number in self.held:
            self.held[number].matrix = changed

    def problems(self) -> list[str]:
        """How the parameters and momentum differ from those of one process."""
        found = []
        for held in self.order():
            found += held.problems(self.optimizer, self.single)
        return found

    def build(self) -> None:
        self.single = self.new_muon("single", {"foreach": False})
        self.build_optimizer()

    def build_optimizer(self) -> None:
        config = self.new_config()
        self.optimizer = self.new_muon("param", {}, distributed_config=config)

    def new_muon(self, which: str, own: dict[str, Any], **options: Any) -> Muon:
        """A Muon of all groups: of their parameters, "param", or of the twins, "single"."""
        groups = []
        for number, group in enumerate(self.groups):
            params = self.params_of(group, which)
            groups.append({**params, **self.options_of(number), **own})
        return Muon(groups, allow_batched_matrices=self.plan.batched, **options)

    def params_of(self, group: list[HeldMatrix], which: str) -> dict[str, Any]:
        params = [getattr(held, which) for held in group]
        if not self.plan.named:
            return {"params": params}
        # torch takes the names of all groups, also of those without parameters.
        if not group:
            return {"params": [], "param_names": []}
        names = [f"w{held.number}" for held in group]
        return {"params": list(zip(names, params, strict=True))}

    def options_of(self, number: int) -> dict[str, Any]:
        """The options of a group, which the plan has from the start or adds later."""
        of_groups = list(self.plan.options)
        for _, options in self.plan.actions_of("add"):
            of_groups.append(options)
        options = dict(of_groups[number])
        rate = options.get("lr")
        if isinstance(rate, tuple):
            options["lr"] = torch.tensor(*rate)
        return options

    def new_config(self) -> Any:
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

    def new_group_config(self) -> Any:
        config = self.plan.config
        mesh = device_mesh(config.mesh)
        groups = {}
        for mesh_dim, kind in enumerate(config.kinds):
            if kind is not None:
                groups[f"{kind}_process_group"] = mesh.get_group(mesh_dim)
        tp_dims, experts = {}, {}
        for index, held in enumerate(self.order()):
            if held.matrix.tp_dim is not None:
                tp_dims[index] = held.matrix.tp_dim
            if held.expert is not None:
                experts[index] = held.expert
        return create_auto_config(
            **groups,
            tp_dim_per_param=tp_dims if config.tp_dim is None else config.tp_dim,
            expert_assignments=experts,
            async_gpu_parallelism=config.asynchronous,
            prefetch_count=config.prefetch,
        )

    def assign(self, params: Any, state: Any) -> dict[int, list[int]]:
        """An assign_fn of the user's."""
        assignments: dict[int, list[int]] = {}
        for index, held in enumerate(self.order()):
            owner = held.sharing[held.number % len(held.sharing)]
            assignments.setdefault(owner, []).append(index)
        return assignments

    def set_gradients(self, gradients: Any) -> None:
        """New gradients, of the kinds ``gradients``, by number; "full" where it says nothing."""
        self.step_number += 1
        kinds = dict(gradients)
        for held in self.order():
            kind = kinds.get(held.number, "full")
            held.set_gradient(self.step_number, kind)
        self.idle_steps += 1
        if any(held.param.grad is not None for held in self.order()):
            self.idle_steps = 0

    def step(self) -> None:
        """Both optimizers take a step with the gradients that are set."""
        before = list(self.versions())
        recorder = Late() if self.is_late else Recorder()
        with recorder, common_config.NewtonSchulzCalls() as calls:
            self.optimizer.step()
        problems = list(recorder.problems)
        problems += self.unexpected(recorder, len(calls.shapes))
        for held, tensor, version in before:
            is_written = tensor._version > version
            if is_written != (held.single.grad is not None):
                problems.append(f"{held.number} was written, or not, without a reason")
        if problems:
            raise AssertionError(f"{problems}")
        self.single.step()
        for held in self.order():
            held.steps += 1
            if held.param.requires_grad:
                held.is_new = False

    def versions(self) -> Iterator[tuple[HeldMatrix, torch.Tensor, int]]:
        """The counters by which autograd learns of a step's writes, of tensors that have elements here."""
        for held in self.order():
            tensors = [held.param]
            # A checkpoint's momentum may have another placement, and makes room for a new tensor.
            if not held.is_new:
                state = self.optimizer.state.get(held.param, {})
                tensors += state.values()
            for tensor in tensors:
                if local(tensor).numel():
                    yield held, tensor, tensor._version

    def unexpected(self, recorder: Recorder, count: int) -> list[str]:
        """Matrices that this rank orthogonalizes and bytes that it receives, beyond the lower bound."""
        if self.plan.config.functions == "wrapped":
            return []
        least = most = expected = 0
        for index, held in enumerate(self.order()):
            if not held.param.requires_grad:
                continue
            has_grad = held.single.grad is not None
            elements = held.elements_here()
            knows = held.holds_of_gradients()
            for part, here in enumerate(elements):
                own = int(here.sum())
                owner = self.optimizer.matrix_owners.get((index, part))
                if owner != self.rank:
                    # The update of what this rank holds, in bfloat16.
                    expected += 2 * own
                    continue
                # The parts of a fused weight have one gradient.
                knows_gradient = knows[part * len(knows) // len(elements)]
                if has_grad:
                    least += 1
                # With an empty shard, it cannot know that a gradient is missing.
                if has_grad or not knows_gradient:
                    most += 1
                # Each element that this rank does not hold, once, in bfloat16.
                expected += 2 * (here.numel() - own)
        found = []
        if not least <= count <= most:
            found.append(f"{count} matrices instead of {least} to {most}")
        received = 0
        for call in recorder.calls:
            received += received_bytes(call, self.rank)
        if received != expected:
            found.append(f"{received} bytes instead of {expected}")
        return found
