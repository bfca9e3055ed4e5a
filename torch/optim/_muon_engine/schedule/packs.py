"""The schedule of a step, and each rank's packs: what it sends to whom, and where each region is."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..._newton_schulz import NS_DTYPE
from ..layouts.layout import Layout, Ranks, Region


# Maximum size of one relay, unless a single shard is larger.
RELAY_BYTES = 64 * 1024**2

# Holders, each with the matrices whose shards it exchanges.
Exchanged = Sequence[tuple[int, Sequence[int]]]
# Whether the shard of a matrix on a rank is sent.
Travels = Callable[[int, int], bool]


class PackedRegion(NamedTuple):
    """A region of ``matrix`` in the shard of ``rank``, row-major, at element ``offset`` of a pack."""

    matrix: int
    rank: int
    region: Region
    offset: int


@dataclass(frozen=True)
class Pack:
    """One side of a gather or scatter on one rank: the split size for each peer, and the packed regions."""

    dtype: torch.dtype
    split_sizes: tuple[int, ...]
    regions: tuple[PackedRegion, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.split_sizes) * self.dtype.itemsize


class Relay(NamedTuple):
    """A broadcast along ``replicas`` of the results that ``source``, one of them, received."""

    replicas: Ranks
    source: int
    pack: Pack


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
    def slot_bytes(self) -> tuple[int, int]:
        """The bytes of a slot that this bucket needs, as a holder and as an owner."""
        as_owner = self.scatter_send.nbytes + self.own_results.nbytes
        as_owner += 0 if self.in_place else self.gather_recv.nbytes
        return max(self.gather_send.nbytes, self.scatter_recv.nbytes), as_owner


@dataclass(frozen=True)
class Bucket:
    """Matrices of the same ``ranks`` that are processed together; ``index`` counts the buckets of these ranks."""

    ranks: Ranks
    index: int
    matrices: tuple[int, ...]
    gather_dtype: torch.dtype
    # Whether only one replica of each shard exchanges it with the owner.
    relayed: bool = False
    # As many consecutive ranks are one node. With more than 1, an exchange has two levels.
    node_size: int = 1

    def node_and_rail(self, rank: int) -> tuple[Ranks, Ranks]:
        """The ranks on the node of ``rank``, and those at its place of each node."""
        place, size = self.ranks.index(rank), self.node_size
        start = place - place % size
        return self.ranks[start : start + size], self.ranks[place % size :: size]


@dataclass(frozen=True)
class Schedule:
    """The buckets of all groups in one global order; a matrix is its index in ``layouts``."""

    layouts: tuple[Layout, ...]
    owners: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    one_owner_at_a_time: bool = False

    def team(self, matrix: int) -> Ranks:
        """The owners of all blocks of a divided matrix, in the order of the blocks."""
        place, count = self.layouts[matrix].key.block
        return self.owners[matrix - place : matrix - place + count]

    def is_source(self, matrix: int, rank: int) -> bool:
        """Whether ``rank`` sends its shard to the owner of ``matrix``; one replica of each shard does."""
        return self.layouts[matrix].shards.source(rank, self.owners[matrix]) == rank

    def receives(self, matrix: int, rank: int) -> bool:
        """Whether ``rank`` gets the update of ``matrix``; one contribution to a sum does."""
        shards, owner = self.layouts[matrix].shards, self.owners[matrix]
        return shards.contribution_of(rank) == shards.contribution_of(owner)

    def packs(self, bucket: Bucket, rank: int) -> LocalPacks:
        """The packs of ``rank``, with splits in the order of the ranks of ``bucket``."""
        owned = self.owned(bucket)
        as_holder = [_between(rank, peer, owned) for peer in bucket.ranks]
        as_owner = [_between(peer, rank, owned) for peer in bucket.ranks]
        relays = self.relays(bucket, rank)
        relayed = {region.matrix for relay in relays for region in relay.pack.regions}
        own = [matrix for matrix in owned.get(rank, ()) if matrix in relayed]
        return LocalPacks(
            gather_send=self._gather(bucket, as_holder),
            gather_recv=self._gather(bucket, as_owner),
            scatter_send=self._scatter(bucket, as_owner),
            scatter_recv=self._scatter(bucket, as_holder),
            own_results=self._pack([(rank, own)], NS_DTYPE, self.receives),
            relays=relays,
        )

    def owned(self, bucket: Bucket) -> dict[int, list[int]]:
        """Owner -> its matrices in ``bucket``."""
        by_owner: dict[int, list[int]] = {}
        for matrix in bucket.matrices:
            by_owner.setdefault(self.owners[matrix], []).append(matrix)
        return by_owner

    def passed_on(
        self, bucket: Bucket, rank: int
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Elements that ``rank`` passes on in a gather and in a scatter, from each of its node to each of its rail."""
        (node, rail), owned = bucket.node_and_rail(rank), self.owned(bucket)
        gathers = ([_between(h, o, owned) for o in rail] for h in node)
        scatters = ([_between(h, o, owned) for h in rail] for o in node)
        return (
            [self._gather(bucket, exchanged).split_sizes for exchanged in gathers],
            [self._scatter(bucket, exchanged).split_sizes for exchanged in scatters],
        )

    def further_groups(self, rank: int) -> dict[Ranks, str]:
        """Further sets of ranks with which ``rank`` has collectives, and what these ranks share."""
        groups: dict[Ranks, str] = {}
        for bucket in (bucket for bucket in self.buckets if rank in bucket.ranks):
            for matrix in self.owned(bucket).get(rank, ()):
                if len(self.team(matrix)) > 1:
                    groups[self.team(matrix)] = "a matrix"
            for relay in self.relays(bucket, rank):
                groups[relay.replicas] = "replicas"
            if bucket.node_size > 1:
                node, rail = bucket.node_and_rail(rank)
                groups |= {node: "node", rail: "rail"}
        return groups

    def relays(self, bucket: Bucket, rank: int) -> tuple[Relay, ...]:
        """The relays along the replicas of ``rank``'s shards, in an order that all replicas share."""
        # Each matrix with its (replicas, source) and its bytes.
        sized: list[tuple[int, tuple[Ranks, int], int]] = []
        for matrix in bucket.matrices if bucket.relayed else ():
            shards = self.layouts[matrix].shards
            replicas = shards.replicas_of(rank)
            if len(replicas) > 1 and not shards.is_empty(rank):
                source = shards.source(rank, self.owners[matrix])
                nbytes = shards.numel_of(rank) * NS_DTYPE.itemsize
                sized.append((matrix, (tuple(sorted(replicas)), source), nbytes))
        return tuple(
            Relay(ranks, source, self._pack([(rank, part)], NS_DTYPE, self.receives))
            for (ranks, source), parts in sorted(grouped(sized, RELAY_BYTES).items())
            for part in parts
        )

    def _gather(self, bucket: Bucket, exchanged: Exchanged) -> Pack:
        return self._pack(exchanged, bucket.gather_dtype, self.is_source)

    def _scatter(self, bucket: Bucket, exchanged: Exchanged) -> Pack:
        def gets_directly(matrix: int, rank: int) -> bool:
            is_direct = not bucket.relayed or self.is_source(matrix, rank)
            return is_direct and self.receives(matrix, rank)

        return self._pack(exchanged, NS_DTYPE, gets_directly)

    def _pack(self, exchanged: Exchanged, dtype: torch.dtype, travels: Travels) -> Pack:
        """One split size per (holder, matrices); ``travels`` says whether a matrix goes from or to a holder."""
        split_sizes: list[int] = []
        regions: list[PackedRegion] = []
        offset = 0
        for holder, matrices in exchanged:
            start = offset
            for matrix in matrices:
                if travels(matrix, holder):
                    for region in self.layouts[matrix].shards.of(holder):
                        regions.append(PackedRegion(matrix, holder, region, offset))
                        offset += region.numel
            split_sizes.append(offset - start)
        return Pack(dtype, tuple(split_sizes), tuple(regions))


