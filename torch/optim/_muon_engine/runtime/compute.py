"""The local part of a step: from gradients to packed regions, and from updates to parameters."""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

# The public profiler range costs tens of microseconds even when no profiler runs.
from torch._C._profiler import _RecordFunctionFast

from ..layouts import Region
from ..process_groups import listed
from ..schedule.packs import grouped
from . import Matrix, Param
from .transport import copy_all, InFlight, LocalBucket, Memory


log = logging.getLogger("torch.optim.muon")

# Accelerators blend and apply regions of this many bytes at once, unless one region is larger.
PREPARED_BYTES = 64 * 1024**2

# A region of a matrix, and the tensor that it is read from or written to. Without an update, that is None.
RegionTensor = tuple[Matrix, Region, Any]


class Compute:
    """Reads gradients and momentum into packs, orthogonalizes, and applies updates. A CPU takes one matrix
    after another, while it is in the cache. Accelerators take all of a bucket.
    """

    def __init__(self, rank: int, device: torch.device, memory: Memory) -> None:
        self.rank = rank
        self.device = device
        self.memory = memory
        self._current: tuple[str, Sequence[Matrix]] = ("", ())

    @property
    def where(self) -> str:
        """The phase of the step that is running or failed; "" between steps."""
        phase, matrices = self._current
        described = [matrix.layout.describe() for matrix in matrices]
        return f"{phase} of {listed(described)}" if phase else ""

    def _enter(self, phase: str, flight: InFlight) -> AbstractContextManager[Any]:
        """Names a phase for a profiler and for errors. For these, callers may narrow ``_current`` to fewer matrices."""
        self._current = phase, flight.matrices
        return _RecordFunctionFast(f"Muon {phase}, {flight.name}")

    def _log(self, phase: str, matrices: Iterable[Matrix]) -> None:
        if log.isEnabledFor(logging.DEBUG):
            for matrix in matrices:
                values = self.rank, phase, matrix.layout.describe(), matrix.owner
                log.debug("rank %d: %s %s, owner %d", *values)

    def pack(self, bucket: LocalBucket) -> None:
        """Accumulates the gradients of the bucket's matrices, and packs this rank's shards."""
        one_by_one = [[matrix] for matrix in bucket.matrices]
        for matrices in one_by_one if self.device.type == "cpu" else [bucket.matrices]:
            self._current = "gather", matrices
            accumulate(matrix.param for matrix in matrices)
            self._log("gather", matrices)
            self.prepare(
                (matrix, region, view)
                for matrix in matrices
                for _, region, view in bucket.gather_send.of(matrix.index)
            )

    def prepare(self, targets: Iterable[RegionTensor]) -> None:
        """Writes regions of the tensors to orthogonalize: momentum, blended with the gradient if nesterov.
        Without a gradient, that is momentum, so that the owner receives defined values.
        """
        for chunk in self._grouped(targets, lambda entry: id(entry[0].param.formulas)):
            momenta = [region.of_local(m.param.momentum) for m, region, _ in chunk]
            grads = [region.of_local(m.param.lerp_start) for m, region, _ in chunk]
            out = None
            if self.device.type == "cpu":
                out = self.memory.scratch("prepared", momenta[0].shape, momenta[0])
            prepared = chunk[0][0].param.formulas.prepare(momenta, grads, out)
            copy_all([(t, made) for (_, _, t), made in zip(chunk, prepared)])

    def batches(self, bucket: LocalBucket) -> list[list[Matrix]]:
        """This rank's matrices of one shape and equal options, as many as the formulas allow in a batch."""
        by_key: dict[Hashable, list[list[Matrix]]] = {}
        for matrix in bucket.matrices:
            if matrix.owner != self.rank or not matrix.is_orthogonalized:
                continue
            formulas, shape = matrix.param.formulas, matrix.layout.shape
            # An owner's blocks come before its other matrices, and each is alone.
            alone = matrix.index if matrix.products is not None else None
            batches = by_key.setdefault((alone, formulas.compute_key, shape), [[]])
            if len(batches[-1]) == formulas.batch_size(shape, self.device):
                batches.append([])
            batches[-1].append(matrix)
        return [batch for batches in by_key.values() for batch in batches]

    def orthogonalize(self, bucket: LocalBucket, batch: Sequence[Matrix]) -> None:
        """Computes the updates of ``batch``, packs them for their holders, and applies this rank's part."""
        with self._enter("orthogonalize", bucket):
            self._current = "assemble", batch
            self._log("orthogonalize", batch)
            shape = (len(batch), *batch[0].layout.shape)
            whole = self.memory.scratch("whole", shape, bucket.scatter_send.flat)
            wholes = whole.unbind()
            self.assemble(bucket, batch, wholes)
            self._current = "orthogonalize", batch
            formulas, products = batch[0].param.formulas, batch[0].products
            if len(batch) == 1:
                updates = [formulas.orthogonalize(wholes[0], products)]
            else:
                updates = list(formulas.orthogonalize(whole).unbind())
            for i, update in enumerate(updates):
                if not update.is_contiguous():
                    # Transposing a tall update once is faster than transposing each region of it.
                    updates[i] = wholes[i].copy_(update)
            results = list(zip(batch, updates, strict=True))
            packed = [
                (view, region.of_matrix(update))
                for matrix, update in results
                for _, region, view in bucket.results_of(matrix.index)
            ]
            copy_all(packed)
            self._current = "apply", batch
            self._log("apply", batch)
            self.apply(
                (matrix, region, region.of_matrix(update))
                for matrix, update in results
                for region in (matrix.shard if matrix.applies else ())
            )

    def assemble(
        self, bucket: LocalBucket, batch: Sequence[Matrix], wholes: Sequence[Tensor]
    ) -> None:
        """Fills ``wholes``, of each matrix's shape, from the received regions and from this rank's own."""
        own: list[RegionTensor] = []
        received: list[tuple[Tensor, Tensor]] = []
        for matrix, out in zip(batch, wholes, strict=True):
            if matrix.layout.shards.partial:
                self._add_contributions(bucket, matrix, out)
                continue
            own += [(matrix, r, r.of_matrix(out)) for r in matrix.sent]
            packed = bucket.gather_recv.of(matrix.index)
            received += [(region.of_matrix(out), view) for _, region, view in packed]
        self.prepare(own)
        copy_all(received)

    def _add_contributions(
        self, bucket: LocalBucket, matrix: Matrix, out: Tensor
    ) -> None:
        """Adds the contributions to a sum in the order of their ranks, whoever owns the matrix."""
        layout = matrix.layout
        total = torch.zeros(layout.shape, dtype=layout.dtype, device=out.device)
        contributions = [
            (layout.shards.contribution_of(rank), region, view)
            for rank, region, view in bucket.gather_recv.of(matrix.index)
        ]
        own = layout.shards.contribution_of(self.rank)
        for region in matrix.sent:
            prepared = torch.empty_like(region.of_local(matrix.param.momentum))
            self.prepare([(matrix, region, prepared)])
            contributions.append((own, region, prepared))
        for _, region, tensor in sorted(contributions, key=lambda entry: entry[0]):
            region.of_matrix(total).add_(tensor.to(total.device))
        out.copy_(total)

    def apply(self, entries: Iterable[RegionTensor]) -> None:
        """Decays regions of parameters, and updates those that have an update."""

        def key(entry: RegionTensor) -> Hashable:
            matrix, _, update = entry
            # Some parameters may be offloaded to a CPU. One launch rounds to one dtype.
            param, shape = matrix.param, matrix.layout.full_shape
            kind = param.local.device, param.local.dtype
            return id(param.formulas), *kind, shape, update is None

        for chunk in self._grouped(entries, key):
            matrix, _, first = chunk[0]
            local = [region.of_local(m.param.local) for m, region, _ in chunk]
            updates = None
            if first is not None:
                updates = [u.to(l.device) for (_, _, u), l in zip(chunk, local)]
            matrix.param.formulas.apply(local, updates, matrix.layout.full_shape)

    def _grouped(
        self, entries: Iterable[RegionTensor], key: Callable[[RegionTensor], Hashable]
    ) -> Iterator[Sequence[RegionTensor]]:
        """Entries with equal keys: one by one on a CPU, up to ``PREPARED_BYTES`` at once elsewhere."""
        if self.device.type == "cpu":
            yield from ([entry] for entry in entries)
        else:
            sized = (
                (e, key(e), e[1].numel * e[0].layout.dtype.itemsize) for e in entries
            )
            yield from chain(*grouped(sized, PREPARED_BYTES).values())


def accumulate(params: Iterable[Param]) -> None:
    """Takes each parameter's gradient into its momentum, once per step."""
    by_formulas: dict[int, list[Param]] = {}
    for param in params:
        if param.grad is not None and not param.is_accumulated:
            param.is_accumulated = True
            by_formulas.setdefault(id(param.formulas), []).append(param)
    for of_formulas in by_formulas.values():
        of_formulas[0].formulas.accumulate(
            [param.momentum for param in of_formulas],
            [param.grad for param in of_formulas if param.grad is not None],
        )
