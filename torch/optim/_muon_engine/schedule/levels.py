"""Exchanges in two levels: the size of a node, and what a rank passes on."""

import math
from collections import Counter

from ..layouts.layout import Ranks
from .schedule import between, Bucket, Schedule


# Split sizes of each pack.
SplitSizes = list[tuple[int, ...]]


def node_size_of(ranks: Ranks, peers: int, ranks_per_node: int, max_peers: int) -> int:
    """How many of ``ranks`` count as one node, so that a rank has at most ``max_peers``, or few; 1 for a
    direct exchange.
    """
    if peers <= max_peers:
        return 1
    count = len(ranks)
    ranks_on_node = Counter(rank // ranks_per_node for rank in ranks)
    smallest = min(ranks_on_node.values())
    are_equal = smallest == max(ranks_on_node.values())
    step = smallest if are_equal else 1
    best = 1
    fewest_peers: float = math.inf
    for size in range(step, count, step):
        if count % size:
            continue
        on_node = size - 1
        on_rail = count // size - 1
        # The smallest node wins if several leave few enough peers.
        peers_of_two = max(max_peers, on_node + on_rail)
        if peers_of_two < fewest_peers:
            best = size
            fewest_peers = peers_of_two
    return best


def passed_on(
    schedule: Schedule, bucket: Bucket, rank: int
) -> tuple[SplitSizes, SplitSizes]:
    """Elements that ``rank`` passes on in a gather and in a scatter, from each of its node to each of its rail."""
    node, rail = bucket.node_and_rail(rank)
    owned = schedule.owned(bucket)
    gathers: SplitSizes = []
    scatters: SplitSizes = []
    for sender in node:
        to_owners = [between(sender, owner, owned) for owner in rail]
        gathers.append(schedule.gather_of(bucket, to_owners).split_sizes)
        to_holders = [between(holder, sender, owned) for holder in rail]
        scatters.append(schedule.scatter_of(bucket, to_holders).split_sizes)
    return gathers, scatters
