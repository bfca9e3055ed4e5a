"""The side channel: everything else that the ranks of a group tell each other in a step.

Gradients never decide which collectives run. At the start of a step, each rank of a group puts what it
knows about each matrix into one small ``all_reduce(MAX)`` of integers, or two if the matrices are many.
A rank acts on its own status, and raises after the last bucket if the ranks differ.

A digest comes together with its negative. All ranks have the same digest if and only if the two maxima
add up to zero.
"""

import zlib
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim._muon_engine.layouts import listed
from torch.optim._muon_engine.process_groups import is_dry_run
from torch.optim._muon_engine.runtime import Matrix, Status
from torch.optim._muon_engine.runtime.transport import InFlight


# Some present, some absent, some unusable: the first columns of each matrix's row.
_SOME = Status.PRESENT, Status.ABSENT, Status.UNUSABLE
# Rows of the first all-reduce. Optimizers of different sizes have the same when ranks confuse them, and
# few optimizers need a second one.
_ROWS = 256

_OTHER_STEP = (
    "the ranks are not in the same step(): a step() of one of them raised before it met the others, in its closure or "
    "in a check, and the caller went on"
)
_OTHER_OPTIMIZER = (
    "the ranks step different optimizers. All ranks must build and step their optimizers in the same order; a set of "
    "optimizers has a different order in each process"
)
_OTHER_OPTIONS = (
    "the ranks have different hyperparameters for these. A scheduler or a checkpoint changed lr, momentum or another "
    "option on some ranks only; compare param_groups of all ranks"
)
_OTHER_VALUES = (
    "the ranks hold different values of these, so they are not replicas. Broadcast the parameters before the first "
    "step, as DistributedDataParallel does. If each rank has parameters of its own (ZeroRedundancyOptimizer, layers or "
    "experts that are not shared), leave their group out of the config"
)
_UNUSABLE = "a rank has a gradient for these that it cannot use. The error on that rank says why"
_SOME_ABSENT = (
    "some of the ranks that hold these have a gradient and some have none. All holders need a gradient, zeros if need "
    "be (an unused expert, a branch that one rank skips), or none of them"
)


