"""A schedule as vectors over ranks.

A loop over ranks, owners and matrices would take hours for 16,384 ranks. Therefore the exchanges come from
arrays of shape (owners, ranks). A test compares them with the engine's own packs.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.optim._muon_engine.schedule.owners import flops_of
from torch.optim._muon_engine.schedule.schedule import Bucket, Schedule
from torch.optim._newton_schulz import NS_DTYPE

from .hardware import Hardware


OUT, IN = 0, 1
INTRA, INTER = 0, 1


@dataclass(frozen=True)
class Loads:
    """One all-to-all: bytes and messages on each rank's links, shape (out or in, intra or inter, ranks).

    Args:
        along: the communicator: "group", "node" or "rail".
        senders, receivers: places in the group. They are pairs; or, if ``complete``, each sender sends to
            each receiver.
    """

    along: str
    nbytes: NDArray
    messages: NDArray
    senders: NDArray
    receivers: NDArray
    complete: bool

    @classmethod
    def of(
        cls,
        along: str,
        sent: NDArray,
        ends: tuple[NDArray, NDArray],
        nodes: NDArray,
        complete: bool = False,
    ) -> "Loads":
        """From the bytes ``sent`` between ``ends``: senders and receivers of the same shape.

        Args:
            nodes: the physical node of each rank of the group.
        """
        senders, receivers = np.broadcast_arrays(*ends)
        travels = (sent > 0) & (senders != receivers)
        senders, receivers = senders[travels], receivers[travels]
        count = len(nodes)
        link = count * (nodes[senders] != nodes[receivers])

        def of_links(weights: NDArray | None) -> NDArray:
            places = link + senders, link + receivers
            found = [np.bincount(at, weights, 2 * count) for at in places]
            return np.reshape(found, (2, 2, count))

        loads = of_links(sent[travels]), of_links(None)
        if complete:
            senders, receivers = (end.ravel() for end in ends)
        return cls(along, *loads, senders, receivers, complete)

    def seconds(self, hardware: Hardware, directions: slice = slice(None)) -> NDArray:
        """How long each rank's busiest link takes, shape (ranks,)."""
        bandwidth = np.array([hardware.intra_bandwidth, hardware.inter_bandwidth])
        latency = np.array([hardware.intra_latency, hardware.inter_latency])
        of_links = (
            self.nbytes[directions] / bandwidth[:, None]
            + self.messages[directions] * latency[:, None]
        )
        return of_links.max((0, 1))

    def latest(self, times: NDArray) -> NDArray:
        """The last of ``times`` of the ranks that each rank receives from; minus infinity without any."""
        last = np.full_like(times, -np.inf)
        if self.complete:
            last[self.receivers] = times[self.senders].max()
        else:
            np.maximum.at(last, self.receivers, times[self.senders])
        return last


