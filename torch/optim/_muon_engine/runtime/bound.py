"""Lists and views that stay the same between steps: regions that foreach functions take together, and views of packs
and of whole matrices.

Nothing here refers to tensors of parameters, momentum or gradients, because their owner may free or replace them
between steps. A region knows how to find its view in them.
"""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..._newton_schulz import NS_DTYPE
from ..layouts.layout import Region
from ..layouts.local import local_part
from ..schedule.packs import grouped
from .matrices import LocalMatrix
from .memory import Memory
from .params import Param, StepInputs
from .transport import LocalBucket


# Accelerators blend and apply regions of this many bytes at once, unless one region is larger.
PREPARED_BYTES = 64 * 1024**2


class Entry(NamedTuple):
    """A region of a parameter on this rank, and the tensor that it is copied to, or updated from. Without an
    update, that is None. The ``matrix`` is the first one of those that have the region.
    """

    matrix: LocalMatrix
    region: Region
    tensor: Any
    # Whether the region is all that this rank stores of the parameter, so that no view is needed.
    is_whole: bool = False


class Chunk(NamedTuple):
    """Regions that foreach functions take together. Their matrices have one parameter group, and one shape if they are
    to be updated.
    """

    group: int
    # The whole matrix's, which scales the learning rate.
    shape: tuple[int, ...]
    entries: list[Entry]
    tensors: list[Any]
    # On a CPU, memory for the blended momentum of its one entry; None for chunks to update.
    scratch: Tensor | None = None

    def present(self, inputs: StepInputs) -> "Chunk":
        """Those whose update this step applies."""
        entries = [entry for entry in self.entries if entry.matrix.applies(inputs)]
        return self._replace(entries=entries, tensors=[e.tensor for e in entries])


class Preparation(NamedTuple):
    """A part of the work before a gather. A CPU takes one matrix after another, while it is in the cache."""

    matrices: Sequence[LocalMatrix]
    # Parameter group -> the parameters whose gradients come into momentum here.
    accumulated: Mapping[int, Sequence[int]]
    chunks: Sequence[Chunk]


class Pair(NamedTuple):
    """A copy of a region of ``matrix``."""

    matrix: LocalMatrix
    target: Tensor
    source: Tensor


class Copies(NamedTuple):
    """Copies that one foreach call makes: from each of ``sources`` to one of ``targets``. There may be none."""

    matrices: list[LocalMatrix]
    targets: list[Tensor]
    sources: list[Tensor]

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "Copies":
        return cls(
            [pair.matrix for pair in pairs],
            [pair.target for pair in pairs],
            [pair.source for pair in pairs],
        )


class Batch(NamedTuple):
    """Matrices of one shape with equal options that this rank orthogonalizes together."""

    matrices: Sequence[LocalMatrix]
    # Of shape (matrices, rows, columns): the momenta, and then their updates.
    whole: Tensor
    # This rank's own regions, blended into ``whole``.
    own: Sequence[Chunk]
    # From received packs to ``whole``.
    received: Copies
    # From ``whole`` to the packs of the other holders.
    results: Copies
    # From ``whole`` to this rank's own regions of parameters.
    applied: Sequence[Chunk]
    # The places of sums, whose contributions are added one after another.
    sums: Sequence[int]


class BoundBucket(NamedTuple):
    """Everything that this rank does with a bucket, but for its collectives."""

    preparations: Sequence[Preparation]
    batches: Sequence[Batch]
    # The packed results of this rank's matrices, which are zeros for those that have no gradients.
    results: Mapping[int, Sequence[Tensor]]
    # From received packs to parameters; and contributions to a sum that receive no update but decay.
    applied: Sequence[Chunk]
    # From each relay's pack to parameters.
    relayed: Mapping[Any, Sequence[Chunk]]


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
            received=Copies.of(_joined_pairs(received)),
            results=Copies.of(_joined_pairs(results)),
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
            for entry in _joined_entries(entries):
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


def _received(matrices: Sequence[LocalMatrix], pack: Any) -> list[Entry]:
    """The regions of ``matrices`` whose updates come in ``pack``."""
    return [
        Entry(matrix, region, view)
        for matrix in matrices
        for _, region, view in pack.of(matrix.index)
    ]


def _joined_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Joins entries whose regions follow each other both in local storage and in the other tensor: heads of a fused
    weight.
    """
    joined: list[Entry] = []
    for entry in entries:
        both = _joined_entry(joined[-1], entry) if joined else None
        if both is None:
            joined.append(entry)
        else:
            joined[-1] = both
    return joined


def _joined_entry(first: Entry, second: Entry) -> Entry | None:
    """One entry for two, if a step takes both or neither, and if it scales their updates alike."""
    shapes = first.matrix.layout.full_shape, second.matrix.layout.full_shape
    if shapes[0] != shapes[1] or not _have_one_gradient(first.matrix, second.matrix):
        return None
    region = _below(first.region, second.region)
    if region is None:
        return None
    if first.tensor is None and second.tensor is None:
        return Entry(first.matrix, region, None)
    # One that has an update and one that has none stay apart.
    if first.tensor is None or second.tensor is None:
        return None
    tensor = _one_below_another(first.tensor, second.tensor)
    return None if tensor is None else Entry(first.matrix, region, tensor)


def _joined_pairs(pairs: Sequence[tuple[int, Pair]]) -> list[Pair]:
    """``pairs``, each with a rank, of which those of one rank whose tensors follow each other are one."""
    joined: list[Pair] = []
    for _, pair in sorted(pairs, key=lambda of_rank: of_rank[0]):
        last = joined[-1] if joined else None
        if last is not None and _have_one_gradient(last.matrix, pair.matrix):
            target = _one_below_another(last.target, pair.target)
            source = _one_below_another(last.source, pair.source)
            if target is not None and source is not None:
                joined[-1] = Pair(last.matrix, target, source)
                continue
        joined.append(pair)
    return joined


def _have_one_gradient(first: LocalMatrix, second: LocalMatrix) -> bool:
    """Whether a step takes both or neither. Owners of a divided matrix always take their blocks."""
    are_alike = first.products is None and second.products is None
    return are_alike and first.gradient_key == second.gradient_key


def _below(first: Region, second: Region) -> Region | None:
    """One region for two, if the rows of the second one follow those of the first one in local storage."""
    if first.repeat[1] > 1 or second.repeat[1] > 1:
        return None
    is_alike = first.width == second.width and first.stride == second.stride
    if is_alike and second.offset == first.offset + first.height * first.stride:
        return first._replace(height=first.height + second.height)
    return None


def _one_below_another(first: Tensor, second: Tensor) -> Tensor | None:
    """A view of both matrices, if the rows of the second one follow those of the first one in memory."""
    if first.ndim != 2 or second.ndim != 2 or first.stride() != second.stride():
        return None
    if first.shape[1] != second.shape[1]:
        return None
    start, row = first.storage_offset(), first.stride(0)
    is_one_memory = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    if not is_one_memory or second.storage_offset() != start + len(first) * row:
        return None
    shape = len(first) + len(second), first.shape[1]
    return first.as_strided(shape, first.stride(), start)
