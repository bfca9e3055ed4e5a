"""The packed memory of each bucket and the all-to-alls that move it."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..._newton_schulz import NS_DTYPE
from ..layouts.layout import Region
from ..process_groups import is_dry_run, listed, OWN_ERRORS, Ranks
from ..schedule.packs import LocalPacks, Pack, slot_sizes
from ..schedule.schedule import Bucket, Schedule
from .matrices import LocalMatrix
from .memory import Memory


class PackedView(NamedTuple):
    """A region of a rank, and its view in packed memory, of the shape of :meth:`Region.of_matrix`."""

    rank: int
    region: Region
    view: Tensor


class BoundPack:
    """A :class:`Pack` at byte ``start`` of ``memory``."""

    def __init__(self, pack: Pack, memory: Tensor, start: int = 0) -> None:
        # These views also exist for fake tensors of any device, which dry runs use.
        self.flat = memory.narrow(0, start, pack.nbytes).view(NS_DTYPE)
        self.split_sizes = list(pack.split_sizes)
        self._views: dict[int, list[PackedView]] = {}
        for matrix_index, rank, region, offset in pack.regions:
            flat = self.flat.narrow(0, offset, region.numel)
            view = region.in_blocks(flat.view(region.height, region.width))
            views = self._views.setdefault(matrix_index, [])
            views.append(PackedView(rank, region, view))

    def of(self, matrix_index: int) -> Sequence[PackedView]:
        return self._views.get(matrix_index, ())


class CollectiveError(RuntimeError):
    """A collective among ``ranks`` failed."""

    def __init__(self, text: str, ranks: Ranks) -> None:
        super().__init__(text)
        self.ranks = ranks


def collective_error(
    collective: str, matrices: Sequence[Any], ranks: Ranks, error: RuntimeError
) -> CollectiveError:
    """A backend's ``error``, with the collective that failed and the matrices that it carried."""
    carried = listed([matrix.described for matrix in matrices])
    return CollectiveError(
        f"the {collective}, with {carried}, among ranks {list(ranks)} failed. One of these ranks ended, failed before it, did "
        f"not call step(), or changed its parameters alone: {error}",
        ranks,
    )


class InFlight:
    """The collectives with ``matrices`` among ``ranks`` that have started and were not waited for."""

    name: str

    def __init__(self, matrices: Sequence[Any], ranks: Ranks) -> None:
        self.matrices = matrices
        self.ranks = ranks
        # The name of each for errors, its handle, and what refers to its memory until it is waited for.
        self.works: list[tuple[str, dist.Work, Any]] = []

    def launch(self, name: str, start: Callable[..., Any], *arguments: Any) -> None:
        """Calls ``start(*arguments)``. The tensors among these must not be touched until :meth:`wait`."""
        try:
            work = start(*arguments)
        except OWN_ERRORS:
            raise  # This rank's note tells the others.
        except RuntimeError as error:
            raise self._failed(name, error) from error
        if work is not None:
            self.works.append((name, work, (start, arguments)))

    def wait(self) -> None:
        """Waits for all of them. Raises CollectiveError if one failed."""
        while self.works:
            name, work, _ = self.works.pop(0)
            try:
                work.wait()
            except OWN_ERRORS:
                raise
            except RuntimeError as error:
                raise self._failed(name, error) from error

    def _failed(self, name: str, error: RuntimeError) -> CollectiveError:
        return collective_error(name, self.matrices, self.ranks, error)


class Transfer(NamedTuple):
    """An all-to-all between two packs, as :meth:`InFlight.launch` takes it."""

    name: str
    start: Callable[..., Any]
    recv: Tensor
    send: Tensor
    recv_sizes: list[int]
    send_sizes: list[int]


def _transfer(
    name: str, recv: BoundPack, send: BoundPack, group: ProcessGroup | None
) -> Transfer | None:
    """The all-to-all among ``group``; None if there is nothing to exchange."""
    if group is None:
        return None
    if is_dry_run() and not (recv.flat.numel() and send.flat.numel()):
        return None  # The fake backend refuses an empty side.
    start = partial(all_to_all, group=group)
    return Transfer(
        name, start, recv.flat, send.flat, recv.split_sizes, send.split_sizes
    )


