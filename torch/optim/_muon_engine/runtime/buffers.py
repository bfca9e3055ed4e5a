"""The packed buffers of each bucket, and the collectives that move them.

The schedule alone decides what is sent, to whom and how much of it. Gradients fill the buffers and
never change a call.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim._muon_engine.process_groups import is_dry_run


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.layouts import Layout, Region
    from torch.optim._muon_engine.schedule.specs import (
        Bucket,
        BucketSpec,
        PackSpec,
        Relay,
        Schedule,
    )


# Broadcasts along replicas of which the results have memory at one time.
RELAYS_IN_FLIGHT = 2


class Slot(NamedTuple):
    """Memory of one bucket in flight, 1D, in bytes.

    What a gather sends and what the scatter then receives share ``outer``: the first is over before
    the second begins. What an owner gathers and sends back shares ``inner`` where both are packed
    alike: a matrix is put together before its update is written.
    """

    outer: Tensor
    inner: Tensor


class PackedRegionView(NamedTuple):
    """A region in a buffer: the rank that holds it, and its view of shape (height, width)."""

    rank: int
    region: Region
    view: Tensor


class PackedBuffer:
    """One side of a gather or scatter over one slot: flat, by region and by flag."""

    def __init__(self, spec: PackSpec, memory: Tensor) -> None:
        self.flat = memory[: spec.nbytes].view(spec.dtype)
        self.splits = list(spec.splits)
        self._regions: dict[int, list[PackedRegionView]] = {}
        for matrix, rank, region, offset in spec.regions:
            flat = self.flat.narrow(0, offset, region.numel)
            view = PackedRegionView(
                rank, region, flat.view(region.height, region.width)
            )
            self._regions.setdefault(matrix, []).append(view)
        places: dict[int, list[int]] = {}
        for flag in spec.flags:
            places.setdefault(flag.matrix, []).append(flag.offset)
        self.matrices = list(places)
        # One row a matrix, one column a peer: all flags of a bucket are read or written at once. A
        # matrix with fewer peers than another repeats its last one.
        longest = max(map(len, places.values()), default=0)
        rows = [
            found + found[-1:] * (longest - len(found)) for found in places.values()
        ]
        self._flag_places = torch.tensor(rows, dtype=torch.long, device=memory.device)

    def regions(self, matrix: int) -> Sequence[PackedRegionView]:
        return self._regions.get(matrix, ())

    def read_flags(self) -> Tensor:
        """Flags of shape (matrices, peers)."""
        return self.flat[self._flag_places]

    def flags_from(self, other: PackedBuffer) -> tuple[Tensor, Tensor]:
        """Where the flags of matrices stand that both have, here and in ``other``; one peer a matrix."""
        row = {matrix: place for place, matrix in enumerate(self.matrices)}
        both = [(row[m], at) for at, m in enumerate(other.matrices) if m in row]
        return (
            self._flag_places[[mine for mine, _ in both]].flatten(),
            other._flag_places[[theirs for _, theirs in both]].flatten(),
        )

    def write_flags(self, values: Tensor) -> None:
        """Writes ``values``, of shape (matrices,), for every peer."""
        if self.matrices:
            self.flat[self._flag_places] = values.to(self.flat.dtype)[:, None]


@dataclass
class BucketBuffers:
    """A bucket as this rank runs it: its buffers, and the collective that is under way."""

    bucket: Bucket
    group: ProcessGroup | None
    # Matrices that this rank owns.
    owned: tuple[int, ...]
    gather_send: PackedBuffer
    gather_recv: PackedBuffer
    scatter_send: PackedBuffer
    scatter_recv: PackedBuffer
    # Of the updates that this rank makes, its own shards, which it relays.
    kept: PackedBuffer
    relays: list[RelayBuffer]
    # The bucket of the same group whose gather may start once this one is on its way back.
    follower: BucketBuffers | None = None
    work: dist.Work | None = None
    _phase: str = ""

    def start_gather(self) -> None:
        self._phase = "gather"
        self._start(self.gather_recv, self.gather_send)

    def start_scatter(self) -> None:
        self._phase = "scatter"
        self._start(self.scatter_recv, self.scatter_send)

    def _start(self, recv: PackedBuffer, send: PackedBuffer) -> None:
        if self.group is None:
            return
        if is_dry_run() and not (recv.flat.numel() and send.flat.numel()):
            return  # The fake backend refuses an empty side.
        # A backend may give up a collective whose handle nobody keeps.
        self.work = dist.all_to_all_single(
            recv.flat,
            send.flat,
            output_split_sizes=recv.splits,
            input_split_sizes=send.splits,
            group=self.group,
            async_op=True,
        )

    def wait(self) -> None:
        if self.work is not None:
            work, self.work = self.work, None
            _wait(
                work, f"{self._phase} of bucket {self.bucket.index}", self.bucket.group
            )

    # Between the collectives. ``prepared`` gives a region of this rank's own shard, of shape
    # (height, width), good until it is called again.

    def pack(self, matrix: int, prepared: Callable[[Region], Tensor]) -> None:
        """Writes what this rank sends of ``matrix`` to its owner."""
        for _, region, view in self.gather_send.regions(matrix):
            view.copy_(prepared(region))

    def assemble(
        self,
        matrix: int,
        layout: Layout,
        own: Sequence[Region],
        rank: int,
        prepared: Callable[[Region], Tensor],
        out: Tensor,
    ) -> Tensor:
        """Puts the whole matrix together on its owner.

        Args:
            own: the regions of the owner's shard that count; none where a replica's count.
            out: shape (rows, columns), of the dtype of the orthogonalization; written to and returned.
        """
        received = self.gather_recv.regions(matrix)
        if layout.shards.partial:
            return _sum_contributions(layout, received, own, rank, prepared, out)
        for region in own:
            region.of_matrix(out).copy_(prepared(region))
        for _, region, view in received:
            region.of_matrix(out).copy_(view)
        return out

    def pack_update(self, matrix: int, update: Tensor) -> None:
        """Writes each holder's regions of ``update``, of shape (rows, columns)."""
        for buffer in (self.scatter_send, self.kept):
            for _, region, view in buffer.regions(matrix):
                view.copy_(region.of_matrix(update))


