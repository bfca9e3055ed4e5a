"""Which matrices are processed together: a pure function of layouts and owners."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from operator import itemgetter
from typing import Any

from ..._newton_schulz import NS_DTYPE
from ..layouts.layout import Layout, Ranks, Shards
from .owners import flops_of
from .schedule import Bucket, Schedule


# Enough buckets to hide transfers behind orthogonalization.
MAX_BUCKETS = 4
# Size of what an owner gathers in a bucket. A group with large matrices exceeds it, see ``_cut``.
BUCKET_BYTES = 256 * 1024**2
# The buckets, run sequentially, should take at most this many times the busiest owner's own work.
MAX_STRETCH = 1.1
# With more replicas of a shard, an owner sends its result to one of them, which relays it.
MAX_REPLICAS = 4
# With more connections of a rank, which cost memory, an exchange takes two levels.
MAX_PEERS = 512

# Owner -> its matrices, in the order in which it works on them.
Queues = dict[int, list[int]]


def make_schedule(
    layouts: Sequence[Layout],
    owners: Sequence[int],
    *,
    one_owner_at_a_time: bool = False,
    ranks_per_node: int = 1,
    slots: int = 3,
) -> Schedule:
    """Cuts the work of each group into buckets, whose owners work at the same time. As many buckets of a group
    as ``slots`` have memory at the same time. ``ranks_per_node`` consecutive ranks are near each other.
    """
    families: dict[tuple, list[int]] = {}
    for i, layout in enumerate(layouts):
        if layout.frozen:
            continue
        # Contributions are summed before they are rounded.
        dtype = layout.dtype if layout.shards.partial else NS_DTYPE
        # All owners of a divided matrix have the turn of the first.
        own = owners[i - layout.key.block[0]], layout.block_of is None
        turn = own if one_owner_at_a_time else (0, False)
        families.setdefault((turn, layout.holders, dtype), []).append(i)

    # Divided matrices come first, in one order for all of their owners, who have collectives for each.
    def order(m: int) -> tuple:
        layout = layouts[m]
        return layout.block_of is None, -flops_of(layout), layout.full_shape, m

    max_buckets = 1 if one_owner_at_a_time else MAX_BUCKETS
    ordered: list[tuple[tuple, Any, list[int]]] = []
    for (turn, ranks, dtype), members in families.items():
        queues: Queues = {}
        for m in sorted(members, key=order):
            queues.setdefault(owners[m], []).append(m)
        limit = BUCKET_BYTES // dtype.itemsize
        for at, cut in enumerate(_cut(queues, layouts, max_buckets, limit, slots)):
            ordered.append(((turn, at, -len(ranks), ranks, str(dtype)), dtype, cut))
    counts: Counter[Ranks] = Counter()
    buckets = []
    for (*_, ranks, _), dtype, cut in sorted(ordered, key=itemgetter(0)):
        shards = Counter(layouts[m].shards for m in cut)
        relayed = _is_relayed(shards, BUCKET_BYTES // dtype.itemsize)
        peers = max(map(_destinations, shards)) if relayed else len(ranks) - 1
        size = _node_size(ranks, peers, ranks_per_node)
        buckets.append(Bucket(ranks, counts[ranks], tuple(cut), dtype, relayed, size))
        counts[ranks] += 1
    return Schedule(tuple(layouts), tuple(owners), tuple(buckets), one_owner_at_a_time)


def _cut(
    queues: Queues, layouts: Sequence[Layout], max_buckets: int, limit: int, slots: int
) -> list[list[int]]:
    """Distributes the owners' matrices over buckets, whose owners work at the same time. A rank waits for a
    bucket's results, so a bucket takes as long as its busiest owner. The first distribution wins whose sum is
    close to the busiest owner's own work, or else the shortest: with ``max_buckets``, or as many as keep each
    owner's elements at ``limit``, then with fewer, then with a few more.
    """
    work = {m: flops_of(layouts[m]) for queue in queues.values() for m in queue}
    largest = max(layouts[m].numel for m in work)
    # One slot may be larger if the others stay at the limit: small matrices fill the time of a large one.
    wide = limit + slots * largest
    usual = max(limit, min(limit + largest, largest * 3 // 2))
    longest = max(map(len, queues.values()))
    gathered = max(sum(layouts[m].numel for m in queue) for queue in queues.values())
    busiest = max(sum(work[m] for m in queue) for queue in queues.values())
    least = -(-gathered // usual)
    wanted = max(least, min(max_buckets, longest))
    more = [wanted + i * -(-wanted // 16) for i in (1, 2)]
    counts = *range(wanted, least - 1, -1), *more
    best: list[list[int]] = []
    shortest = math.inf
    for (first, rest), count in product(((usual, usual), (wide, limit)), counts):
        if shortest <= MAX_STRETCH * busiest:
            break
        limits = [rest if at % slots else first for at in range(count)]
        buckets, time = _spread(queues, layouts, work, limits)
        shards = [Counter(layouts[m].shards for m in bucket) for bucket in buckets]
        # No holder sends more than twice the limit in a bucket without relays.
        fits = all(_replicas(s) > 1 or _load(s) <= 2 * first for s in shards)
        if buckets and time < shortest and fits:
            best, shortest = buckets, time
    if best:
        return best
    # One bucket for each divided matrix and for one other matrix of every owner always fits.
    teams: dict[int, list[int]] = {}
    for m in (m for queue in queues.values() for m in queue if layouts[m].block_of):
        teams.setdefault(m - layouts[m].key.block[0], []).append(m)
    alone = [[m for m in queue if not layouts[m].block_of] for queue in queues.values()]
    rounds = ([queue[i] for queue in alone if i < len(queue)] for i in range(longest))
    return [*teams.values(), *filter(None, rounds)]


def _spread(
    queues: Queues, layouts: Sequence[Layout], work: dict[int, int], limits: list[int]
) -> tuple[list[list[int]], int]:
    """All matrices in buckets, and the sum of the busiest owners' work; [] if they do not fit. The busiest
    owner's matrices, cut into shares of equal work, give each bucket a height. Every owner puts its matrices,
    heaviest first, where it has most room. The resulting heights are filled again.
    """
    leader = max(queues.values(), key=lambda queue: sum(work[m] for m in queue))
    count = len(limits)
    heights = [0] * count
    total, before = max(1, sum(work[m] for m in leader)), 0
    for m in leader:
        # The bucket in whose share of the work the matrix's middle falls.
        at = min(count - 1, count * (2 * before + work[m]) // (2 * total))
        heights[at] += work[m]
        before += work[m]
    # The longest shares go to the buckets with the largest limits.
    places = sorted(range(count), key=lambda at: -limits[at])
    for at, height in zip(places, sorted(heights, reverse=True)):
        heights[at] = height
    best: tuple[list[list[int]], int] = [], 0
    for _ in range(2):
        buckets: list[list[int]] = [[] for _ in range(count)]
        busiest = [0] * count
        # The first block of each matrix -> the bucket of all its blocks.
        placed: dict[int, int] = {}
        for queue in queues.values():
            room, free = list(heights), list(limits)
            last = -1
            for m in queue:
                size, first = layouts[m].numel, m - layouts[m].key.block[0]
                places = [placed[first]] if first in placed else range(count)
                fitting = [at for at in places if free[at] >= size]
                if not fitting:
                    return best
                at = max(fitting, key=room.__getitem__)
                # Heads that follow each other stay together, because they are copied together.
                is_next = last >= 0 and layouts[last].key.index == layouts[m].key.index
                if is_next and work[last] == work[m]:
                    before = placed[last - layouts[last].key.block[0]]
                    if before in fitting and room[before] >= work[m]:
                        at = before
                placed[first], last = at, m
                room[at] -= work[m]
                free[at] -= size
                buckets[at].append(m)
            busiest = [max(b, h - r) for b, h, r in zip(busiest, heights, room)]
        if not best[0] or sum(busiest) < best[1]:
            best = [bucket for bucket in buckets if bucket], sum(busiest)
        heights = busiest
    return best


def _load(counts: Counter[Shards]) -> int:
    """Elements that the busiest holder of a bucket sends or receives. ``counts`` are of its matrices."""
    numels: Counter[int] = Counter()
    for shards, count in counts.items():
        for rank, numel in zip(shards.ranks, shards.numels, strict=True):
            numels[rank] += count * numel
    return max(numels.values(), default=0)


def _replicas(counts: Counter[Shards]) -> int:
    return max(shards.most_replicas for shards in counts)


def _is_relayed(counts: Counter[Shards], limit: int) -> bool:
    """Whether one replica of each shard relays the results to the others."""
    most = _replicas(counts)
    # Without relays, an owner has memory for each replica's copy.
    return most > MAX_REPLICAS or (most > 1 and 3 * _load(counts) > 2 * limit)


def _destinations(shards: Shards) -> int:
    """How many ranks exchange their shards with the owner if there are relays."""
    return sum(not shards.is_empty(ranks[0]) for ranks in shards.replica_sets)


def _node_size(ranks: Ranks, peers: int, ranks_per_node: int) -> int:
    """How many of ``ranks`` count as one node, so that a rank has few peers; 1 for a direct exchange."""
    if peers <= MAX_PEERS:
        return 1
    count = len(ranks)
    per_node = Counter(rank // ranks_per_node for rank in ranks)
    fewest = min(per_node.values())
    step = fewest if fewest == max(per_node.values()) else 1
    # How many peers a rank has on its node and its rail, by the size of a node.
    sizes = [(s + count // s - 2, s) for s in range(step, count, step) if not count % s]
    return min(((max(p, MAX_PEERS), s) for p, s in sizes), default=(0, 1))[1]
