"""Which rank stores which region of a matrix."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..process_groups import Ranks


# The ``repeat`` of a rectangle that is one block.
ONE_BLOCK = (0, 1, 0)


class Region(NamedTuple):
    """A rectangle of a matrix, and where a rank's local storage holds it. Element (i, j) of the rectangle is
    element (row + i, column + j) of the matrix, and element ``offset + i * stride + j`` of the local tensor.
    With a ``repeat`` of (dim, count, apart), the rows (dim 0) or columns (dim 1) are ``count`` equal blocks,
    which begin ``apart`` elements from each other.
    """

    row: int
    column: int
    height: int
    width: int
    offset: int
    stride: int
    repeat: tuple[int, int, int] = ONE_BLOCK

    @property
    def numel(self) -> int:
        return self.height * self.width

    def span(self, dim: int) -> tuple[int, int]:
        """The first row (dim 0) or column (dim 1), and how many there are."""
        if dim:
            return self.column, self.width
        return self.row, self.height

    def shifted(self, dim: int, by: int, extent: int | None = None) -> "Region":
        """This rectangle ``by`` rows (dim 0) or columns (dim 1) further on, of ``extent`` of them."""
        start, size = self.span(dim)
        if extent is not None:
            size = extent
        if dim:
            return self._replace(column=start + by, width=size)
        return self._replace(row=start + by, height=size)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements follow each other in local storage."""
        _, count, _ = self.repeat
        return count == 1 and (self.height <= 1 or self.width == self.stride)

    def in_blocks(self, view: Tensor) -> Tensor:
        """A ``view`` of shape (height, width), with one more dimension for several blocks."""
        dim, count, _ = self.repeat
        if count == 1:
            return view
        return view.unflatten(dim, (count, -1))

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """The view of ``matrix`` that is this rectangle; of three dimensions for several blocks."""
        if matrix.shape != (self.height, self.width):
            rows = slice(self.row, self.row + self.height)
            columns = slice(self.column, self.column + self.width)
            matrix = matrix[rows, columns]
        return self.in_blocks(matrix)

    def of_local(self, local: Tensor) -> Tensor:
        """The view of the local tensor that holds this rectangle, of the shape that :meth:`of_matrix` has."""
        dim, count, apart = self.repeat
        if count == 1 and local.shape == (self.height, self.width):
            return local
        sizes = [self.height, self.width]
        steps = [self.stride, 1]
        if count > 1:
            sizes[dim : dim + 1] = count, sizes[dim] // count
            steps.insert(dim, apart)
        last = self.offset
        for size, step in zip(sizes, steps):
            last += (size - 1) * step
        if local.ndim > 2 and local.numel():
            numel = local[0].numel()
            matrix, offset = divmod(self.offset, numel)
            if last < (matrix + 1) * numel:
                return self._replace(offset=offset).of_local(local[matrix])
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

        def in_storage(step: int) -> int:
            rows, columns = divmod(step, self.stride)
            return rows * row_stride + columns * column_stride

        start = local.storage_offset() + in_storage(self.offset)
        strides = [in_storage(step) for step in steps]
        return local.as_strided(sizes, strides, start)


Regions = tuple[Region, ...]
Shape = tuple[int, int]


class Key(NamedTuple):
    """Names the ``sub``-th matrix of parameter ``index``."""

    # pyrefly: ignore [bad-override]
    index: int
    sub: int = 0
    name: str | None = None
    expert: int | None = None

    @property
    def short(self) -> str:
        text = f"parameter {self.index}" if self.name is None else self.name
        if self.sub:
            text += f"[{self.sub}]"
        return text

    def describe(self, shape: tuple[int, ...]) -> str:
        """The matrix in words, with the ``shape`` of the tensor that is meant."""
        text = f"parameter {self.index}"
        if self.name is not None:
            text += f" {self.name!r}"
        if self.sub:
            text += f", its matrix {self.sub},"
        if self.expert is not None:
            text += f", expert {self.expert},"
        return f"{text} of shape {tuple(shape)}"