class LocalBucket(InFlight):
    """A bucket on this rank: its packs bound to a slot, and the collective in flight. A slot has two parts. The
    packs that a gather sends and that the scatter later receives share ``as_holder``. Those of the owner are
    in ``as_owner``, in the same place if they have the same regions. A single rank has no ``group``.
    """

    def __init__(
        self,
        bucket: Bucket,
        matrices: Sequence[LocalMatrix],
        packs: LocalPacks,
        slot: tuple[Tensor, Tensor],
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(matrices, bucket.ranks)
        as_holder, as_owner = slot
        start = 0 if packs.in_place else packs.gather_recv.nbytes
        self.bucket = bucket
        self.name = f"bucket {bucket.index} of {len(bucket.ranks)} ranks"
        self.gather_send = BoundPack(packs.gather_send, as_holder)
        self.gather_recv = BoundPack(packs.gather_recv, as_owner)
        self.scatter_send = BoundPack(packs.scatter_send, as_owner, start)
        self.scatter_recv = BoundPack(packs.scatter_recv, as_holder)
        end = start + packs.scatter_send.nbytes
        self.own_results = BoundPack(packs.own_results, as_owner, end)
        self.planned_relays = packs.relays
        self.relays: list[Any] = []
        name = self.name
        self.gather = _transfer(
            f"gather of {name}", self.gather_recv, self.gather_send, group
        )
        self.scatter = _transfer(
            f"scatter of {name}", self.scatter_recv, self.scatter_send, group
        )

    def start_gather(self) -> None:
        """Starts to send this rank's shards to the owners, and to receive those of its matrices."""
        if self.gather is not None:
            self.launch(*self.gather)

    def start_scatter(self) -> None:
        """Starts to send the updates to the holders, and to receive those of this rank's shards."""
        if self.scatter is not None:
            self.launch(*self.scatter)

    def pack_relays(self) -> None:
        """Packs the results that this rank relays to its replicas."""
        for relay in self.relays:
            copy_all(relay.copied)

    def results_of(self, matrix_index: int) -> Sequence[PackedView]:
        """Where this owner packs each holder's regions of the update of a matrix."""
        sent = self.scatter_send.of(matrix_index)
        return [*sent, *self.own_results.of(matrix_index)]


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
) -> dist.Work:
    """Starts an all-to-all of flat tensors. The caller must keep the handle until it has waited."""
    splits = {"output_split_sizes": recv_sizes, "input_split_sizes": send_sizes}
    return dist.all_to_all_single(recv, send, **splits, group=group, async_op=True)


def local_buckets(
    schedule: Schedule,
    matrices: Mapping[int, LocalMatrix],
    rank: int,
    groups: Mapping[Ranks, ProcessGroup | None],
    memory: Memory,
    slot_count: int,
) -> dict[int, LocalBucket]:
    """This rank's buckets by their index in the schedule, over one ring of slots per group. ``matrices`` are this
    rank's, by their index in the schedule.
    """
    indices_of: dict[Ranks, list[int]] = {}
    for index, bucket in enumerate(schedule.buckets):
        if rank in bucket.ranks:
            indices_of.setdefault(bucket.ranks, []).append(index)
    local: dict[int, LocalBucket] = {}
    for ranks, indices in indices_of.items():
        all_packs = [schedule.packs(schedule.buckets[index], rank) for index in indices]
        sizes = slot_sizes(all_packs, slot_count)
        slots = [(memory.zeros(held), memory.zeros(owned)) for held, owned in sizes]
        for index, packs, slot in zip(indices, all_packs, itertools.cycle(slots)):
            bucket = schedule.buckets[index]
            own = [matrices[matrix_index] for matrix_index in bucket.matrices]
            local[index] = LocalBucket(bucket, own, packs, slot, groups[ranks])
    return {index: local[index] for index in sorted(local)}
