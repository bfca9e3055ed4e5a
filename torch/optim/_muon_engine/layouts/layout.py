"""Which rank stores which region of a matrix."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..process_groups import Ranks


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
    repeat: tuple[int, int, int] = (0, 1, 0)

    @property
    def numel(self) -> int:
        return self.height * self.width

    def span(self, dim: int) -> tuple[int, int]:
        """The first row (dim 0) or column (dim 1), and how many there are."""
        return (self.column, self.width) if dim else (self.row, self.height)

    def shifted(self, dim: int, by: int, extent: int | None = None) -> "Region":
        """This rectangle ``by`` rows (dim 0) or columns (dim 1) further on, of ``extent`` of them."""
        start, size = self.span(dim)
        size = size if extent is None else extent
        if dim:
            return self._replace(column=start + by, width=size)
        return self._replace(row=start + by, height=size)

    def in_blocks(self, view: Tensor) -> Tensor:
        """A ``view`` of shape (height, width), with one more dimension for several blocks."""
        dim, count, _ = self.repeat
        return view if count == 1 else view.unflatten(dim, (count, -1))

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """The view of ``matrix`` that is this rectangle; of three dimensions for several blocks."""
        if matrix.shape != (self.height, self.width):
            rows = slice(self.row, self.row + self.height)
            matrix = matrix[rows, self.column : self.column + self.width]
        return self.in_blocks(matrix)

    def of_local(self, local: Tensor) -> Tensor:
        """The view of the local tensor that holds this rectangle, of the shape that :meth:`of_matrix` has."""
        dim, count, apart = self.repeat
        if count == 1 and local.shape == (self.height, self.width):
            return local
        sizes, steps = [self.height, self.width], [self.stride, 1]
        if count > 1:
            sizes[dim : dim + 1] = count, sizes[dim] // count
            steps.insert(dim, apart)
        last = self.offset + sum((n - 1) * step for n, step in zip(sizes, steps))
        if local.ndim > 2 and local.numel():
            at, offset = divmod(self.offset, local[0].numel())
            if last < (at + 1) * local[0].numel():
                return self._replace(offset=offset).of_local(local[at])
        if last >= local.numel():
            raise ValueError(
                f"a local tensor of shape {tuple(local.shape)} does not hold {self}, which its layout was read from"
            )
        # A gradient may have any strides. One may have been expanded.
        if local.ndim == 2 and local.shape[1] == self.stride:
            row, column = local.stride()
        else:
            column = local.view(-1).stride(0)
            row = column * self.stride
        start, *strides = (
            step // self.stride * row + step % self.stride * column
            for step in (self.offset, *steps)
        )
        return local.as_strided(sizes, strides, local.storage_offset() + start)


Regions = tuple[Region, ...]
Shape = tuple[int, int]


class Key(NamedTuple):
    """Names the ``sub``-th matrix of parameter ``index``, and of a divided one the block."""

    # pyrefly: ignore [bad-override]
    index: int
    sub: int = 0
    name: str | None = None
    expert: int | None = None
    # The place of a block, and the number of blocks.
    block: tuple[int, int] = (0, 1)

    @property
    def short(self) -> str:
        name = self.name if self.name is not None else f"parameter {self.index}"
        name += f"[{self.sub}]" if self.sub else ""
        place, count = self.block
        return f"{name} {place + 1}/{count}" if count > 1 else name

    def describe(self, shape: tuple[int, ...]) -> str:
        """The matrix in words, with the ``shape`` of the tensor that is meant."""
        text = f"parameter {self.index}"
        text += f" {self.name!r}" if self.name is not None else ""
        text += f", its matrix {self.sub}," if self.sub else ""
        text += f", expert {self.expert}," if self.expert is not None else ""
        place, count = self.block
        text += f", block {place + 1} of {count}," if count > 1 else ""
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
    # Which contribution to a sum (Partial) each shard is; empty for no sum.
    contributions: tuple[int, ...] = ()
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
        return tuple(sum(r.numel for r in regions) for regions in self.regions)

    @cached_property
    def replica_sets(self) -> tuple[Ranks, ...]:
        """The ranks that store one (contribution, shard), for each distinct one, in the order of ``ranks``."""
        sets: dict[tuple[int, Regions], list[int]] = {}
        contributions = self.contributions or itertools.repeat(0)
        for rank, of_sum, shard in zip(self.ranks, contributions, self.regions):
            sets.setdefault((of_sum, shard), []).append(rank)
        return tuple(map(tuple, sets.values()))

    @cached_property
    def most_replicas(self) -> int:
        """The largest number of replicas of a shard that is not empty."""
        stored = (ranks for ranks in self.replica_sets if not self.is_empty(ranks[0]))
        return max(map(len, stored), default=0)

    @cached_property
    def _replicas(self) -> dict[int, tuple[Ranks, int]]:
        """Rank -> the replicas of its shard, and its place among them."""
        sets = self.replica_sets
        return {rank: (ranks, n) for ranks in sets for n, rank in enumerate(ranks)}

    @cached_property
    def digest(self) -> str:
        """A hash that ranks compare in place of the shards."""
        content = repr((self.ranks, self.regions, self.contributions))
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @cached_property
    def partial(self) -> bool:
        return len(set(self.contributions)) > 1

    def of(self, rank: int) -> Regions:
        return self.regions[self._place[rank]]

    def is_empty(self, rank: int) -> bool:
        """Whether ``rank`` shares the matrix, but stores no element of it."""
        return not self.numel_of(rank)

    def numel_of(self, rank: int) -> int:
        return self.numels[self._place[rank]]

    def contribution_of(self, rank: int) -> int:
        return self.contributions[self._place[rank]] if self.contributions else 0

    def replicas_of(self, rank: int) -> Ranks:
        return self._replicas[rank][0]

    def source(self, rank: int, owner: int) -> int:
        """The rank that exchanges ``rank``'s shard with ``owner``: itself, or another replica of the shard."""
        # The one at the owner's place of its replicas, so that HSDP's shard groups stay together.
        replicas, (_, place) = self.replicas_of(rank), self._replicas[owner]
        return replicas[min(place, len(replicas) - 1)]


