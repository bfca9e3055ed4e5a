"""The packed memory of each bucket and the all-to-alls that move it."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..layouts import Region
from ..process_groups import is_dry_run, listed, OWN_ERRORS, Ranks
from ..schedule.packs import Bucket, LocalPacks, Pack, Relay, Schedule, slot_sizes
from . import Matrix


class Memory:
    """Bytes for packs, and scratch memory. Unless ``keep``, packs take a device's memory in a step only (MPS
    cannot): entering this object allocates their storages, and leaving it frees them, as FSDP2 does. Views stay valid.
    """

    def __init__(self, device: torch.device, keep: bool) -> None:
        self.device = device
        self._is_freed = device.type not in ("cpu", "mps") and not keep
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        # Memory that one matrix after another uses, by purpose, dtype and device.
        self._scratch: dict[Any, Tensor] = {}

    def zeros(self, nbytes: int) -> Tensor:
        """A 1D tensor of ``nbytes`` bytes for packs. Its storage may be empty between steps."""
        # The ranks connect by sending it, and a debugging backend looks for NaN there.
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        self._storages.append((memory.untyped_storage(), nbytes))
        return memory

    def scratch(self, purpose: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of ``shape``, valid until the next call with this purpose."""
        key, numel = (purpose, like.dtype, like.device), math.prod(shape)
        if key not in self._scratch or numel > len(self._scratch[key]):
            self._scratch[key] = like.new_empty(numel)
        return self._scratch[key][:numel].view(shape)

    def __enter__(self) -> None:
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)

    def __exit__(self, error: object, *traceback: object) -> None:
        # A collective that failed may still write.
        for storage, _ in self._storages if self._is_freed and error is None else ():
            storage.resize_(0)
        if self.device.type != "cpu":
            self._scratch.clear()


class Levels(NamedTuple):
    """The groups and sizes of an all-to-all in two levels. Accelerators run both on ``stream``. ``passed`` has
    the elements that this rank passes on: a row per rank of the node, a column per rank of the rail.
    """

    node: ProcessGroup | None
    rail: ProcessGroup | None
    passed: Sequence[Sequence[int]]
    stream: torch.Stream | None


class PackedView(NamedTuple):
    """A region of a rank, and its view in packed memory, of the shape of :meth:`Region.of_matrix`."""

    rank: int
    region: Region
    view: Tensor


class BoundPack:
    """A :class:`Pack` at byte ``start`` of ``memory``."""

    def __init__(self, pack: Pack, memory: Tensor, start: int = 0) -> None:
        # These views also exist for fake tensors of any device, which dry runs use.
        self.flat = memory.narrow(0, start, pack.nbytes).view(pack.dtype)
        self.split_sizes = list(pack.split_sizes)
        self._views: dict[int, list[PackedView]] = {}
        for matrix, rank, region, offset in pack.regions:
            flat = self.flat.narrow(0, offset, region.numel)
            view = region.in_blocks(flat.view(region.height, region.width))
            views = self._views.setdefault(matrix, [])
            views.append(PackedView(rank, region, view))

    def of(self, matrix: int) -> Sequence[PackedView]:
        return self._views.get(matrix, ())


class CollectiveError(RuntimeError):
    """A collective among ``ranks`` failed."""

    def __init__(self, text: str, ranks: Ranks) -> None:
        super().__init__(text)
        self.ranks = ranks


@contextmanager
def naming(collective: str, matrices: Sequence[Matrix], ranks: Ranks) -> Iterator[None]:
    """Adds to a backend's error which collective failed and which matrices it carried."""
    try:
        yield
    except OWN_ERRORS:
        raise  # This rank's note tells the others.
    except RuntimeError as error:
        carried = listed([matrix.layout.describe() for matrix in matrices])
        raise CollectiveError(
            f"the {collective}, with {carried}, among ranks {list(ranks)} failed. One of these ranks ended, failed before it, did "
            f"not call step(), or changed its parameters alone: {error}",
            ranks,
        ) from error


