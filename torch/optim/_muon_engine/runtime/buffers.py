"""The packed buffers of each bucket, and the collectives that move them.

The schedule alone decides what is sent, to whom and how much of it. Gradients fill the buffers and
never change a call.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim._muon_engine.layouts import listed
from torch.optim._muon_engine.runtime.exchange import all_to_all, TwoLevelExchange
from torch.optim._muon_engine.schedule.specs import (
    relay_sizes,
    RELAYS_IN_FLIGHT,
    slot_sizes,
    slots_for,
)


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.layouts import Layout, Region
    from torch.optim._muon_engine.schedule.specs import (
        Bucket,
        BucketSpec,
        PackSpec,
        Relay,
        Schedule,
        TwoLevel,
    )


_INT_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Slot(NamedTuple):
    """Memory of one bucket in flight, 1D, in bytes.

    What a gather sends and what the scatter then receives share ``outer``: the first is over before
    the second begins. What an owner gathers and sends back shares ``inner`` where both are packed
    alike: a matrix is put together before its update is written. ``staging`` is for what a rank passes on
    in an exchange of two levels.
    """

    outer: Tensor
    inner: Tensor
    staging: Tensor


class PackedRegionView(NamedTuple):
    """A region in a buffer: the rank that holds it, and its view of shape (height, width)."""

    rank: int
    region: Region
    view: Tensor


class PackedBuffer:
    """One side of a gather or scatter: flat, by region and by flag, from byte ``start`` of ``memory``."""

    def __init__(self, spec: PackSpec, memory: Tensor, start: int = 0) -> None:
        # Views that fake tensors of any device have, for dry runs.
        self.flat = memory.narrow(0, start, spec.nbytes).view(spec.dtype)
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
        self._rows, self._flags = rows, spec.flags

    def regions(self, matrix: int) -> Sequence[PackedRegionView]:
        return self._regions.get(matrix, ())

    def flag_ranks(self) -> list[list[int]]:
        """By whom flags are said, or to whom, a list for each of ``matrices``."""
        said = {flag.offset: flag.rank for flag in self._flags}
        return [[said[at] for at in row] for row in self._rows]

    @property
    def _ints(self) -> Tensor:
        # A float is exact for fewer integers than it has bits, and copies of it keep the bits.
        return self.flat.view(_INT_OF_SIZE[self.flat.itemsize])

    def read_flags(self) -> Tensor:
        """Flags of shape (matrices, peers), of 16 bits each."""
        return self._ints[self._flag_places].to(torch.int32) & 0xFFFF

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
            ints = self._ints
            ints[self._flag_places] = values.to(ints.dtype).unsqueeze(1)


@dataclass
class BucketBuffers:
    """A bucket as this rank runs it: its buffers, and the collective that is under way."""

    bucket: Bucket
    # Of all matrices of the schedule.
    layouts: Sequence[Layout]
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
    gather_hops: TwoLevel | None = None
    scatter_hops: TwoLevel | None = None
    two_level: TwoLevelExchange | None = None
    # The bucket of the same group whose gather may start once this one is on its way back.
    follower: BucketBuffers | None = None
    work: dist.Work | None = None
    _phase: str = ""

    def start_gather(self) -> None:
        self._start("gather", self.gather_recv, self.gather_send, self.gather_hops)

    def start_scatter(self) -> None:
        self._start("scatter", self.scatter_recv, self.scatter_send, self.scatter_hops)

    def _start(
        self, phase: str, recv: PackedBuffer, send: PackedBuffer, hops: TwoLevel | None
    ) -> None:
        self._phase = phase
        if self.group is None:
            return
        with self._named():
            if hops is None or self.two_level is None:
                self.work = all_to_all(
                    recv.flat, send.flat, recv.splits, send.splits, self.group
                )
            else:
                start = getattr(self.two_level, phase)
                self.work = start(hops, recv.flat, send.flat)

    def wait(self) -> None:
        if self.work is not None:
            work, self.work = self.work, None
            with self._named():
                work.wait()

    def _named(self) -> AbstractContextManager[None]:
        what = f"{self._phase} of bucket {self.bucket.index}"
        layouts = (self.layouts[number] for number in self.bucket.matrices)
        return named(what, layouts, self.bucket.group)

    # Between the collectives: pairs of a target and its source, for :func:`copy_all`.

    def received(self, matrix: int, out: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Regions of ``out``, of shape (rows, columns), and what came of ``matrix`` for them."""
        found = self.gather_recv.regions(matrix)
        return [(region.of_matrix(out), view) for _, region, view in found]

    def returned(self, matrix: int, update: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Where each holder's regions of ``update``, of shape (rows, columns), go."""
        sent = [*self.scatter_send.regions(matrix), *self.kept.regions(matrix)]
        return [(view, region.of_matrix(update)) for _, region, view in sent]


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies sources to their targets, in few launches."""
    # Foreach functions refuse empty lists.
    if pairs:
        targets, sources = zip(*pairs)
        torch._foreach_copy_(targets, sources)


@dataclass
class RelayBuffer:
    """A broadcast of one bucket along replicas, as this rank takes part in it."""

    bucket: Bucket
    # Of all matrices of the schedule.
    layouts: Sequence[Layout]
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
            copy_all(
                [
                    (target.view, found.view)
                    for matrix in self.packed.matrices
                    for found, target in zip(
                        origin.regions(matrix), self.packed.regions(matrix)
                    )
                ]
            )
            self.packed._ints[mine] = origin._ints[theirs]

    def start(self) -> None:
        if self.work is None:
            with self._named():
                self.work = dist.broadcast(
                    self.packed.flat, self.relay.source, group=self.group, async_op=True
                )

    def wait(self) -> None:
        if self.work is not None:
            work, self.work = self.work, None
            with self._named():
                work.wait()

    def _named(self) -> AbstractContextManager[None]:
        what = f"relay of bucket {self.bucket.index} from rank {self.relay.source}"
        layouts = (self.layouts[number] for number in self.packed.matrices)
        return named(what, layouts, self.relay.replicas)


class ExchangeError(RuntimeError):
    """A collective among ``ranks`` failed."""

    def __init__(self, text: str, ranks: Sequence[int]) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


@contextmanager
def named(what: str, layouts: Iterable[Layout], ranks: Sequence[int]) -> Iterator[None]:
    """Says in the errors of a backend which exchange failed, and what it carried."""
    try:
        yield
    except RuntimeError as error:
        carried = listed([layout.describe() for layout in layouts])
        raise ExchangeError(
            f"the {what}, with {carried}, among ranks {list(ranks)} failed. One of these ranks ended, failed before it, did "
            f"not call step(), or changed its parameters alone: {error}",
            ranks,
        ) from error


def add_contributions(
    bucket: BucketBuffers,
    matrix: int,
    layout: Layout,
    own: Sequence[tuple[Region, Tensor]],
    rank: int,
    out: Tensor,
) -> None:
    """Adds contributions to ``matrix`` in their order, which is the same whoever owns the matrix.

    Args:
        own: what the owner contributes itself, a tensor for each of its regions.
        out: shape (rows, columns), of the dtype of the orthogonalization.
    """
    total = torch.zeros(layout.shape, dtype=layout.dtype, device=out.device)
    of = layout.shards.contribution_of
    parts = [
        (of(sender), region, view)
        for sender, region, view in bucket.gather_recv.regions(matrix)
    ]
    parts += [(of(rank), region, tensor) for region, tensor in own]
    for _, region, tensor in sorted(parts, key=lambda part: part[0]):
        region.of_matrix(total).add_(tensor)
    out.copy_(total)


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
                _bucket_buffers(bucket, schedule.layouts, groups, spec, slot, passing)
                for (_, bucket, spec), slot in zip(specs, itertools.cycle(slots))
            ]
            for buffers, follower in zip(ring, ring[prefetch_count + 1 :]):
                buffers.follower = follower
            placed += zip((place for place, _, _ in specs), ring)
        # Replicas of which one speaks for all, and the matrices that it does so for.
        self.replica_sets = [
            (ranks, groups[ranks], matrices)
            for ranks, matrices in sorted(schedule.replica_sets(rank).items())
        ]
        # All groups in one order, of which each rank runs its part.
        self.buckets = [buffers for _, buffers in sorted(placed, key=lambda p: p[0])]

    def _slots(self, specs: Sequence[BucketSpec], device: torch.device) -> list[Slot]:
        return [
            Slot(*(torch.empty(n, dtype=torch.uint8, device=device) for n in sizes))
            for sizes in slot_sizes(specs, slots_for(self.prefetch_count))
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
            self._connect_exchange(buckets)
        for ranks, relay in sorted(relaying.items(), key=lambda item: item[0]):
            first = torch.zeros(1, dtype=torch.uint8, device=self.device)
            dist.broadcast(first, ranks[0], group=relay.group)

    def _connect_exchange(self, buckets: Sequence[BucketBuffers]) -> None:
        """A byte to each rank that one of ``buckets``, of one group, exchanges something with."""
        sides: dict[ProcessGroup | None, list[tuple[Sequence[int], ...]]] = {}
        for b in buckets:
            for recv, send, hops in (
                (b.gather_recv, b.gather_send, b.gather_hops),
                (b.scatter_recv, b.scatter_send, b.scatter_hops),
            ):
                if hops is None or b.two_level is None:
                    sides.setdefault(b.group, []).append((recv.splits, send.splits))
                    continue
                for hop in (hops.first, hops.second):
                    group = b.two_level.groups[hop.ranks]
                    sides.setdefault(group, []).append((hop.receives, hop.sends))
        for group, found in sides.items():
            received, sent = (
                [int(any(splits)) for splits in zip(*side)] for side in zip(*found)
            )
            work = all_to_all(
                torch.empty(sum(received), dtype=torch.uint8, device=self.device),
                torch.zeros(sum(sent), dtype=torch.uint8, device=self.device),
                received,
                sent,
                group,
            )
            if work is not None:
                work.wait()

    def drain(self) -> None:
        """Waits for whatever is under way, after an error."""
        for buffers in self.buckets:
            for one in (buffers, *buffers.relays):
                # The error that led here is the one to report.
                with suppress(Exception):
                    one.wait()


def _bucket_buffers(
    bucket: Bucket,
    layouts: Sequence[Layout],
    groups: Mapping[tuple[int, ...], ProcessGroup | None],
    spec: BucketSpec,
    slot: Slot,
    passing: _RelayMemory,
) -> BucketBuffers:
    back = 0 if spec.in_place else spec.gather_recv.nbytes
    return BucketBuffers(
        bucket,
        layouts,
        groups[bucket.group],
        spec.owned,
        gather_send=PackedBuffer(spec.gather_send, slot.outer),
        gather_recv=PackedBuffer(spec.gather_recv, slot.inner),
        scatter_send=PackedBuffer(spec.scatter_send, slot.inner, back),
        scatter_recv=PackedBuffer(spec.scatter_recv, slot.outer),
        kept=PackedBuffer(spec.kept, slot.inner, back + spec.scatter_send.nbytes),
        relays=[
            RelayBuffer(bucket, layouts, relay, groups[relay.replicas], packed)
            for relay, packed in passing.buffers(spec.relays)
        ],
        gather_hops=spec.gather_hops,
        scatter_hops=spec.scatter_hops,
        two_level=TwoLevelExchange(groups, slot.outer, slot.staging)
        if bucket.node_size > 1
        else None,
    )


class _RelayMemory:
    """What a rank passes on of a bucket is packed as a whole, so that the slot is free at once.

    What it is passed goes through a ring, each broadcast applied before the next but one.
    """

    def __init__(
        self, relays: Iterable[Sequence[Relay]], rank: int, device: torch.device
    ) -> None:
        self.rank = rank
        sent, received = relay_sizes(relays, rank)
        self._sent = torch.empty(sent, dtype=torch.uint8, device=device)
        self._ring = [
            torch.empty(received, dtype=torch.uint8, device=device)
            for _ in range(RELAYS_IN_FLIGHT)
        ]

    def buffers(self, relays: Sequence[Relay]) -> Iterator[tuple[Relay, PackedBuffer]]:
        """One for each of the ``relays`` of a bucket."""
        start, ring = 0, itertools.cycle(self._ring)
        for relay in relays:
            if relay.source == self.rank:
                yield relay, PackedBuffer(relay.packed, self._sent, start)
                start += relay.packed.nbytes
            else:
                yield relay, PackedBuffer(relay.packed, next(ring))
