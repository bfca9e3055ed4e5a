"""How many owners divide a matrix among them: the option ``owners_per_matrix``."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import NamedTuple

import torch

from ..layouts.divide import divide
from ..layouts.layout import Layout, Ranks, Shape
from .owners import newton_schulz_flops


# A matrix with a shorter side is not divided: the collectives of its owners take longer than they save.
MIN_DIVIDED = 2048
# A matrix is divided if its work is more than this many times the mean work of the group's ranks.
MIN_LOAD = 1.0
# ``owners_per_matrix="auto"``: an H100's FLOP/s in Newton-Schulz, bytes/s in a node and between nodes, and
# the seconds of a hop in a node. Ranks must choose the same numbers, so these are constants.
FLOPS = 989e12 / 2
NODE = 450e9
NETWORK = 50e9
LATENCY = 0.47e-6
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
