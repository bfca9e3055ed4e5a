"""Which rank orthogonalizes which matrix."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from ..._newton_schulz_variants import uses_gram
from ..layouts.layout import Layout, Ranks, Shape, Shards
from ..process_groups import larger_first, listed


def newton_schulz_flops(shape: Sequence[int], algorithm: str = "quintic") -> int:
    """FLOPs of five iterations on an accelerator. Each iteration of the quintic has two products with the long
    side and one square product. The Gram form has four and fourteen in all. "symmetric" is the quintic there.
    """
    short, long = sorted(shape)
    wide, square = 2 * short * short * long, 2 * short**3
    if uses_gram(shape, algorithm, is_cpu=False):
        return 4 * wide + 14 * square
    return 5 * (2 * wide + square)


# A matrix with a shorter side is not divided: the collectives of its owners take longer than they save.
MIN_DIVIDED = 2048
# A matrix is divided if its work is more than this many times the mean work of the group's ranks.
MIN_LOAD = 1.0
# ``owners_per_matrix="auto"``: an H100's FLOP/s in Newton-Schulz, bytes/s in a node and between nodes, and
# the seconds of a hop in a node. Ranks must choose the same numbers, so these are constants.
FLOPS, NODE, NETWORK, LATENCY = 989e12 / 2, 450e9, 50e9, 0.47e-6
# Each further owner of a matrix makes its bucket this much slower in simulations.
WAIT = 0.02
# A larger number of owners, which rounds differently, must save this part of the time.
MIN_SAVED = 0.02


class Class(NamedTuple):
    """Matrices that have the same number of owners; ``shards`` counts distinct shards with replicas, else 1."""

    shape: Shape
    algorithm: str = "quintic"
    shards: int = 1

    @classmethod
    def of(cls, layout: Layout, algorithm: str = "quintic") -> "Class":
        shards = layout.shards
        count = len(shards.replica_sets) if shards.most_replicas > 1 else 1
        return cls(layout.full_shape, algorithm, count)


def divided(
    layouts: Sequence[Layout],
    owners: int | str,
    ranks_per_node: int = 1,
    algorithms: Iterable[str] = repeat("quintic"),
) -> list[Layout]:
    """``layouts`` with as many blocks as ``owners`` for each matrix that is worth it. "auto" takes the numbers
    of :func:`best_division`, by the ``ns_algorithm`` of each (default: "quintic").
    """
    if owners == 1:
        return list(layouts)
    from ..layouts.divide import divide

    by_ranks: dict[Ranks, dict[int, Class]] = {}
    for i, kind in enumerate(map(Class.of, layouts, algorithms)):
        if not layouts[i].frozen:
            by_ranks.setdefault(layouts[i].holders, {})[i] = kind
    numbers = [1] * len(layouts)
    for ranks, classes in by_ranks.items():
        members = Counter(classes.values())
        if owners == "auto":
            counts, _ = best_division(members, ranks, ranks_per_node)
        else:
            work = {kind: newton_schulz_flops(kind.shape) for kind in members}
            mean = sum(n * work[kind] for kind, n in members.items()) / len(ranks)
            heavy = (kind for kind in members if work[kind] > MIN_LOAD * mean)
            counts = {c: int(owners) for c in heavy if min(c.shape) >= MIN_DIVIDED}
        for i, kind in classes.items():
            numbers[i] = counts.get(kind, 1)
    return list(chain.from_iterable(map(divide, layouts, numbers)))


def best_division(
    members: Mapping[Class, int], ranks: Sequence[int], ranks_per_node: int
) -> tuple[dict[Class, int], float]:
    """The numbers of owners with which ``ranks`` are fastest. It compares one number for all classes with the
    smallest numbers that keep each matrix within a limit. The busiest rank decides, and the transfers of one
    matrix, which overlap with nothing. Also returns the seconds that Newton-Schulz takes then.
    """
    size = len(ranks)
    # Owners are ranks of one node, of which there may be few, or whole nodes.
    near = min(Counter(rank // ranks_per_node for rank in ranks).values())
    possible = {*range(1, near + 1)}
    if near > 1:
        possible |= {*range(near, size + 1, near)}
    # (seconds, number of owners) of each class, by the number.
    choices: list[list[tuple[float, int]]] = []
    for kind in members:
        numbers = {1}
        if min(kind.shape) >= MIN_DIVIDED:
            numbers |= {2, 4, 8, 16, 32, 64}
            if kind.shards > 1:
                # With other numbers, the replicas of some shards have more to relay than others.
                even = {n for n in numbers if not (n % near or kind.shards % n)}
                numbers = {1, kind.shards} | even
        numbers = sorted(numbers & possible)
        choices.append([(_seconds(kind, count, near), count) for count in numbers])
    divisions = set()
    for limit, most in chain.from_iterable(choices):
        few = tuple([c for c in row if c[1] <= most][-1] for row in choices)
        fast = tuple(
            next((c for c in row if c[0] <= limit), min(row)) for row in choices
        )
        divisions |= {few, fast}
    best: dict[Class, int] = {}
    seconds = shortest = math.inf
    for taken in sorted(divisions, key=lambda d: (sum(n for _, n in d), d)):
        busy = _busiest(dict(zip(members, taken)), members, size)
        counts = dict(zip(members, (count for _, count in taken)))
        largest = max(math.prod(kind.shape) / n for kind, n in counts.items())
        # Both ways, in bfloat16. Owners wait for the slowest of them.
        total = busy + 2 * 2 * largest / (NODE if size == near else NETWORK)
        total *= 1 + WAIT * (max(counts.values()) - 1)
        if total < (1 - MIN_SAVED) * shortest:
            best, seconds, shortest = counts, busy, total
    return best, seconds


def _seconds(kind: Class, count: int, ranks_per_node: int) -> float:
    """Seconds of one matrix with ``count`` owners, and of their collectives."""
    # Each of five steps all-reduces a float32 Gram matrix and all-gathers a bfloat16 polynomial of it.
    moved = (count - 1) / count * min(kind.shape) ** 2 * (2 * 4 + 2)
    # Rings over whole nodes use all of their network adapters.
    is_near = count <= ranks_per_node
    bandwidth = NODE if is_near else min(NODE, NETWORK * ranks_per_node)
    together = 5 * (moved / bandwidth + 3 * (count - 1) * LATENCY)
    work = newton_schulz_flops(kind.shape, algorithm=kind.algorithm)
    return work / count / FLOPS + together


def _busiest(
    taken: Mapping[Class, tuple[float, int]], members: Mapping[Class, int], ranks: int
) -> float:
    """Seconds of the busiest rank, if each matrix goes to the owners that are free first."""
    busy = torch.zeros(ranks, dtype=torch.float64, device="cpu")
    for kind, (seconds, count) in sorted(taken.items(), key=lambda item: -item[1][0]):
        if not seconds:
            continue  # Matrices without elements.
        teams = busy[: ranks // count * count].view(-1, count)
        free, places = teams.amax(1).sort(stable=True)
        free = free[: members[kind]]
        rounds = -(-members[kind] // len(free)) + int((free[-1] - free[0]) / seconds)
        ends = free[:, None] + seconds * torch.arange(1, rounds + 1, device="cpu")
        first = ends.flatten().sort(stable=True).indices[: members[kind]]
        turns = (first // rounds).bincount()
        teams[places[: len(turns)]] = (free[: len(turns)] + seconds * turns)[:, None]
    return float(busy.max())


def flops_of(layout: Layout) -> int:
    """The work of one owner of a matrix."""
    return newton_schulz_flops(layout.full_shape) // layout.key.block[1]


def assign_owners(
    layouts: Sequence[Layout],
    start: Callable[[Ranks], int] = lambda ranks: 0,
    ranks_per_node: int = 1,
) -> list[int]:
    """One owner for each layout, out of all ranks of its group; the first one for a frozen layout.

    Heaviest first, each to the rank with the fewest FLOPs so far, then the fewest bytes to receive. Ties go
    to the first rank from place ``start`` in the group. Equal matrices of one parameter (heads, experts) go to
    ranks that store all of them, or else in runs. A group counts the work of its ranks in groups that
    contain all of them (dense matrices, for a group that shares experts). It counts no other work, in which
    its ranks differ. The blocks of a matrix, which follow each other, go to neighbours.
    """
    owners = [layout.holders[0] for layout in layouts]
    # Ranks -> equal matrices, by their work and by the shards of their blocks.
    members: dict[Ranks, dict[tuple, list[int]]] = {}
    for i, layout in enumerate(layouts):
        place, count = layout.key.block
        if place == 0 and not layout.frozen:
            digests = tuple(block.shards.digest for block in layouts[i : i + count])
            of_ranks = members.setdefault(layout.holders, {})
            of_ranks.setdefault((-flops_of(layout), digests), []).append(i)
    # Matrices that have their owners already.
    in_runs: set[int] = set()
    # For each rank of a group, the FLOPs and the elements to receive that its matrices add.
    added: dict[Ranks, Tensor] = {}
    for ranks in larger_first(members):
        load = torch.zeros(2, len(ranks), dtype=torch.int64, device="cpu")
        for wider, work in added.items():
            place = {rank: at for at, rank in enumerate(wider)}
            if place.keys() >= set(ranks):
                load += work[:, [place[rank] for rank in ranks]]
        before = load.clone()
        # By size, the places of neighbours, of shape (teams, size), on one node if each node has enough.
        teams_of: dict[int, Tensor] = {}
        per_node = [*Counter(rank // ranks_per_node for rank in ranks).values()]
        kinds = sorted(members[ranks].items(), key=lambda item: item[0][0])
        dealt: set[int] = set()
        for (minus_flops, digests), equal in kinds:
            size = len(digests)
            if minus_flops not in dealt and size == 1:
                dealt.add(minus_flops)
                parts = _parts_of_one_size(layouts, kinds, minus_flops)
                _deal_in_runs(
                    load, ranks, layouts, parts, -minus_flops, start(ranks), owners
                )
                in_runs.update(parts)
            equal = [i for i in equal if i not in in_runs]
            if not equal:
                continue
            if size not in teams_of:
                nodes = per_node if min(per_node) >= size else [len(ranks)]
                parts = torch.arange(len(ranks), device="cpu").split(nodes)
                teams = torch.cat([part.unfold(0, size, size) for part in parts])
                teams_of[size] = teams.roll(-(start(ranks) // size), 0)
            blocks = layouts[equal[0] : equal[0] + size]
            numels = [[b.numel - n for n in b.shards.numels] for b in blocks]
            order = torch.tensor(blocks[0].shards.ranks, device="cpu").argsort()
            received = torch.tensor(numels, device="cpu")[:, order]
            while equal:
                chosen = _give(load, teams_of[size], -minus_flops, received, len(equal))
                for i, team in zip(equal, chosen.tolist()):
                    owners[i : i + size] = [ranks[place] for place in team]
                equal = equal[len(chosen) :]
        added[ranks] = load - before
    return owners


def _parts_of_one_size(
    layouts: Sequence[Layout],
    kinds: Sequence[tuple[tuple, list[int]]],
    minus_flops: int,
) -> list[int]:
    """The undivided matrices with this work whose parameters have several of them: heads, or experts of a stack."""
    matrices = [
        i
        for (work, digests), equal in kinds
        if work == minus_flops and len(digests) == 1
        for i in equal
    ]
    count = Counter(layouts[i].key.index for i in matrices)
    return sorted(i for i in matrices if count[layouts[i].key.index] > 1)


def _deal_in_runs(
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


def _give(
    load: Tensor, teams: Tensor, flops: int, received: Tensor, count: int
) -> Tensor:
    """Gives some of ``count`` equal matrices to the least loaded teams, and returns these. Teams that receive
    the fewest elements come first. ``load`` is the FLOPs of each rank and the elements that it receives, of
    shape (2, ranks), and ``received`` the elements of each block, of shape (size, ranks).
    """
    busy = load[0, teams].amax(1)
    teams = teams[busy == busy.min()]
    rows = torch.arange(len(received), device="cpu")
    elements = load[1, teams] + received[rows, teams]
    teams = teams[elements.sum(1).argsort(stable=True)[:count]]
    load[0, teams] += flops
    load[1, teams] += received[rows, teams]
    return teams


def owners_of(
    assignments: Mapping[int, Sequence[int]],
    layouts: Sequence[Layout],
    described: Sequence[str],
    world_size: int,
) -> list[int]:
    """The owner of each layout. Raises AssertionError unless each index has one rank, ValueError if that lacks a piece."""
    if not isinstance(assignments, Mapping):
        raise TypeError(
            f"assign_fn must return a dict of rank -> indices, not {assignments!r}"
        )
    for rank in assignments:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"assign_fn names rank {rank}, but the ranks are 0 to {world_size - 1}"
            )
    count = Counter(chain.from_iterable(assignments.values()))
    indices = range(len(described))
    wrong = {
        "unknown": sorted(count.keys() - indices),
        "missing": sorted(indices - count.keys()),
        "assigned more than once": [i for i in indices if count[i] > 1],
    }
    problems = [
        f"{verb} {bad}: {listed([described[i] for i in bad if i in indices])}"
        for verb, bad in wrong.items()
        if bad
    ]
    if problems:
        raise AssertionError(
            f"assign_fn must give each of parameters 0 to {len(described) - 1} to exactly one rank; {'; '.join(problems)}"
        )
    by_index = {index: rank for rank, owned in assignments.items() for index in owned}
    owners = [by_index[layout.key.index] for layout in layouts]
    for layout, owner in zip(layouts, owners, strict=True):
        if owner not in layout.holders:
            raise ValueError(
                f"assign_fn gives {layout.describe()} to rank {owner}, which holds no piece of it; ranks {list(layout.holders)} do"
            )
    return owners
