"""The schedule of a step: its buckets, their owners, and each rank's packs. A matrix is its index in ``layouts``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial


from ..layouts.layout import Layout, Ranks, Shards
from .packs import LocalPacks, Pack, PackedRegion, Relay


# Whether the shard of a matrix on a rank is sent.
Travels = Callable[[int, int], bool]
# A holder, and the matrices whose shards it exchanges with one owner. A rank makes many of these pairs.
Exchanged = tuple[int, Sequence[int]]


@dataclass(frozen=True)
class Bucket:
    """Matrices of the same ``ranks`` that are processed together; ``index`` counts the buckets of these ranks."""

    ranks: Ranks
    index: int
    matrices: tuple[int, ...]
    # Whether only one replica of each shard exchanges it with the owner.
    relayed: bool = False


@dataclass(frozen=True)
class Schedule:
    """The buckets of all groups in one global order."""

    layouts: tuple[Layout, ...]
    owners: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    one_owner_at_a_time: bool = False

    def is_source(self, matrix: int, rank: int) -> bool:
        """Whether ``rank`` sends its shard to the owner of ``matrix``; one replica of each shard does."""
        return self.layouts[matrix].shards.source(rank, self.owners[matrix]) == rank

    def packs(self, bucket: Bucket, rank: int) -> LocalPacks:
        """The packs of ``rank``, with splits in the order of the ranks of ``bucket``."""
        owned = self.owned(bucket)
        as_holder: list[Exchanged] = []
        as_owner: list[Exchanged] = []
        for peer in bucket.ranks:
            as_holder.append(between(rank, peer, owned))
            as_owner.append(between(peer, rank, owned))
        relays = self.relays(bucket, rank)
        relayed: set[int] = set()
        for relay in relays:
            relayed.update(region.matrix for region in relay.pack.regions)
        computed = [matrix for matrix in owned.get(rank, ()) if matrix in relayed]
        return LocalPacks(
            gather_send=self.gather_of(bucket, as_holder),
            gather_recv=self.gather_of(bucket, as_owner),
            scatter_send=self.scatter_of(bucket, as_owner),
            scatter_recv=self.scatter_of(bucket, as_holder),
            own_results=self._results(rank, computed),
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
        for bucket in self.buckets:
            if rank not in bucket.ranks:
                continue
            for relay in self.relays(bucket, rank):
                groups[relay.replicas] = "replicas"
        return groups

    def relays(self, bucket: Bucket, rank: int) -> tuple[Relay, ...]:
        """The relays along the replicas of ``rank``'s shards, in an order that all replicas share."""
        if bucket.relayed:
            from .relays import relays_of

            shards: dict[int, Shards] = {}
            owners: dict[int, int] = {}
            for matrix in bucket.matrices:
                shards[matrix] = self.layouts[matrix].shards
                owners[matrix] = self.owners[matrix]
            return relays_of(shards, owners, rank, partial(self._results, rank))
        return ()

    def _results(self, rank: int, matrices: Sequence[int]) -> Pack:
        """The pack of the updates of ``matrices`` for their shards on ``rank``."""
        return self._pack([(rank, matrices)], lambda matrix, rank: True)

    def gather_of(self, bucket: Bucket, exchanged: Sequence[Exchanged]) -> Pack:
        """The pack of shards on their way to the owners."""
        return self._pack(exchanged, self.is_source)

    def scatter_of(self, bucket: Bucket, exchanged: Sequence[Exchanged]) -> Pack:
        """The pack of updates on their way to the holders."""

        def gets_directly(matrix: int, rank: int) -> bool:
            return not bucket.relayed or self.is_source(matrix, rank)

        return self._pack(exchanged, gets_directly)

    def _pack(self, exchanged: Sequence[Exchanged], travels: Travels) -> Pack:
        """One split size for each of ``exchanged``; ``travels`` says whether a matrix goes from or to a holder."""
        split_sizes: list[int] = []
        regions: list[PackedRegion] = []
        offset = 0
        for holder, matrices in exchanged:
            start = offset
            for matrix in matrices:
                if not travels(matrix, holder):
                    continue
                for region in self.layouts[matrix].shards.of(holder):
                    regions.append(PackedRegion(matrix, holder, region, offset))
                    offset += region.numel
            split_sizes.append(offset - start)
        return Pack(tuple(split_sizes), tuple(regions))


def between(holder: int, owner: int, owned: dict[int, list[int]]) -> Exchanged:
    """The matrices whose shards ``holder`` exchanges with ``owner``; none if they are one rank."""
    if holder == owner:
        return holder, ()
    return holder, owned.get(owner, ())