class Wave(NamedTuple):
    """Broadcasts that disjoint replica sets make at the same time.

    Args:
        ranks: global ranks, shape (sets, replicas).
        is_source: which of ``ranks`` have the result already.
        nbytes: for each set.
    """

    ranks: NDArray
    is_source: NDArray
    nbytes: NDArray

    def nodes(self, gpus_per_node: int) -> int:
        return len(np.unique(self.ranks[0] // gpus_per_node))

    def seconds(self, hardware: Hardware) -> tuple[NDArray, float]:
        """The time of the links of a ring in the order of ranks, and of its hops, which block no link."""
        nodes = self.nodes(hardware.gpus_per_node)
        inside = self.ranks.shape[1] - nodes
        slowest = hardware.inter_bandwidth if nodes > 1 else hardware.intra_bandwidth
        hops = (nodes - 1) * hardware.inter_latency + inside * hardware.intra_latency
        return self.nbytes / slowest, hops


@dataclass(frozen=True)
class BucketPlan:
    """A bucket for all ranks of its group; vectors are in the order of ``ranks``.

    Args:
        owners: places of owners in ``ranks``.
        gather, scatter: one or two all-to-alls each.
        work: for each of ``owners`` the FLOPs of its matrices.
        shared: for each of ``owners`` the short sides of its blocks of divided matrices, and their teams.
    """

    bucket: Bucket
    ranks: NDArray
    owners: NDArray
    gather: tuple[Loads, ...]
    scatter: tuple[Loads, ...]
    work: NDArray
    shared: list[list[tuple[int, tuple[int, ...]]]]
    relays: list[Wave]

    def seconds(self, hardware: Hardware) -> NDArray:
        """The time of each owner's Newton-Schulz."""
        teams = [sum(together(hardware, *of) for of in found) for found in self.shared]
        return self.work / hardware.flops + np.array(teams)


def together(
    hardware: Hardware, short: int, team: tuple[int, ...], steps: int = 5
) -> float:
    """Seconds of the collectives of a divided matrix: rings that overlap with nothing.

    Each step all-reduces a float32 Gram matrix and all-gathers a bfloat16 polynomial of it.
    """
    on_node = Counter(rank // hardware.gpus_per_node for rank in team)
    bandwidth, nodes, hops = hardware.intra_bandwidth, len(on_node), len(team) - 1
    if nodes > 1:
        # As many rings as adapters of the node that has fewest ranks.
        adapters = min(on_node.values()) * hardware.inter_bandwidth
        bandwidth = min(bandwidth, adapters)
    latency = (nodes - 1) * hardware.inter_latency
    latency += (hops - nodes + 1) * hardware.intra_latency
    nbytes = hops / len(team) * short * short * (2 * 4 + 2)
    return steps * (nbytes / bandwidth + 3 * latency)


@dataclass(frozen=True)
class Plan:
    """The buckets of all groups, in the schedule's order."""

    world: int
    gpus_per_node: int
    one_owner_at_a_time: bool
    buckets: list[BucketPlan]


def make_plan(schedule: Schedule, world: int, gpus_per_node: int) -> Plan:
    buckets = [
        _plan_bucket(schedule, bucket, gpus_per_node) for bucket in schedule.buckets
    ]
    return Plan(world, gpus_per_node, schedule.one_owner_at_a_time, buckets)


def _plan_bucket(schedule: Schedule, bucket: Bucket, gpus_per_node: int) -> BucketPlan:
    ranks = np.array(bucket.ranks)
    owner_ranks = np.unique([schedule.owners[m] for m in bucket.matrices])
    owners = np.searchsorted(ranks, owner_ranks)
    work = np.zeros(len(owners))
    shared: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in owners]
    for m in bucket.matrices:
        at = np.searchsorted(owner_ranks, schedule.owners[m])
        layout = schedule.layouts[m]
        work[at] += flops_of(layout)
        if layout.block_of:
            shared[at].append((min(layout.block_of), schedule.team(m)))
    gathered, scattered = _volumes(schedule, bucket, owners)
    everybody, nodes = np.arange(len(ranks)), ranks // gpus_per_node
    if bucket.node_size > 1:
        gather = _gather_in_two_levels(gathered, owners, nodes, bucket.node_size)
        scatter = _scatter_in_two_levels(scattered, owners, nodes, bucket.node_size)
    else:
        ends, whole = (everybody[None], owners[:, None]), not bucket.relayed
        gather = (Loads.of("group", gathered, ends, nodes, whole),)
        scatter = (Loads.of("group", scattered, ends[::-1], nodes, whole),)
    exchanges, waves = (gather, scatter), _waves(schedule, bucket)
    return BucketPlan(bucket, ranks, owners, *exchanges, work, shared, waves)


def _volumes(
    schedule: Schedule, bucket: Bucket, owners: NDArray
) -> tuple[NDArray, NDArray]:
    """Bytes that owners gather and send back, shape (owners, ranks)."""
    ranks = np.array(bucket.ranks)
    counts = {}
    for matrix in bucket.matrices:
        count = counts.setdefault(schedule.layouts[matrix].shards, 0 * owners)
        count[np.searchsorted(ranks[owners], schedule.owners[matrix])] += 1
    gathered, scattered = (np.zeros((len(owners), len(ranks))) for _ in range(2))
    for shards, count in counts.items():
        if shards.partial:
            raise NotImplementedError("the simulation has no Partial parameters")
        numels = np.array(shards.numels)[np.argsort(shards.ranks)]
        number, replicas = np.zeros_like(ranks), np.ones_like(ranks)
        for members in shards.replica_sets:
            if len(members) > 1:
                places = np.searchsorted(ranks, members)
                number[places] = np.arange(len(members))
                replicas[places] = len(members)
        # As Shards.source: the source is the replica with the owner's number, or the last one.
        wanted = np.minimum(number[owners][:, None], replicas - 1)
        from_sources = count[:, None] * numels * (wanted == number)
        gathered += from_sources
        scattered += from_sources if bucket.relayed else count[:, None] * numels
    dtypes = bucket.gather_dtype, NS_DTYPE
    for side, dtype in zip((gathered, scattered), dtypes):
        side[np.arange(len(owners)), owners] = 0
        side *= dtype.itemsize
    return gathered, scattered


def _gather_in_two_levels(
    sent: NDArray, owners: NDArray, nodes: NDArray, node_size: int
) -> tuple[Loads, Loads]:
    """Through the rank of the holder's node that is on the owner's rail."""
    holders, rails = np.arange(len(nodes)), np.arange(node_size)[:, None]
    of_rail = (owners % node_size == rails).astype(float) @ sent
    corners = holders - holders % node_size + rails
    of_node = sent.reshape(len(owners), -1, node_size).sum(2)
    ends = holders[::node_size] + owners[:, None] % node_size, owners[:, None]
    return (
        Loads.of("node", of_rail, (holders[None], corners), nodes),
        Loads.of("rail", of_node, ends, nodes),
    )


def _scatter_in_two_levels(
    sent: NDArray, owners: NDArray, nodes: NDArray, node_size: int
) -> tuple[Loads, Loads]:
    """Through the rank of the owner's node that is on the holder's rail."""
    holders, rails = np.arange(len(nodes)), np.arange(node_size)[None]
    of_rail = sent.reshape(len(owners), -1, node_size).sum(1)
    corners = (owners - owners % node_size)[:, None] + rails
    starts = holders[::node_size][:, None]
    of_node = (owners // node_size == starts // node_size).astype(float) @ sent
    ends = starts + holders % node_size, holders[None]
    return (
        Loads.of("node", of_rail, (owners[:, None], corners), nodes),
        Loads.of("rail", of_node, ends, nodes),
    )


def _waves(schedule: Schedule, bucket: Bucket) -> list[Wave]:
    """The engine's own relays. A relay begins when the earlier relays of all its ranks have begun."""
    if not bucket.relayed:
        return []
    shards = {schedule.layouts[m].shards for m in bucket.matrices}
    sets = {
        ranks
        for one in shards
        for ranks in one.replica_sets
        if len(ranks) > 1 and not one.is_empty(ranks[0])
    }
    # A rank in several replica sets makes the relays of all of them.
    by_set = {ranks: schedule.relays(bucket, ranks[0]) for ranks in sorted(sets)}
    turn: dict[int, int] = {}
    waves: dict[tuple[int, int], list] = {}
    for ranks, relays in by_set.items():
        for relay in relays:
            if relay.replicas == tuple(sorted(ranks)):
                at = max(turn.get(rank, 0) for rank in ranks)
                turn.update(dict.fromkeys(ranks, at + 1))
                waves.setdefault((at, len(ranks)), []).append(relay)
    return [
        Wave(
            np.array([relay.replicas for relay in wave]),
            np.array([[r == relay.source for r in relay.replicas] for relay in wave]),
            np.array([float(relay.pack.nbytes) for relay in wave]),
        )
        for _, wave in sorted(waves.items(), key=lambda item: item[0])
    ]
