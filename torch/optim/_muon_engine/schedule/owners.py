"""Which rank orthogonalizes which matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.optim._muon_engine.layouts import Layout


def newton_schulz_flops(shape: Sequence[int], ns_steps: int = 5) -> int:
    """Multiply-adds, doubled, of ``ns_steps`` iterations: three products on the short side."""
    short, long = sorted(shape)
    return ns_steps * (4 * short * short * long + 2 * short**3)


class _Loads:
    """What the ranks of one group have to do so far, one element a rank in the group's order."""

    def __init__(self, group: tuple[int, ...]) -> None:
        self.group = group
        self.flops = torch.zeros(len(group), dtype=torch.int64, device="cpu")
        self.received = torch.zeros_like(self.flops)

    def give(self, flops: int, numel: int, held: Tensor) -> int:
        """Gives a matrix, of which each rank holds ``held`` elements, to a rank, and returns that."""
        # What it would have received is what decides between ranks of equal load; then the first.
        received = self.received - held
        busier = self.flops != self.flops.min()
        place = int(received.masked_fill(busier, _NEVER).argmin())
        self.flops[place] += flops
        self.received[place] += numel - held[place]
        return self.group[place]


_NEVER = 2**62


def assign_owners(layouts: Iterable[Layout]) -> list[int]:
    """One owner for each layout, out of its whole group: shards, replicas and TP alike.

    Heaviest first, each to the rank with the fewest FLOPs so far, then the fewest bytes to receive.
    Loads are counted within a group only: ranks of one group may differ in the other groups that
    they are in, and each must come to the same answer from what all of the group know.
    """
    layouts = list(layouts)
    owners = [0] * len(layouts)
    loads: dict[tuple[int, ...], _Loads] = {}
    held: dict[int, Tensor] = {}
    flops = [newton_schulz_flops(layout.shape) for layout in layouts]
    for i in sorted(range(len(layouts)), key=lambda i: -flops[i]):
        layout, shards = layouts[i], layouts[i].shards
        if id(shards) not in held:
            by_rank = dict(zip(shards.ranks, shards.numels, strict=True))
            held[id(shards)] = torch.tensor(
                [by_rank[rank] for rank in shards.group],
                dtype=torch.int64,
                device="cpu",
            )
        if layout.group not in loads:
            loads[layout.group] = _Loads(layout.group)
        owners[i] = loads[layout.group].give(flops[i], layout.numel, held[id(shards)])
    return owners


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
