"""A schedule as vectors over ranks: all that the timeline needs of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TYPE_CHECKING

import numpy as np
from torch.optim._muon_engine.schedule.owners import newton_schulz_flops

from .messages import Group
from .relays import Wave, waves
from .shards import Vectors


if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch.optim._muon_engine.schedule.specs import Bucket, Schedule

    from .messages import Exchange, Loads


class Volume(NamedTuple):
    """Bytes that owners gather and send back, shape (owners, ranks)."""

    gather: NDArray
    scatter: NDArray


@dataclass(frozen=True)
class BucketPlan:
    """A bucket for all ranks of its group; vectors are in the order of ``ranks``.

    Args:
        owners: places of owners in ``ranks``.
        work: for each of ``owners`` the FLOPs of its matrices, in the order of the step.
        slot: bytes of ``BucketSpec.nbytes``, shape (outer, inner or passed on, ranks).
        peers: ranks that a rank exchanges something with.
    """

    bucket: Bucket
    ranks: NDArray
    owners: NDArray
    gather: Exchange
    scatter: Exchange
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


def make_plan(schedule: Schedule, world: int, gpus_per_node: int) -> Plan:
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
        made = plan_bucket(schedule, bucket, vectors, gpus_per_node)
        plan.turns[-1].append(made)
    return plan


def plan_bucket(
    schedule: Schedule,
    bucket: Bucket,
    vectors: dict[int, Vectors],
    gpus_per_node: int,
) -> BucketPlan:
    ranks = np.array(bucket.group)
    owner_ranks = np.unique([schedule.owners[m] for m in bucket.matrices])
    owners = np.searchsorted(ranks, owner_ranks)
    volume, kept = volume_of(schedule, bucket, owners, vectors)
    group = Group(ranks, owners, gpus_per_node)
    gather, scatter = (
        group.in_two_levels(sent, to_owners, bucket.node_size)
        if bucket.node_size > 1
        else group.in_one_level(sent, to_owners, not bucket.relayed)
        for sent, to_owners in ((volume.gather, True), (volume.scatter, False))
    )
    return BucketPlan(
        bucket=bucket,
        ranks=ranks,
        owners=owners,
        gather=gather,
        scatter=scatter,
        work=work_of(schedule, bucket, owner_ranks),
        relays=waves(schedule, bucket, vectors),
        slot=_slot(volume, kept, owners, np.maximum(gather.passed, scatter.passed)),
        peers=_peers(volume, owners)
        if bucket.node_size == 1
        else _peers_of_hops((*gather.hops, *scatter.hops), len(ranks)),
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


def _slot(volume: Volume, kept: NDArray, owners: NDArray, passed: NDArray) -> NDArray:
    slot = np.zeros((3, volume.gather.shape[1]))
    slot[0] = np.maximum(volume.gather.sum(0), volume.scatter.sum(0))
    slot[0] = np.maximum(slot[0], passed)
    in_place = (volume.gather == volume.scatter).all(1)
    apart = np.where(in_place, 0, volume.gather.sum(1))
    slot[1, owners] = volume.scatter.sum(1) + kept + apart
    slot[2] = passed
    return slot


def _peers(volume: Volume, owners: NDArray) -> NDArray:
    """Owners that a rank sends shards to, and ranks that send it theirs."""
    speaks = (volume.gather > 0) | (volume.scatter > 0)
    peers = speaks.sum(0)
    between = speaks[:, owners]
    both = between & between.T
    peers[owners] += speaks.sum(1) - both.sum(1)
    return peers


def _peers_of_hops(hops: Sequence[Loads], ranks: int) -> NDArray:
    """Ranks of its node and of its rail that a rank exchanges something with."""
    pairs = np.concatenate([(hop.senders, hop.receivers) for hop in hops], axis=1)
    pairs = np.unique(np.sort(pairs, axis=0), axis=1)
    return np.bincount(pairs.ravel(), minlength=ranks)
