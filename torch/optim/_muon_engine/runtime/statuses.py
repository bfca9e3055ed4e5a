"""The side channel: everything else that the ranks of a group tell each other in a step.

Gradients never decide which collectives run. At the start of a step, each rank of a group puts what it
knows about each matrix into one small ``all_reduce(MAX)`` of integers, or two if the matrices are many. The
first step, and each one on a CPU, waits for the result, and raises before anything moves if the ranks differ.
On accelerators, a later step acts on this rank's own status, and the step after it reads the result. A digest
comes with its negative: it is the same on all ranks if and only if the two maxima add up to zero.
"""

import zlib
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..process_groups import is_dry_run, listed, Ranks
from . import Matrix, Status
from .transport import InFlight


# Rows of the first all-reduce: equal for optimizers of all sizes, so that ranks which confuse them get an
# error instead of another size. Few optimizers need a second one.
_ROWS = 256

_OTHER_STEP = "the ranks are not in the same step(): a closure or a check raised on some of them, and the caller went on"
_OTHER_OPTIMIZER = "the ranks step different optimizers. Build and step them in the same order; a set has its own on each rank"
_OTHER_OPTIONS = "the ranks have different hyperparameters for these. A scheduler or a checkpoint changed those of some ranks only"
_OTHER_VALUES = (
    "the ranks hold different values of these, so they are not replicas. Broadcast the parameters before the first "
    "step, as DistributedDataParallel does. If each rank has parameters of its own (ZeroRedundancyOptimizer, layers or "
    "experts that are not shared), leave their group out of the config"
)
_UNUSABLE = "a rank has a gradient for these that it cannot use. The error on that rank says why"
_SOME_ABSENT = (
    "some of the ranks that hold these have a gradient and some have none. All need one, or none of them: zeros for an "
    "unused expert or a branch that one rank skips"
)
OTHER_GROUP = "ranks that share matrices with this one differ in others that this rank does not hold. Their error says how"


