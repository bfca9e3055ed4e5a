"""A schedule as vectors over ranks: all that the timeline needs of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TYPE_CHECKING

import numpy as np
from torch.optim._muon_engine.schedule.owners import newton_schulz_flops

from . import messages
from .relays import Wave, waves
from .shards import Vectors


if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch.optim._muon_engine.schedule.specs import Bucket, Schedule

# Owner and rank, as places in the group: a rank that exchanges something with the owner.
Pairs = tuple["NDArray", "NDArray"]
Cost = messages.Loads | messages.TwoLevel
Exchange = Callable[..., Cost]


class Volume(NamedTuple):
    """Bytes that owners gather and send back, shape (owners, ranks)."""

    gather: NDArray
    scatter: NDArray


@dataclass(frozen=True)
class BucketPlan:
    """A bucket for all ranks of its group; vectors are in the order of ``ranks``.

    Args:
        owners: places of owners in ``ranks``.
        pairs: who exchanges with whom; None where all do with all owners.
        work: for each of ``owners`` the FLOPs of its matrices, in the order of the step.
        slot: bytes of ``BucketSpec.nbytes``, shape (outer or inner, ranks).
        peers: ranks that a rank exchanges something with.
    """

    bucket: Bucket
    ranks: NDArray
    owners: NDArray
    pairs: Pairs | None
    gather: Cost
    scatter: Cost
    work: list[list[int]]
    relays: list[Wave]
    slot: NDArray
    peers: NDArray


@dataclass(frozen=True)
class Plan:
    """``turns`` have buckets of disjoint groups, which ranks run at the same time."""

    world: int
    gpus_per_node: int
    turns: list[list[BucketPlan]] = field(default_factory=list)


def make_plan(
    schedule: Schedule,
    world: int,
    gpus_per_node: int,
    exchange: Exchange = messages.direct,
) -> Plan:
    plan = Plan(world, gpus_per_node)
    vectors: dict[int, Vectors] = {}
    for layout in schedule.layouts:
        if id(layout.shards) not in vectors:
            vectors[id(layout.shards)] = Vectors.of(layout.shards)
    busy = np.ones(world, bool)
    for bucket in schedule.buckets:
        group = np.array(bucket.group)
        if busy[group].any():
            plan.turns.append([])
            busy[:] = False
        busy[group] = True
        made = plan_bucket(schedule, bucket, vectors, gpus_per_node, exchange)
        plan.turns[-1].append(made)
    return plan


def plan_bucket(
    schedule: Schedule,
    bucket: Bucket,
    vectors: dict[int, Vectors],
    gpus_per_node: int,
    exchange: Exchange,
) -> BucketPlan:
    ranks = np.array(bucket.group)
    owner_ranks = np.unique([schedule.owners[m] for m in bucket.matrices])
    owners = np.searchsorted(ranks, owner_ranks)
    volume, kept = volume_of(schedule, bucket, owners, vectors)
    gather, scatter = volume
    speaks = (gather > 0) | (scatter > 0)
    return BucketPlan(
        bucket=bucket,
        ranks=ranks,
        owners=owners,
        pairs=np.nonzero(speaks) if bucket.relayed else None,
        gather=exchange(gather.T, ranks, owner_ranks, ranks, gpus_per_node),
        scatter=exchange(scatter, owner_ranks, ranks, ranks, gpus_per_node),
        work=work_of(schedule, bucket, owner_ranks),
        relays=waves(schedule, bucket, vectors),
        slot=_slot(volume, kept, owners),
        peers=_peers(speaks, owners),
    )


def volume_of(
    schedule: Schedule, bucket: Bucket, owners: NDArray, vectors: dict[int, Vectors]
) -> tuple[Volume, NDArray]:
    """What travels with each owner, and what an owner keeps of a relayed bucket for its replicas."""
    ranks = np.array(bucket.group)
    counts: dict[int, NDArray] = {}
    for matrix in bucket.matrices:
        count = counts.setdefault(
            id(schedule.layouts[matrix].shards), np.zeros(len(owners))
        )
        count[np.searchsorted(ranks[owners], schedule.owners[matrix])] += 1
    volume = Volume(*(np.zeros((len(owners), len(ranks))) for _ in range(2)))
    kept = np.zeros(len(owners))
    for key, count in counts.items():
        one = vectors[key]
        sources = one.sources(owners) if one.sets else True
        # A flag goes with each shard, and only from sources that hold something where others are
        # relayed to.
        said = sources & (one.numels > 0) if bucket.relayed else True
        volume.gather[:] += count[:, None] * (one.numels * sources + said)
        volume.scatter[:] += count[:, None] * ((one.numels + 1) * said)
        relays = (one.replicas[owners] > 1) & (one.numels[owners] > 0)
        kept += count * (one.numels + 1)[owners] * relays
    for side, dtype in zip(volume, (bucket.gather_dtype, bucket.scatter_dtype)):
        side[np.arange(len(owners)), owners] = 0
        side *= dtype.itemsize
    kept *= bucket.scatter_dtype.itemsize * bucket.relayed
    return volume, kept


def work_of(
    schedule: Schedule, bucket: Bucket, owner_ranks: Sequence[int]
) -> list[list[int]]:
    """FLOPs of each owner's matrices; those of one shape follow each other, as in a step."""
    by_shape: dict[int, dict[tuple[int, int], list[int]]] = {r: {} for r in owner_ranks}
    for matrix in bucket.matrices:
        shape = schedule.layouts[matrix].shape
        flops = newton_schulz_flops(shape)
        by_shape[schedule.owners[matrix]].setdefault(shape, []).append(flops)
    return [[f for same in by_shape[r].values() for f in same] for r in owner_ranks]


def _slot(volume: Volume, kept: NDArray, owners: NDArray) -> NDArray:
    slot = np.zeros((2, volume.gather.shape[1]))
    slot[0] = np.maximum(volume.gather.sum(0), volume.scatter.sum(0))
    in_place = (volume.gather == volume.scatter).all(1)
    apart = np.where(in_place, 0, volume.gather.sum(1))
    slot[1, owners] = volume.scatter.sum(1) + kept + apart
    return slot


def _peers(speaks: NDArray, owners: NDArray) -> NDArray:
    """Owners that a rank sends shards to, and ranks that send it theirs."""
    peers = speaks.sum(0)
    between = speaks[:, owners]
    both = between & between.T
    peers[owners] += speaks.sum(1) - both.sum(1)
    return peers
