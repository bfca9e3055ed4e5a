"""The owners that a user's ``assign_fn`` chooses."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from ..layouts.layout import Layout
from ..process_groups import listed


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