# Equal objects are few, and are compared by identity.
@dataclass(eq=False, repr=False)
class Shards:
    """The shards of all ranks of a group, of one matrix or of many with equal shards.

    Derived properties are computed once, because no loop may go over both all ranks and all matrices.
    A rank that holds no shard is a KeyError.
    """

    # Global ranks, in the framework's order.
    ranks: Ranks
    # The regions of each of these ranks, in storage order. Replicas hold equal rectangles.
    regions: tuple[Regions, ...]
    # How matrices with these shards were cut -> the shards of each part, which they share.
    parts: dict[Any, list["Shards"]] = field(default_factory=dict)

    @cached_property
    def holders(self) -> Ranks:
        """The same ranks, sorted."""
        return tuple(sorted(self.ranks))

    @cached_property
    def _place(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def numels(self) -> tuple[int, ...]:
        numels: list[int] = []
        for regions in self.regions:
            numels.append(sum(region.numel for region in regions))
        return tuple(numels)

    @cached_property
    def replica_sets(self) -> tuple[Ranks, ...]:
        """The ranks that store one shard, for each distinct one, in the order of ``ranks``."""
        sets: dict[Regions, list[int]] = {}
        for rank, shard in zip(self.ranks, self.regions):
            sets.setdefault(shard, []).append(rank)
        return tuple(map(tuple, sets.values()))

    @cached_property
    def most_replicas(self) -> int:
        """The largest number of replicas of a shard that is not empty."""
        most = 0
        for ranks in self.replica_sets:
            if not self.is_empty(ranks[0]):
                most = max(most, len(ranks))
        return most

    @cached_property
    def _replicas(self) -> dict[int, tuple[int, int]]:
        """Rank -> the number of its replica set, and its place in the set."""
        replicas: dict[int, tuple[int, int]] = {}
        for number, ranks in enumerate(self.replica_sets):
            for place, rank in enumerate(ranks):
                replicas[rank] = number, place
        return replicas

    def replica_set_of(self, rank: int) -> int:
        """The number of the set of replicas of ``rank``'s shard."""
        number, _ = self._replicas[rank]
        return number

    @cached_property
    def digest(self) -> str:
        """A hash that ranks compare in place of the shards."""
        content = repr((self.ranks, self.regions))
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def of(self, rank: int) -> Regions:
        return self.regions[self._place[rank]]

    def is_empty(self, rank: int) -> bool:
        """Whether ``rank`` shares the matrix, but stores no element of it."""
        return not self.numel_of(rank)

    def numel_of(self, rank: int) -> int:
        return self.numels[self._place[rank]]

    def replicas_of(self, rank: int) -> Ranks:
        return self.replica_sets[self.replica_set_of(rank)]

    def source(self, rank: int, owner: int) -> int:
        """The rank that exchanges ``rank``'s shard with ``owner``: itself, or another replica of the shard."""
        # The one at the owner's place of its replicas, so that HSDP's shard groups stay together. All ranks
        # with empty shards are replicas of each other, so a shard has fewer replicas than they are. Therefore the place
        # is in proportion.
        replicas = self.replicas_of(rank)
        _, place_of_owner = self._replicas[owner]
        replicas_of_owner = self.replicas_of(owner)
        return replicas[place_of_owner * len(replicas) // len(replicas_of_owner)]


@dataclass(frozen=True)
class Layout:
    """One matrix: its global shape, and which rank stores what of it. ``placement`` names the placements or groups,
    for error messages. A ``frozen`` one is in no bucket.
    """

    key: Key
    shape: Shape
    dtype: torch.dtype
    shards: Shards
    placement: str = ""
    frozen: bool = False

    @property
    def numel(self) -> int:
        rows, columns = self.shape
        return rows * columns

    @property
    def holders(self) -> Ranks:
        return self.shards.holders

    def describe(self) -> str:
        return self.key.describe(self.shape)


def matrix_shape(shape: Sequence[int], flatten: bool) -> Shape:
    """The shape of a matrix in a parameter: dimension 0 by all others, or else the last two."""
    if flatten:
        return shape[0], math.prod(shape[1:])
    return shape[-2], shape[-1]


def not_2d(described: str) -> ValueError:
    """The error for a parameter that holds no matrix, in upstream's words."""
    return ValueError(f"Muon only supports 2D parameters whereas we found {described}")


def check_cover(layout: Layout) -> None:
    """Raises ValueError unless the distinct shards tile the matrix: no gap, no overlap."""
    regions: list[Region] = []
    for rank, *_ in layout.shards.replica_sets:
        regions += [region for region in layout.shards.of(rank) if region.numel]
    problem = _overlap(regions) or _gap(regions, layout.shape)
    if problem:
        raise ValueError(f"{layout.describe()}: {problem} ({layout.placement})")


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
