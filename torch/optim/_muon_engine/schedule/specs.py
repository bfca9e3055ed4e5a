"""The schedule of a step, and from it each rank's part: what it sends whom, and what is packed where.

What one rank sends another in a gather or scatter is one split: the regions of each matrix in order,
row-major and unpadded, then one flag for each matrix.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch.optim._muon_engine.layouts import Layout, Region


# What one relay takes along, unless a single shard is above.
RELAY_BYTES = 64 * 1024**2
# Broadcasts along replicas of which the results have memory at one time.
RELAYS_IN_FLIGHT = 2


class PackedRegion(NamedTuple):
    """A region of ``matrix`` in the shard of ``rank``, at element ``offset`` of a packed buffer."""

    matrix: int
    rank: int
    region: Region
    offset: int


class Flag(NamedTuple):
    """The flag that ``rank`` sends (or is sent) about ``matrix``, at element ``offset``."""

    matrix: int
    rank: int
    offset: int


@dataclass(frozen=True)
class PackSpec:
    """One rank's side of a gather or scatter: its splits by peer, and what stands where in the buffer."""

    dtype: torch.dtype
    splits: tuple[int, ...]
    regions: tuple[PackedRegion, ...]
    flags: tuple[Flag, ...]

    @property
    def matrices(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(flag.matrix for flag in self.flags))

    @property
    def numel(self) -> int:
        return sum(self.splits)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Hop(NamedTuple):
    """One rank's part of an all-to-all among ``ranks``: elements to and from each of them."""

    ranks: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]


class TwoLevel(NamedTuple):
    """A gather or scatter in two hops, one within nodes and one along rails.

    A rail has the ranks at the same place of each node. What a holder sends an owner goes by way of the
    rank of its node that stands on the owner's rail, and comes back the same way. So a rank has
    connections with its node and its rail only, however many ranks there are.

    ``passed`` are the elements that arrive by the first hop and leave by the second: a row for each
    rank that they come from, a column for each that they go to.
    """

    first: Hop
    passed: tuple[tuple[int, ...], ...]
    second: Hop

    @property
    def numel(self) -> int:
        return sum(sum(row) for row in self.passed)


class Relay(NamedTuple):
    """A broadcast along ``replicas`` of what ``source``, one of them, got back from owners."""

    replicas: tuple[int, ...]
    source: int
    packed: PackSpec


@dataclass(frozen=True)
class BucketSpec:
    """What one rank does in one bucket; ``owned`` are the matrices that it orthogonalizes.

    ``kept`` is what it relays of these itself. ``relays`` are those of its replicas, in their order.
    """

    gather_send: PackSpec
    gather_recv: PackSpec
    scatter_send: PackSpec
    scatter_recv: PackSpec
    owned: tuple[int, ...]
    kept: PackSpec
    relays: tuple[Relay, ...]
    gather_hops: TwoLevel | None = None
    scatter_hops: TwoLevel | None = None

    @property
    def in_place(self) -> bool:
        """Whether the update of a matrix goes where the matrix was gathered; not with direct replicas."""
        return self.gather_recv == self.scatter_send

    @property
    def nbytes(self) -> tuple[int, int, int]:
        """Of the memory that shards leave from and come back to, of the owner's, and of what is passed on."""
        outer = max(self.gather_send.nbytes, self.scatter_recv.nbytes, self.passed)
        inner = self.scatter_send.nbytes + self.kept.nbytes
        if not self.in_place:
            inner += self.gather_recv.nbytes
        return outer, inner, self.passed

    @property
    def passed(self) -> int:
        """Bytes that this rank passes on between two hops."""
        if self.gather_hops is None or self.scatter_hops is None:
            return 0
        return max(
            self.gather_hops.numel * self.gather_send.dtype.itemsize,
            self.scatter_hops.numel * self.scatter_send.dtype.itemsize,
        )


