"""The side channel: how the ranks of a group learn in a step that they differ.

Gradients never decide which of the engine's collectives run. At the start of a step, each rank of a group puts what it
knows about each gradient into one small ``all_reduce(MAX)`` of integers, or two if gradients are many, and one more of
a single integer in groups that overlap others. The first step, and each one on a CPU, waits for the result, and raises before anything moves if the ranks differ.
On accelerators, a later step acts on this rank's own status, and the step after it reads the result. A digest
comes with its negative: it is the same on all ranks if and only if the two maxima add up to zero.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..agreement import Agreement
from ..process_groups import is_dry_run, larger_first, Ranks
from .matrices import LocalMatrix
from .params import StepInputs
from .status_rows import FIRST_ROWS, Header, StatusRows
from .transport import InFlight


OTHER_GROUP = "ranks that share matrices with this one differ in others that this rank does not hold. Their error says how"


class Statuses(InFlight):
    """The side channel of a group of ranks, for the ``matrices`` that it shares, in the order of all ranks. The group
    ``overlaps`` others without containing them.
    """

    def __init__(
        self,
        matrices: Sequence[LocalMatrix],
        ranks: Ranks,
        group: ProcessGroup,
        serial: int,
        device: torch.device,
        overlaps: bool = False,
    ) -> None:
        super().__init__(matrices, ranks)
        self._group, self.device = group, device
        self.overlaps = overlaps
        # What this rank says.
        self._own = StatusRows(matrices, serial)
        # Places of the rows that are whole on every rank, whose values the ranks compare.
        replicated = [
            place
            for place, of_gradient in enumerate(self._own.gradients, 1)
            if all(len(m.layout.shards.replica_sets) == 1 for m in of_gradient)
        ]
        self._replica_values: Any = None
        if replicated:
            from .replica_values import ReplicaValues

            self._replica_values = ReplicaValues(self._own.gradients, replicated)
        # The table that the group reduces, and the result on the host. Only copies between a device and pinned
        # memory do not wait.
        self._table = torch.zeros_like(self._own.rows, device=device)
        self._host = self._table
        self._copied: torch.Event | None = None
        self._has_host_copy = device.type != "cpu"
        if self._has_host_copy:
            pins = torch.accelerator.is_available()
            self._host = torch.zeros_like(self._table, device="cpu", pin_memory=pins)
        # Fake tensors have no values.
        self._is_dry_run = is_dry_run()
        # Whether ranks differ, for the groups that overlap others.
        self._flag = torch.zeros(1, dtype=torch.int64, device=device)
        # Whether this rank knew of a problem at the start of the last step.
        self._knew_of_problem = False
        # Whether the result in ``_host`` is unread.
        self._is_unread = False
        # Whether the result lacks the second all-reduce, which waits until the first one was looked at.
        self._lacks_second = False

    def start(
        self, step: int, inputs: StepInputs, knows_of_problem: bool, awaits: bool
    ) -> None:
        """Starts the ``step``-th step's all-reduce. This rank may know of a problem: its own, or that of a smaller group."""
        self._own.write(step, inputs, knows_of_problem)
        self._knew_of_problem = knows_of_problem
        if self._has_host_copy:
            # The last result was read, so this memory is free. A copy from it does not wait.
            self._host.copy_(self._own.rows)
            self._table.copy_(self._host, non_blocking=True)
        else:
            self._table.copy_(self._own.rows)
        if self._replica_values is not None:
            self._replica_values.write(self._table, inputs)
        self._is_unread = True
        self._lacks_second = awaits and len(self._table) > FIRST_ROWS
        self.reduce()

    def reduce(self) -> None:
        """Starts the first all-reduce, and also the second one if the step does not await the first."""
        self._reduce(self._table[:FIRST_ROWS])
        if len(self._table) > FIRST_ROWS and not self._lacks_second:
            self._reduce(self._table[FIRST_ROWS:])

    def _reduce(self, rows: Tensor) -> None:
        largest, group = dist.ReduceOp.MAX, self._group
        start = partial(dist.all_reduce, op=largest, group=group, async_op=True)
        self.launch("all-reduce of statuses", start, rows)

    def reduce_flag(self) -> None:
        """Starts the all-reduce of one integer that only groups that overlap others have."""
        self._reduce(self._flag)

    def differs_elsewhere(self, knows_of_problem: bool) -> bool:
        """Whether a rank of this group knows of a problem, as this one may. Waits."""
        if self._is_dry_run:
            return False
        self._flag.fill_(knows_of_problem)
        self.reduce_flag()
        self.wait()
        return bool(self._flag)

    def finish(self, inputs: StepInputs) -> None:
        """Ends a step that has moved its matrices."""
        if self._replica_values is not None:
            self._replica_values.finish(inputs)
        if self.works:
            self._fetch()

    def _fetch(self) -> None:
        """Waits for the all-reduces in flight, and brings their result to the host. On accelerators, the device waits and
        not the host: neither for them nor for the copy.
        """
        was_in_flight = bool(self.works)
        self.wait()
        if was_in_flight and self._has_host_copy and not self._is_dry_run:
            self._host.copy_(self._table, non_blocking=True)
            # An event alone would record on the current device, which may be another one.
            stream = torch.accelerator.current_stream(self.device)
            self._copied = stream.record_event(self._copied)

    def _wait_for_result(self) -> None:
        self._fetch()
        if self._copied is not None:
            self._copied.synchronize()

    def _result(self) -> list[list[int]]:
        """The rows that were reduced: the header, and one for each gradient. Waits."""
        self._wait_for_result()
        return self._host[: self._own.count].tolist()

    def mismatch(self, inputs: StepInputs | None = None) -> str:
        """How the ranks differ in the last step; "" if they do not, or if the answer was given before. Waits. With the
        ``inputs`` of that step, the text has this rank's options.
        """
        if not self._is_unread or self._is_dry_run:
            return ""
        self._is_unread = False
        if not self._lacks_second and not self._knew_of_problem:
            self._wait_for_result()
            count = self._own.count
            if torch.equal(self._host[:count], self._own.rows[:count]):
                # The maxima are what this rank said, so all ranks said the same.
                return ""
        return self._difference(inputs)

    def _difference(self, inputs: StepInputs | None) -> str:
        """How the ranks differ, in words."""
        from .mismatches import difference, other_program

        header, *rows = self._result()
        text = other_program(header, self.matrices)
        if self._lacks_second and not text:
            # The second all-reduce comes after this check, or those of two optimizers would pair up.
            self._reduce(self._table[FIRST_ROWS:])
            rows = self._result()[1:]
        text = text or difference(self._own.gradients, rows, inputs)
        return text or (OTHER_GROUP if header[Header.ELSEWHERE] else "")


