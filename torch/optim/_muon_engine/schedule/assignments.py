"""The owners that a user's ``assign_fn`` chooses."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ..layouts.layout import Layout
from ..process_groups import listed


def owners_of(
    assignments: Mapping[int, Sequence[int]],
    layouts: Sequence[Layout],
    described: Sequence[str],
    world_size: int,
) -> list[int]:
    """The owner of each layout. Raises AssertionError unless each index has one rank, ValueError if that lacks a piece."""
    _check_ranks(assignments, world_size)
    problems = _problems_with(assignments, described)
    if problems:
        raise AssertionError(
            f"assign_fn must give each of parameters 0 to {len(described) - 1} to exactly one rank; {'; '.join(problems)}"
        )
    rank_of: dict[int, int] = {}
    for rank, indices in assignments.items():
        rank_of.update(dict.fromkeys(indices, rank))
    owners: list[int] = []
    for layout in layouts:
        owner = rank_of[layout.key.index]
        if owner not in layout.holders:
            raise ValueError(
                f"assign_fn gives {layout.describe()} to rank {owner}, which holds no piece of it; ranks {list(layout.holders)} do"
            )
        owners.append(owner)
    return owners


def _check_ranks(assignments: Mapping[int, Sequence[int]], world_size: int) -> None:
    """Raises TypeError or ValueError unless ``assignments`` is a dict of ranks."""
    if not isinstance(assignments, Mapping):
        raise TypeError(
            f"assign_fn must return a dict of rank -> indices, not {assignments!r}"
        )
    for rank in assignments:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"assign_fn names rank {rank}, but the ranks are 0 to {world_size - 1}"
            )


def _problems_with(
    assignments: Mapping[int, Sequence[int]], described: Sequence[str]
) -> list[str]:
    """In words, the indices that do not have exactly one rank. ``described`` has the text of each parameter."""
    count: Counter[int] = Counter()
    for assigned in assignments.values():
        for index in assigned:
            count[index] += 1
    indices = range(len(described))
    wrong = {
        "unknown": sorted(count.keys() - indices),
        "missing": sorted(indices - count.keys()),
        "assigned more than once": [index for index in indices if count[index] > 1],
    }
    problems: list[str] = []
    for verb, wrong_indices in wrong.items():
        if wrong_indices:
            known = [described[index] for index in wrong_indices if index in indices]
            problems.append(f"{verb} {wrong_indices}: {listed(known)}")
    return problems
