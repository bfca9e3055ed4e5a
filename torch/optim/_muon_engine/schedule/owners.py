"""Which rank orthogonalizes which matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.optim._muon_engine.layouts import larger_first


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.optim._muon_engine.layouts import Layout, Shards


def newton_schulz_flops(shape: Sequence[int], ns_steps: int = 5) -> int:
    """Multiply-adds, doubled, of ``ns_steps`` iterations: three products on the short side."""
    short, long = sorted(shape)
    return ns_steps * (4 * short * short * long + 2 * short**3)


class _Loads:
    """What the ranks of one group have to do so far, of shape (2, ranks): FLOPs, elements to receive."""

    def __init__(self, group: tuple[int, ...], others: Iterable[_Loads]) -> None:
        self.group = group
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
        # What it would have received is what decides between ranks of equal load; then the first.
        busier = busy != busy.min()
        place = int((received - held).masked_fill(busier, _NEVER).argmin())
        busy[place] += flops
        received[place] += numel - held[place]
        return self.group[place]


_NEVER = 2**62


def assign_owners(layouts: Iterable[Layout]) -> list[int]:
    """One owner for each layout, out of its whole group: shards, replicas and TP alike.

    Heaviest first, each to the rank with the fewest FLOPs so far, then the fewest bytes to receive.
    A group counts what its ranks do for groups that all of them are in (dense matrices, where it has
    experts), and nothing else: ranks may differ in the other groups that they are in, and each must come
    to the same answer from what all of the group know.
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
        loads = _Loads(group, groups)
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
    assignments: Mapping[int, Sequence[int]],
    describe: Sequence[str],
    world_size: int | None,
) -> None:
    """Raises AssertionError unless each index stands exactly once; ValueError for unknown ranks."""
    if not isinstance(assignments, Mapping) or any(
        type(number) is not int
        for rank, owned in assignments.items()
        for number in (rank, *owned)
    ):
        raise ValueError(
            f"assign_fn has to return a dict of rank -> list of parameter indices, all of them ints, but returned "
            f"{assignments!r}"
        )
    count: dict[int, int] = defaultdict(int)
    for rank, owned in assignments.items():
        if rank < 0 or (world_size is not None and rank >= world_size):
            raise ValueError(
                f"assign_fn names rank {rank}, but the ranks are 0 to {world_size - 1 if world_size else '?'}"
            )
        for index in owned:
            count[index] += 1
    unknown = sorted(i for i in count if not 0 <= i < len(describe))
    if unknown:
        raise AssertionError(
            f"assign_fn names parameters {unknown}, but the indices are 0 to {len(describe) - 1}"
        )
    missing = [i for i in range(len(describe)) if not count[i]]
    doubled = [i for i in range(len(describe)) if count[i] > 1]
    if missing or doubled:
        found = [
            f"{verb} {which}: {', '.join(describe[i] for i in which[:8])}"
            + (f" and {len(which) - 8} more" if len(which) > 8 else "")
            for verb, which in (
                ("missing", missing),
                ("assigned more than once", doubled),
            )
            if which
        ]
        raise AssertionError(
            f"assign_fn must give each parameter to exactly one rank; {'; '.join(found)}"
        )
