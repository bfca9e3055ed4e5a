"""A schedule as vectors over ranks.

A loop over ranks, owners and matrices would take hours for 16,384 ranks. Therefore the exchanges come from
arrays of shape (owners, ranks). A test compares them with the engine's own packs.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.optim._muon_engine.layouts.layout import Ranks, Shards
from torch.optim._muon_engine.schedule.schedule import Bucket, Schedule
from torch.optim._newton_schulz import NS_DTYPE

from .costs import batch_seconds, MatrixKind
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
            going_out = np.bincount(link + senders, weights, 2 * count)
            coming_in = np.bincount(link + receivers, weights, 2 * count)
            return np.reshape([going_out, coming_in], (2, 2, count))

        nbytes = of_links(sent[travels])
        messages = of_links(None)
        if complete:
            senders, receivers = ends[0].ravel(), ends[1].ravel()
        return cls(along, nbytes, messages, senders, receivers, complete)

    def seconds(self, hardware: Hardware, directions: slice = slice(None)) -> NDArray:
        """How long each rank's busiest link takes, shape (ranks,)."""
        bandwidth = np.array([hardware.intra_bandwidth, hardware.inter_bandwidth])
        latency = np.array([hardware.intra_latency, hardware.inter_latency])
        transfers = self.nbytes[directions] / bandwidth[:, None]
        delays = self.messages[directions] * latency[:, None]
        of_links = transfers + delays
        return of_links.max((0, 1))

    def latest(self, times: NDArray) -> NDArray:
        """The last of ``times`` of the ranks that each rank receives from; minus infinity without any."""
        last = np.full_like(times, -np.inf)
        of_senders = times[self.senders]
        if self.complete:
            last[self.receivers] = of_senders.max()
        else:
            np.maximum.at(last, self.receivers, of_senders)
        return last


class Wave(NamedTuple):
    """Broadcasts that disjoint replica sets make at the same time.

    Args:
        ranks: global ranks, shape (sets, replicas).
        is_source: which of ``ranks`` have the result already.
        nbytes: for each set.
        nodes: how many nodes the replicas of a set are on.
    """

    ranks: NDArray
    is_source: NDArray
    nbytes: NDArray
    nodes: int

    def seconds(self, hardware: Hardware) -> tuple[NDArray, float]:
        """The time of the links of a ring in the order of ranks, and of its hops, which block no link."""
        nodes = self.nodes
        _, replicas = self.ranks.shape
        slowest = hardware.inter_bandwidth if nodes > 1 else hardware.intra_bandwidth
        between_nodes = (nodes - 1) * hardware.inter_latency
        inside_nodes = (replicas - nodes) * hardware.intra_latency
        return self.nbytes / slowest, between_nodes + inside_nodes


class SharedBlock(NamedTuple):
    """A block of a divided matrix: its short side, and the ranks that orthogonalize the matrix together."""

    short_side: int
    team: tuple[int, ...]


@dataclass(frozen=True)
class BucketPlan:
    """A bucket for all ranks of its group; vectors are in the order of ``ranks``.

    Args:
        owners: places of owners in ``ranks``.
        gather, scatter: one or two all-to-alls each.
        work: for each of ``owners`` how many matrices of each kind it has.
        shared: for each of ``owners`` its blocks of divided matrices.
        elements: what passes over memory go through.
    """

    bucket: Bucket
    ranks: NDArray
    owners: NDArray
    gather: tuple[Loads, ...]
    scatter: tuple[Loads, ...]
    work: list[Counter[MatrixKind]]
    shared: list[list[SharedBlock]]
    elements: "Elements"
    relays: list[Wave]

    def batches(self, hardware: Hardware, algorithm: str) -> tuple[NDArray, NDArray]:
        """The time of each owner's blocks of divided matrices, which come first, shape (owners,); and of its batches, in
        their order, shape (most batches, owners).
        """
        divided = np.zeros(len(self.owners))
        by_owner: list[list[float]] = []
        for owner, kinds in enumerate(self.work):
            whole: list[float] = []
            for kind, count in kinds.items():
                seconds = batch_seconds(kind, count, algorithm, hardware)
                if kind.owners > 1:
                    divided[owner] += sum(seconds)
                else:
                    whole += seconds
            for block in self.shared[owner]:
                divided[owner] += seconds_together(block, hardware)
            by_owner.append(whole)
        batches = np.zeros((max(map(len, by_owner)), len(by_owner)))
        for owner, whole in enumerate(by_owner):
            batches[: len(whole), owner] = whole
        return divided, batches


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


