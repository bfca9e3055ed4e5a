"""Owners of the parts of one parameter: the heads of a fused weight, or the experts of a stack. A matrix is its index in
``layouts``, and a rank of a group has a place in it.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..layouts.layout import Layout, Ranks, Shards


class _Busy(NamedTuple):
    """A rank among the least loaded ones: by its FLOPs, then by its distance from the first place."""

    flops: int
    distance: int
    place: int


def _several_of_a_parameter(
    layouts: Sequence[Layout], matrices: Sequence[int]
) -> list[int]:
    """Those of ``matrices`` whose parameters have several of them: heads, or experts of a stack."""
    count = Counter(layouts[matrix].key.index for matrix in matrices)
    several: list[int] = []
    for matrix in sorted(matrices):
        if count[layouts[matrix].key.index] > 1:
            several.append(matrix)
    return several


def deal_parts(
    load: Tensor,
    ranks: Ranks,
    layouts: Sequence[Layout],
    equal: Sequence[int],
    flops: int,
    first: int,
    owners: list[int],
) -> list[int]:
    """Gives owners to those of ``equal`` matrices whose parameters have several of them, and returns these. They go to the
    least loaded ranks. A part goes to a rank that stores all of it. The others go to one rank in runs, so that the copies
    of a run are one copy. ``load`` and ``owners`` change.
    """
    matrices = _several_of_a_parameter(layouts, equal)
    if not matrices:
        return []
    count = len(ranks)
    room = _shares(load[0].tolist(), len(matrices), flops, first)
    place_of = {rank: place for place, rank in enumerate(ranks)}
    others = _deal_to_holders(layouts, matrices, ranks, room, owners)

    runs: list[int] = []
    for distance in range(count):
        place = (first + distance) % count
        runs += [ranks[place]] * room[place]
    for matrix, rank in zip(others, runs, strict=True):
        owners[matrix] = rank

    for matrix in matrices:
        owner = owners[matrix]
        layout = layouts[matrix]
        place = place_of[owner]
        load[0, place] += flops
        load[1, place] += layout.numel - layout.shards.numel_of(owner)
    return matrices


def _shares(busy: Sequence[int], parts: int, flops: int, first: int) -> list[int]:
    """How many of the ``parts`` each place gets: always the least busy one, and of several the first one from ``first``."""
    count = len(busy)
    shares = [0] * count
    heap: list[_Busy] = []
    for place, work in enumerate(busy):
        heap.append(_Busy(work, (place - first) % count, place))
    heapq.heapify(heap)
    for _ in range(parts):
        least = heap[0]
        heapq.heapreplace(heap, least._replace(flops=least.flops + flops))
        shares[least.place] += 1
    return shares


def _deal_to_holders(
    layouts: Sequence[Layout],
    matrices: Sequence[int],
    ranks: Ranks,
    room: list[int],
    owners: list[int],
) -> list[int]:
    """Gives each matrix that some ranks store whole, but not all, to the one of these that has most ``room``. Returns the
    other matrices.
    """
    place_of = {rank: place for place, rank in enumerate(ranks)}

    def most_room(rank: int) -> tuple[int, int]:
        place = place_of[rank]
        return room[place], -place

    # Many parts have the same shards.
    storing_whole: dict[Shards, list[int]] = {}
    others: list[int] = []
    for matrix in matrices:
        layout = layouts[matrix]
        shards = layout.shards
        if shards not in storing_whole:
            storing_whole[shards] = _ranks_with(shards, layout.numel)
        candidates = storing_whole[shards]
        free = [rank for rank in candidates if room[place_of[rank]]]
        if not free or len(candidates) == len(ranks):
            others.append(matrix)
            continue
        owner = max(free, key=most_room)
        owners[matrix] = owner
        room[place_of[owner]] -= 1
    return others


def _ranks_with(shards: Shards, elements: int) -> list[int]:
    """The ranks that store as many ``elements``."""
    ranks: list[int] = []
    for rank, numel in zip(shards.ranks, shards.numels, strict=True):
        if numel == elements:
            ranks.append(rank)
    return ranks
