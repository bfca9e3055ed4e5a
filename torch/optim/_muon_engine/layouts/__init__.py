"""Which rank stores which region of a matrix. What is special to a framework stays in here."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TYPE_CHECKING

import torch.distributed as dist


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup


class Region(NamedTuple):
    """A rectangle of a matrix, and where a rank's local storage holds it.

    Element (i, j) of the rectangle is element (row + i, column + j) of the matrix, and stands at
    ``offset + i * stride + j`` of the local tensor's elements.
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
    def end(self) -> int:
        """The element of the local tensor after the last one of this rectangle."""
        rows = (self.height - 1) * self.stride + self.width
        return self.offset + rows if self.numel else 0

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """The view of ``matrix``, of shape (rows, columns), that this rectangle covers."""
        if matrix.shape == (self.height, self.width):
            return matrix
        return matrix[
            self.row : self.row + self.height, self.column : self.column + self.width
        ]

    def of_local(self, local: Tensor) -> Tensor:
        """The view, of shape (height, width), of the local tensor that holds this rectangle."""
        if local.shape == (self.height, self.width):
            return local
        if local.ndim > 2 and local.numel():
            # A stack of matrices, of which this is in one.
            at, offset = divmod(self.offset, local.shape[-2] * local.shape[-1])
            matrix = local
            for size in (
                math.prod(local.shape[i:-2]) for i in range(1, local.ndim - 1)
            ):
                matrix = matrix[at // size]
                at %= size
            return self._replace(offset=offset).of_local(matrix)
        if self.end > local.numel():
            raise ValueError(
                f"a local tensor of shape {tuple(local.shape)} does not hold {self}: it is not the one that the layout "
                "was read from"
            )
        if local.ndim == 2 and local.shape[1] == self.stride:
            row, column = divmod(self.offset, self.stride)
            return local[row : row + self.height, column : column + self.width]
        flat = local.view(-1)
        # A gradient may have been expanded, so that its elements do not follow each other.
        (apart,) = flat.stride()
        return flat.as_strided(
            (self.height, self.width),
            (self.stride * apart, apart),
            flat.storage_offset() + self.offset * apart,
        )


def whole_regions(rows: int, columns: int) -> tuple[Region, ...]:
    """What a rank holds that has all of a matrix, in a tensor of its shape."""
    return (Region(0, 0, rows, columns, 0, columns),) if rows * columns else ()


class Key(NamedTuple):
    """Names one matrix: the parameter's index, its place in a flat parameter, its name if known.

    ``expert`` is the id of the expert that it belongs to, under expert parallelism.
    """

    # pyrefly: ignore [bad-override]
    index: int
    sub: int = 0
    name: str | None = None
    expert: int | None = None

    def describe(self, shape: tuple[int, ...]) -> str:
        name = f" {self.name!r}" if self.name is not None else ""
        sub = f", matrix {self.sub} of it," if self.sub else ""
        expert = f", expert {self.expert}," if self.expert is not None else ""
        return f"parameter {self.index}{name}{sub}{expert} of shape {tuple(shape)}"


class Shards:
    """The shards of all ranks of a group, of one matrix or of many that were read alike.

    Args:
        ranks: global ranks, in the framework's order.
        regions: for each of ``ranks`` the rectangles that it stores, in storage order; none where its
            shard is empty. Replicas hold equal rectangles.
        contributions: where the matrix is a sum of contributions that were never added up, which one
            each of ``ranks`` holds a shard of; otherwise empty.

    What follows from these is computed once: at real sizes there are many ranks and many matrices,
    and no loop goes over both.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        regions: tuple[tuple[Region, ...], ...],
        contributions: tuple[int, ...] = (),
    ) -> None:
        self.ranks = ranks
        self.regions = regions
        self.contributions = contributions

    def __repr__(self) -> str:
        return f"Shards({len(self.ranks)} ranks, {self.digest})"

    @cached_property
    def group(self) -> tuple[int, ...]:
        """The ranks that share the matrix, in the order that all of them agree on."""
        return tuple(sorted(self.ranks))

    @cached_property
    def _place(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """How many elements each of ``ranks`` stores."""
        return tuple(sum(r.numel for r in regions) for regions in self.regions)

    @cached_property
    def replica_sets(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that store one (contribution, shard), for each distinct one, in the group's order."""
        sets: dict[tuple[int, tuple[Region, ...]], list[int]] = {}
        contributions = self.contributions or itertools.repeat(0)
        for rank, of_sum, shard in zip(self.ranks, contributions, self.regions):
            sets.setdefault((of_sum, shard), []).append(rank)
        return tuple(map(tuple, sets.values()))

    @cached_property
    def replicas(self) -> int:
        """How many ranks store the shard that most of them store, of those that are not empty."""
        stored = (ranks for ranks in self.replica_sets if not self.is_empty(ranks[0]))
        return max(map(len, stored), default=0)

    @cached_property
    def _replica_number(self) -> dict[int, tuple[int, int]]:
        """Rank -> its replica set, and its place in the set."""
        return {
            rank: (at, number)
            for at, ranks in enumerate(self.replica_sets)
            for number, rank in enumerate(ranks)
        }

    @cached_property
    def digest(self) -> str:
        content = repr((self.ranks, self.regions, self.contributions))
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def partial(self) -> bool:
        return len(set(self.contributions)) > 1

    def __contains__(self, rank: int) -> bool:
        return rank in self._place

    def of(self, rank: int) -> tuple[Region, ...]:
        return self.regions[self._place[rank]]

    def is_empty(self, rank: int) -> bool:
        return not self.numels[self._place[rank]]

    def contribution_of(self, rank: int) -> int:
        return self.contributions[self._place[rank]] if self.contributions else 0

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that store what ``rank`` stores, itself among them."""
        return self.replica_sets[self._replica_number[rank][0]]

    def source(self, rank: int, owner: int) -> int:
        """Which replica of ``rank``'s shard is exchanged with ``owner``: the one of the owner's replica.

        The n-th ranks of all replica sets form the n-th replica.
        """
        replicas = self.replicas_of(rank)
        return replicas[min(self._replica_number[owner][1], len(replicas) - 1)]


@dataclass(frozen=True)
class Layout:
    """One matrix: its global shape, and which rank stores what of it.

    ``source`` says in words where the reader has this from, for error messages.
    """

    key: Key
    shape: tuple[int, int]
    dtype: torch.dtype
    shards: Shards
    source: str = ""

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks that share the matrix, in the order that all of them agree on."""
        return self.shards.group

    def describe(self) -> str:
        return self.key.describe(self.shape)


class Reader(Protocol):
    """Asks a framework where the shards of its parameters are. It knows no config and no engine."""

    # Whether a 1D parameter may be one that FSDP1 flattened.
    takes_flat_params: bool
    # Whether a parameter may be a stack of matrices, as the optimizer says.
    takes_stacks: bool

    def read(
        self,
        params: Sequence[Tensor],
        names: Sequence[str | None],
        error: BaseException | None = None,
    ) -> list[Layout]:
        """The layouts of all matrices in ``params``, in an order that all who share some have alike.

        A reader that asks other ranks tells them an ``error`` of this one, and raises it then.
        """

    def sharing(
        self, params: Sequence[Tensor]
    ) -> dict[tuple[int, ...], list[ProcessGroup]]:
        """Sorted ranks that share one of ``params``, as last read -> the framework's groups for it.

        If :meth:`read` raised, only what is known without it. All ranks on which it raised must return
        the same.
        """

    def meeting(
        self, params: Sequence[Tensor]
    ) -> dict[tuple[int, ...], list[ProcessGroup]]:
        """Sorted ranks that have to read ``params`` together -> their groups; known before reading."""

    def device_of(self, params: Sequence[Tensor]) -> torch.device:
        """Where the groups' collectives take their buffers."""

    def describe_state(self, state: dict[str, Any]) -> None:
        """Writes into a config's ``state`` what users are promised to find there."""

    def check_index(self, tensor: Tensor, index: int) -> None:
        """Raises IndexError where what the user said of parameter ``index`` cannot be."""

    def whole(self, tensor: Tensor, index: int) -> Tensor:
        """The full matrix of ``tensor``, on every caller."""

    def piece(self, full: Tensor, index: int) -> Tensor:
        """This rank's piece of ``full``, cut without communication."""


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first of ``names``, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def larger_first(groups: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The one order in which all ranks go through their groups: by size, then by rank."""
    return sorted(groups, key=lambda ranks: (-len(ranks), ranks))


def process_rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return 0


def whole_layouts(key: Key, param: Tensor) -> list[Layout]:
    """The layouts of matrices that this rank alone answers for, whole: one, or those of a stack."""
    if param.ndim < 2:
        raise ValueError(
            f"Muon only supports 2D parameters whereas we found {key.describe(param.shape)}"
        )
    rows, columns = param.shape[-2:]
    found = []
    for sub in range(math.prod(param.shape[:-2])):
        full = moved(whole_regions(rows, columns), sub * rows * columns)
        shards = Shards((process_rank(),), (full,))
        found.append(
            Layout(
                key._replace(sub=sub) if sub else key,
                (rows, columns),
                param.dtype,
                shards,
                "a plain tensor",
            )
        )
    return found


def moved(regions: tuple[Region, ...], offset: int) -> tuple[Region, ...]:
    """``regions``, held ``offset`` elements further on."""
    return tuple(region._replace(offset=region.offset + offset) for region in regions)


def check_cover(layout: Layout) -> None:
    """Raises ValueError unless the distinct shards tile the matrix: no gap, no overlap."""
    shards = layout.shards
    by_contribution: dict[int, list[Region]] = {}
    for rank, *_ in shards.replica_sets:
        regions = by_contribution.setdefault(shards.contribution_of(rank), [])
        regions += (region for region in shards.of(rank) if region.numel)
    for regions in by_contribution.values():
        _check_tiles(layout, regions)


def _check_tiles(layout: Layout, regions: list[Region]) -> None:
    rows, columns = layout.shape
    found = sum(region.numel for region in regions)
    # Bands of rows from the top down. Each rectangle is looked at in its own bands only.
    edges = sorted({edge for r in regions for edge in (r.row, r.row + r.height)})
    waiting = sorted(regions, reverse=True)
    band: list[Region] = []
    for top, bottom in itertools.pairwise(edges):
        band = [r for r in band if r.row + r.height > top]
        while waiting and waiting[-1].row < bottom:
            band.append(waiting.pop())
        reach = 0
        for left, right in sorted((r.column, r.column + r.width) for r in band):
            if left < reach:
                raise ValueError(
                    f"{layout.describe()}: pieces overlap in rows {top} to {bottom}, column {left} ({layout.source})"
                )
            reach = right
    if found != layout.numel or any(
        min(r.row, r.column) < 0
        or r.row + r.height > rows
        or r.column + r.width > columns
        for r in regions
    ):
        raise ValueError(
            f"{layout.describe()}: its pieces hold {found} of {layout.numel} elements ({layout.source})"
        )
