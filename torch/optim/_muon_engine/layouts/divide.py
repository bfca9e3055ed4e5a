"""Cuts a layout into parts or blocks. Everything that follows treats each of them as a matrix."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.optim._muon_engine.layouts import Layout, Region, Shards
from torch.optim._muon_split import Split


def split(
    layout: Layout, how: Split, known: dict[Any, list[Shards]]
) -> Iterator[Layout]:
    """The parts of a fused weight, which are matrices of their own.

    Args:
        known: shards that were cut before. Equal ones share one result.

    Raises:
        ValueError: the sizes do not add up to the rows or columns of the matrix.
    """
    problem = how.problem_with(layout.shape)
    if problem:
        raise ValueError(f"{layout.describe()}: {problem}")
    cut = _cut(layout.shards, how, known)
    for number, (size, shards) in enumerate(zip(how.sizes, cut, strict=True)):
        sub = layout.key.sub * len(how.sizes) + number
        (rows, columns), lines = layout.shape, size * how.repeats
        shape = (lines, columns) if how.dim == 0 else (rows, lines)
        key = layout.key._replace(sub=sub)
        yield replace(layout, key=key, shape=shape, shards=shards)


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
        zip(sizes, _cut(layout.shards, Split(tuple(sizes), 1, dim), known), strict=True)
    ):
        key = layout.key._replace(block=(number, count))
        shape = (size, columns) if dim == 0 else (rows, size)
        yield replace(layout, key=key, shape=shape, shards=shards, divided=layout.shape)


def _cut(shards: Shards, how: Split, known: dict[Any, list[Shards]]) -> list[Shards]:
    key = shards, how
    if key not in known:
        # Replicas share one tuple of regions, and its parts.
        parts = {regions: _parts(regions, how) for regions in shards.regions}
        known[key] = [
            Shards(
                shards.ranks,
                tuple(parts[regions][at] for regions in shards.regions),
                shards.contributions,
            )
            for at in range(len(how.sizes))
        ]
    return known[key]


def _parts(regions: tuple[Region, ...], how: Split) -> list[tuple[Region, ...]]:
    """For each part, the rectangles of ``regions`` in it, by the rows and columns of the part."""
    parts: list[list[Region]] = []
    period, offset, dim = sum(how.sizes), 0, how.dim
    for size in how.sizes:
        found: list[Region] = []
        for region in regions:
            start, extent = _span(region, dim)
            if how.repeats == 1:
                first, last = max(0, offset - start), min(extent, offset + size - start)
                found += _lines(_moved(region, dim, start - offset), dim, first, last)
                continue
            # The part's lines before the region's first line, and before its end.
            first, last = (
                at // period * size + min(max(at % period - offset, 0), size)
                for at in (start, start + extent)
            )
            # The whole part, of which the region has these lines.
            unit = region.stride if dim == 0 else 1
            part = _moved(region, dim, 0, size * how.repeats)._replace(
                offset=region.offset + (offset - start) * unit,
                repeat=(dim, how.repeats, period * unit),
            )
            found += _lines(part, dim, first, last)
        parts.append(found)
        offset += size
    return [tuple(found) for found in parts]


def _span(region: Region, dim: int) -> tuple[int, int]:
    """The first row or column of ``region``, and how many it has."""
    if dim == 0:
        return region.row, region.height
    return region.column, region.width


def _moved(region: Region, dim: int, start: int, extent: int | None = None) -> Region:
    extent = _span(region, dim)[1] if extent is None else extent
    names = Region._fields[dim], Region._fields[2 + dim]
    return region._replace(**dict(zip(names, (start, extent))))


def _lines(region: Region, dim: int, first: int, last: int) -> Iterator[Region]:
    """The rows or columns ``first`` to ``last`` of a region: at most a part of a block, blocks, a part."""
    along, count, apart = region.repeat
    start, extent = _span(region, dim)
    size = extent // (count if along == dim else 1)
    while first < last:
        block, inside = divmod(first, size)
        blocks = 1 if inside else max(1, (last - first) // size)
        end = min(last, (block + blocks) * size)
        offset = block * apart + inside * (region.stride if dim == 0 else 1)
        repeat = region.repeat
        if along == dim:
            repeat = (dim, blocks, apart) if blocks > 1 else (0, 1, 0)
        yield _moved(region, dim, start + first, end - first)._replace(
            offset=region.offset + offset, repeat=repeat
        )
        first = end
