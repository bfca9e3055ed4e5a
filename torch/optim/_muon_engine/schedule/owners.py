"""Which rank orthogonalizes which matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.optim._muon_engine.layouts import Layout


def newton_schulz_flops(shape: Sequence[int], ns_steps: int = 5) -> int:
    """Multiply-adds, doubled, of ``ns_steps`` iterations: three products on the short side."""
    short, long = sorted(shape)
    return ns_steps * (4 * short * short * long + 2 * short**3)


def assign_owners(layouts: Iterable[Layout]) -> list[int]:
    """One owner for each layout, out of its whole group: shards, replicas and TP alike.

    Heaviest first, each to the rank with the fewest FLOPs so far, then the fewest bytes to receive.
    Loads are counted within a group only: ranks of one group may differ in the other groups that
    they are in, and each must come to the same answer from what all of the group know.
    """
    layouts = list(layouts)
    owners = [0] * len(layouts)
    flops: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    received: dict[tuple[int, ...], dict[int, int]] = defaultdict(
        lambda: defaultdict(int)
    )
    heaviest_first = sorted(
        range(len(layouts)), key=lambda i: -newton_schulz_flops(layouts[i].shape)
    )
    for i in heaviest_first:
        layout = layouts[i]
        load, inbound = flops[layout.group], received[layout.group]
        missing = {
            rank: layout.numel - sum(region.numel for region in piece)
            for rank, piece in zip(layout.ranks, layout.shards, strict=True)
        }
        owner = min(layout.group, key=lambda r: (load[r], inbound[r] + missing[r], r))
        load[owner] += newton_schulz_flops(layout.shape)
        inbound[owner] += missing[owner]
        owners[i] = owner
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