@dataclass
class RelayBuffer:
    """A broadcast of one bucket along replicas, as this rank takes part in it."""

    bucket: Bucket
    relay: Relay
    group: ProcessGroup | None
    packed: PackedBuffer
    work: dist.Work | None = None
    # Where flags stand that come from each of several buffers.
    _flags: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def pack(self, results: BucketBuffers) -> None:
        """On the source: writes what came back to it, and what it made itself."""
        origins = (results.scatter_recv, results.kept)
        if not self._flags:
            self._flags = [self.packed.flags_from(origin) for origin in origins]
        for origin, (mine, theirs) in zip(origins, self._flags):
            for matrix in self.packed.matrices:
                found, wanted = origin.regions(matrix), self.packed.regions(matrix)
                for (_, _, view), (_, _, target) in zip(found, wanted):
                    target.copy_(view)
            self.packed.flat[mine] = origin.flat[theirs]

    def start(self) -> None:
        if self.work is None:
            self.work = dist.broadcast(
                self.packed.flat, self.relay.source, group=self.group, async_op=True
            )

    def wait(self) -> None:
        if self.work is not None:
            work, self.work = self.work, None
            what = f"relay of bucket {self.bucket.index} from rank {self.relay.source}"
            _wait(work, what, self.relay.replicas)


def _wait(work: dist.Work, what: str, ranks: Sequence[int]) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"the {what} among ranks {list(ranks)} failed. One of these ranks ended, failed before it, did not call "
            f"step(), or changed its parameters alone: {error}"
        ) from error


def _sum_contributions(
    layout: Layout,
    received: Sequence[PackedRegionView],
    own: Sequence[Region],
    rank: int,
    prepared: Callable[[Region], Tensor],
    out: Tensor,
) -> Tensor:
    """Adds contributions in their order, which is the same whoever owns the matrix."""
    total = torch.zeros(layout.shape, dtype=layout.dtype, device=out.device)
    parts: list[tuple[int, Region, Tensor | None]] = [
        (layout.shards.contribution_of(sender), region, view)
        for sender, region, view in received
    ]
    parts += [(layout.shards.contribution_of(rank), region, None) for region in own]
    for _, region, view in sorted(parts, key=lambda part: part[0]):
        region.of_matrix(total).add_(prepared(region) if view is None else view)
    return out.copy_(total)


