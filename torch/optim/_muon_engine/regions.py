"""Where the elements of matrices are: regions of a rank's storage, and the layout of a matrix."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor

from .process_groups import Ranks, short_hash


class Region(NamedTuple):
    """A rectangle of a matrix, and where a rank's local storage holds it. Element (i, j) of the rectangle is
    element (row + i, column + j) of the matrix, and element ``offset + i * stride + j`` of the local tensor.
    """

    row: int
    column: int
    height: int
    width: int
    offset: int
    stride: int

    @property
    def numel(self) -> int:
        return self.height * self.width

    def shifted(self, dim: int, by: int) -> "Region":
        """This rectangle ``by`` rows (dim 0) or columns (dim 1) further on in the matrix."""
        if dim:
            return self._replace(column=self.column + by)
        return self._replace(row=self.row + by)

    def rows(self, first: int, count: int) -> "Region":
        """``count`` rows of this rectangle."""
        offset = self.offset + first * self.stride
        return self._replace(row=self.row + first, height=count, offset=offset)

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """The view of ``matrix`` that is this rectangle."""
        if matrix.shape == (self.height, self.width):
            return matrix
        rows = slice(self.row, self.row + self.height)
        columns = slice(self.column, self.column + self.width)
        return matrix[rows, columns]

    def of_local(self, local: Tensor) -> Tensor:
        """The view of the local tensor that holds this rectangle. Raises ValueError if the tensor is too small."""
        if local.shape == (self.height, self.width):
            return local
        last = self.offset + (self.height - 1) * self.stride + self.width - 1
        if local.ndim > 2 and local.numel():
            numel = local[0].numel()
            place, offset = divmod(self.offset, numel)
            # One matrix of a stack, whose matrices may be apart.
            if last < (place + 1) * numel:
                return self._replace(offset=offset).of_local(local[place])
        if last >= local.numel():
            raise ValueError(
                f"a local tensor of shape {tuple(local.shape)} does not hold {self}, which its layout was read from"
            )
        # A gradient may have any strides. One may have been expanded.
        if local.ndim == 2 and local.shape[1] == self.stride:
            row_stride, column_stride = local.stride()
        else:
            column_stride = local.view(-1).stride(0)
            row_stride = column_stride * self.stride
        rows, columns = divmod(self.offset, self.stride)
        start = local.storage_offset() + rows * row_stride + columns * column_stride
        size = self.height, self.width
        return local.as_strided(size, (row_stride, column_stride), start)


Regions = tuple[Region, ...]
# The ranks that share a matrix, by replica and by shard: grid[replica][shard].
Grid = tuple[Ranks, ...]
Shape = tuple[int, int]


def ranks_of(grid: Grid) -> Ranks:
    """The ranks of ``grid``, in ascending order."""
    return tuple(sorted(chain(*grid)))


def place_in_order(grid: Grid) -> tuple:
    """The place of ``grid`` in the order of all grids: larger ones first. It depends on the grid alone."""
    ranks = ranks_of(grid)
    return -len(ranks), ranks, grid


# Equal objects are few, and are compared by identity.
@dataclass(eq=False, repr=False)
class Layout:
    """Which rank stores which regions of a matrix: those of ``shards[s]`` are on the ranks ``grid[r][s]`` of all replicas
    r. Equally cut matrices share one layout. Asked about a rank that holds no shard, it raises KeyError.
    """

    grid: Grid
    shards: tuple[Regions, ...]

    @cached_property
    def ranks(self) -> Ranks:
        return ranks_of(self.grid)

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Rank -> the numbers of the replica and of the shard that it has."""
        places: dict[int, tuple[int, int]] = {}
        for replica, row in enumerate(self.grid):
            for shard, rank in enumerate(row):
                places[rank] = replica, shard
        return places

    @cached_property
    def digest(self) -> str:
        """A hash that ranks compare in place of the layout."""
        return short_hash((self.grid, self.shards))

    def regions_of(self, rank: int) -> Regions:
        _, shard = self.places[rank]
        return self.shards[shard]

    def numel_of(self, rank: int) -> int:
        return sum(region.numel for region in self.regions_of(rank))


def digest_of(regions: Regions, local: Tensor) -> Tensor:
    """A digest of the bits of the values in ``regions`` of a local tensor: an integer on its device. It knows the rows and
    columns of each value, and takes memory for one region at most.
    """
    # The sums of larger integers would lose their highest bits.
    ints = {1: torch.int8, 2: torch.int16}
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for region in regions:
        values = region.of_local(local).contiguous()
        values = values.view(ints.get(values.itemsize, torch.int32))
        for dim in range(2):
            sums = values.sum(1 - dim, dtype=torch.int64)
            places = torch.arange(1, 2 * len(sums), 2, device=local.device)
            total = 31 * total + (sums * places).sum()
    return total


def newton_schulz_flops(shape: Sequence[int]) -> int:
    """FLOPs of five quintic iterations: each has two products with the long side and one square product."""
    short, long = sorted(shape)
    return 5 * (2 * 2 * short * short * long + 2 * short**3)


def problem_with_tiling(regions: Sequence[Region], shape: Shape) -> str:
    """Why the ``regions`` do not tile a matrix of ``shape``; "" if they do."""
    # The points where an odd number of rectangles have a corner, the matrix among them. Without any, the regions hold each
    # element of the matrix an odd number of times, and each place outside of it an even number of times. If they have as
    # many elements as the matrix, they hold each of them once.
    odd: set[tuple[int, int]] = set()
    for row, column, height, width, *_ in (*regions, (0, 0, *shape)):
        for corner in product((row, row + height), (column, column + width)):
            odd ^= {corner}
    held, numel = sum(region.numel for region in regions), math.prod(shape)
    if not odd and held == numel:
        return ""
    return f"its pieces hold {held} of {numel} elements, and overlap, leave gaps or stick out"
