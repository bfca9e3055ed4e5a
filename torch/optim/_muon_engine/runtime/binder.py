"""Binds what stays the same between steps, when an engine is built and when options of batches change."""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..._newton_schulz import NS_DTYPE
from ..layouts.local import local_part
from ..schedule.packs import grouped
from .bound import (
    Batch,
    BoundBucket,
    Chunk,
    Copies,
    Entry,
    Pair,
    Preparation,
)
from .joining import joined_entries, joined_pairs
from .matrices import LocalMatrix
from .memory import Memory
from .params import Param
from .transport import LocalBucket


# Accelerators blend and apply regions of this many bytes at once, unless one region is larger.
PREPARED_BYTES = 64 * 1024**2


class Binder:
    """Binds the work of this ``rank`` on ``buckets``, which are in the order of their gathers. A CPU (``is_cpu``) takes
    one region after another.
    """

    def __init__(
        self,
        buckets: Sequence[LocalBucket],
        params: Sequence[Param],
        rank: int,
        memory: Memory,
    ) -> None:
        self.memory = memory
        self.device = memory.device
        self.is_cpu = memory.device.type == "cpu"
        self._buckets = buckets
        self._params = params
        self._rank = rank
        # The memory of the largest batch, in bytes.
        self._whole: Any = None

    def bind(self, formulas: Sequence[Any]) -> dict[LocalBucket, BoundBucket]:
        """Binds all buckets, with the batches that the ``formulas`` of each parameter group allow."""
        batches_of = {b: self._batches(b, formulas) for b in self._buckets}
        self._take_memory(batches_of)
        # A parameter's gradient comes into momentum before the first gather of one of its matrices.
        accumulated: set[int] = set()
        return {
            bucket: self._bind(bucket, batches_of[bucket], accumulated)
            for bucket in self._buckets
        }

    def _batches(
        self, bucket: LocalBucket, formulas: Sequence[Any]
    ) -> list[list[LocalMatrix]]:
        """This rank's matrices of one shape and equal options, as many as the formulas allow in a batch."""
        by_key: dict[Hashable, list[list[LocalMatrix]]] = {}
        for matrix in bucket.matrices:
            if matrix.owner != self._rank:
                continue
            shape = matrix.layout.shape
            # An owner's blocks come before its other matrices, and each is alone.
            alone = matrix.index if matrix.products is not None else None
            key = alone, formulas[matrix.group].compute_key, shape
            batches = by_key.setdefault(key, [[]])
            room = formulas[matrix.group].batch_size(shape, self.device)
            if len(batches[-1]) == room:
                batches.append([])
            batches[-1].append(matrix)
        return [batch for batches in by_key.values() for batch in batches]

    def _take_memory(
        self, batches_of: Mapping[Any, Sequence[Sequence[LocalMatrix]]]
    ) -> None:
        numels = [
            len(batch) * batch[0].layout.numel
            for batches in batches_of.values()
            for batch in batches
        ]
        needed = max(numels, default=0) * NS_DTYPE.itemsize
        for bucket in batches_of:
            for matrix in bucket.matrices:
                for region in matrix.sent if self.is_cpu else ():
                    self.memory.reserve(region.numel, matrix.layout.dtype)
        if self._whole is None or needed > len(self._whole):
            if self._whole is not None:
                self.memory.release(self._whole)
            self._whole = self.memory.zeros(needed)

    def _bind(
        self,
        bucket: LocalBucket,
        batches: Sequence[Sequence[LocalMatrix]],
        accumulated: set[int],
    ) -> BoundBucket:
        preparations: list[Preparation] = []
        one_by_one = [[matrix] for matrix in bucket.matrices]
        for matrices in one_by_one if self.is_cpu else [bucket.matrices]:
            new: dict[int, list[int]] = {}
            for matrix in matrices:
                if matrix.param_index not in accumulated:
                    accumulated.add(matrix.param_index)
                    new.setdefault(matrix.group, []).append(matrix.param_index)
            entries = [
                Entry(matrix, region, view)
                for matrix in matrices
                for _, region, view in bucket.gather_send.of(matrix.index)
            ]
            preparations.append(Preparation(matrices, new, self._blended(entries)))
        own = [matrix for matrix in bucket.matrices if matrix.owner == self._rank]
        others = [matrix for matrix in bucket.matrices if matrix.owner != self._rank]
        decayed = [
            Entry(matrix, region, None)
            for matrix in others
            if not matrix.receives
            for region in matrix.shard
        ]
        return BoundBucket(
            preparations=preparations,
            batches=[self._bind_batch(bucket, batch) for batch in batches],
            results={
                m.index: [v.view for v in bucket.results_of(m.index)] for m in own
            },
            applied=self._updated(_received(others, bucket.scatter_recv) + decayed),
            relayed={
                relay: self._updated(_received(relay.matrices, relay.packed))
                for relay in bucket.relays
                if not relay.is_source
            },
        )

    def _bind_batch(
        self, bucket: LocalBucket, matrices: Sequence[LocalMatrix]
    ) -> Batch:
        rows, columns = matrices[0].layout.shape
        numel = len(matrices) * rows * columns
        nbytes = numel * NS_DTYPE.itemsize
        flat = self._whole.narrow(0, 0, nbytes).view(NS_DTYPE)
        whole = flat.view(len(matrices), rows, columns)
        sent: list[Entry] = []
        received: list[tuple[int, Pair]] = []
        results: list[tuple[int, Pair]] = []
        applied: list[Entry] = []
        for matrix, of_matrix in zip(matrices, whole.unbind(), strict=True):
            if not matrix.layout.shards.partial:
                for region in matrix.sent:
                    sent.append(Entry(matrix, region, region.of_matrix(of_matrix)))
                for rank, region, view in bucket.gather_recv.of(matrix.index):
                    pair = Pair(matrix, region.of_matrix(of_matrix), view)
                    received.append((rank, pair))
            for rank, region, view in bucket.results_of(matrix.index):
                pair = Pair(matrix, view, region.of_matrix(of_matrix))
                results.append((rank, pair))
            for region in matrix.shard:
                applied.append(Entry(matrix, region, region.of_matrix(of_matrix)))
        return Batch(
            matrices,
            whole,
            own=self._blended(sent),
            received=Copies.of(_joined(received)),
            results=Copies.of(_joined(results)),
            applied=self._updated(applied),
            sums=[
                at for at, matrix in enumerate(matrices) if matrix.layout.shards.partial
            ],
        )

    def _chunks(
        self,
        entries: Sequence[Entry],
        kind_of: Callable[[Entry], Hashable],
        needs_scratch: bool,
    ) -> list[Chunk]:
        """Entries whose regions go into one foreach call: one by one on a CPU, and elsewhere up to ``PREPARED_BYTES``
        of one kind.
        """
        if self.is_cpu:
            lists = [[entry] for entry in entries]
        else:
            sized = []
            for entry in joined_entries(entries):
                nbytes = entry.region.numel * entry.matrix.layout.dtype.itemsize
                sized.append((entry, kind_of(entry), nbytes))
            by_kind = grouped(sized, PREPARED_BYTES)
            lists = [of_chunk for of_kind in by_kind.values() for of_chunk in of_kind]
        chunks = []
        for of_chunk in lists:
            matrix = of_chunk[0].matrix
            bound = [self._with_extent(entry) for entry in of_chunk]
            tensors = [entry.tensor for entry in bound]
            shape = matrix.layout.full_shape
            scratch = None
            if needs_scratch and self.is_cpu:
                scratch = self._scratch_for(bound[0])
            chunks.append(Chunk(matrix.group, shape, bound, tensors, scratch))
        return chunks

    def _with_extent(self, entry: Entry) -> Entry:
        """``entry``, which knows whether its region is all that this rank stores of the parameter."""
        stored = local_part(self._params[entry.matrix.param_index].tensor)
        _, count, _ = entry.region.repeat
        extent = entry.region.height, entry.region.width
        return entry._replace(is_whole=count == 1 and stored.shape == extent)

    def _scratch_for(self, entry: Entry) -> Tensor | None:
        """Memory for the blended momentum of a region. All regions use the same memory, one after another."""
        dtype = self._params[entry.matrix.param_index].grad_dtype
        if dtype is None:
            return None  # The momentum may have any dtype.
        region = entry.region
        flat = self.memory.scratch(region.numel, dtype)
        return region.in_blocks(flat.view(region.height, region.width))

    def _blended(self, entries: Sequence[Entry]) -> list[Chunk]:
        """Chunks of momenta to blend with gradients."""
        group_of = operator.attrgetter("matrix.group")
        return self._chunks(entries, group_of, needs_scratch=True)

    def _updated(self, entries: Sequence[Entry]) -> list[Chunk]:
        """Chunks of parameters to update."""

        def kind_of(entry: Entry) -> Hashable:
            # Some parameters may be offloaded to a CPU. One launch rounds to one dtype.
            matrix = entry.matrix
            tensor = local_part(self._params[matrix.param_index].tensor)
            of_matrix = matrix.group, matrix.layout.full_shape
            return *of_matrix, tensor.device, tensor.dtype, entry.tensor is None

        return self._chunks(entries, kind_of, needs_scratch=False)


def _joined(pairs: Sequence[tuple[int, Pair]]) -> list[Pair]:
    """``pairs``, each with a rank; some as one if a parameter has several of the matrices."""
    matrices = {pair.matrix.index: pair.matrix for _, pair in pairs}
    gradients = {matrix.gradient_key for matrix in matrices.values()}
    if len(gradients) == len(matrices):
        return [pair for _, pair in pairs]
    return joined_pairs(pairs)


def _received(matrices: Sequence[LocalMatrix], pack: Any) -> list[Entry]:
    """The regions of ``matrices`` whose updates come in ``pack``."""
    return [
        Entry(matrix, region, view)
        for matrix in matrices
        for _, region, view in pack.of(matrix.index)
    ]
