"""A schedule as vectors over ranks.

A loop over ranks, owners and matrices would take hours for 16,384 ranks. Therefore the exchanges come from
arrays of shape (owners, ranks). A test compares them with the engine's own packs.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.optim._muon_engine.layouts.layout import Shards
from torch.optim._muon_engine.schedule.schedule import Bucket, Schedule
from torch.optim._newton_schulz import NS_DTYPE
from tools.bench.models import Shape

from .hardware import Hardware


OUT, IN = 0, 1
INTRA, INTER = 0, 1


class Loads(NamedTuple):
    """The bytes and messages of a transfer on each rank's links, shape (out or in, intra or inter, ranks)."""

    nbytes: NDArray
    messages: NDArray

    @classmethod
    def between(cls, owners: NDArray, sent: NDArray, nodes: NDArray) -> "Loads":
        """The bytes ``sent`` from ranks to ``owners``, shape (owners, ranks). ``nodes`` has the node of each rank."""
        loads = []
        for weights in (sent, (sent > 0).astype(float)):
            on_links = np.zeros((2, 2, len(nodes)))
            is_inside = nodes[owners][:, None] == nodes
            for link, travels in ((INTRA, is_inside), (INTER, ~is_inside)):
                on_link = weights * travels
                on_links[OUT, link] = on_link.sum(0)
                on_links[IN, link, owners] = on_link.sum(1)
            loads.append(on_links)
        return cls(*loads)

    def reversed(self) -> "Loads":
        """The same bytes on their way back."""
        return Loads(self.nbytes[::-1], self.messages[::-1])

    def seconds(self, hardware: Hardware) -> NDArray:
        """How long each rank's busiest link takes, shape (ranks,)."""
        bandwidth = np.array([hardware.intra_bandwidth, hardware.inter_bandwidth])
        latency = np.array([hardware.intra_latency, hardware.inter_latency])
        transfers = self.nbytes / bandwidth[:, None]
        delays = self.messages * latency[:, None]
        of_links = transfers + delays
        return of_links.max((0, 1))


class Elements(NamedTuple):
    """Elements of the matrices of a bucket, for each of its ranks.

    Args:
        held: those that it stores.
        sent: those of them that it sends to owners or to itself, for one replica of each shard does.
        applied: those of them that owners update; a relay brings the others.
        packed: those that it receives as an owner, and sends as one.
    """

    held: NDArray
    sent: NDArray
    applied: NDArray
    packed: NDArray


@dataclass(frozen=True)
class BucketPlan:
    """A bucket for all ranks of its group; vectors are in the order of ``ranks``.

    Args:
        owners: places of owners in ``ranks``.
        relays: all of them together.
        work: for each of ``owners`` how many matrices of each shape it has.
        elements: what passes over memory go through.
    """

    bucket: Bucket
    ranks: NDArray
    owners: NDArray
    gather: Loads
    scatter: Loads
    relays: Loads
    work: list[Counter[Shape]]
    elements: Elements


def make_plan(schedule: Schedule, gpus_per_node: int) -> list[BucketPlan]:
    """The buckets of all groups, in the schedule's order."""
    plan = []
    for bucket in schedule.buckets:
        plan.append(_plan_bucket(schedule, bucket, gpus_per_node))
    return plan


def _plan_bucket(schedule: Schedule, bucket: Bucket, gpus_per_node: int) -> BucketPlan:
    ranks = np.array(bucket.ranks)
    owner_ranks = np.unique([schedule.owners[matrix] for matrix in bucket.matrices])
    owners = np.searchsorted(ranks, owner_ranks)
    place_of_owner = {rank: at for at, rank in enumerate(owner_ranks.tolist())}
    work: list[Counter[Shape]] = [Counter() for _ in owners]
    # How many matrices with these shards each owner has.
    counts: dict[Shards, NDArray] = {}
    for matrix in bucket.matrices:
        layout = schedule.layouts[matrix]
        place = place_of_owner[schedule.owners[matrix]]
        work[place][layout.shape] += 1
        count = counts.setdefault(layout.shards, np.zeros_like(owners))
        count[place] += 1
    gathered, scattered, elements = _volumes(bucket, owners, counts)
    nodes = ranks // gpus_per_node
    gather = Loads.between(owners, gathered * NS_DTYPE.itemsize, nodes)
    scatter = Loads.between(owners, scattered * NS_DTYPE.itemsize, nodes)
    relays = _relays(counts, elements, nodes)
    return BucketPlan(
        bucket, ranks, owners, gather, scatter.reversed(), relays, work, elements
    )


def _volumes(
    bucket: Bucket, owners: NDArray, counts: dict[Shards, NDArray]
) -> tuple[NDArray, NDArray, Elements]:
    """Elements that owners gather and send back, shape (owners, ranks); and what passes go through."""
    ranks = np.array(bucket.ranks)
    gathered = np.zeros((len(owners), len(ranks)))
    scattered = np.zeros_like(gathered)
    held = np.zeros(len(ranks))
    for shards, count in counts.items():
        order = np.argsort(shards.ranks)
        numels = np.array(shards.numels)[order]
        held += count.sum() * numels
        all_replicas = count[:, None] * numels
        from_sources = all_replicas
        if shards.most_replicas > 1:
            from_sources = all_replicas * _are_sources(shards, ranks, owners)
        gathered += from_sources
        scattered += from_sources if bucket.relayed else all_replicas
    sent, applied = gathered.sum(0), scattered.sum(0)
    # An owner sends nothing to itself.
    places = np.arange(len(owners))
    gathered[places, owners] = 0
    scattered[places, owners] = 0
    packed = np.zeros(len(ranks))
    packed[owners] = gathered.sum(1) + scattered.sum(1)
    return gathered, scattered, Elements(held, sent, applied, packed)


def _are_sources(shards: Shards, ranks: NDArray, owners: NDArray) -> NDArray:
    """Which ranks send their shards to which owner, shape (owners, ranks)."""
    replica_numbers = np.zeros_like(ranks)
    replica_counts = np.ones_like(ranks)
    for replicas in shards.replica_sets:
        places = np.searchsorted(ranks, replicas)
        replica_numbers[places] = np.arange(len(replicas))
        replica_counts[places] = len(replicas)
    # As Shards.source: the source is the replica with the owner's number, in proportion to their replicas.
    numbers_of_owners = replica_numbers[owners][:, None]
    counts_of_owners = replica_counts[owners][:, None]
    wanted = numbers_of_owners * replica_counts // counts_of_owners
    return wanted == replica_numbers


def _relays(counts: Iterable[Shards], elements: Elements, nodes: NDArray) -> Loads:
    """Each rank receives the updates that no owner sends it. Broadcasts are rings, so replicas send as much together."""
    nbytes = np.zeros((2, 2, len(nodes)))
    relayed = elements.held - elements.applied
    if relayed.any():
        link = INTRA if nodes[0] == nodes[-1] else INTER
        nbytes[:, link] = relayed * NS_DTYPE.itemsize
    return Loads(nbytes, np.zeros_like(nbytes))