def _between(
    holder: int, owner: int, owned: dict[int, list[int]]
) -> tuple[int, Sequence[int]]:
    """The matrices whose shards ``holder`` exchanges with ``owner``; none if they are one rank."""
    return holder, () if holder == owner else owned.get(owner, ())


def grouped(sized: Iterable[tuple[Any, Any, int]], limit: int) -> dict[Any, list[list]]:
    """The items of (item, key, size), by key, in lists of at most ``limit`` unless one item is larger."""
    lists: dict[Any, list[list]] = {}
    room: dict[Any, int] = {}
    for item, key, size in sized:
        if room.get(key, -1) < size:
            lists.setdefault(key, []).append([])
            room[key] = limit
        room[key] -= size
        lists[key][-1].append(item)
    return lists


def slots_for(prefetch_count: int) -> int:
    """Slots of a group: one per prefetched gather, one to orthogonalize, one on its way back."""
    return prefetch_count + 2


def slot_sizes(packs: Sequence[LocalPacks], slots: int) -> list[tuple[int, int]]:
    """Bytes of each slot, as in :attr:`LocalPacks.slot_bytes`, for the ``packs`` of a group's buckets in turn."""
    count = min(len(packs), slots)
    rings = [zip(*(p.slot_bytes for p in packs[at::count])) for at in range(count)]
    return [(max(as_holder), max(as_owner)) for as_holder, as_owner in rings]


def relay_sizes(relays: Iterable[Sequence[Relay]], rank: int) -> tuple[int, int]:
    """Bytes of the results that ``rank`` relays in one bucket, and of the largest that it is sent."""
    sent = received = 0
    for of_bucket in relays:
        own = sum(relay.pack.nbytes for relay in of_bucket if relay.source == rank)
        others = [relay.pack.nbytes for relay in of_bucket if relay.source != rank]
        sent, received = max(sent, own), max([received, *others])
    return sent, received