class Statuses(InFlight):
    """The side channel of a group of ranks, for the ``matrices`` that it shares, in the order of all ranks. Matrices
    that have one gradient have one row. The group ``overlaps`` others without containing them.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        ranks: Ranks,
        group: ProcessGroup,
        serial: int,
        device: torch.device,
        overlaps: bool = False,
    ) -> None:
        super().__init__(matrices, ranks)
        self.name, self._group, self._device = "statuses", group, device
        self.overlaps = overlaps
        keys = [(m.layout.key, m.layout.shape) for m in matrices]
        # Ranks may name the modules of an expert differently.
        names = [(k.name if k.expert is None else k.expert, s) for k, s in keys]
        self._identity = zlib.crc32(repr((serial, names)).encode())
        by_gradient: dict[tuple[int, int], list[Matrix]] = {}
        for matrix in matrices:
            by_gradient.setdefault(matrix.source_of_gradient, []).append(matrix)
        # The matrices of each row after the header.
        self._rows = list(by_gradient.values())
        # Places of the rows that are whole on every rank: the first step that moves them compares their values.
        self._replicated = [
            at
            for at, row in enumerate(self._rows, 1)
            if all(len(matrix.layout.shards.replica_sets) == 1 for matrix in row)
        ]
        # The table that the group reduces; on the host, this rank's rows before that and the result after
        # it. Only copies between a device and pinned memory do not wait.
        shape = max(_ROWS, 1 + len(self._rows)), 7
        self._table = torch.zeros(shape, dtype=torch.int64, device=device)
        self._host = self._table
        self._copied: torch.Event | None = None
        if device.type != "cpu":
            pins = torch.accelerator.is_available()
            self._host = torch.zeros_like(self._table, device="cpu", pin_memory=pins)
        # Whether ranks differ, for the groups that overlap others.
        self._flag = torch.zeros(1, dtype=torch.int64, device=device)
        # Whether the result in ``_host`` is unread, and lacks the second all-reduce.
        self._is_new = self._is_partial = False

    def start(self, step: int, differs: bool, awaits: bool) -> None:
        """Starts the ``step``-th step's all-reduce. It ``differs`` if a problem is known elsewhere."""
        formulas = {id(m.param.formulas): m.param.formulas for m in self.matrices}
        digests = {key: options.digest for key, options in formulas.items()}
        header = step, -step, self._identity, -self._identity, differs, 0, 0
        rows: list[tuple[int, ...]] = [header]
        for first, *_ in self._rows:
            digest = digests[id(first.param.formulas)]
            status = first.status
            one_hot = (status == each for each in Status if each != Status.EMPTY)
            rows.append((*one_hot, digest, -digest, 0, 0))
        self._host[: len(rows)] = torch.tensor(rows, device="cpu")
        self._table.copy_(self._host, non_blocking=True)
        self._add_values()
        self._is_new = True
        self._is_partial = awaits and len(self._table) > _ROWS
        self.reduce()

    def reduce(self) -> None:
        """Starts the first all-reduce, and also the second one if the step does not await the first."""
        self._reduce(self._table[:_ROWS])
        if len(self._table) > _ROWS and not self._is_partial:
            self._reduce(self._table[_ROWS:])

    def _reduce(self, rows: Tensor) -> None:
        largest, group = dist.ReduceOp.MAX, self._group
        start = partial(dist.all_reduce, op=largest, group=group, async_op=True)
        self.launch("all-reduce of statuses", start, rows)

    def reduce_flag(self) -> None:
        """Starts the all-reduce of one integer that only groups that overlap others have."""
        self._reduce(self._flag)

    def differs_elsewhere(self, is_known: bool) -> bool:
        """Whether a rank of this group knows of a mismatch, as this one does if ``is_known``. Waits."""
        if is_dry_run():
            return False
        self._flag.fill_(is_known)
        self.reduce_flag()
        self.wait()
        return bool(self._flag)

    def _add_values(self) -> None:
        """Adds digests of the values of replicated matrices, in the first step that moves them."""
        # A checkpoint makes a step that moves nothing before it loads the values.
        places = [at for at in self._replicated if self._moves(at)]
        if places:
            digests = [_digest_of(self._rows[at - 1]) for at in places]
            values = torch.stack([digest.to(self._device) for digest in digests])
            self._table[places, 5], self._table[places, 6] = values, -values

    def _moves(self, place: int) -> bool:
        """Whether this step moves the matrices of a row."""
        return self._rows[place - 1][0].param.formulas.moves

    def finish(self) -> None:
        """Ends a step that has moved its matrices."""
        # A step that raised has moved nothing, and the next one compares the values again.
        self._replicated = [at for at in self._replicated if not self._moves(at)]
        self._fetch()

    def _fetch(self) -> None:
        """On accelerators, the host waits neither for the all-reduce nor for the copy of the result."""
        is_new = bool(self.works) and not is_dry_run()
        self.wait()
        if is_new and self._host is not self._table:
            self._host.copy_(self._table, non_blocking=True)
            # An event alone would record on the current device, which may be another one.
            stream = torch.accelerator.current_stream(self._device)
            self._copied = stream.record_event(self._copied)

    def _result(self) -> list[list[int]]:
        """The rows that were reduced: the header, and one for each gradient. Waits."""
        self._fetch()
        if self._copied is not None:
            self._copied.synchronize()
        return self._host[: len(self._rows) + 1].tolist()

    def mismatch(self) -> str:
        """How the ranks differ in the last step; "" if they do not, or if the answer was given before. Waits."""
        if not self._is_new or is_dry_run():
            return ""  # Fake tensors have no values.
        self._is_new = False
        header, *rows = self._result()
        step, minus_step, identity, minus_identity, is_elsewhere, *_ = header
        text = ""
        if step + minus_step or identity + minus_identity:
            text = _OTHER_OPTIMIZER if identity + minus_identity else _OTHER_STEP
            shared = listed([matrix.layout.describe() for matrix in self.matrices], 4)
            text += f". This rank's optimizer has {shared}"
        if self._is_partial and not text:
            # The second all-reduce comes after this check, or those of two optimizers would pair up.
            self._reduce(self._table[_ROWS:])
            rows = self._result()[1:]
        reasons = _OTHER_OPTIONS, _OTHER_VALUES, _UNUSABLE, _SOME_ABSENT
        by_row = [
            (options + minus_options, sum(values), unusable, present and absent)
            for present, absent, unusable, options, minus_options, *values in rows
        ]
        for reason, column in zip(reasons, zip(*by_row)):
            different = [row for row, d in zip(self._rows, column, strict=True) if d]
            if different and not text:
                text = f"{reason}: {listed(list(map(_described, different)), 4)}"
                if reason == _OTHER_OPTIONS:
                    text += f". This rank has {different[0][0].param.formulas}"
        return text or (OTHER_GROUP if is_elsewhere else "")


def _described(row: Sequence[Matrix]) -> str:
    """The matrices of a row, in words."""
    text = row[0].layout.describe()
    return text if len(row) == 1 else f"{text} and {len(row) - 1} more of its parts"


def _digest_of(row: Sequence[Matrix]) -> Tensor:
    """32 bits of a sum over the bits of the matrices' values: a scalar integer on their device."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    local = row[0].param.local
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for region in (region for matrix in row for region in matrix.shard):
        values = region.of_local(local)
        total += values.view(ints[values.itemsize]).sum(dtype=torch.int64)
    # The golden ratio's bits carry a difference in any bit into the highest ones.
    return ((total * -7046029254386353131) >> 32) & 0xFFFFFFFF
