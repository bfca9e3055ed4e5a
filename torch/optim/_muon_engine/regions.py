"""Where the elements of matrices are: regions of a rank's storage, the layout of a matrix, and the matrix itself."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._muon_split import Split
from .._newton_schulz_variants import uses_gram
from .process_groups import Ranks


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

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements follow each other in local storage."""
        return self.height <= 1 or self.width == self.stride

    def shifted(self, dim: int, by: int) -> "Region":
        """This rectangle ``by`` rows (dim 0) or columns (dim 1) further on in the matrix."""
        if dim:
            return self._replace(column=self.column + by)
        return self._replace(row=self.row + by)

    def rows(self, first: int, count: int) -> "Region":
        """``count`` rows of this rectangle."""
        offset = self.offset + first * self.stride
        return Region(
            self.row + first, self.column, count, self.width, offset, self.stride
        )

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
    return tuple(sorted(itertools.chain(*grid)))


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
    def _places(self) -> dict[int, tuple[int, int]]:
        places: dict[int, tuple[int, int]] = {}
        for replica, row in enumerate(self.grid):
            for shard, rank in enumerate(row):
                places[rank] = replica, shard
        return places

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """The elements of each shard."""
        return tuple(sum(r.numel for r in regions) for regions in self.shards)

    @cached_property
    def digest(self) -> str:
        """A hash that ranks compare in place of the layout."""
        content = repr((self.grid, self.shards))
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def place_of(self, rank: int) -> tuple[int, int]:
        """The numbers of the replica and of the shard that ``rank`` has."""
        return self._places[rank]

    def regions_of(self, rank: int) -> Regions:
        _, shard = self._places[rank]
        return self.shards[shard]

    def numel_of(self, rank: int) -> int:
        _, shard = self._places[rank]
        return self.numels[shard]


@dataclass(frozen=True)
class Matrix:
    """One matrix of parameter ``index``, the ``sub``-th one. ``placement`` names the placements or groups, for errors.
    With a ``split``, its owner orthogonalizes its parts. A ``frozen`` matrix is in no bucket.
    """

    index: int
    shape: Any
    dtype: torch.dtype
    layout: Layout
    placement: str
    frozen: bool = False
    sub: int = 0
    name: str | None = None
    expert: int | None = None
    split: Split = Split()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def flops(self) -> int:
        """The work of its owner: five quintic steps of each part."""
        return sum(map(newton_schulz_flops, self.split.shapes_of_parts(self.shape)))

    @property
    def described(self) -> str:
        return describe(self.index, self.shape, self.name, self.sub, self.expert)


def describe(
    index: int,
    shape: Sequence[int],
    name: str | None = None,
    sub: int = 0,
    expert: int | None = None,
) -> str:
    """A parameter, or the ``sub``-th matrix in it, in words, with the ``shape`` of the tensor that is meant."""
    text = f"parameter {index}"
    if name is not None:
        text += f" {name!r}"
    if sub:
        text += f", its matrix {sub},"
    if expert is not None:
        text += f", expert {expert},"
    return f"{text} of shape {tuple(shape)}"


def newton_schulz_flops(shape: Sequence[int], ns_algorithm: str = "quintic") -> int:
    """FLOPs of five iterations on an accelerator. Each iteration of the quintic has two products with the long
    side and one square product. The Gram form has four and fourteen in all. "symmetric" is the quintic there.
    """
    short, long = sorted(shape)
    wide, square = 2 * short * short * long, 2 * short**3
    if ns_algorithm == "gram":
        if uses_gram(shape, ns_algorithm, is_cpu=False):
            return 4 * wide + 14 * square
    return 5 * (2 * wide + square)


def matrix_shape(shape: Sequence[int], flatten: bool) -> Shape:
    """The shape of a matrix in a parameter: dimension 0 by all others, or else the last two."""
    if flatten:
        return shape[0], math.prod(shape[1:])
    return shape[-2], shape[-1]


def not_2d(described: str) -> ValueError:
    """The error for a parameter that holds no matrix, in upstream's words."""
    return ValueError(f"Muon only supports 2D parameters whereas we found {described}")


def checked(matrices: Sequence[Matrix]) -> Sequence[Matrix]:
    """The ``matrices``. Raises ValueError if the shards of one do not tile it, or if a split does not fit."""
    # Matrices of equal layout and shape need one check.
    for matrix in {(m.layout, m.shape): m for m in reversed(matrices)}.values():
        regions = [r for shard in matrix.layout.shards for r in shard if r.numel]
        problem = _overlap(regions) or _gap(regions, matrix.shape)
        if problem:
            raise ValueError(f"{matrix.described}: {problem} ({matrix.placement})")
    for matrix in matrices:
        if matrix.split.sizes:
            problem = matrix.split.problem_with(matrix.shape)
            if problem:
                raise ValueError(f"{matrix.described}: {problem}")
    return matrices


def _gap(regions: Sequence[Region], shape: Shape) -> str:
    """How many elements ``regions`` without overlaps hold, for an error message; "" if they are those of a matrix."""
    rows, columns = shape
    numel = bottom = right = 0
    for region in regions:
        numel += region.numel
        bottom = max(bottom, region.row + region.height)
        right = max(right, region.column + region.width)
    # A matrix without elements has no regions.
    is_inside = not regions or (bottom == rows and right == columns)
    if is_inside and numel == rows * columns:
        return ""
    return f"its pieces hold {numel} of {rows * columns} elements"


def _overlap(regions: Sequence[Region]) -> str:
    """Where two of ``regions`` overlap, for an error message; "" if none do."""
    by_row = sorted(regions)
    # Only those that reach the row where others start can overlap these.
    band: list[Region] = []
    for top, starting in itertools.groupby(by_row, key=attrgetter("row")):
        reaching = [region for region in band if region.row + region.height > top]
        band = sorted([*reaching, *starting], key=attrgetter("column"))
        for left, right in itertools.pairwise(band):
            if left.column + left.width > right.column:
                bottom = min(left.row + left.height, right.row + right.height)
                return f"pieces overlap: rows {top} to {bottom}, column {right.column}"
    return ""
