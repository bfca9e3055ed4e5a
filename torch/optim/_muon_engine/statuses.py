"""The side channel: how the ranks of a grid learn at the start of a step that they differ.

Gradients never decide which of the engine's collectives run. At the start of a step, each rank puts what it knows into bytes
(see ``agreement``): a head, and a byte for each gradient. An all-reduce along the row and one along the column give the maxima
of the grid. The first steps, and each one on a CPU, wait for the result, and raise before anything moves if the ranks
differ. On accelerators, a later step acts on what this rank knows, and the step after it reads the result.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import (
    agree,
    BYTES,
    differences,
    Meeting,
    Signature,
    with_complements,
)
from .inputs import Status, StepInputs
from .params import Matrix
from .process_groups import GridGroups, InFlight, listed, short_hash
from .regions import digest_of


# The head: whether parameters have changed since the engine was built, whether this rank knows of a problem, and the digits
# of the step, of the optimizer and of the options.
_CHANGED, _PROBLEM = 0, 1
_STEP, _OPTIMIZER, _OPTIONS = slice(2, 10), slice(10, 18), slice(18, 26)
_FIRST_GRADIENT = 26
# A byte of the head that says no, and the next one says yes. Zero is no opinion.
_NO = 1

_OTHER_STEP = "the ranks are not in the same step(): a closure or a check raised on some of them, and the caller went on"
_OTHER_OPTIMIZER = "the ranks step different optimizers. Build and step them in the same order; a set has its own on each rank"
_CHANGED_ALONE = (
    "parameters changed on some of the ranks that share these, and not on others. All of them must make the change "
    "before the same step()"
)
ELSEWHERE = (
    "ranks that share matrices with this one have a problem. Their error says how"
)
_OTHER_OPTIONS = "the ranks have different hyperparameters, because a scheduler or a checkpoint changed those of some ranks only"
_OTHER_VALUES = (
    "the ranks hold different values of these, so they are not replicas. Broadcast the parameters before the first "
    "step, as DistributedDataParallel does. If each rank has parameters of its own (ZeroRedundancyOptimizer, layers or "
    "experts that are not shared), leave their group out of the config"
)
_UNUSABLE = "a rank has a gradient or momentum for these that it cannot use. The error on that rank says why"
_SOME_ABSENT = (
    "some of the ranks that hold these have a gradient and some have none. All need one, or none of them: zeros for an "
    "unused expert or a branch that one rank skips"
)


class Statuses(InFlight):
    """The side channel of a grid, for the ``matrices`` that it shares, in the order of all ranks."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        groups: GridGroups,
        device: torch.device,
    ) -> None:
        super().__init__(matrices)
        self._groups, self.device = groups, device
        # The matrices with replicas, whose values were not compared yet.
        self._replicated: list[Matrix] = []
        if groups.column is not None:
            self._replicated = [m for m in matrices if not m.param.is_sum]
        # Whether the ranks know how they differ before anything moves: on a CPU, and elsewhere in the first steps.
        self.awaits = True
        # The bytes of this rank, and later the result, with their complements; and the table that the group reduces. Only copies
        # between a device and pinned memory do not wait.
        tables = -(-(_FIRST_GRADIENT + len(matrices)) // BYTES)
        pins = device.type != "cpu" and torch.accelerator.is_available()
        self._host = torch.zeros(
            tables, 2, BYTES, dtype=torch.uint8, device="cpu", pin_memory=pins
        )
        self._table = torch.zeros_like(self._host, device=device)
        self._copied: torch.Event | None = None
        # Digits that tell the optimizer from others over the grid, and from those of other grids with this row or column.
        self._identity = short_hash((matrices[0].layout.grid, groups.serial))[:8]
        # Whether the result is unread, and whether it is still in ``_table``.
        self._is_unread = self._is_on_device = False

    def start(
        self,
        step: int,
        inputs: StepInputs | None,
        knows_of_problem: bool,
        has_changed: bool,
    ) -> None:
        """Starts the ``step``-th step's all-reduce. This rank may know of a problem: its own, or that of a smaller group.
        Without ``inputs``, it has no opinion of gradients and options: its parameters have changed since the engine was
        built, or its options are invalid.
        """
        values = bytearray([_NO + has_changed, _NO + knows_of_problem])
        # No digit has the byte zero.
        values += f"{step:08x}{self._identity}".encode()
        if inputs is not None:
            of_groups = [short_hash(f.option_texts()) for f in inputs.formulas]
            # Ranks may have equal options in one parameter group or in several.
            options = [of_groups[m.param.param_group] for m in self.matrices]
            values += short_hash(options)[:8].encode()
            values += bytes(inputs.status(matrix) for matrix in self.matrices)
        # The last result was read, so this memory is free. A copy from it does not wait.
        self._host.copy_(with_complements(values, len(self._host)))
        self._table.copy_(self._host, non_blocking=True)
        self.reduce()
        self._is_unread = self._is_on_device = True

    def reduce(self) -> None:
        """Starts to reduce the tables over the grid."""
        groups = self._groups.several
        for group in groups:
            # On accelerators, only the device waits for the row.
            self.wait()
            for table in self._table:
                start = partial(dist.all_reduce, op=dist.ReduceOp.MAX)
                self.launch("all-reduce of statuses", group, start, table)

    def difference(self, inputs: StepInputs | None = None) -> str:
        """How the ranks differ in the last step; "" if they do not, or if the answer was given before. Waits. With the
        ``inputs`` of a step at whose start all ranks of the group wait, they tell each other more if they differ.
        """
        if not self._is_unread:
            return ""
        self._is_unread = False
        self._fetch()
        if self._copied is not None:
            self._copied.synchronize()
        text, differs = "", differences(self._host)
        # All ranks may know of one problem.
        has_problem = int(self._host[0, 0, _PROBLEM]) > _NO
        if has_problem or not torch.equal(differs, torch.zeros_like(differs)):
            text = self._difference(differs, has_problem, inputs)
        if not text and inputs is not None:
            text = self._other_values(inputs)
        return text

    def _difference(
        self, differs: Tensor, has_problem: bool, inputs: StepInputs | None
    ) -> str:
        """How the ranks differ, in words. With ``inputs``, all ranks of the group make this call."""
        for places, text in (
            (_OPTIMIZER, _OTHER_OPTIMIZER),
            (_STEP, _OTHER_STEP),
            (_CHANGED, _CHANGED_ALONE),
        ):
            if differs[places].any():
                shared = listed([matrix.described for matrix in self.matrices], 4)
                return f"{text}. This rank's optimizer has {shared}"
        if gradients := self._other_gradients(differs):
            return gradients
        if differs[_OPTIONS].any():
            # A rank with a problem may have no inputs.
            knows_more = inputs is not None and not has_problem
            return _OTHER_OPTIONS + (self._first_option(inputs) if knows_more else "")
        return ELSEWHERE if has_problem else ""

    def _other_gradients(self, differs: Tensor) -> str:
        """The gradients that some ranks lack or cannot use, in words."""
        largest = self._host[:, 0].flatten()
        unusable: list[str] = []
        absent: list[str] = []
        for place, matrix in enumerate(self.matrices, _FIRST_GRADIENT):
            if largest[place] == Status.UNUSABLE:
                unusable.append(matrix.described)
            elif differs[place]:
                absent.append(matrix.described)
        if unusable:
            return f"{_UNUSABLE}: {listed(unusable, 4)}"
        return f"{_SOME_ABSENT}: {listed(absent, 4)}" if absent else ""

    def _first_option(self, inputs: StepInputs) -> str:
        """The first option that differs, and its values. All ranks of the grid make this call."""
        own: list[Signature] = []
        for matrix in self.matrices:
            own.append((matrix.described, inputs.formulas_of(matrix).option_texts()))
        meeting = Meeting(self._groups.several, own)
        return f": {self._compared([meeting])}"

    def _other_values(self, inputs: StepInputs) -> str:
        """The first matrix whose replicas have different values, in words. All ranks of the grid make this call. The values
        are compared in the first step that moves any: a checkpoint makes one that does not before it loads them.
        """
        options = map(inputs.formulas_of, self._replicated)
        if not any(formulas.moves_parameters for formulas in options):
            return ""
        own: list[Signature] = []
        for matrix in self._replicated:
            regions = matrix.layout.regions_of(inputs.rank)
            digest = int(digest_of(regions, inputs.params[matrix.index].local))
            own.append((matrix.described, {"the digest of its values": f"{digest:x}"}))
        meetings: list[Meeting] = []
        # The column first: the other columns must hear of a difference.
        for group in reversed(self._groups.several):
            compared = own if group is self._groups.column else ()
            meetings.append(Meeting([group], compared))
        text = self._compared(meetings)
        if text:
            return f"{_OTHER_VALUES}: {text}"
        self._replicated = []
        return ""

    def _compared(self, meetings: Sequence[Meeting]) -> str:
        """How the ranks differ in what they tell in the ``meetings``, in words; "" if they do not."""
        try:
            # Objects travel on the current device, which DDP does not ask its users to set.
            with torch.accelerator.device_index(self.device.index):
                agree(meetings, None)
        except ValueError as error:
            return str(error)
        return ""

    def finish(self) -> None:
        """Ends a step that has moved its matrices. On accelerators, the result goes to the host meanwhile."""
        self._fetch()
        self.awaits = bool(self._replicated) or self.device.type == "cpu"

    def _fetch(self) -> None:
        """Waits for the all-reduce in flight, and brings its result to the host. On accelerators, the device waits and
        not the host: neither for it nor for the copy.
        """
        self.wait()
        if self._is_on_device:
            self._is_on_device = False
            self._host.copy_(self._table, non_blocking=True)
            if self._table.device.type != "cpu":
                # An event alone would record on the current device, which may be another one.
                stream = torch.accelerator.current_stream(self._table.device)
                self._copied = stream.record_event(self._copied)
