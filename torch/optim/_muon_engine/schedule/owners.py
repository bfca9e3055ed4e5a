"""Which rank orthogonalizes which matrix."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon_engine.layouts import larger_first, Layout, listed, Shards
from torch.optim._muon_engine.layouts.divide import divide


def newton_schulz_flops(shape: Sequence[int], ns_steps: int = 5) -> int:
    """Multiply-adds, doubled, of ``ns_steps`` iterations: three products on the short side."""
    short, long = sorted(shape)
    return ns_steps * (4 * short * short * long + 2 * short**3)


# A matrix with a shorter side is not divided: the collectives of its owners take longer than they save.
MIN_DIVIDED = 2048
# A matrix is divided if its work is more than this many times the mean work of the group's ranks.
# Dividing others would only add collectives.
MIN_LOAD = 1.0


def is_worth_dividing(layout: Layout, mean: float) -> bool:
    """Whether several owners are faster, where ``mean`` is the mean work of the group's ranks."""
    is_large = min(layout.whole) >= MIN_DIVIDED
    return is_large and newton_schulz_flops(layout.whole) > MIN_LOAD * mean


def divided(layouts: Sequence[Layout], owners: int) -> list[Layout]:
    """``layouts`` with ``owners`` blocks for each matrix that is worth it."""
    if owners == 1:
        return list(layouts)
    work: Counter[tuple[int, ...]] = Counter()
    for layout in layouts:
        work[layout.group] += newton_schulz_flops(layout.shape)
    known: dict[Any, Any] = {}
    found: list[Layout] = []
    for layout in layouts:
        mean = work[layout.group] / len(layout.group)
        is_worth = is_worth_dividing(layout, mean)
        found += divide(layout, owners if is_worth else 1, known)
    return found


def flops_of(layout: Layout) -> int:
    """The work of one owner of a matrix."""
    return newton_schulz_flops(layout.whole) // layout.key.block[1]


class _Loads:
    """The work of the ranks of one group so far, of shape (2, ranks): FLOPs, elements to receive."""

    def __init__(
        self,
        group: tuple[int, ...],
        others: Iterable["_Loads"],
        start: int,
        ranks_per_node: int,
    ) -> None:
        self.group = group
        self.start = start
        self.ranks_per_node = ranks_per_node
        self.before = torch.zeros(2, len(group), dtype=torch.int64, device="cpu")
        for other in others:
            place = {rank: i for i, rank in enumerate(other.group)}
            if all(rank in place for rank in group):
                places = [place[rank] for rank in group]
                self.before += (other.load - other.before)[:, places]
        self.load = self.before.clone()
        self._teams: dict[int, Tensor] = {}

    def give(self, flops: int, blocks: Sequence[tuple[int, Tensor]]) -> list[int]:
        """Gives a matrix to one rank for each of its blocks, and returns these.

        Each block has its number of elements, and how many of them each rank holds.
        """
        teams = self._teams_of(len(blocks))
        busy, received = self.load
        # Teams of equal load: the one that receives fewest bytes, then the first from ``start`` on.
        load = busy[teams].amax(1)
        apart = [received[t] - held[t] for t, (_, held) in zip(teams.T, blocks)]
        bytes_ = sum(apart).masked_fill(load != load.min(), _NEVER)  # type: ignore[union-attr]
        start = self.start // len(blocks)
        at = (int(bytes_.roll(-start).argmin()) + start) % len(teams)
        places = teams[at].tolist()
        for place, (numel, held) in zip(places, blocks, strict=True):
            busy[place] += flops
            received[place] += numel - held[place]
        return [self.group[place] for place in places]

    def _teams_of(self, size: int) -> Tensor:
        """Places of neighbouring ranks, of shape (teams, size): of one node if a node has enough."""
        if size not in self._teams:
            nodes: dict[int, list[int]] = {}
            for place, rank in enumerate(self.group):
                nodes.setdefault(rank // self.ranks_per_node, []).append(place)
            parts = list(nodes.values())
            if min(map(len, parts)) < size:
                parts = [list(range(len(self.group)))]
            teams = [
                part[at : at + size]
                for part in parts
                for at in range(0, len(part) - size + 1, size)
            ]
            self._teams[size] = torch.tensor(teams, device="cpu")
        return self._teams[size]


_NEVER = 2**62


def assign_owners(
    layouts: Iterable[Layout],
    start: Callable[[tuple[int, ...]], int] = lambda group: 0,
    ranks_per_node: int = 1,
) -> list[int]:
    """One owner for each layout, out of all ranks of its group.

    Heaviest first, each to the rank with the fewest FLOPs so far, then the fewest bytes to receive. A
    group counts the work of its ranks in groups that contain all of them (dense matrices, for a group
    that shares experts). It counts no other work, because its ranks must come to the same result and
    differ in their other groups. The blocks of a matrix, which follow each other, go to neighbours.

    Args:
        start: the place in a group from which ties are broken. Without it, many optimizers of few
            matrices would all choose the first rank.
        ranks_per_node: this many consecutive ranks are near each other.
    """
    layouts = list(layouts)
    owners = [0] * len(layouts)
    flops = [flops_of(layout) for layout in layouts]
    members: dict[tuple[int, ...], list[int]] = {}
    for i in sorted(range(len(layouts)), key=lambda i: -flops[i]):
        if layouts[i].key.block[0] == 0:
            members.setdefault(layouts[i].group, []).append(i)
    groups: list[_Loads] = []
    held: dict[int, Tensor] = {}
    for group in larger_first(members):
        loads = _Loads(group, groups, start(group), ranks_per_node)
        groups.append(loads)
        for i in members[group]:
            blocks = layouts[i : i + layouts[i].key.block[1]]
            for shards in (block.shards for block in blocks):
                if id(shards) not in held:
                    held[id(shards)] = _held(shards)
            found = [(block.numel, held[id(block.shards)]) for block in blocks]
            owners[i : i + len(blocks)] = loads.give(flops[i], found)
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


def owners_of(
    assignments: Mapping[int, Sequence[int]], layouts: Sequence[Layout]
) -> list[int]:
    """The owner of each layout. Raises ValueError for one that holds no piece of it."""
    by_index = {index: rank for rank, owned in assignments.items() for index in owned}
    owners = [by_index[layout.key.index] for layout in layouts]
    for layout, owner in zip(layouts, owners, strict=True):
        if owner not in layout.group:
            raise ValueError(
                f"assign_fn gives {layout.describe()} to rank {owner}, which holds no piece of it; the ranks that "
                f"do are {list(layout.group)}"
            )
    return owners
