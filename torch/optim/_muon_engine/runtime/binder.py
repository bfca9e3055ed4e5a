"""Binds what stays the same between steps: when a step first needs its memory, and when options of batches change."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..._newton_schulz import NS_DTYPE
from ..layouts.local import local_part
from ..schedule.packs import grouped
from .bound import (
    Batch,
    BlendedRegions,
    BoundBucket,
    Copies,
    Entry,
    Pair,
    Preparation,
    UpdatedRegions,
)
from .joining import joined_entries, joined_pairs
from .matrices import LocalMatrix
from .memory import Memory
from .params import Param
from .transport import BoundPack, LocalBucket


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
        # The parameter groups whose passes over memory are kernels, which need no memory of their own.
        self._fused_groups: set[int] = set()
        # The indices of the parameters whose gradients come into momentum where the momentum is blended.
        self._accumulating: set[int] = set()

    def bind(self, formulas: Mapping[int, Any]) -> dict[LocalBucket, BoundBucket]:
        """Binds all buckets, with the batches that the ``formulas`` of each parameter group allow."""
        batches_of: dict[LocalBucket, list[list[LocalMatrix]]] = {}
        for bucket in self._buckets:
            batches_of[bucket] = self._batches(bucket, formulas)
        self._take_memory(batches_of)
        self._fused_groups = self._groups_with_kernels(formulas)
        self._accumulating = self._accumulating_params()
        # A parameter's gradient comes into momentum before the first gather of one of its matrices.
        accumulated: set[int] = set()
        bound: dict[LocalBucket, BoundBucket] = {}
        for bucket, batches in batches_of.items():
            preparations = self._preparations(bucket, accumulated)
            bound[bucket] = self._bind(bucket, preparations, batches)
        return bound

    def _batches(
        self, bucket: LocalBucket, formulas: Mapping[int, Any]
    ) -> list[list[LocalMatrix]]:
        """This rank's matrices of one shape and equal options, as many as the formulas allow in a batch."""
        by_kind: dict[Hashable, list[list[LocalMatrix]]] = {}
        for matrix in bucket.matrices:
            if matrix.owner != self._rank:
                continue
            shape = matrix.layout.shape
            of_group = formulas[matrix.param_group]
            batches = by_kind.setdefault((of_group.compute_key, shape), [[]])
            if len(batches[-1]) == of_group.batch_size(shape, self.device):
                batches.append([])
            batches[-1].append(matrix)
        all_batches: list[list[LocalMatrix]] = []
        for batches in by_kind.values():
            all_batches += batches
        return all_batches

    def _groups_with_kernels(self, formulas: Mapping[int, Any]) -> set[int]:
        param_groups = {param.param_group for param in self._params}
        return {
            param_group
            for param_group in param_groups
            if formulas[param_group].has_kernels(self.device)
        }

    def _accumulating_params(self) -> set[int]:
        """The indices of the parameters of which this rank blends all that it stores, as regions without gaps. Kernels
        take these gradients into momentum in the same pass.
        """
        taken: set[int] = set()
        others: set[int] = set()
        for bucket in self._buckets:
            for matrix in bucket.matrices:
                is_taken = (
                    matrix.param_group in self._fused_groups
                    and not matrix.is_sum
                    and matrix.sent == matrix.shard
                    and all(region.is_contiguous for region in matrix.sent)
                )
                (taken if is_taken else others).add(matrix.param_index)
        return taken - others

    def _take_memory(
        self, batches_of: Mapping[LocalBucket, Sequence[Sequence[LocalMatrix]]]
    ) -> None:
        """Takes memory for the largest batch, and on a CPU for the largest blended region of each dtype."""
        largest = 0
        for bucket, batches in batches_of.items():
            for batch in batches:
                largest = max(largest, len(batch) * batch[0].layout.numel)
            if self.is_cpu:
                for matrix in bucket.matrices:
                    for region in matrix.sent:
                        self.memory.reserve(region.numel, matrix.layout.dtype)
        needed = largest * NS_DTYPE.itemsize
        if self._whole is None or needed > len(self._whole):
            if self._whole is not None:
                self.memory.release(self._whole)
            self._whole = self.memory.zeros(needed)

    def _preparations(
        self, bucket: LocalBucket, accumulated: set[int]
    ) -> list[Preparation]:
        """The work before the gather of ``bucket``. ``accumulated`` has the parameters of earlier gathers, and gets
        those of this one.
        """
        parts = [bucket.matrices]
        if self.is_cpu:
            parts = [[matrix] for matrix in bucket.matrices]
        preparations: list[Preparation] = []
        for matrices in parts:
            new: dict[int, list[int]] = {}
            sent: list[Entry] = []
            for matrix in matrices:
                index = matrix.param_index
                if index not in accumulated and index not in self._accumulating:
                    accumulated.add(index)
                    new.setdefault(matrix.param_group, []).append(index)
                for _, region, view in bucket.gather_send.of(matrix.index):
                    sent.append(Entry(matrix, region, view))
            preparations.append(Preparation(matrices, new, self._blended(sent)))
        return preparations

    def _bind(
        self,
        bucket: LocalBucket,
        preparations: Sequence[Preparation],
        batches: Sequence[Sequence[LocalMatrix]],
    ) -> BoundBucket:
        results: dict[int, list[Tensor]] = {}
        others: list[LocalMatrix] = []
        for matrix in bucket.matrices:
            if matrix.owner == self._rank:
                packed = bucket.results_of(matrix.index)
                results[matrix.index] = [view for _, _, view in packed]
                continue
            others.append(matrix)
        relayed: dict[Any, Sequence[UpdatedRegions]] = {}
        for relay in bucket.relays:
            if not relay.is_source:
                received = _received(relay.matrices, relay.packed)
                relayed[relay] = self._updated(received)
        received = _received(others, bucket.scatter_recv)
        return BoundBucket(
            preparations=preparations,
            batches=[self._bind_batch(bucket, batch) for batch in batches],
            packed_results=results,
            applied=self._updated(received),
            relayed=relayed,
        )

    def _bind_batch(
        self, bucket: LocalBucket, matrices: Sequence[LocalMatrix]
    ) -> Batch:
        rows, columns = matrices[0].layout.shape
        nbytes = len(matrices) * rows * columns * NS_DTYPE.itemsize
        flat = self._whole.narrow(0, 0, nbytes).view(NS_DTYPE)
        whole = flat.view(len(matrices), rows, columns)
        sent: list[Entry] = []
        received: list[tuple[int, Pair]] = []
        results: list[tuple[int, Pair]] = []
        applied: list[Entry] = []
        for place, matrix in enumerate(matrices):
            of_matrix = whole[place]
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
        )

    def _blended(self, entries: Sequence[Entry]) -> list[BlendedRegions]:
        """The momenta to blend with gradients, which some of them accumulate in the same pass."""

        def accumulates(entry: Entry) -> bool:
            return entry.matrix.param_index in self._accumulating

        def kind_of(entry: Entry) -> Hashable:
            # The kernels take contiguous targets only.
            is_contiguous = entry.tensor.is_contiguous()
            return entry.matrix.param_group, accumulates(entry), is_contiguous

        blended: list[BlendedRegions] = []
        for together in self._taken_together(entries, kind_of):
            first = together[0]
            blended.append(
                BlendedRegions(
                    first.matrix.param_group,
                    together,
                    targets=[entry.tensor for entry in together],
                    scratch=self._scratch_for(first) if self.is_cpu else None,
                    accumulates=accumulates(first),
                )
            )
        return blended

    def _updated(self, entries: Sequence[Entry]) -> list[UpdatedRegions]:
        """The regions of parameters to update."""

        def kind_of(entry: Entry) -> Hashable:
            matrix = entry.matrix
            stored = self._stored(entry)
            # Some parameters may be offloaded to a CPU. One launch rounds to one dtype.
            of_storage = stored.device, stored.dtype
            has_update = entry.tensor is not None
            return matrix.param_group, matrix.layout.shape, of_storage, has_update

        updated: list[UpdatedRegions] = []
        for together in self._taken_together(entries, kind_of):
            first = together[0]
            updates = None
            if first.tensor is not None:
                updates = [entry.tensor for entry in together]
            matrix = first.matrix
            updated.append(
                UpdatedRegions(
                    matrix.param_group, matrix.layout.shape, together, updates
                )
            )
        return updated

    def _taken_together(
        self, entries: Sequence[Entry], kind_of: Callable[[Entry], Hashable]
    ) -> list[list[Entry]]:
        """Entries whose regions go into one foreach call: one by one on a CPU, and elsewhere up to ``PREPARED_BYTES``
        of one kind. They know whether their regions are all that this rank stores of the parameters.
        """
        if self.is_cpu:
            return [[self._with_is_whole(entry)] for entry in entries]
        sized: list[tuple[Entry, Hashable, int]] = []
        for entry in joined_entries(entries):
            nbytes = entry.region.numel * entry.matrix.layout.dtype.itemsize
            if entry.matrix.param_group in self._fused_groups:
                # All regions in one launch.
                nbytes = 0
            sized.append((self._with_is_whole(entry), kind_of(entry), nbytes))
        together: list[list[Entry]] = []
        for of_kind in grouped(sized, PREPARED_BYTES).values():
            together += of_kind
        return together

    def _with_is_whole(self, entry: Entry) -> Entry:
        region = entry.region
        _, count, _ = region.repeat
        is_one_block = count == 1
        shape = region.height, region.width
        is_whole = is_one_block and self._stored(entry).shape == shape
        return entry._replace(is_whole=is_whole)

    def _stored(self, entry: Entry) -> Tensor:
        """What this rank stores of the parameter."""
        return local_part(self._params[entry.matrix.param_index].tensor)

    def _scratch_for(self, entry: Entry) -> Tensor | None:
        """Memory for the blended momentum of a region. All regions use the same memory, one after another."""
        dtype = self._params[entry.matrix.param_index].grad_dtype
        if dtype is None:
            return None  # The momentum may have any dtype.
        region = entry.region
        flat = self.memory.scratch(region.numel, dtype)
        return region.in_blocks(flat.view(region.height, region.width))


def _joined(pairs: Sequence[tuple[int, Pair]]) -> list[Pair]:
    """``pairs``, each with a rank; some as one if a parameter has several of the matrices."""
    gradient_of = {pair.matrix.index: pair.matrix.gradient_key for _, pair in pairs}
    if len(set(gradient_of.values())) == len(gradient_of):
        return [pair for _, pair in pairs]
    return joined_pairs(pairs)


def _received(matrices: Sequence[LocalMatrix], pack: BoundPack) -> list[Entry]:
    """The regions of ``matrices`` whose updates come in ``pack``."""
    received: list[Entry] = []
    for matrix in matrices:
        for _, region, view in pack.of(matrix.index):
            received.append(Entry(matrix, region, view))
    return received