class SideChannel:
    """All side channels of this rank, smaller groups first, so that a mismatch reaches the larger ones that contain
    them.
    """

    def __init__(self, statuses: Sequence[Statuses], device: torch.device) -> None:
        self.statuses = statuses
        self.device = device
        # All matrices that this rank shares.
        self.matrices: list[LocalMatrix] = []
        for each in statuses:
            self.matrices += each.matrices
        # Whether ranks know how they differ before anything moves: on a CPU, and elsewhere in the first step.
        self.awaits = True

    def share(self, step: int, inputs: StepInputs) -> str:
        """Starts the exchange of this rank's ``step``-th step, before anything moves. A group passes a mismatch on
        to larger groups. A group that overlaps others may hear of it in none of them, so ranks that wait for the
        result pass it on to such groups once more. A rank that cannot use a gradient tells all of its groups,
        because each of them must end the step here. Returns how ranks differ; "" if they do not, or if it does not
        wait.
        """
        text = ""
        awaits = self.awaits
        # The unusable gradient may be of a matrix that no other rank has.
        has_problem = bool(inputs.problems)
        for statuses in self.statuses:
            knows_of_problem = has_problem or bool(text)
            statuses.start(step, inputs, knows_of_problem, awaits)
            if awaits:
                # It may launch a collective, so every rank calls it.
                reason = statuses.mismatch(inputs)
                # A larger group's own reason says more.
                if reason and text in ("", OTHER_GROUP):
                    text = reason
        if not awaits:
            return text
        for statuses in reversed(self.statuses):
            knows_of_problem = has_problem or bool(text)
            if statuses.overlaps and statuses.differs_elsewhere(knows_of_problem):
                text = text or OTHER_GROUP
        return text

    def finish(self, inputs: StepInputs) -> None:
        """Ends a step that has moved its matrices."""
        for statuses in self.statuses:
            statuses.finish(inputs)
        self.awaits = self.device.type == "cpu"

    def mismatch(self) -> str:
        """How ranks differed in the last step; "" if they did not, or if the answer was given before. Waits."""
        texts = [statuses.mismatch() for statuses in self.statuses]
        return "; ".join(filter(None, texts))


def side_channel(
    matrices: Sequence[LocalMatrix],
    agreement: Agreement,
    device: torch.device,
) -> SideChannel:
    """The side channels of the groups that share ``matrices``."""
    by_ranks: dict[Ranks, list[LocalMatrix]] = {}
    for matrix in matrices:
        by_ranks.setdefault(matrix.layout.holders, []).append(matrix)
    statuses = []
    for ranks in reversed(larger_first(by_ranks)):
        group = agreement.groups[ranks]
        if group is not None:
            statuses.append(
                Statuses(
                    by_ranks[ranks],
                    ranks,
                    group,
                    agreement.serials[ranks],
                    device,
                    overlaps=ranks in agreement.overlapping,
                )
            )
    return SideChannel(statuses, device)
