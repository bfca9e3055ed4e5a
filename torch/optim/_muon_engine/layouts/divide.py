"""Cuts a layout into parts. Everything that follows treats each of them as a matrix."""

from collections.abc import Iterator
from dataclasses import replace

from ..._muon_split import Split
from .layout import Layout, ONE_BLOCK, Region, Regions, Shards


def split_fused(layout: Layout, split: Split) -> Iterator[Layout]:
    """The parts of a fused weight. Raises ValueError if they do not add up to its rows or columns."""
    problem = split.problem_with(layout.shape)
    if problem:
        raise ValueError(f"{layout.describe()}: {problem}")
    first_sub = layout.key.sub * len(split.sizes)
    for place, part in enumerate(_parts(layout, split)):
        key = layout.key._replace(sub=first_sub + place)
        yield replace(part, key=key)


def _parts(layout: Layout, split: Split) -> Iterator[Layout]:
    """Each part, under the key of the layout."""
    shards = layout.shards
    if split not in shards.parts:
        shards.parts[split] = _shards_of_parts(shards, split)
    shapes = split.shapes_of_parts(layout.shape)
    for shape, of_part in zip(shapes, shards.parts[split], strict=True):
        yield replace(layout, shape=shape, shards=of_part)


def _shards_of_parts(shards: Shards, split: Split) -> list[Shards]:
    # Replicas share one tuple of regions, and its parts.
    cut: dict[Regions, list[Regions]] = {}
    for regions in shards.regions:
        if regions not in cut:
            cut[regions] = _regions_of_parts(regions, split)
    of_parts: list[Shards] = []
    for place in range(len(split.sizes)):
        regions_of_ranks = tuple(cut[regions][place] for regions in shards.regions)
        of_parts.append(Shards(shards.ranks, regions_of_ranks))
    return of_parts


def _regions_of_parts(regions: Regions, split: Split) -> list[Regions]:
    """For each part, the rectangles of ``regions`` in it, by the rows and columns of the part."""
    of_parts: list[Regions] = []
    offset = 0
    for size in split.sizes:
        inside: list[Region] = []
        for region in regions:
            inside += _region_in_part(region, split, offset, size)
        of_parts.append(tuple(inside))
        offset += size
    return of_parts


def _region_in_part(
    region: Region, split: Split, offset: int, size: int
) -> Iterator[Region]:
    """The rectangles of ``region`` in the part that has ``size`` lines from line ``offset`` of each repetition."""
    period = sum(split.sizes)
    start, extent = region.span(split.dim)

    def lines_before(line: int) -> int:
        """How many of the part's lines come before a line of the fused weight."""
        repetitions, inside = divmod(line, period)
        return repetitions * size + min(max(inside - offset, 0), size)

    if split.repeats == 1:
        part = region.shifted(split.dim, -offset)
    else:
        # The whole part, of which the region has some lines.
        apart = _line_apart(region, split.dim)
        whole = region.shifted(split.dim, -start, size * split.repeats)
        part = whole._replace(
            offset=region.offset + (offset - start) * apart,
            repeat=(split.dim, split.repeats, period * apart),
        )
    first = lines_before(start)
    end = lines_before(start + extent)
    return _lines(part, split.dim, first, end)


def _line_apart(region: Region, dim: int) -> int:
    """The elements of the local tensor from a row (dim 0) or column (dim 1) to the next one."""
    return region.stride if dim == 0 else 1


def _lines(region: Region, dim: int, first: int, end: int) -> Iterator[Region]:
    """The part's rows or columns from ``first`` to before ``end``: at most a tail, whole blocks and a head."""
    repeat_dim, count, apart = region.repeat
    start, extent = region.span(dim)
    size = extent
    if repeat_dim == dim:
        size = extent // count
    while first < end:
        block, inside = divmod(first - start, size)
        blocks = 1
        if not inside:
            blocks = max(1, (end - first) // size)
        stop = min(end, start + (block + blocks) * size)
        repeat = region.repeat
        if repeat_dim == dim:
            repeat = (dim, blocks, apart) if blocks > 1 else ONE_BLOCK
        lines = region.shifted(dim, first - start, stop - first)
        offset = block * apart + inside * _line_apart(region, dim)
        yield lines._replace(offset=region.offset + offset, repeat=repeat)
        first = stop