@dataclass(frozen=True)
class Bucket:
    """Matrices of one group that take the step together; ``index`` counts the group's buckets.

    In a ``relayed`` one, of all replicas of a shard only one exchanges it with the owner, and ranks
    whose shard is empty take no part. Where ``node_size``, the ranks of the group that count as one
    node, is more than one, the exchange takes two levels.
    """

    group: tuple[int, ...]
    index: int
    matrices: tuple[int, ...]
    gather_dtype: torch.dtype
    scatter_dtype: torch.dtype
    relayed: bool = False
    node_size: int = 1

    def node_and_rail(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ranks of the group that stand on ``rank``'s node, and those at its place of each node."""
        place = self.group.index(rank)
        at = place % self.node_size
        return (
            self.group[place - at : place - at + self.node_size],
            self.group[at :: self.node_size],
        )

    @property
    def by_rail(self) -> tuple[int, ...]:
        """The group, one rail after the other."""
        rails = (self.group[at :: self.node_size] for at in range(self.node_size))
        return tuple(itertools.chain.from_iterable(rails))


@dataclass(frozen=True)
class Schedule:
    """The buckets of all groups in their global order; matrices go by their place in ``layouts``."""

    layouts: tuple[Layout, ...]
    owners: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    one_owner_at_a_time: bool = False

    def is_source(self, matrix: int, rank: int) -> bool:
        """Whether the shard of ``rank`` goes into ``matrix``; of replicas, one does."""
        return self.layouts[matrix].shards.source(rank, self.owners[matrix]) == rank

    def _speaks(self, matrix: int, rank: int) -> bool:
        # Empty shards look like replicas, and there may be thousands.
        is_empty = self.layouts[matrix].shards.is_empty(rank)
        return not is_empty and self.is_source(matrix, rank)

    def receives(self, matrix: int, rank: int) -> bool:
        """Whether ``rank`` gets the update of ``matrix``; of contributions to a sum, one does."""
        shards, owner = self.layouts[matrix].shards, self.owners[matrix]
        return shards.contribution_of(rank) == shards.contribution_of(owner)

    def spec(
        self, bucket: Bucket, rank: int, group_order: tuple[int, ...]
    ) -> BucketSpec:
        """``rank``'s part of ``bucket``; buffers are ordered as ``group_order``, the collective's."""
        owned: dict[int, list[int]] = {}
        for matrix in bucket.matrices:
            owned.setdefault(self.owners[matrix], []).append(matrix)
        mine = owned.get(rank, [])
        two_level = bucket.node_size > 1
        # A gather runs from holder to owner, a scatter from owner to holder.
        as_holder = [
            (rank, () if peer == rank else owned.get(peer, ()))
            for peer in (bucket.by_rail if two_level else group_order)
        ]
        as_owner = [
            (peer, () if peer == rank else mine)
            for peer in (bucket.group if two_level else group_order)
        ]
        gather, scatter = bucket.gather_dtype, bucket.scatter_dtype
        says = self._speaks if bucket.relayed else None
        relays = self.relays(bucket, rank) if bucket.relayed else ()
        relayed = {m for relay in relays for m in relay.packed.matrices}
        kept = [m for m in mine if m in relayed]
        spec = BucketSpec(
            gather_send=self._pack_spec(as_holder, gather, self.is_source, says),
            gather_recv=self._pack_spec(as_owner, gather, self.is_source, says),
            scatter_send=self._pack_spec(as_owner, scatter, self.receives, says),
            scatter_recv=self._pack_spec(as_holder, scatter, self.receives, says),
            owned=tuple(mine),
            kept=self._pack_spec([(rank, kept)], scatter, self.receives),
            relays=relays,
        )
        return self._in_two_levels(bucket, rank, spec, owned) if two_level else spec

    def _in_two_levels(
        self,
        bucket: Bucket,
        rank: int,
        spec: BucketSpec,
        owned: Mapping[int, Sequence[int]],
    ) -> BucketSpec:
        node, rail = bucket.node_and_rail(rank)
        says = self._speaks if bucket.relayed else None

        def passed_on(
            dtype: torch.dtype, travels: Callable[[int, int], bool]
        ) -> list[tuple[int, ...]]:
            """Elements between each holder of the node and each owner on the rail."""
            return [
                self._pack_spec(
                    [
                        (holder, () if owner == holder else owned.get(owner, ()))
                        for owner in rail
                    ],
                    dtype,
                    travels,
                    says,
                ).splits
                for holder in node
            ]

        gathered = passed_on(bucket.gather_dtype, self.is_source)
        scattered = passed_on(bucket.scatter_dtype, self.receives)
        by_rail, by_node = len(rail), len(node)
        return replace(
            spec,
            gather_hops=TwoLevel(
                Hop(node, _sums(spec.gather_send.splits, by_rail), _totals(gathered)),
                tuple(gathered),
                Hop(
                    rail,
                    _totals(zip(*gathered)),
                    _sums(spec.gather_recv.splits, by_node),
                ),
            ),
            scatter_hops=TwoLevel(
                Hop(
                    rail,
                    _sums(spec.scatter_send.splits, by_node),
                    _totals(zip(*scattered)),
                ),
                tuple(zip(*scattered)),
                Hop(node, _totals(scattered), _sums(spec.scatter_recv.splits, by_rail)),
            ),
        )

    def further_groups(self, rank: int) -> dict[tuple[int, ...], str]:
        """Ranks among which ``rank`` has collectives beside its groups', and what they are to each other."""
        found = dict.fromkeys(self.replica_sets(rank), "replicas")
        for bucket in self.buckets:
            if bucket.node_size > 1 and rank in bucket.group:
                node, rail = bucket.node_and_rail(rank)
                found |= {node: "node", rail: "rail"}
        return found

    def relays(self, bucket: Bucket, rank: int) -> tuple[Relay, ...]:
        """Those along the replicas of ``rank``'s shards, in an order that all replicas have alike."""
        found: dict[tuple[tuple[int, ...], int], list[list[int]]] = {}
        room: dict[tuple[tuple[int, ...], int], int] = {}
        for matrix in bucket.matrices:
            shards = self.layouts[matrix].shards
            replicas = shards.replicas_of(rank)
            if len(replicas) == 1 or shards.is_empty(rank):
                continue
            route = replicas, shards.source(rank, self.owners[matrix])
            size = sum(region.numel for region in shards.of(rank))
            size *= bucket.scatter_dtype.itemsize
            if room.get(route, -1) < size:
                found.setdefault(route, []).append([])
                room[route] = RELAY_BYTES
            room[route] -= size
            found[route][-1].append(matrix)
        return tuple(
            Relay(
                tuple(sorted(replicas)),
                source,
                self._pack_spec([(rank, part)], bucket.scatter_dtype, self.receives),
            )
            for (replicas, source), parts in sorted(found.items())
            for part in parts
        )

    def replica_sets(self, rank: int) -> dict[tuple[int, ...], list[int]]:
        """Sorted ranks that relay to each other, ``rank`` among them -> the matrices in question."""
        found: dict[tuple[int, ...], list[int]] = {}
        for bucket in self.buckets:
            if bucket.relayed and rank in bucket.group:
                for matrix in bucket.matrices:
                    shards = self.layouts[matrix].shards
                    replicas = shards.replicas_of(rank)
                    if len(replicas) > 1 and not shards.is_empty(rank):
                        found.setdefault(replicas, []).append(matrix)
        return {tuple(sorted(ranks)): matrices for ranks, matrices in found.items()}

    def _pack_spec(
        self,
        exchanged: Sequence[tuple[int, Sequence[int]]],
        dtype: torch.dtype,
        travels: Callable[[int, int], bool],
        says: Callable[[int, int], bool] | None = None,
    ) -> PackSpec:
        """One split for each holder and the matrices that it exchanges.

        Args:
            travels: whether regions of a matrix go from, or to, a holder.
            says: whether a flag goes from, or to, it, and all else only then; by default always.
        """
        splits: list[int] = []
        regions: list[PackedRegion] = []
        flags: list[Flag] = []
        offset = 0
        for holder, matrices in exchanged:
            start = offset
            if says is not None:
                matrices = [m for m in matrices if says(m, holder)]
            for matrix in matrices:
                if travels(matrix, holder):
                    for region in self.layouts[matrix].shards.of(holder):
                        regions.append(PackedRegion(matrix, holder, region, offset))
                        offset += region.numel
            for matrix in matrices:
                flags.append(Flag(matrix, holder, offset))
                offset += 1
            splits.append(offset - start)
        return PackSpec(dtype, tuple(splits), tuple(regions), tuple(flags))


def slots_for(prefetch_count: int) -> int:
    """Slots of a group: for the gathers ahead, the bucket at hand and the one on its way back."""
    return prefetch_count + 2


def slot_sizes(specs: Sequence[BucketSpec], slots: int) -> list[tuple[int, ...]]:
    """Bytes of each slot, as of :attr:`BucketSpec.nbytes`, for one rank's buckets of a group.

    A slot is as large as its largest bucket; the schedule knows which buckets share one.
    """
    count = min(len(specs), slots)
    return [
        tuple(max(sizes) for sizes in zip(*(s.nbytes for s in specs[at::count])))
        for at in range(count)
    ]


def relay_sizes(relays: Iterable[Sequence[Relay]], rank: int) -> tuple[int, int]:
    """Bytes that ``rank`` needs for what it relays of a bucket, and for each relay that it is sent."""
    sent = received = 0
    for of_bucket in relays:
        sizes = [(relay.source == rank, relay.packed.nbytes) for relay in of_bucket]
        sent = max(sent, sum(size for mine, size in sizes if mine))
        received = max([received, *(size for mine, size in sizes if not mine)])
    return sent, received


def _totals(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(row) for row in rows)


def _sums(splits: Sequence[int], length: int) -> tuple[int, ...]:
    """Of ``length`` splits at a time."""
    return _totals(splits[i : i + length] for i in range(0, len(splits), length))
