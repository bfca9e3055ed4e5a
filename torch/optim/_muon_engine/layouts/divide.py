"""Cuts a layout into blocks. Everything that follows treats a block as a matrix."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch.optim._muon_engine.layouts import Layout, Region, Shards


def split(
    layout: Layout, sizes: Sequence[int], known: dict[Any, list[Shards]]
) -> Iterator[Layout]:
    """The parts of a fused weight, which are matrices of their own.

    Args:
        sizes: the rows of each part.
        known: shards that were cut before. Equal ones share one result.

    Raises:
        ValueError: the sizes do not add up to the rows of the matrix.
    """
    problem = problem_with(sizes, layout.shape[0])
    if problem:
        raise ValueError(f"{layout.describe()}: {problem}")
    for number, (rows, shards) in enumerate(
        zip(sizes, _cut(layout.shards, sizes, 0, known), strict=True)
    ):
        key = layout.key._replace(sub=layout.key.sub * len(sizes) + number)
        shape = rows, layout.shape[1]
        yield replace(layout, key=key, shape=shape, shards=shards)


def problem_with(sizes: Sequence[int], rows: int, dim: int = 0) -> str:
    """Why a matrix with this many rows cannot be split by ``sizes``; "" if it can."""
    if any(type(size) is not int or size < 1 for size in sizes):
        return f"split must be positive ints but is {tuple(sizes)}"
    if sum(sizes) != rows:
        return f"split {tuple(sizes)} adds up to {sum(sizes)}, but dimension {dim} has {rows}"
    return ""


def divide(
    layout: Layout, owners: int, known: dict[Any, list[Shards]]
) -> Iterator[Layout]:
    """``owners`` blocks along the long side, which as many ranks orthogonalize together.

    A group of fewer ranks divides a matrix among all of them.
    """
    count = min(owners, len(layout.group))
    if count == 1:
        yield layout
        return
    rows, columns = layout.shape
    dim, long = (0, rows) if rows > columns else (1, columns)
    sizes = [long * (at + 1) // count - long * at // count for at in range(count)]
    for number, (size, shards) in enumerate(
        zip(sizes, _cut(layout.shards, sizes, dim, known), strict=True)
    ):
        key = layout.key._replace(block=(number, count))
        shape = (size, columns) if dim == 0 else (rows, size)
        yield replace(layout, key=key, shape=shape, shards=shards, divided=layout.shape)


def _cut(
    shards: Shards, sizes: Sequence[int], dim: int, known: dict[Any, list[Shards]]
) -> list[Shards]:
    key = shards, tuple(sizes), dim
    if key not in known:
        edges = [0, *accumulate(sizes)]
        # Replicas share one tuple of regions, and its blocks.
        parts = {regions: _parts(regions, edges, dim) for regions in shards.regions}
        known[key] = [
            Shards(
                shards.ranks,
                tuple(parts[regions][at] for regions in shards.regions),
                shards.contributions,
            )
            for at in range(len(sizes))
        ]
    return known[key]


def _parts(
    regions: tuple[Region, ...], edges: Sequence[int], dim: int
) -> list[tuple[Region, ...]]:
    """For each block between two ``edges`` along ``dim``, the part of ``regions`` in it."""
    found: list[list[Region]] = [[] for _ in edges[1:]]
    for region in regions:
        start = at = region[dim]
        end = start + region[2 + dim]
        while at < end:
            block = bisect_right(edges, at) - 1
            size = min(end, edges[block + 1]) - at
            place, apart = at - edges[block], at - start
            if dim == 0:
                offset = region.offset + apart * region.stride
                part = region._replace(row=place, height=size, offset=offset)
            else:
                offset = region.offset + apart
                part = region._replace(column=place, width=size, offset=offset)
            found[block].append(part)
            at += size
    return [tuple(part) for part in found]