class Statuses(InFlight):
    """The side channel of one group of ranks.

    Args:
        matrices: those that the group shares, in the order of all ranks.
        number: which of the optimizers over these ranks this is.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        ranks: tuple[int, ...],
        group: ProcessGroup,
        number: int,
        device: torch.device,
    ) -> None:
        super().__init__(matrices, ranks)
        self._group = group
        self._device = device
        keys = [(m.layout.key, m.layout.shape) for m in matrices]
        # Ranks may name the modules of an expert differently.
        names = [(k.name if k.expert is None else k.expert, s) for k, s in keys]
        self._identity = zlib.crc32(repr((number, names)).encode())
        # Whole on every rank: the first step that moves them compares their values.
        self._replicated = [m for m in matrices if _is_replicated(m)]
        self._table = torch.empty(0)
        self._host: tuple[Tensor, torch.Event | None] | None = None

    def start(self, step: int) -> None:
        """Starts the all-reduce of this rank's ``step``-th step."""
        formulas = {id(m.param.formulas): m.param.formulas for m in self.matrices}
        digests = {key: of.digest for key, of in formulas.items()}
        rows: list[tuple[int, ...]] = [
            (step, -step, self._identity, -self._identity, 0)
        ]
        for matrix in self.matrices:
            digest = digests[id(matrix.param.formulas)]
            status = matrix.status
            rows.append((*(status == one for one in _SOME), digest, -digest))
        table = torch.zeros(max(_ROWS, len(rows)), 7, dtype=torch.int64)
        table[: len(rows), :5] = torch.tensor(rows)
        self._table = table.to(self._device)
        self._add_values()
        self._reduce(self._table[:_ROWS])

    def _reduce(self, rows: Tensor) -> None:
        what = rows, dist.ReduceOp.MAX, self._group, True
        self.launch("all-reduce of statuses", partial(dist.all_reduce, *what))

    def _add_values(self) -> None:
        """Adds digests of the values of replicated matrices, once."""
        # A step that moves nothing (a checkpoint makes one) may come before the values are loaded.
        now = [m for m in self._replicated if m.param.formulas.moves]
        if now:
            place = {id(m): at for at, m in enumerate(self.matrices, 1)}
            found = torch.stack([_digest_of(m).to(self._device) for m in now])
            rows = [place[id(m)] for m in now]
            self._table[rows, 5], self._table[rows, 6] = found, -found
            self._replicated = [m for m in self._replicated if m not in now]

    def check_step(self) -> None:
        """On a CPU: raises RuntimeError if the ranks are in different steps or optimizers.

        This check precedes the first gather and the second all-reduce, which starts here. Otherwise those of
        two optimizers would pair up.
        """
        if self._device.type == "cpu" and not is_dry_run():
            self.wait()
            text = self._other_step(self._table[0].tolist())
            if text:
                raise RuntimeError(text)
        if len(self._table) > _ROWS:
            self._reduce(self._table[_ROWS:])

    def finish(self) -> None:
        """Waits for the all-reduce, and copies its result to the host without waiting for the device."""
        self.wait()
        if is_dry_run():
            return  # Nothing came from other ranks, and fake tensors have no values.
        copied = None
        host = self._table
        if host.device.type != "cpu":
            host = torch.empty_like(host, device="cpu", pin_memory=True)
            host.copy_(self._table, non_blocking=True)
            copied = torch.Event(self._device)
            copied.record()
        self._host = host, copied

    def forget(self) -> None:
        """Drops the results of a step that failed."""
        self.works, self._host = [], None

    def mismatch(self) -> str:
        """How the ranks differed in the last finished step; "" if they did not."""
        if self._host is None:
            return ""
        (host, copied), self._host = self._host, None
        if copied is not None:
            copied.synchronize()
        header, *rows = host[: len(self.matrices) + 1].tolist()
        text = self._other_step(header)
        for differs, what in _MISMATCHES:
            found = [
                matrix.layout.describe()
                for matrix, row in zip(self.matrices, rows, strict=True)
                if differs(*row)
            ]
            if found and not text:
                text = f"{what}: {listed(found, 4)}"
        return text

    def _other_step(self, header: Sequence[int]) -> str:
        step, minus_step, identity, minus_identity, *_ = header
        if step + minus_step == identity + minus_identity == 0:
            return ""
        text = _OTHER_OPTIMIZER if identity + minus_identity else _OTHER_STEP
        shared = listed([matrix.layout.describe() for matrix in self.matrices], 4)
        return f"{text}. This rank's optimizer has {shared}"


# Predicates on a matrix's columns after the all-reduce, the most telling first.
_MISMATCHES = (
    (lambda p, a, u, o, minus_o, v, minus_v: o + minus_o, _OTHER_OPTIONS),
    (lambda p, a, u, o, minus_o, v, minus_v: v + minus_v, _OTHER_VALUES),
    (lambda p, a, u, *_: u, _UNUSABLE),
    (lambda p, a, u, *_: p and a, _SOME_ABSENT),
)


def _is_replicated(matrix: Matrix) -> bool:
    shards = matrix.layout.shards
    return len(shards.replica_sets) == 1 and not shards.partial


def _digest_of(matrix: Matrix) -> Tensor:
    """32 bits of a sum over the bits of the matrix's values: a scalar integer on their device."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = torch.zeros((), dtype=torch.int64, device=matrix.param.local.device)
    for region in matrix.shard:
        values = matrix.local(region)
        found += values.view(ints[values.itemsize]).sum(dtype=torch.int64)
    # The golden ratio's bits carry a difference in any bit into the highest ones.
    return ((found * -7046029254386353131) >> 32) & 0xFFFFFFFF
