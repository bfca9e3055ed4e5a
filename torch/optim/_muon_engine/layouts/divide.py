"""Cuts a layout into parts or blocks. Everything that follows treats each of them as a matrix."""

from collections.abc import Iterator
from dataclasses import replace

from ..._muon_split import Split
from .layout import Layout, Region, Regions, Shards


def split_fused(layout: Layout, fused: Split) -> Iterator[Layout]:
    """The parts of a ``fused`` weight. Raises ValueError if they do not add up to its rows or columns."""
    problem = fused.problem_with(layout.shape)
    if problem:
        raise ValueError(f"{layout.describe()}: {problem}")
    for place, part in enumerate(_parts(layout, fused)):
        key = layout.key._replace(sub=layout.key.sub * len(fused.sizes) + place)
        yield replace(part, key=key)


def divide(layout: Layout, owners: int) -> Iterator[Layout]:
    """``owners`` blocks along the long side, or one for each rank of a smaller group."""
    count = min(owners, len(layout.holders))
    if count == 1:
        yield layout
        return
    rows, columns = layout.shape
    dim, long = (0, rows) if rows > columns else (1, columns)
    sizes = [long * (at + 1) // count - long * at // count for at in range(count)]
    # Blocks are cut like the parts of a fused weight.
    for place, block in enumerate(_parts(layout, Split(tuple(sizes), 1, dim))):
        key = layout.key._replace(block=(place, count))
        yield replace(block, key=key, block_of=layout.shape)


def _parts(layout: Layout, split: Split) -> Iterator[Layout]:
    """Each part, under the key of the layout."""
    (rows, columns), shards = layout.shape, layout.shards
    if split not in shards.parts:
        # Replicas share one tuple of regions, and its parts.
        parts = {regions: _regions(regions, split) for regions in shards.regions}
        by_part = zip(*(parts[regions] for regions in shards.regions), strict=True)
        ranks, sums = shards.ranks, shards.contributions
        shards.parts[split] = [Shards(ranks, part, sums) for part in by_part]
    for size, part in zip(split.sizes, shards.parts[split], strict=True):
        lines = size * split.repeats
        shape = (rows, lines) if split.dim else (lines, columns)
        yield replace(layout, shape=shape, shards=part)


def _regions(regions: Regions, split: Split) -> list[Regions]:
    """For each part, the rectangles of ``regions`` in it, by the rows and columns of the part."""
    parts: list[Regions] = []
    period, offset, dim = sum(split.sizes), 0, split.dim
    for size in split.sizes:
        inside: list[Region] = []
        for region in regions:
            start, extent = region.span(dim)
            # The part's lines before the region's first line, and before its end.
            first, last = (
                at // period * size + min(max(at % period - offset, 0), size)
                for at in (start, start + extent)
            )
            if split.repeats == 1:
                part = region.shifted(dim, -offset)
            else:
                # The whole part, of which the region has these lines.
                unit = region.stride if dim == 0 else 1
                part = region.shifted(dim, -start, size * split.repeats)._replace(
                    offset=region.offset + (offset - start) * unit,
                    repeat=(dim, split.repeats, period * unit),
                )
            inside += _lines(part, dim, first, last)
        parts.append(tuple(inside))
        offset += size
    return parts


def _lines(region: Region, dim: int, first: int, last: int) -> Iterator[Region]:
    """The part's rows or columns ``first`` to ``last`` of a region: at most a tail, whole blocks and a head."""
    along, count, apart = region.repeat
    start, extent = region.span(dim)
    size = extent // (count if along == dim else 1)
    while first < last:
        block, inside = divmod(first - start, size)
        blocks = 1 if inside else max(1, (last - first) // size)
        end = min(last, start + (block + blocks) * size)
        offset = block * apart + inside * (region.stride if dim == 0 else 1)
        repeat = region.repeat
        if along == dim:
            repeat = (dim, blocks, apart) if blocks > 1 else (0, 1, 0)
        yield region.shifted(dim, first - start, end - first)._replace(
            offset=region.offset + offset, repeat=repeat
        )
        first = end