class InFlight:
    """The collectives with ``matrices`` among ``ranks`` that have started and were not waited for."""

    name: str

    def __init__(self, matrices: Sequence[Matrix], ranks: Ranks) -> None:
        self.matrices = matrices
        self.ranks = ranks
        # The name of each for errors, its handle, and what refers to its memory until it is waited for.
        self.works: list[tuple[str, dist.Work, Any]] = []

    def launch(self, name: str, start: Callable[..., Any], *memory: Any) -> None:
        """Calls ``start(*memory)``. The memory must not be touched until :meth:`wait`."""
        with naming(name, self.matrices, self.ranks):
            work = start(*memory)
        if work is not None:
            self.works.append((name, work, (start, memory)))

    def wait(self) -> None:
        """Waits for all of them. Raises CollectiveError if one failed."""
        while self.works:
            name, work, _ = self.works.pop(0)
            with naming(name, self.matrices, self.ranks):
                work.wait()


class LocalBucket(InFlight):
    """A bucket on this rank: its packs bound to a slot, and the collective in flight. A slot has two parts. The
    packs that a gather sends and that the scatter later receives share ``as_holder``. Those of the owner are
    in ``as_owner``, in the same place if they have the same regions. A single rank has no ``group``. ``levels`` are
    those of the gather and of the scatter, if they take two.
    """

    def __init__(
        self,
        bucket: Bucket,
        matrices: Sequence[Matrix],
        packs: LocalPacks,
        slot: tuple[Tensor, Tensor],
        group: ProcessGroup | None,
        levels: Sequence[Levels],
    ) -> None:
        super().__init__(matrices, bucket.ranks)
        as_holder, as_owner = slot
        start = 0 if packs.in_place else packs.gather_recv.nbytes
        self.name = f"bucket {bucket.index} of {len(bucket.ranks)} ranks"
        self.gather_send = BoundPack(packs.gather_send, as_holder)
        self.gather_recv = BoundPack(packs.gather_recv, as_owner)
        self.scatter_send = BoundPack(packs.scatter_send, as_owner, start)
        self.scatter_recv = BoundPack(packs.scatter_recv, as_holder)
        end = start + packs.scatter_send.nbytes
        self.own_results = BoundPack(packs.own_results, as_owner, end)
        self.relays: list[Any] = []
        self._group = group
        self._levels = levels

    def start_gather(self) -> None:
        """Starts to send this rank's shards to the owners, and to receive those of its matrices."""
        self._start("gather", self.gather_recv, self.gather_send)

    def start_scatter(self) -> None:
        """Starts to send the updates to the holders, and to receive those of this rank's shards."""
        self._start("scatter", self.scatter_recv, self.scatter_send)

    def _start(self, phase: str, recv: BoundPack, send: BoundPack) -> None:
        start = partial(all_to_all, group=self._group)
        if self._levels:
            levels = self._levels[phase == "scatter"]
            start = partial(two_level_all_to_all, levels=levels, temporary=[])
        if self._group is not None:
            memory = recv.flat, send.flat, recv.split_sizes, send.split_sizes
            self.launch(f"{phase} of {self.name}", start, *memory)

    def results_of(self, matrix: int) -> Sequence[PackedView]:
        """Where this owner packs each holder's regions of the update of ``matrix``."""
        return [*self.scatter_send.of(matrix), *self.own_results.of(matrix)]


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies to the first tensor of each pair from the second."""
    if pairs:  # Foreach functions refuse empty lists.
        targets, sources = zip(*pairs)
        torch._foreach_copy_(targets, sources)


def all_to_all(
    recv: Tensor,
    send: Tensor,
    recv_sizes: list[int],
    send_sizes: list[int],
    group: ProcessGroup | None,
) -> dist.Work | None:
    """Starts an all-to-all of flat tensors. The caller must keep the handle until it has waited."""
    if is_dry_run() and not (recv.numel() and send.numel()):
        return None  # The fake backend refuses an empty side.
    splits = {"output_split_sizes": recv_sizes, "input_split_sizes": send_sizes}
    return dist.all_to_all_single(recv, send, **splits, group=group, async_op=True)


def two_level_all_to_all(
    recv: Tensor,
    send: Tensor,
    recv_sizes: Sequence[int],
    send_sizes: Sequence[int],
    levels: Levels,
    temporary: list[Tensor],
) -> dist.Work | None:
    """Like :func:`all_to_all`, but a rank connects only to the ranks of its node and of its rail. An element first
    goes to the rank of the sender's node that is on the receiver's rail, for which a CPU waits. ``temporary``
    gets the memory that must live until the result was waited for.
    """
    node, rail, passed, stream = levels
    width, nodes = len(passed), len(passed[0])
    if stream is not None:
        # The second level runs while the compute stream goes on. An error may free the memory early, so
        # the allocator must know both streams.
        stream.wait_stream(torch.accelerator.current_stream(recv.device))
        recv.record_stream(stream)
        send.record_stream(stream)
    with stream or nullcontext():
        chunks = send.split(list(send_sizes))
        by_rail = [chunks[at::width] for at in range(width)]
        arriving = send.new_empty(sum(sum(row) for row in passed))
        leaving = torch.cat([chunk for of_rail in by_rail for chunk in of_rail])
        first = all_to_all(
            arriving,
            leaving,
            [sum(row) for row in passed],
            [sum(map(len, of_rail)) for of_rail in by_rail],
            node,
        )
        if first is not None:
            first.wait()
        # One chunk per rank of the node and rank of the rail; the second all-to-all sends by rail.
        rows = arriving.split([size for row in passed for size in row])
        passing = torch.cat([c for at in range(nodes) for c in rows[at::nodes]])
        temporary += [arriving, leaving, passing]
        return all_to_all(
            recv,
            passing,
            [sum(recv_sizes[at * width : (at + 1) * width]) for at in range(nodes)],
            [sum(column) for column in zip(*passed)],
            rail,
        )


def local_buckets(
    schedule: Schedule,
    matrices: Mapping[int, Matrix],
    rank: int,
    groups: Mapping[Ranks, ProcessGroup | None],
    memory: Memory,
    slot_count: int,
) -> list[tuple[LocalBucket, tuple[Relay, ...]]]:
    """This rank's buckets in their global order, over one ring of slots per group; and their relays.
    ``matrices`` are this rank's, by their index in the schedule.
    """
    packs = {b: schedule.packs(b, rank) for b in schedule.buckets if rank in b.ranks}
    has_stream = memory.device.type != "cpu" and any(b.node_size > 1 for b in packs)
    stream = torch.Stream(memory.device) if has_stream else None
    local: dict[Bucket, LocalBucket] = {}
    for ranks in dict.fromkeys(bucket.ranks for bucket in packs):
        ring = [bucket for bucket in packs if bucket.ranks == ranks]
        sizes = slot_sizes([packs[b] for b in ring], slot_count)
        slots = [(memory.zeros(held), memory.zeros(owned)) for held, owned in sizes]
        for bucket, slot in zip(ring, itertools.cycle(slots)):
            own = [matrices[index] for index in bucket.matrices]
            levels: list[Levels] = []
            if bucket.node_size > 1:
                node, rail = (groups[r] for r in bucket.node_and_rail(rank))
                passed = schedule.passed_on(bucket, rank)
                levels = [Levels(node, rail, of_phase, stream) for of_phase in passed]
            local[bucket] = LocalBucket(
                bucket, own, packs[bucket], slot, groups[ranks], levels
            )
    return [(local[bucket], of_rank.relays) for bucket, of_rank in packs.items()]
