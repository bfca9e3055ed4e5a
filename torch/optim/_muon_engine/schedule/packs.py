"""What a rank sends to whom in a bucket, and where each region is packed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..._newton_schulz import NS_DTYPE
from ..layouts.layout import Ranks, Region


class PackedRegion(NamedTuple):
    """A region of ``matrix`` in the shard of ``rank``, row-major, at element ``offset`` of a pack."""

    matrix: int
    rank: int
    region: Region
    offset: int


@dataclass(frozen=True)
class Pack:
    """One side of a gather or scatter on one rank: the split size for each peer, and the packed regions."""

    split_sizes: tuple[int, ...]
    regions: tuple[PackedRegion, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.split_sizes) * NS_DTYPE.itemsize


class Relay(NamedTuple):
    """A broadcast along ``replicas`` of the results that ``source``, one of them, received."""

    replicas: Ranks
    source: int
    pack: Pack


class SlotBytes(NamedTuple):
    """The memory of a slot, for the packs of a holder and for those of an owner."""

    as_holder: int
    as_owner: int


class LocalPacks(NamedTuple):
    """All packs of one rank in one bucket."""

    gather_send: Pack
    gather_recv: Pack
    scatter_send: Pack
    scatter_recv: Pack
    # The results that the rank computed itself and relays to its replicas.
    own_results: Pack
    relays: tuple[Relay, ...]

    @property
    def in_place(self) -> bool:
        """Whether an update is packed where its matrix was gathered; false with direct replicas."""
        return self.gather_recv == self.scatter_send

    @property
    def slot_bytes(self) -> SlotBytes:
        """The bytes of a slot that this bucket needs."""
        as_holder = max(self.gather_send.nbytes, self.scatter_recv.nbytes)
        as_owner = self.scatter_send.nbytes + self.own_results.nbytes
        if not self.in_place:
            as_owner += self.gather_recv.nbytes
        return SlotBytes(as_holder, as_owner)


def grouped(sized: Iterable[tuple[Any, Any, int]], limit: int) -> dict[Any, list[list]]:
    """The items of (item, key, size), by key, in lists of at most ``limit`` unless one item is larger."""
    lists: dict[Any, list[list]] = {}
    room: dict[Any, int] = {}
    for item, key, size in sized:
        is_first = key not in lists
        if is_first:
            lists[key] = []
        if is_first or room[key] < size:
            lists[key].append([])
            room[key] = limit
        room[key] -= size
        lists[key][-1].append(item)
    return lists


def slots_for(prefetch_count: int) -> int:
    """Slots of a group: one per prefetched gather, one to orthogonalize, one on its way back."""
    return prefetch_count + 2


def slot_sizes(packs: Sequence[LocalPacks], slots: int) -> list[SlotBytes]:
    """The bytes of each slot, for the ``packs`` of a group's buckets, which take the slots in turn."""
    count = min(len(packs), slots)
    sizes: list[SlotBytes] = []
    for slot in range(count):
        as_holder = as_owner = 0
        for local in packs[slot::count]:
            needed = local.slot_bytes
            as_holder = max(as_holder, needed.as_holder)
            as_owner = max(as_owner, needed.as_owner)
        sizes.append(SlotBytes(as_holder, as_owner))
    return sizes
