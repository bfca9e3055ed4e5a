"""Owners of the parts of one parameter: the heads of a fused weight, or the experts of a stack."""

import heapq
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from ..layouts.layout import Layout, Ranks, Shards


def several_of_a_parameter(
    layouts: Sequence[Layout], matrices: Sequence[int]
) -> list[int]:
    """Those of ``matrices`` whose parameters have several of them: heads, or experts of a stack."""
    count = Counter(layouts[i].key.index for i in matrices)
    return sorted(i for i in matrices if count[layouts[i].key.index] > 1)


def deal_in_runs(
    load: Tensor,
    ranks: Ranks,
    layouts: Sequence[Layout],
    matrices: Sequence[int],
    flops: int,
    first: int,
    owners: list[int],
) -> None:
    """Gives equal parts of parameters to the least loaded ranks, and updates ``load`` and ``owners``. A part goes to a
    rank that stores all of it. The others go to one rank in runs, so that the copies of a run are one copy.
    """
    if not matrices:
        return
    # How many parts each rank gets: always the least loaded one, and the first one from ``first`` of several.
    count = len(ranks)
    busy = [
        (work, (place - first) % count, place)
        for place, work in enumerate(load[0].tolist())
    ]
    heapq.heapify(busy)
    room = [0] * count
    for _ in matrices:
        work, turn, place = busy[0]
        heapq.heapreplace(busy, (work + flops, turn, place))
        room[place] += 1
    places = {rank: place for place, rank in enumerate(ranks)}
    # Shards -> the ranks that store all of a matrix. Many parts have the same shards.
    whole_of: dict[Shards, list[int]] = {}
    others: list[int] = []
    for i in matrices:
        shards = layouts[i].shards
        if shards not in whole_of:
            numels = zip(shards.ranks, shards.numels, strict=True)
            whole_of[shards] = [r for r, numel in numels if numel == layouts[i].numel]
        free = [r for r in whole_of[shards] if room[places[r]]]
        if free and len(whole_of[shards]) < count:
            owners[i] = max(free, key=lambda r: (room[places[r]], -places[r]))
            room[places[owners[i]]] -= 1
        else:
            others.append(i)
    in_order = [(first + at) % count for at in range(count)]
    runs = [place for place in in_order for _ in range(room[place])]
    for i, place in zip(others, runs, strict=True):
        owners[i] = ranks[place]
    for i in matrices:
        place, shards = places[owners[i]], layouts[i].shards
        load[0, place] += flops
        load[1, place] += layouts[i].numel - shards.numel_of(owners[i])
