"""The schedule of a step: its buckets, their owners, and each rank's packs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..._newton_schulz import NS_DTYPE
from ..layouts.layout import Layout, Ranks
from .packs import LocalPacks, Pack, PackedRegion, Relay


# Holders, each with the matrices whose shards it exchanges.
Exchanged = Sequence[tuple[int, Sequence[int]]]
# Whether the shard of a matrix on a rank is sent.
Travels = Callable[[int, int], bool]


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
        as_holder = [between(rank, peer, owned) for peer in bucket.ranks]
        as_owner = [between(peer, rank, owned) for peer in bucket.ranks]
        relays = self.relays(bucket, rank)
        relayed = {region.matrix for relay in relays for region in relay.pack.regions}
        own = [matrix for matrix in owned.get(rank, ()) if matrix in relayed]
        return LocalPacks(
            gather_send=self.gather_of(bucket, as_holder),
            gather_recv=self.gather_of(bucket, as_owner),
            scatter_send=self.scatter_of(bucket, as_owner),
            scatter_recv=self.scatter_of(bucket, as_holder),
            own_results=self._pack([(rank, own)], NS_DTYPE, self.receives),
            relays=relays,
        )

    def owned(self, bucket: Bucket) -> dict[int, list[int]]:
        """Owner -> its matrices in ``bucket``."""
        by_owner: dict[int, list[int]] = {}
        for matrix in bucket.matrices:
            by_owner.setdefault(self.owners[matrix], []).append(matrix)
        return by_owner

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
        if not bucket.relayed:
            return ()
        from .relays import relays_of

        def packed(matrices: Sequence[int]) -> Pack:
            return self._pack([(rank, matrices)], NS_DTYPE, self.receives)

        shards = {matrix: self.layouts[matrix].shards for matrix in bucket.matrices}
        owners = {matrix: self.owners[matrix] for matrix in bucket.matrices}
        return relays_of(shards, owners, rank, packed)

    def gather_of(self, bucket: Bucket, exchanged: Exchanged) -> Pack:
        """The pack of shards on their way to the owners."""
        return self._pack(exchanged, bucket.gather_dtype, self.is_source)

    def scatter_of(self, bucket: Bucket, exchanged: Exchanged) -> Pack:
        """The pack of updates on their way to the holders."""

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


def between(
    holder: int, owner: int, owned: dict[int, list[int]]
) -> tuple[int, Sequence[int]]:
    """The matrices whose shards ``holder`` exchanges with ``owner``; none if they are one rank."""
    return holder, () if holder == owner else owned.get(owner, ())
