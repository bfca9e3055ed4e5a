"""The packed memory of each bucket and the all-to-alls that move it.

The schedule alone decides what is sent, to whom and how much. Gradients fill the memory and never
change a call.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim._muon_engine.layouts import listed, Region
from torch.optim._muon_engine.process_groups import is_dry_run
from torch.optim._muon_engine.runtime import Matrix
from torch.optim._muon_engine.schedule.packs import (
    Bucket,
    LocalPacks,
    Pack,
    Relay,
    Schedule,
    slot_sizes,
    slots_for,
)


# Starts the gather (0) or the scatter (1) of a bucket.
Exchange = Callable[[int, "BoundPack", "BoundPack"], dist.Work | None]


class PackedView(NamedTuple):
    """The view, of shape (height, width), of a region in packed memory, and the rank that holds it."""

    rank: int
    region: Region
    view: Tensor


class BoundPack:
    """A :class:`Pack` at byte ``start`` of ``memory``."""

    def __init__(self, pack: Pack, memory: Tensor, start: int = 0) -> None:
        # These views also exist for fake tensors of any device, which dry runs use.
        self.flat = memory.narrow(0, start, pack.nbytes).view(pack.dtype)
        self.splits = list(pack.splits)
        self._views: dict[int, list[PackedView]] = {}
        for matrix, rank, region, offset in pack.regions:
            flat = self.flat.narrow(0, offset, region.numel)
            view = flat.view(region.height, region.width)
            found = self._views.setdefault(matrix, [])
            found.append(PackedView(rank, region, view))

    def of(self, matrix: int) -> Sequence[PackedView]:
        """The packed regions of ``matrix``."""
        return self._views.get(matrix, ())


class ExchangeError(RuntimeError):
    """A collective among ``ranks`` failed."""

    def __init__(self, text: str, ranks: Sequence[int]) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


@contextmanager
def named(
    what: str, matrices: Sequence[Matrix], ranks: Sequence[int]
) -> Iterator[None]:
    """Adds to a backend's error which collective failed and which matrices it carried."""
    try:
        yield
    except RuntimeError as error:
        carried = listed([matrix.layout.describe() for matrix in matrices])
        raise ExchangeError(
            f"the {what}, with {carried}, among ranks {list(ranks)} failed. One of these ranks ended, failed before it, did "
            f"not call step(), or changed its parameters alone: {error}",
            ranks,
        ) from error


class InFlight:
    """The collectives with ``matrices`` among ``ranks`` that have started and were not waited for."""

    def __init__(self, matrices: Sequence[Matrix], ranks: Sequence[int]) -> None:
        self.matrices = matrices
        self.ranks = ranks
        # With the name of each for errors.
        self.works: list[tuple[str, dist.Work]] = []

    def launch(self, what: str, start: Callable[[], dist.Work | None]) -> None:
        with named(what, self.matrices, self.ranks):
            work = start()
        if work is not None:
            self.works.append((what, work))

    def wait(self) -> None:
        while self.works:
            what, work = self.works.pop(0)
            with named(what, self.matrices, self.ranks):
                work.wait()