class Cut(NamedTuple):
    """A process group over which a matrix is cut along ``dim``; None for replicas and for FSDP1's regions."""

    kind: str
    ranks: Ranks
    dim: int | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks hold different shards, and not replicas."""
        return self.kind == "fsdp" or self.dim is not None


Cuts = tuple[Cut, ...]


@dataclass(frozen=True)
class Layout:
    """One matrix, or a block of a divided one: its global shape, and which rank stores what of it.
    ``placement`` names the placements or groups, for error messages. A ``frozen`` one is in no bucket.
    While ranks read, a layout is what a rank knows, and the ranks of ``cuts`` know the rest. ``block_of`` is
    the shape of the matrix that a block is from.
    """

    key: Key
    shape: Shape
    dtype: torch.dtype
    shards: Shards
    placement: str = ""
    frozen: bool = False
    cuts: Cuts = ()
    block_of: Shape | None = None

    @property
    def full_shape(self) -> Shape:
        """The shape of the matrix; of a block, that of the matrix that it is from."""
        return self.block_of or self.shape

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def holders(self) -> Ranks:
        return self.shards.holders

    def describe(self) -> str:
        return self.key.describe(self.shape)


def matrix_shape(shape: Sequence[int], flatten: bool) -> Shape:
    """The shape of a matrix in a parameter: dimension 0 by all others, or else the last two."""
    return (shape[0], math.prod(shape[1:])) if flatten else (shape[-2], shape[-1])


def not_2d(described: str) -> ValueError:
    """The error for a parameter that holds no matrix, in upstream's words."""
    return ValueError(f"Muon only supports 2D parameters whereas we found {described}")


def check_cover(layout: Layout) -> None:
    """Raises ValueError unless the distinct shards tile the matrix: no gap, no overlap."""
    shards, (rows, columns) = layout.shards, layout.shape
    by_contribution: dict[int, list[Region]] = {}
    for rank, *_ in shards.replica_sets:
        regions = by_contribution.setdefault(shards.contribution_of(rank), [])
        regions += (region for region in shards.of(rank) if region.numel)
    for regions in by_contribution.values():
        problem, numel = _overlap(regions), sum(region.numel for region in regions)
        bottom = max((r.row + r.height for r in regions), default=rows)
        right = max((r.column + r.width for r in regions), default=columns)
        if not problem and (numel, bottom, right) != (layout.numel, rows, columns):
            problem = f"its pieces hold {numel} of {layout.numel} elements"
        if problem:
            raise ValueError(f"{layout.describe()}: {problem} ({layout.placement})")


def _overlap(regions: list[Region]) -> str:
    """Where two of ``regions`` overlap, for an error message; "" if none do."""
    # Only those that reach the row where others start can overlap these.
    band: list[Region] = []
    for top, starting in itertools.groupby(sorted(regions), key=lambda r: r.row):
        band = [*(r for r in band if r.row + r.height > top), *starting]
        band.sort(key=lambda r: r.column)
        for left, right in itertools.pairwise(band):
            if left.column + left.width > right.column:
                bottom = min(left.row + left.height, right.row + right.height)
                return f"pieces overlap: rows {top} to {bottom}, column {right.column}"
    return ""