class Buffers:
    """The buckets of one rank over persistent memory: each group has a ring of slots."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        groups: Mapping[tuple[int, ...], ProcessGroup | None],
        device: torch.device,
        prefetch_count: int,
    ) -> None:
        self.device = device
        self.prefetch_count = prefetch_count
        rings: dict[tuple[int, ...], list[tuple[int, Bucket, BucketSpec]]] = {}
        for place, bucket in enumerate(schedule.buckets):
            if rank not in bucket.group:
                continue
            group = groups[bucket.group]
            order = (
                tuple(dist.get_process_group_ranks(group)) if group else bucket.group
            )
            spec = schedule.spec(bucket, rank, order)
            rings.setdefault(bucket.group, []).append((place, bucket, spec))
        relays = [
            spec.relays
            for specs in rings.values()
            for _, _, spec in specs
            if spec.relays
        ]
        passing = _RelayMemory(relays, rank, device)
        placed: list[tuple[int, BucketBuffers]] = []
        for specs in rings.values():
            slots = self._slots([spec for _, _, spec in specs], device)
            ring = [
                _bucket_buffers(bucket, groups, spec, slot, passing)
                for (_, bucket, spec), slot in zip(specs, itertools.cycle(slots))
            ]
            for buffers, follower in zip(ring, ring[prefetch_count + 1 :]):
                buffers.follower = follower
            placed += zip((place for place, _, _ in specs), ring)
        # Replicas of which one speaks for all, and the matrices that it does so for.
        self.replica_sets = [
            (groups[ranks], matrices)
            for ranks, matrices in sorted(schedule.replica_sets(rank).items())
        ]
        # All groups in one order, of which each rank runs its part.
        self.buckets = [buffers for _, buffers in sorted(placed, key=lambda p: p[0])]

    def _slots(self, specs: Sequence[BucketSpec], device: torch.device) -> list[Slot]:
        """Slots for the gathers ahead, the bucket at hand and the one on its way back."""
        sizes = [
            max(spec.nbytes[i] for spec in specs) for i in range(len(specs[0].nbytes))
        ]
        return [
            Slot(
                *(torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
            )
            for _ in range(min(len(specs), self.prefetch_count + 2))
        ]

    def connect(self) -> None:
        """Makes the first collective of each group, tiny, while all ranks are at one place.

        Backends of accelerators connect two ranks when they first exchange something. Made in the middle of
        a step, with other collectives under way, connections have deadlocked.
        """
        exchanging: dict[tuple[int, ...], list[BucketBuffers]] = {}
        relaying: dict[tuple[int, ...], RelayBuffer] = {}
        for bucket in self.buckets:
            if bucket.group is not None:
                exchanging.setdefault(bucket.bucket.group, []).append(bucket)
            for relay in bucket.relays:
                relaying.setdefault(relay.relay.replicas, relay)
        for _, buckets in sorted(exchanging.items(), key=lambda item: item[0]):
            sides = [(b.gather_send, b.gather_recv) for b in buckets]
            sides += [(b.scatter_send, b.scatter_recv) for b in buckets]
            sent, received = (
                [int(any(splits)) for splits in zip(*(side.splits for side in some))]
                for some in zip(*sides)
            )
            dist.all_to_all_single(
                torch.empty(sum(received), dtype=torch.uint8, device=self.device),
                torch.zeros(sum(sent), dtype=torch.uint8, device=self.device),
                output_split_sizes=received,
                input_split_sizes=sent,
                group=buckets[0].group,
            )
        for ranks, relay in sorted(relaying.items(), key=lambda item: item[0]):
            first = torch.zeros(1, dtype=torch.uint8, device=self.device)
            dist.broadcast(first, ranks[0], group=relay.group)

    def drain(self) -> None:
        """Waits for whatever is under way, after an error."""
        for buffers in self.buckets:
            for one in (buffers, *buffers.relays):
                # The error that led here is the one to report.
                with suppress(Exception):
                    one.wait()


def _bucket_buffers(
    bucket: Bucket,
    groups: Mapping[tuple[int, ...], ProcessGroup | None],
    spec: BucketSpec,
    slot: Slot,
    passing: _RelayMemory,
) -> BucketBuffers:
    updates = slot.inner[0 if spec.in_place else spec.gather_recv.nbytes :]
    return BucketBuffers(
        bucket,
        groups[bucket.group],
        spec.owned,
        gather_send=PackedBuffer(spec.gather_send, slot.outer),
        gather_recv=PackedBuffer(spec.gather_recv, slot.inner),
        scatter_send=PackedBuffer(spec.scatter_send, updates),
        scatter_recv=PackedBuffer(spec.scatter_recv, slot.outer),
        kept=PackedBuffer(spec.kept, updates[spec.scatter_send.nbytes :]),
        relays=[
            RelayBuffer(bucket, relay, groups[relay.replicas], packed)
            for relay, packed in passing.buffers(spec.relays)
        ],
    )


class _RelayMemory:
    """What a rank passes on of a bucket is packed as a whole, so that the slot is free at once.

    What it is passed goes through a ring, each broadcast applied before the next but one.
    """

    def __init__(
        self, relays: Iterable[Sequence[Relay]], rank: int, device: torch.device
    ) -> None:
        self.rank = rank
        sent = received = 0
        for of_bucket in relays:
            sizes = [(relay.source == rank, relay.packed.nbytes) for relay in of_bucket]
            sent = max(sent, sum(size for mine, size in sizes if mine))
            received = max([received, *(size for mine, size in sizes if not mine)])
        self._sent = torch.empty(sent, dtype=torch.uint8, device=device)
        self._ring = [
            torch.empty(received, dtype=torch.uint8, device=device)
            for _ in range(RELAYS_IN_FLIGHT)
        ]

    def buffers(self, relays: Sequence[Relay]) -> Iterator[tuple[Relay, PackedBuffer]]:
        """One for each of the ``relays`` of a bucket."""
        free, ring = self._sent, itertools.cycle(self._ring)
        for relay in relays:
            mine = relay.source == self.rank
            yield relay, PackedBuffer(relay.packed, free if mine else next(ring))
            free = free[relay.packed.nbytes if mine else 0 :]
