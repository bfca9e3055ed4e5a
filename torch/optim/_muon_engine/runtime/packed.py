"""The step of an engine that moves shards itself, in packed all-to-alls."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..agreement import Agreement
from ..process_groups import Ranks
from ..schedule.order import local_order, LocalWork, Phase, step_order
from ..schedule.packs import slots_for
from ..schedule.schedule import Schedule
from .binder import Binder
from .compute import MuonCompute
from .executor import drain, Executor, Progress
from .matrices import matrices_of
from .memory import Memory
from .params import Param, StepInputs
from .statuses import side_channel
from .transport import InFlight, local_buckets, LocalBucket


class PackedStep:
    """Runs the buckets of one rank, step after step, over memory that keeps its addresses."""

    def __init__(
        self,
        schedule: Schedule,
        params: Sequence[Param],
        agreement: Agreement,
        *,
        rank: int,
        device: torch.device,
        prefetch_count: int,
    ) -> None:
        self.memory = Memory(device)
        self.progress = Progress()
        groups = agreement.groups
        matrices = matrices_of(schedule, params, rank)
        # This rank's buckets, by their index in the schedule.
        self._by_index = local_buckets(
            schedule, matrices, rank, groups, self.memory, slots_for(prefetch_count)
        )
        self.buckets = list(self._by_index.values())
        # What follows asks the matrices and buckets for what is attached here.
        self._attach(schedule, matrices.values(), groups, rank)
        self.side_channel = side_channel(list(matrices.values()), agreement, device)
        # All that may have collectives in flight.
        self._flights: list[InFlight] = [*self.side_channel.statuses, *self.buckets]
        for bucket in self.buckets:
            self._flights += bucket.relays
        one_at_a_time = schedule.one_owner_at_a_time and prefetch_count == 0
        # The group of each bucket, and the order of all ranks.
        self._ranks_of_buckets = [bucket.ranks for bucket in schedule.buckets]
        self._order = step_order(
            self._ranks_of_buckets,
            prefetch_count,
            one_at_a_time=one_at_a_time,
        )
        self.binder = Binder(self._in_order_of_gathers(), params, rank, self.memory)
        self.compute = MuonCompute(rank, self.progress)
        # The parameter groups of this rank's matrices, and the options that decided which of these share a batch.
        self._param_groups = sorted({m.param_group for m in matrices.values()})
        self._compute_keys: list[Hashable] | None = None
        self._executor: Any = None
        # Whether nobody has asked how ranks differed in the last step.
        self.is_unread = False
        self.bind({param.param_group: param.formulas for param in params})

    def _in_order_of_gathers(self) -> list[LocalBucket]:
        """This rank's buckets as their gathers follow each other."""
        in_order: list[LocalBucket] = []
        for phase, index in self._order:
            if phase is Phase.GATHER and index in self._by_index:
                in_order.append(self._by_index[index])
        return in_order

    def _attach(
        self,
        schedule: Schedule,
        matrices: Any,
        groups: Mapping[Ranks, ProcessGroup | None],
        rank: int,
    ) -> None:
        """Adds what few optimizers need: relays."""
        if any(local.planned_relays for local in self.buckets):
            from .relays import attach_relays

            attach_relays(self.buckets, groups, rank, self.memory)

    @property
    def awaits_statuses(self) -> bool:
        """Whether ranks know how they differ before anything moves."""
        return self.side_channel.awaits

    @property
    def where(self) -> str:
        """The phase of the step that is running or failed; "" between steps."""
        return str(self.progress)

    def share_statuses(self, step: int, inputs: StepInputs | None) -> str:
        """Starts the side channel of the ``step``-th step. Returns how ranks differ, if it waits for the result. Without
        ``inputs``, this rank raises an error, and tells the others that it has a problem.
        """
        self.progress.now = "statuses", self.side_channel.matrices
        self.is_unread = not self.side_channel.awaits
        return self.side_channel.share(step, inputs)

    def run(self, inputs: StepInputs) -> None:
        """Makes a step in the one order of all ranks. DTensor's collectives for gradients come first."""
        inputs.place(self.progress)
        self._executor.run(inputs)
        self.side_channel.finish()
        self.progress.now = "", ()

    def drain(self) -> None:
        """After an error, waits for everything in flight."""
        drain(self._flights)

    def mismatch(self) -> str:
        """How ranks differed in the last step; "" if they did not, or if the answer was given before. Waits."""
        self.is_unread = False
        return self.side_channel.difference()

    def bind(self, formulas: Mapping[int, Any]) -> None:
        """Binds what stays the same between steps, and makes this rank's list of operations. ``formulas`` are those of
        each parameter group. Nothing changes if the options of this rank's batches are those of the last call.
        """
        keys = [formulas[group].compute_key for group in self._param_groups]
        if keys == self._compute_keys:
            return
        self._compute_keys = keys
        self.compute.bound = self.binder.bind(formulas)
        work_of = {}
        for index, bucket in self._by_index.items():
            batches = self.compute.bound[bucket].batches
            work_of[index] = LocalWork(bucket, batches, bucket.relays)
        operations = local_order(self._order, self._ranks_of_buckets, work_of)
        self._executor = Executor(operations, self.compute, self.memory, self.progress)