class LocalBucket(InFlight):
    """A bucket on this rank: four packs bound to a slot, and the collective in flight.

    A slot has two parts. The packs that a gather sends and that the scatter later receives share
    ``outer``. The packs of the owner share ``inner`` if both have the same regions.

    Args:
        exchange: starts the gather (0) or the scatter (1) from (recv, send).
    """

    def __init__(
        self,
        bucket: Bucket,
        matrices: Sequence[Matrix],
        packs: LocalPacks,
        slot: tuple[Tensor, Tensor],
        exchange: Exchange,
    ) -> None:
        super().__init__(matrices, bucket.group)
        outer, inner = slot
        back = 0 if packs.in_place else packs.gather_recv.nbytes
        self.bucket = bucket
        self.gather_send = BoundPack(packs.gather_send, outer)
        self.gather_recv = BoundPack(packs.gather_recv, inner)
        self.scatter_send = BoundPack(packs.scatter_send, inner, back)
        self.scatter_recv = BoundPack(packs.scatter_recv, outer)
        self.kept = BoundPack(packs.kept, inner, back + packs.scatter_send.nbytes)
        # The LocalRelays that follow its scatter.
        self.relays: list[Any] = []
        # The next bucket of the group. It takes this bucket's slot.
        self.follower: LocalBucket | None = None
        self._exchange = exchange

    def start_gather(self) -> None:
        self._start("gather", 0, self.gather_recv, self.gather_send)

    def start_scatter(self) -> None:
        self._start("scatter", 1, self.scatter_recv, self.scatter_send)

    def _start(self, what: str, *which: Any) -> None:
        start = functools.partial(self._exchange, *which)
        self.launch(f"{what} of bucket {self.bucket.index}", start)

    @property
    def name(self) -> str:
        return f"bucket {self.bucket.index} of {len(self.bucket.group)} ranks"

    def results_of(self, matrix: int) -> Iterator[PackedView]:
        """Where this owner packs each holder's regions of the update of ``matrix``."""
        yield from self.scatter_send.of(matrix)
        yield from self.kept.of(matrix)


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies each (target, source), in few launches."""
    # Foreach functions refuse empty lists.
    if pairs:
        targets, sources = zip(*pairs)
        torch._foreach_copy_(targets, sources)


def all_to_all(
    recv: Tensor,
    send: Tensor,
    recv_splits: Sequence[int],
    send_splits: Sequence[int],
    group: ProcessGroup | None,
) -> dist.Work | None:
    """Starts an all-to-all of flat tensors. The caller must keep the handle until it has waited."""
    if is_dry_run() and not (recv.numel() and send.numel()):
        return None  # The fake backend refuses an empty side.
    return dist.all_to_all_single(
        recv,
        send,
        output_split_sizes=list(recv_splits),
        input_split_sizes=list(send_splits),
        group=group,
        async_op=True,
    )


def two_level_all_to_all(
    recv: Tensor,
    send: Tensor,
    recv_splits: Sequence[int],
    send_splits: Sequence[int],
    node: ProcessGroup | None,
    rail: ProcessGroup | None,
    passed: Sequence[Sequence[int]],
) -> dist.Work | None:
    """Like :func:`all_to_all`, but a rank connects only to the ranks of its node and of its rail.

    An element first goes to the rank of the sender's node that is on the receiver's rail. A
    CPU waits for this first all-to-all.

    Args:
        passed: elements that this rank passes on, one row per rank of the node, one column per rank of
            the rail.
    """
    width, nodes = len(passed), len(passed[0])
    chunks = send.split(list(send_splits))
    by_rail = [chunks[at::width] for at in range(width)]
    arriving = send.new_empty(sum(sum(row) for row in passed))
    first = all_to_all(
        arriving,
        _joined([chunk for of_rail in by_rail for chunk in of_rail], send),
        [sum(row) for row in passed],
        [sum(map(len, of_rail)) for of_rail in by_rail],
        node,
    )
    if first is not None:
        first.wait()
    # One chunk per rank of the node and rank of the rail; the second all-to-all sends by rail.
    rows = arriving.split([size for row in passed for size in row])
    leaving = [chunk for at in range(nodes) for chunk in rows[at::nodes]]
    return all_to_all(
        recv,
        _joined(leaving, send),
        [sum(recv_splits[at * width : (at + 1) * width]) for at in range(nodes)],
        [sum(column) for column in zip(*passed)],
        rail,
    )


def _joined(chunks: Sequence[Tensor], like: Tensor) -> Tensor:
    filled = [chunk for chunk in chunks if chunk.numel()]
    return torch.cat(filled) if filled else like.new_empty(0)


def local_buckets(
    schedule: Schedule,
    matrices: Mapping[int, Matrix],
    rank: int,
    groups: Mapping[tuple[int, ...], ProcessGroup | None],
    device: torch.device,
    prefetch_count: int,
) -> list[tuple[LocalBucket, tuple[Relay, ...]]]:
    """This rank's buckets in their global order, over one ring of slots per group; and their relays.

    Args:
        matrices: this rank's matrices by their index in the schedule.
        groups: process groups by their sorted ranks; None for a single rank.
    """
    packs = {b: schedule.packs(b, rank) for b in schedule.buckets if rank in b.group}
    empty = functools.partial(torch.empty, dtype=torch.uint8, device=device)
    made: dict[Bucket, LocalBucket] = {}
    for group in dict.fromkeys(bucket.group for bucket in packs):
        ring = [bucket for bucket in packs if bucket.group == group]
        sizes = slot_sizes([packs[b] for b in ring], slots_for(prefetch_count))
        slots = [(empty(outer), empty(inner)) for outer, inner in sizes]
        for bucket, slot in zip(ring, itertools.cycle(slots)):
            own = [matrices[number] for number in bucket.matrices]
            exchange = _exchange_of(schedule, bucket, rank, groups, device)
            made[bucket] = LocalBucket(bucket, own, packs[bucket], slot, exchange)
        for bucket, follower in zip(ring, ring[prefetch_count + 1 :]):
            made[bucket].follower = made[follower]
    return [(made[bucket], found.relays) for bucket, found in packs.items()]


def _exchange_of(
    schedule: Schedule,
    bucket: Bucket,
    rank: int,
    groups: Mapping[tuple[int, ...], ProcessGroup | None],
    device: torch.device,
) -> Exchange:
    group = groups[bucket.group]
    if group is None:
        return lambda *_: None

    def flat(recv: BoundPack, send: BoundPack) -> tuple[Any, Any, Any, Any]:
        return recv.flat, send.flat, recv.splits, send.splits

    if bucket.node_size == 1:
        return lambda _, recv, send: all_to_all(*flat(recv, send), group)
    node, rail = bucket.node_and_rail(rank)
    passed = schedule.passed_on(bucket, rank)
    # Accelerators run the second level while the compute stream goes on.
    stream = None if device.type == "cpu" else torch.Stream(device)

    def in_two_levels(phase: int, recv: BoundPack, send: BoundPack) -> dist.Work | None:
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(device))
        with stream or nullcontext():
            levels = groups[node], groups[rail], passed[phase]
            return two_level_all_to_all(*flat(recv, send), *levels)

    return in_two_levels


def connect(buckets: Sequence[LocalBucket]) -> None:
    """Runs the collectives of each bucket once, so that backends connect while nothing overlaps.

    Accelerator backends connect two ranks when they first exchange something. Connecting in the middle
    of a step, with other collectives in flight, has deadlocked.
    """
    for bucket in buckets:
        for start in (bucket.start_gather, bucket.start_scatter):
            start()
            bucket.wait()
        for relay in bucket.relays:
            relay.start()
            relay.wait()
        for products in (m.products for m in bucket.matrices if m.products):
            products.norm(bucket.gather_send.flat.new_ones(1))


def drain(buckets: Sequence[LocalBucket]) -> None:
    """Waits for everything in flight, after an error."""
    for bucket in buckets:
        for one in (bucket, *bucket.relays):
            # The error that led here is the one to report.
            with suppress(Exception):
                one.wait()
