"""The schedule of a step, and from it each rank's part: what it sends whom, and what is packed where.

What one rank sends another in a gather or scatter is one split: the regions of each matrix in order,
row-major and unpadded, then one flag for each matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.optim._muon_engine.layouts import Layout, Region


# What one relay takes along, unless a single shard is above.
RELAY_BYTES = 64 * 1024**2


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

    @property
    def in_place(self) -> bool:
        """Whether the update of a matrix goes where the matrix was gathered; not with direct replicas."""
        return self.gather_recv == self.scatter_send

    @property
    def nbytes(self) -> tuple[int, int]:
        """Of the memory that shards leave from and come back to, and of the owner's."""
        outer = max(self.gather_send.nbytes, self.scatter_recv.nbytes)
        inner = self.scatter_send.nbytes + self.kept.nbytes
        return outer, inner if self.in_place else inner + self.gather_recv.nbytes


@dataclass(frozen=True)
class Bucket:
    """Matrices of one group that take the step together; ``index`` counts the group's buckets.

    In a ``relayed`` one, of all replicas of a shard only one exchanges it with the owner, and ranks
    whose shard is empty take no part.
    """

    group: tuple[int, ...]
    index: int
    matrices: tuple[int, ...]
    gather_dtype: torch.dtype
    scatter_dtype: torch.dtype
    relayed: bool = False


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
        # A gather runs from holder to owner, a scatter from owner to holder.
        others = [() if peer == rank else owned.get(peer, ()) for peer in group_order]
        as_holder = [(rank, matrices) for matrices in others]
        as_owner = [(peer, () if peer == rank else mine) for peer in group_order]
        gather, scatter = bucket.gather_dtype, bucket.scatter_dtype
        says = self._speaks if bucket.relayed else None
        relays = self._relays(bucket, rank) if bucket.relayed else ()
        relayed = {m for relay in relays for m in relay.packed.matrices}
        kept = [m for m in mine if m in relayed]
        return BucketSpec(
            gather_send=self._pack_spec(as_holder, gather, self.is_source, says),
            gather_recv=self._pack_spec(as_owner, gather, self.is_source, says),
            scatter_send=self._pack_spec(as_owner, scatter, self.receives, says),
            scatter_recv=self._pack_spec(as_holder, scatter, self.receives, says),
            owned=tuple(mine),
            kept=self._pack_spec([(rank, kept)], scatter, self.receives),
            relays=relays,
        )

    def _relays(self, bucket: Bucket, rank: int) -> tuple[Relay, ...]:
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