def seconds_together(block: SharedBlock, hardware: Hardware, steps: int = 5) -> float:
    """Seconds of the collectives of a divided matrix: rings that overlap with nothing.

    Each step all-reduces a float32 Gram matrix and all-gathers a bfloat16 polynomial of it.
    """
    ranks_on_node = Counter(rank // hardware.gpus_per_node for rank in block.team)
    nodes = len(ranks_on_node)
    members = len(block.team)
    hops = members - 1
    bandwidth = hardware.intra_bandwidth
    if nodes > 1:
        # As many rings as adapters of the node that has fewest ranks.
        adapters = min(ranks_on_node.values()) * hardware.inter_bandwidth
        bandwidth = min(bandwidth, adapters)
    latency = (nodes - 1) * hardware.inter_latency
    latency += (hops - nodes + 1) * hardware.intra_latency
    bytes_of_element = 2 * 4 + 2
    side = block.short_side
    nbytes = hops / members * side * side * bytes_of_element
    return steps * (nbytes / bandwidth + 3 * latency)


@dataclass(frozen=True)
class Plan:
    """The buckets of all groups, in the schedule's order."""

    world: int
    gpus_per_node: int
    one_owner_at_a_time: bool
    buckets: list[BucketPlan]


def make_plan(schedule: Schedule, world: int, gpus_per_node: int) -> Plan:
    buckets = []
    for bucket in schedule.buckets:
        buckets.append(_plan_bucket(schedule, bucket, gpus_per_node))
    return Plan(world, gpus_per_node, schedule.one_owner_at_a_time, buckets)


def _plan_bucket(schedule: Schedule, bucket: Bucket, gpus_per_node: int) -> BucketPlan:
    ranks = np.array(bucket.ranks)
    owner_ranks = np.unique([schedule.owners[matrix] for matrix in bucket.matrices])
    owners = np.searchsorted(ranks, owner_ranks)
    work, shared = _works(schedule, bucket, owner_ranks)
    gathered, scattered, elements = _volumes(schedule, bucket, owners)
    nodes = ranks // gpus_per_node
    if bucket.node_size > 1:
        gather = _gather_in_two_levels(gathered, owners, nodes, bucket.node_size)
        scatter = _scatter_in_two_levels(scattered, owners, nodes, bucket.node_size)
    else:
        holders = np.arange(len(ranks))[None]
        of_owners = owners[:, None]
        complete = not bucket.relayed
        gather = (Loads.of("group", gathered, (holders, of_owners), nodes, complete),)
        scatter = (Loads.of("group", scattered, (of_owners, holders), nodes, complete),)
    relays = _waves(schedule, bucket, gpus_per_node)
    exchanges = gather, scatter
    return BucketPlan(bucket, ranks, owners, *exchanges, work, shared, elements, relays)


def _works(
    schedule: Schedule, bucket: Bucket, owner_ranks: NDArray
) -> tuple[list[Counter[MatrixKind]], list[list[SharedBlock]]]:
    """``work`` and ``shared`` of :class:`BucketPlan`."""
    work: list[Counter[MatrixKind]] = [Counter() for _ in owner_ranks]
    shared: list[list[SharedBlock]] = [[] for _ in owner_ranks]
    places = {rank: place for place, rank in enumerate(owner_ranks.tolist())}
    for matrix in bucket.matrices:
        owner = places[schedule.owners[matrix]]
        layout = schedule.layouts[matrix]
        _, blocks = layout.key.block
        work[owner][MatrixKind(layout.full_shape, blocks)] += 1
        if layout.block_of:
            short_side = min(layout.block_of)
            shared[owner].append(SharedBlock(short_side, schedule.team(matrix)))
    return work, shared


def _volumes(
    schedule: Schedule, bucket: Bucket, owners: NDArray
) -> tuple[NDArray, NDArray, Elements]:
    """Bytes that owners gather and send back, shape (owners, ranks); and what passes go through."""
    ranks = np.array(bucket.ranks)
    places_of_owners = {rank: at for at, rank in enumerate(ranks[owners].tolist())}
    # How many matrices with these shards each owner has.
    counts: dict[Shards, NDArray] = {}
    for matrix in bucket.matrices:
        shards = schedule.layouts[matrix].shards
        count = counts.setdefault(shards, np.zeros_like(owners))
        count[places_of_owners[schedule.owners[matrix]]] += 1
    # With 16,384 ranks, an array of this shape has 2 GB. Without replicas, one is enough.
    gathered = np.zeros((len(owners), len(ranks)))
    scattered = gathered
    has_replicas = any(shards.most_replicas > 1 for shards in counts)
    if has_replicas or bucket.gather_dtype != NS_DTYPE:
        scattered = np.zeros_like(gathered)
    held = np.zeros(len(ranks))
    for shards, count in counts.items():
        if shards.partial:
            raise NotImplementedError("the simulation has no Partial parameters")
        order = np.argsort(shards.ranks)
        numels = np.array(shards.numels)[order]
        held += count.sum() * numels
        if scattered is gathered:
            for owner in np.flatnonzero(count):
                gathered[owner] += count[owner] * numels
            continue
        all_replicas = count[:, None] * numels
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
    if scattered is not gathered:
        scattered *= NS_DTYPE.itemsize
    gathered *= bucket.gather_dtype.itemsize
    return gathered, scattered, Elements(held, sent, applied, packed)


def _are_sources(shards: Shards, ranks: NDArray, owners: NDArray) -> NDArray:
    """Which ranks send their shards to which owner, shape (owners, ranks)."""
    replica_numbers = np.zeros_like(ranks)
    replica_counts = np.ones_like(ranks)
    for replicas in shards.replica_sets:
        count = len(replicas)
        if count > 1:
            places = np.searchsorted(ranks, replicas)
            replica_numbers[places] = np.arange(count)
            replica_counts[places] = count
    # As Shards.source: the source is the replica with the owner's number, in proportion to their replicas.
    numbers_of_owners = replica_numbers[owners][:, None]
    counts_of_owners = replica_counts[owners][:, None]
    wanted = numbers_of_owners * replica_counts // counts_of_owners
    return wanted == replica_numbers


def _gather_in_two_levels(
    sent: NDArray, owners: NDArray, nodes: NDArray, node_size: int
) -> tuple[Loads, Loads]:
    """Through the rank of the holder's node that is on the owner's rail."""
    holders = np.arange(len(nodes))
    rails = np.arange(node_size)[:, None]
    rails_of_owners = owners % node_size
    first_of_node = holders - holders % node_size
    is_on_rail = (rails_of_owners == rails).astype(float)
    to_rails = is_on_rail @ sent
    inside = holders[None], first_of_node + rails
    from_nodes = sent.reshape(len(owners), -1, node_size).sum(2)
    first_holders = holders[::node_size]
    across = first_holders + rails_of_owners[:, None], owners[:, None]
    return (
        Loads.of("node", to_rails, inside, nodes),
        Loads.of("rail", from_nodes, across, nodes),
    )


def _scatter_in_two_levels(
    sent: NDArray, owners: NDArray, nodes: NDArray, node_size: int
) -> tuple[Loads, Loads]:
    """Through the rank of the owner's node that is on the holder's rail."""
    holders = np.arange(len(nodes))
    rails = np.arange(node_size)[None]
    first_of_node = (owners - owners % node_size)[:, None]
    to_rails = sent.reshape(len(owners), -1, node_size).sum(1)
    inside = owners[:, None], first_of_node + rails
    first_holders = holders[::node_size][:, None]
    is_on_node = (owners // node_size == first_holders // node_size).astype(float)
    from_nodes = is_on_node @ sent
    across = first_holders + holders % node_size, holders[None]
    return (
        Loads.of("node", to_rails, inside, nodes),
        Loads.of("rail", from_nodes, across, nodes),
    )


class Result(NamedTuple):
    """What one replica of a set relays to the others: its place in the sorted set, and the bytes."""

    source: int
    nbytes: float


def _waves(schedule: Schedule, bucket: Bucket, gpus_per_node: int) -> list[Wave]:
    """The engine's own relays. A relay begins when the earlier relays of all its ranks have begun."""
    if not bucket.relayed:
        return []
    all_shards = list({schedule.layouts[matrix].shards for matrix in bucket.matrices})
    # The replicas of shards of equal sizes have equal relays, so that these are made once.
    known: dict[tuple, list[Result]] = {}
    # By rank: the number of its next wave.
    next_wave: Counter[int] = Counter()
    # The relays of a wave have equally many replicas.
    waves: dict[tuple[int, int], list[tuple[Ranks, Result]]] = {}
    for replicas in _replica_sets(all_shards):
        sizes = _sizes_on(replicas, all_shards)
        if sizes not in known:
            known[sizes] = _results_of(schedule, bucket, replicas)
        # A rank in several replica sets makes the relays of all of them.
        for result in known[sizes]:
            number = max(next_wave[rank] for rank in replicas)
            for rank in replicas:
                next_wave[rank] = number + 1
            key = number, len(replicas)
            waves.setdefault(key, []).append((tuple(sorted(replicas)), result))
    return [_wave_of(waves[key], gpus_per_node) for key in sorted(waves)]


def _sizes_on(replicas: Ranks, all_shards: Sequence[Shards]) -> tuple:
    """What the relays of these replicas depend on: their order, and the elements of each shard that they share."""
    places = {rank: place for place, rank in enumerate(sorted(replicas))}
    order = tuple(places[rank] for rank in replicas)
    sizes = []
    for shards in all_shards:
        is_shared = shards.replicas_of(replicas[0]) == replicas
        sizes.append(shards.numel_of(replicas[0]) if is_shared else -1)
    return order, tuple(sizes)


def _results_of(schedule: Schedule, bucket: Bucket, replicas: Ranks) -> list[Result]:
    """The relays among ``replicas``, in the engine's order."""
    in_order = tuple(sorted(replicas))
    found = []
    for relay in schedule.relays(bucket, replicas[0]):
        if relay.replicas == in_order:
            source = in_order.index(relay.source)
            found.append(Result(source, float(relay.pack.nbytes)))
    return found


def _replica_sets(all_shards: Iterable[Shards]) -> list[Ranks]:
    """Those that hold a shard with elements."""
    replica_sets = set()
    for shards in all_shards:
        for replicas in shards.replica_sets:
            if len(replicas) > 1 and not shards.is_empty(replicas[0]):
                replica_sets.add(replicas)
    return sorted(replica_sets)


def _wave_of(relays: Sequence[tuple[Ranks, Result]], gpus_per_node: int) -> Wave:
    """Relays that are made at the same time, a row each."""
    ranks = np.array([replicas for replicas, _ in relays])
    sources = np.array([[result.source] for _, result in relays])
    nbytes = np.array([result.nbytes for _, result in relays])
    replicas = ranks.shape[1]
    nodes = np.unique(ranks[0] // gpus_per_node)
    return Wave(ranks, np.arange(replicas) == sources, nbytes, len(nodes))
