"""Which rank orthogonalizes which matrix."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.optim._muon_engine.layouts import larger_first, listed


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from torch.optim._muon_engine.layouts import Layout, Shards


def newton_schulz_flops(shape: Sequence[int], ns_steps: int = 5) -> int:
    """Multiply-adds, doubled, of ``ns_steps`` iterations: three products on the short side."""
    short, long = sorted(shape)
    return ns_steps * (4 * short * short * long + 2 * short**3)


class _Loads:
    """The work of the ranks of one group so far, of shape (2, ranks): FLOPs, elements to receive."""

    def __init__(
        self, group: tuple[int, ...], others: Iterable[_Loads], start: int
    ) -> None:
        self.group = group
        self.start = start
        self.before = torch.zeros(2, len(group), dtype=torch.int64, device="cpu")
        for other in others:
            place = {rank: i for i, rank in enumerate(other.group)}
            if all(rank in place for rank in group):
                places = [place[rank] for rank in group]
                self.before += (other.load - other.before)[:, places]
        self.load = self.before.clone()

    def give(self, flops: int, numel: int, held: Tensor) -> int:
        """Gives a matrix, of which each rank holds ``held`` elements, to a rank, and returns that."""
        busy, received = self.load
        # Ranks of equal load: the one that receives fewest bytes, then the first from ``start`` on.
        bytes_ = (received - held).masked_fill(busy != busy.min(), _NEVER)
        count = len(self.group)
        place = (int(bytes_.roll(-self.start).argmin()) + self.start) % count
        busy[place] += flops
        received[place] += numel - held[place]
        return self.group[place]


_NEVER = 2**62


def assign_owners(
    layouts: Iterable[Layout], start: Callable[[tuple[int, ...]], int] = lambda group: 0
) -> list[int]:
    """One owner for each layout, out of all ranks of its group.

    Heaviest first, each to the rank with the fewest FLOPs so far, then the fewest bytes to receive. A
    group counts the work of its ranks in groups that contain all of them (dense matrices, for a group
    that shares experts). It counts no other work, because its ranks must come to the same result and
    differ in their other groups.

    Args:
        start: the place in a group from which ties are broken. Without it, many optimizers of few
            matrices would all choose the first rank.
    """
    layouts = list(layouts)
    owners = [0] * len(layouts)
    flops = [newton_schulz_flops(layout.shape) for layout in layouts]
    members: dict[tuple[int, ...], list[int]] = {}
    for i in sorted(range(len(layouts)), key=lambda i: -flops[i]):
        members.setdefault(layouts[i].group, []).append(i)
    groups: list[_Loads] = []
    held: dict[int, Tensor] = {}
    for group in larger_first(members):
        loads = _Loads(group, groups, start(group))
        groups.append(loads)
        for i in members[group]:
            shards = layouts[i].shards
            if id(shards) not in held:
                held[id(shards)] = _held(shards)
            owners[i] = loads.give(flops[i], layouts[i].numel, held[id(shards)])
    return owners


def _held(shards: Shards) -> Tensor:
    """How many elements each rank of the group holds, in the group's order."""
    by_rank = dict(zip(shards.ranks, shards.numels, strict=True))
    numels = [by_rank[rank] for rank in shards.group]
    return torch.tensor(numels, dtype=torch.int64, device="cpu")


def by_rank(indices: Sequence[int], owners: Sequence[int]) -> dict[int, list[int]]:
    """Global rank -> sorted parameter indices; a flat parameter counts for its first matrix."""
    first: dict[int, int] = {}
    for index, owner in zip(indices, owners, strict=True):
        first.setdefault(index, owner)
    result: dict[int, list[int]] = defaultdict(list)
    for index, owner in first.items():
        result[owner].append(index)
    return {rank: sorted(result[rank]) for rank in sorted(result)}


def check_assignments(
    assignments: Mapping[int, Sequence[int]], describe: Sequence[str], world_size: int
) -> None:
    """Raises AssertionError unless each index is assigned exactly once; ValueError for unknown ranks."""
    if not isinstance(assignments, Mapping) or any(
        type(number) is not int
        for rank, owned in assignments.items()
        for number in (rank, *owned)
    ):
        raise ValueError(
            f"assign_fn must return a dict of rank -> list of parameter indices, all of them ints, but returned {assignments!r}"
        )
    for rank in assignments:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"assign_fn names rank {rank}, but the ranks are 0 to {world_size - 1}"
            )
    count = Counter(index for owned in assignments.values() for index in owned)
    indices = range(len(describe))
    unknown = sorted(i for i in count if i not in indices)
    if unknown:
        raise AssertionError(
            f"assign_fn names parameters {unknown}, but the indices are 0 to {len(describe) - 1}"
        )
    wrong = {
        "missing": [i for i in indices if not count[i]],
        "assigned more than once": [i for i in indices if count[i] > 1],
    }
    found = [
        f"{verb} {which}: {listed([describe[i] for i in which])}"
        for verb, which in wrong.items()
        if which
    ]
    if found:
        raise AssertionError(
            f"assign_fn must give each parameter to exactly one rank; {'; '.join(found)}"
        )
