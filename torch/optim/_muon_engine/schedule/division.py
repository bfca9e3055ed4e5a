"""How many owners divide a matrix among them: the option ``owners_per_matrix``."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import torch

from ..._newton_schulz import DEFAULT_NS_STEPS, NS_DTYPE
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
# The numbers of owners that "auto" considers for matrices without replicas.
NUMBERS = (1, 2, 4, 8, 16, 32, 64)


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


class Choice(NamedTuple):
    """A number of owners of each matrix of a class, and the seconds for which a matrix keeps them busy."""

    seconds: float
    owners: int


# One choice for each class.
Division = tuple[Choice, ...]


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
    # Ranks -> the class of each of their matrices, by its index in ``layouts``.
    classes_of: dict[Ranks, dict[int, Class]] = {}
    for matrix, (layout, algorithm) in enumerate(zip(layouts, algorithms)):
        if not layout.frozen:
            of_group = classes_of.setdefault(layout.holders, {})
            of_group[matrix] = Class.of(layout, algorithm)

    owners_of_matrix = [1] * len(layouts)
    for ranks, of_group in classes_of.items():
        members = Counter(of_group.values())
        if owners == "auto":
            owners_of_class, _ = best_division(members, ranks, ranks_per_node)
        else:
            owners_of_class = dict.fromkeys(_heavy(members, len(ranks)), int(owners))
        for matrix, kind in of_group.items():
            owners_of_matrix[matrix] = owners_of_class.get(kind, 1)

    blocks: list[Layout] = []
    for layout, count in zip(layouts, owners_of_matrix, strict=True):
        blocks += divide(layout, count)
    return blocks


def _heavy(members: Mapping[Class, int], ranks: int) -> list[Class]:
    """The classes that ``ranks`` divide if a user says how often."""
    flops = {kind: newton_schulz_flops(kind.shape) for kind in members}
    total = 0
    for kind, count in members.items():
        total += count * flops[kind]
    mean = total / ranks
    heavy: list[Class] = []
    for kind in members:
        if flops[kind] > MIN_LOAD * mean and min(kind.shape) >= MIN_DIVIDED:
            heavy.append(kind)
    return heavy


def best_division(
    members: Mapping[Class, int], ranks: Sequence[int], ranks_per_node: int
) -> tuple[dict[Class, int], float]:
    """The numbers of owners with which ``ranks`` are fastest. It compares one number for all classes with the
    smallest numbers that keep each matrix within a limit. The busiest rank decides, and the transfers of one
    matrix, which overlap with nothing. Also returns the seconds that Newton-Schulz takes then.
    """
    ranks_on_node = Counter(rank // ranks_per_node for rank in ranks)
    near = min(ranks_on_node.values())
    choices = [_choices(kind, near, len(ranks)) for kind in members]
    best: dict[Class, int] = {}
    seconds = math.inf
    shortest = math.inf
    for division in sorted(_divisions(choices), key=_fewest_owners_first):
        choice_of = dict(zip(members, division))
        busy = _busiest(choice_of, members, len(ranks))
        total = _with_transfers(busy, choice_of, is_one_node=near == len(ranks))
        if total < (1 - MIN_SAVED) * shortest:
            best = {kind: choice.owners for kind, choice in choice_of.items()}
            seconds = busy
            shortest = total
    return best, seconds


def _choices(kind: Class, near: int, ranks: int) -> list[Choice]:
    """The choices for a class, in the order of the numbers of owners. Owners are ranks of one node, of which there may
    be few (``near``), or whole nodes.
    """
    numbers = {1}
    if min(kind.shape) >= MIN_DIVIDED:
        numbers.update(NUMBERS)
        if kind.shards > 1:
            # With other numbers, the replicas of some shards have more to relay than others.
            numbers = {1, kind.shards}
            for number in NUMBERS:
                if number % near == 0 and kind.shards % number == 0:
                    numbers.add(number)
    choices: list[Choice] = []
    for number in sorted(numbers):
        are_neighbours = number <= near
        are_whole_nodes = near > 1 and number <= ranks and number % near == 0
        if are_neighbours or are_whole_nodes:
            choices.append(Choice(_seconds(kind, number, near), number))
    return choices


def _divisions(choices: Sequence[Sequence[Choice]]) -> set[Division]:
    """The divisions to compare: for each choice of any class, all classes with as many owners, and all classes with
    the fewest owners that take as few seconds.
    """
    divisions: set[Division] = set()
    for of_class in choices:
        for limit in of_class:
            alike: list[Choice] = []
            within: list[Choice] = []
            for possible in choices:
                few = [choice for choice in possible if choice.owners <= limit.owners]
                alike.append(few[-1])
                fast = [
                    choice for choice in possible if choice.seconds <= limit.seconds
                ]
                within.append(fast[0] if fast else min(possible))
            divisions |= {tuple(alike), tuple(within)}
    return divisions


def _fewest_owners_first(division: Division) -> tuple[int, Division]:
    """A key to sort by."""
    return sum(choice.owners for choice in division), division


def _with_transfers(
    busy: float, choice_of: Mapping[Class, Choice], is_one_node: bool
) -> float:
    """The seconds of Newton-Schulz, of the transfers of the largest block, and of the waits of its owners."""
    largest = 0.0
    most_owners = 0
    for kind, choice in choice_of.items():
        largest = max(largest, math.prod(kind.shape) / choice.owners)
        most_owners = max(most_owners, choice.owners)
    both_ways = 2 * NS_DTYPE.itemsize * largest
    bandwidth = NODE if is_one_node else NETWORK
    # Owners wait for the slowest of them.
    slowdown = 1 + WAIT * (most_owners - 1)
    return (busy + both_ways / bandwidth) * slowdown


def _seconds(kind: Class, count: int, ranks_per_node: int) -> float:
    """Seconds of one matrix with ``count`` owners, and of their collectives."""
    # Each step all-reduces a float32 Gram matrix, which is two passes, and all-gathers a bfloat16 polynomial of it.
    bytes_per_element = 2 * torch.float32.itemsize + NS_DTYPE.itemsize
    passes = 3
    elements = min(kind.shape) ** 2
    moved = (count - 1) / count * elements * bytes_per_element
    # Rings over whole nodes use all of their network adapters.
    is_near = count <= ranks_per_node
    bandwidth = NODE if is_near else min(NODE, NETWORK * ranks_per_node)
    hops = passes * (count - 1)
    collectives = DEFAULT_NS_STEPS * (moved / bandwidth + hops * LATENCY)
    flops = newton_schulz_flops(kind.shape, ns_algorithm=kind.algorithm)
    return flops / count / FLOPS + collectives


def _busiest(
    choice_of: Mapping[Class, Choice], members: Mapping[Class, int], ranks: int
) -> float:
    """Seconds of the busiest rank, if each matrix goes to the owners that are free first."""
    busy = torch.zeros(ranks, dtype=torch.float64, device="cpu")
    slowest_first = sorted(choice_of.items(), key=lambda item: -item[1].seconds)
    for kind, (seconds, owners) in slowest_first:
        if not seconds:
            continue  # Matrices without elements.
        matrices = members[kind]
        teams = busy[: ranks // owners * owners].view(-1, owners)
        free, places = teams.amax(1).sort(stable=True)
        # More teams than matrices are not needed.
        free = free[:matrices]
        # A team gets none if it is free when the first team could have taken all. A tiny matrix beside a large one
        # would have billions of rounds.
        free = free[free <= free[0] + seconds * matrices]
        # The first team to be free takes at most this many matrices before the others have as much work.
        rounds = math.ceil(matrices / len(free))
        rounds += int((free[-1] - free[0]) / seconds)
        numbers = torch.arange(1, rounds + 1, device="cpu")
        # The ends of the matrices that each team could take: the earliest of all come true.
        ends = free[:, None] + seconds * numbers
        earliest = ends.flatten().sort(stable=True).indices[:matrices]
        taken = (earliest // rounds).bincount()
        until = free[: len(taken)] + seconds * taken
        teams[places[: len(taken)]] = until[:, None]
    return float(busy.max())
