"""What Muon does with the buckets of a step: gradients and momentum to packs, whole matrices to updates, updates to
parameters.

Everything that stays the same between steps is bound when the engine is built: which regions a foreach function
takes together, and the views of packs and of whole matrices. A step only looks up its parameters' tensors. It keeps
no reference to them, because their owner may free or replace them between steps.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._newton_schulz import NS_DTYPE
from ..layouts import dtensor
from ..layouts.layout import Region
from ..schedule.packs import grouped
from .matrices import LocalMatrix
from .executor import Progress
from .memory import Memory
from .params import Param, StepInputs
from .transport import copy_all, InFlight, LocalBucket


log = logging.getLogger("torch.optim.muon")

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
    """Regions that foreach functions take together. Their matrices have one parameter group and one shape."""

    group: int
    # The whole matrix's, which scales the learning rate.
    shape: tuple[int, ...]
    entries: list[Entry]
    tensors: list[Any]
    # On a CPU, memory for the blended momentum of its one entry.
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
    """Copies that one foreach call makes: from each of ``sources`` to one of ``targets``."""

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

    def run(self) -> None:
        if self.targets:  # Foreach functions refuse empty lists.
            torch._foreach_copy_(self.targets, self.sources)


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


class MuonCompute:
    """Binds the work on ``buckets`` of this ``rank``, and does it. ``buckets`` are in the order of their gathers."""

    def __init__(
        self,
        buckets: Sequence[LocalBucket],
        params: Sequence[Param],
        rank: int,
        memory: Memory,
        progress: Progress,
    ) -> None:
        self.rank = rank
        self.memory = memory
        self.progress = progress
        self._params = params
        self._buckets = buckets
        # Where this rank computes. A CPU takes one region after another.
        self.device = memory.device
        self.is_cpu = memory.device.type == "cpu"
        # What the batches depend on, by parameter group.
        self._compute_keys: dict[int, Hashable] = {}
        # The memory of the largest batch, in bytes.
        self._whole: Any = None
        self._bound: dict[LocalBucket, BoundBucket] = {}

    def bind(self, formulas: Sequence[Any]) -> bool:
        """Binds the work anew if the options of batches have changed. Returns whether they have."""
        groups = {
            matrix.group for bucket in self._buckets for matrix in bucket.matrices
        }
        keys = {group: formulas[group].compute_key for group in sorted(groups)}
        if keys == self._compute_keys:
            return False
        self._compute_keys = keys
        batches_of = {b: self._batches(b, formulas) for b in self._buckets}
        self._take_memory(batches_of)
        # A parameter's gradient comes into momentum before the first gather of one of its matrices.
        accumulated: set[int] = set()
        self._bound = {
            bucket: self._bind(bucket, batches_of[bucket], accumulated)
            for bucket in self._buckets
        }
        return True

    def batches(self, bucket: LocalBucket) -> Sequence[Batch]:
        return self._bound[bucket].batches

    # The three phases, in the words of upstream's proposal for executors of optimizer steps.

    def prepare(self, bucket: LocalBucket, inputs: StepInputs) -> None:
        """Accumulates the gradients of the bucket's matrices, and packs this rank's shards."""
        for matrices, accumulated, chunks in self._bound[bucket].preparations:
            self.progress.now = "gather", matrices
            for group, param_indices in accumulated.items():
                inputs.accumulate(group, param_indices)
            if log.isEnabledFor(logging.DEBUG):
                self._log("gather", matrices)
            for chunk in chunks:
                self._blend(chunk, inputs)

    def compute(self, bucket: LocalBucket, batch: Batch, inputs: StepInputs) -> None:
        """Orthogonalizes ``batch``, packs the updates for their holders, and applies this rank's part."""
        matrices = batch.matrices
        present: Sequence[int] = range(len(matrices))
        if not inputs.is_complete:
            present = [at for at in present if matrices[at].is_orthogonalized(inputs)]
            if not present:
                return
            if len(present) < len(matrices):
                batch = _part_of(batch, present)
                matrices = [batch.matrices[at] for at in present]
        self.progress.now = "assemble", matrices
        logs = log.isEnabledFor(logging.DEBUG)
        if logs:
            self._log("orthogonalize", matrices)
        for chunk in batch.own:
            self._blend(chunk, inputs)
        batch.received.run()
        for at in batch.sums:
            if at in present:
                self._add_contributions(bucket, batch, at, inputs)
        self.progress.now = "orthogonalize", matrices
        self._orthogonalize(batch, present, inputs)
        batch.results.run()
        self.progress.now = "apply", matrices
        if logs:
            self._log("apply", matrices)
        self._apply(batch.applied, inputs)

    def clear_absent(self, bucket: LocalBucket, inputs: StepInputs) -> None:
        """Packs zeros for those matrices of this rank that were not orthogonalized."""
        if inputs.is_complete:
            return
        zeros = [
            view
            for matrix in bucket.matrices
            if matrix.index in self._bound[bucket].results
            and not matrix.is_orthogonalized(inputs)
            for view in self._bound[bucket].results[matrix.index]
        ]
        if zeros:
            torch._foreach_zero_(zeros)

    def apply_updates(self, bucket: LocalBucket, inputs: StepInputs) -> None:
        """Applies the updates that this rank received."""
        self._log_received(bucket, bucket.scatter_recv, inputs)
        self._apply(self._bound[bucket].applied, inputs)

    def apply_relayed(
        self, bucket: LocalBucket, relay: Any, inputs: StepInputs
    ) -> None:
        """Applies the updates that this rank received over a relay."""
        self._log_received(relay, relay.packed, inputs)
        self._apply(self._bound[bucket].relayed.get(relay, ()), inputs)

    # What is bound.

    def _batches(
        self, bucket: LocalBucket, formulas: Sequence[Any]
    ) -> list[list[LocalMatrix]]:
        """This rank's matrices of one shape and equal options, as many as the formulas allow in a batch."""
        by_key: dict[Hashable, list[list[LocalMatrix]]] = {}
        for matrix in bucket.matrices:
            if matrix.owner != self.rank:
                continue
            shape = matrix.layout.shape
            # An owner's blocks come before its other matrices, and each is alone.
            alone = matrix.index if matrix.products is not None else None
            key = alone, self._compute_keys[matrix.group], shape
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
        sent: list[Preparation] = []
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
            sent.append(Preparation(matrices, new, self._blended(entries)))
        own = [matrix for matrix in bucket.matrices if matrix.owner == self.rank]
        others = [matrix for matrix in bucket.matrices if matrix.owner != self.rank]
        decayed = [
            Entry(matrix, region, None)
            for matrix in others
            if not matrix.receives
            for region in matrix.shard
        ]
        return BoundBucket(
            preparations=sent,
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
        self, entries: Sequence[Entry], kind_of: Callable[[Entry], Hashable]
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
            scratch = self._scratch_for(bound[0]) if self.is_cpu else None
            chunks.append(Chunk(matrix.group, shape, bound, tensors, scratch))
        return chunks

    def _with_extent(self, entry: Entry) -> Entry:
        """``entry``, which knows whether its region is all that this rank stores of the parameter."""
        stored = dtensor.local_part(self._params[entry.matrix.param_index].tensor)
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
        return self._chunks(entries, lambda entry: entry.matrix.group)

    def _updated(self, entries: Sequence[Entry]) -> list[Chunk]:
        """Chunks of parameters to update."""

        def kind_of(entry: Entry) -> Hashable:
            # Some parameters may be offloaded to a CPU. One launch rounds to one dtype.
            matrix = entry.matrix
            tensor = dtensor.local_part(self._params[matrix.param_index].tensor)
            of_matrix = matrix.group, matrix.layout.full_shape
            return *of_matrix, tensor.device, tensor.dtype, entry.tensor is None

        return self._chunks(entries, kind_of)

    # What a step does.

    def _blend(self, chunk: Chunk, inputs: StepInputs) -> None:
        """Writes regions of the tensors to orthogonalize: momentum, blended with the gradient if nesterov.
        Without a gradient, that is momentum, so that the owner receives defined values.
        """
        momenta, gradients = [], []
        for matrix, region, _, is_whole in chunk.entries:
            of_param = inputs.params[matrix.param_index]
            momentum, gradient = of_param.momentum, of_param.gradient
            if gradient is None:
                gradient = momentum
            if not is_whole:
                momentum = region.of_local(momentum)
                gradient = region.of_local(gradient)
            momenta.append(momentum)
            gradients.append(gradient)
        formulas = inputs.formulas[chunk.group]
        prepared = formulas.prepare(momenta, gradients, chunk.scratch)
        torch._foreach_copy_(chunk.tensors, prepared)

    def _orthogonalize(
        self, batch: Batch, present: Sequence[int], inputs: StepInputs
    ) -> None:
        """Replaces the momenta in ``batch.whole`` at the places ``present`` by their updates."""
        first = batch.matrices[0]
        formulas, count = inputs.formulas[first.group], len(present)
        if len(batch.matrices) == 1:
            formulas.orthogonalize(batch.whole[0], first.products, out=batch.whole[0])
            return
        # The first places, without gaps: the last matrices move there meanwhile.
        gaps = sorted({*range(count)} - {*present})
        fillers = [place for place in present if place >= count]
        moved = [
            (batch.whole[gap], batch.whole[filler])
            for gap, filler in zip(gaps, fillers, strict=True)
        ]
        copy_all(moved)
        whole = batch.whole[:count]
        if count == 1:
            formulas.orthogonalize(whole[0], out=whole[0])
        else:
            formulas.orthogonalize(whole, out=whole)
        copy_all([(filler, gap) for gap, filler in moved])

    def _add_contributions(
        self, bucket: LocalBucket, batch: Batch, place: int, inputs: StepInputs
    ) -> None:
        """Adds the contributions to a sum in the order of their ranks, whoever owns the matrix."""
        matrix, out = batch.matrices[place], batch.whole[place]
        layout, shards = matrix.layout, matrix.layout.shards
        total = torch.zeros(layout.shape, dtype=layout.dtype, device=out.device)
        contributions = [
            (shards.contribution_of(rank), region, view)
            for rank, region, view in bucket.gather_recv.of(matrix.index)
        ]
        momentum = inputs.params[matrix.param_index].momentum
        for region in matrix.sent:
            prepared = torch.empty_like(region.of_local(momentum))
            entry = Entry(matrix, region, prepared)
            self._blend(Chunk(matrix.group, layout.shape, [entry], [prepared]), inputs)
            contributions.append((shards.contribution_of(self.rank), region, prepared))
        for _, region, tensor in sorted(contributions, key=lambda entry: entry[0]):
            region.of_matrix(total).add_(tensor.to(total.device))
        out.copy_(total)

    def _apply(self, chunks: Sequence[Chunk], inputs: StepInputs) -> None:
        """Decays regions of parameters, and updates those that have an update."""
        for chunk in chunks:
            if not inputs.is_complete:
                chunk = chunk.present(inputs)
            entries, tensors = chunk.entries, chunk.tensors
            if not entries:
                continue
            local = []
            for matrix, region, _, is_whole in entries:
                part = inputs.params[matrix.param_index].local
                local.append(part if is_whole else region.of_local(part))
            updates = None
            if tensors[0] is not None:
                device = local[0].device
                updates = tensors
                if device != tensors[0].device:
                    updates = [update.to(device) for update in tensors]
            inputs.formulas[chunk.group].apply(local, updates, chunk.shape)

    def _log(self, phase: str, matrices: Iterable[LocalMatrix]) -> None:
        for matrix in matrices:
            values = self.rank, phase, matrix.layout.describe(), matrix.owner
            log.debug("rank %d: %s %s, owner %d", *values)

    def _log_received(
        self, flight: InFlight, received: Any, inputs: StepInputs
    ) -> None:
        """Logs the updates of other owners' matrices that have come, or that this rank has no element of."""
        if not log.isEnabledFor(logging.DEBUG):
            return
        for matrix in flight.matrices:
            if matrix.owner == self.rank or not matrix.applies(inputs):
                continue
            if received.of(matrix.index) or not matrix.shard:
                self._log("apply", [matrix])


def _received(matrices: Sequence[LocalMatrix], pack: Any) -> list[Entry]:
    """The regions of ``matrices`` whose updates come in ``pack``."""
    return [
        Entry(matrix, region, view)
        for matrix in matrices
        for _, region, view in pack.of(matrix.index)
    ]


def _part_of(batch: Batch, present: Sequence[int]) -> Batch:
    """``batch``, with the work on the matrices at some of its places."""
    indices = {batch.matrices[place].index for place in present}

    def chunks(bound: Sequence[Chunk]) -> list[Chunk]:
        found = []
        for chunk in bound:
            entries = [
                entry for entry in chunk.entries if entry.matrix.index in indices
            ]
            if entries:
                tensors = [entry.tensor for entry in entries]
                found.append(chunk._replace(entries=entries, tensors=tensors))
        return found

    def copies(bound: Copies) -> Copies:
        pairs = [Pair(*pair) for pair in zip(*bound) if pair[0].index in indices]
        return Copies.of(pairs)

    return batch._replace(
        own=chunks(batch.own),
        received=copies(batch.received),
        results=copies(batch.results),
        applied=chunks(batch.applied),
    )


def _joined_entries(entries: Sequence[Entry]) -> list[Entry]:
    """``entries``, of which those that follow each other, here and there, are one: the heads of a fused weight."""
    joined: list[Entry] = []
    for entry in entries:
        last = joined[-1] if joined else None
        if last is not None and _have_one_gradient(last.matrix, entry.matrix):
            region = _below(last.region, entry.region)
            tensor = None
            if region is not None and entry.tensor is not None:
                tensor = _one_below_another(last.tensor, entry.tensor)
            if region is not None and (tensor is None) == (entry.tensor is None):
                joined[-1] = Entry(last.matrix, region, tensor)
                continue
        joined.append(entry)
    return joined


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
    return are_alike and first.source_of_gradient == second.source_of_gradient


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
