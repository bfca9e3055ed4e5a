"""Ranks tell each other over process groups what they hold, and put it together to layouts.

A group does not say how a matrix was cut, so nothing about sizes is assumed. Cuts are undone in the
reverse of the order in which they were made, with the sizes that the members of each group report.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, TYPE_CHECKING

import torch.distributed as dist
from torch.optim._muon_engine.agreement import exchange, names_ranks
from torch.optim._muon_engine.layouts import (
    check_cover,
    Key,
    Layout,
    Region,
    Shards,
)


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch.distributed import ProcessGroup


# The order in which cuts are undone. FSDP cuts last, the shard that TP left; what remains are replicas.
KINDS = ("fsdp", "tp", "ddp", "cp")

_IN_WORDS = {
    "name": "its name",
    "dtype": "its dtype",
    "dim": "the dimension that it is cut along (None: not at all)",
}


class Part(NamedTuple):
    """What a set of ranks holds of one matrix, in coordinates of what they hold together."""

    shape: tuple[int, int]
    holders: tuple[tuple[int, tuple[Region, ...]], ...]


class GroupPlacement(NamedTuple):
    """A group over which a matrix is cut along ``dim``, or replicated where that is None."""

    kind: str
    group: ProcessGroup
    dim: int | None = None
    # Of a DTensor, whose placements count rather than the group.
    lenient: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def cuts(self) -> bool:
        # FSDP1's regions are in the matrix's coordinates already: sharded, but not along a dimension.
        return self.kind == "fsdp" or self.dim is not None


class LocalMatrix(NamedTuple):
    """What this rank knows of one matrix by itself."""

    key: Key
    dtype: torch.dtype
    part: Part
    placements: tuple[GroupPlacement, ...]
    source: str = ""
    contributions: tuple[int, ...] = ()


class _Told(NamedTuple):
    """What one rank tells the others of a group about one matrix."""

    name: str | None
    dtype: str
    part: Part
    dim: int | None


# What the members of a group call a matrix that they share: the expert's id, if it is an expert's, and
# its number among those. Ranks may hold others beside these.
_Name = tuple["int | None", int]


def merge(
    matrices: Sequence[LocalMatrix],
    groups: Iterable[tuple[str, ProcessGroup]],
    ep_ranks: tuple[int, ...],
    error: BaseException | None,
) -> tuple[list[Layout], list[str]]:
    """The layout of each of ``matrices``, and warnings.

    Args:
        matrices: in the order of their keys.
        groups: kind and group of those to go through, even if no matrix of this rank asks for it.
        ep_ranks: the ranks of this rank's expert-parallel group, none of which has a replica of its experts.
        error: what went wrong on this rank so far. It is told to the others, who are waiting.

    Raises:
        ValueError: groups contradict each other, or shards do not tile a matrix; like ``error``, on
            every rank that is linked to the one that found it.
    """
    return _Merge(matrices, groups, ep_ranks).run(error)


class _Merge:
    def __init__(
        self,
        matrices: Sequence[LocalMatrix],
        groups: Iterable[tuple[str, ProcessGroup]],
        ep_ranks: tuple[int, ...],
    ) -> None:
        self.matrices = matrices
        self.ep_ranks = ep_ranks
        self.parts = [matrix.part for matrix in matrices]
        self.same_parts: dict[Part, Part] = {}
        self.warnings: list[str] = []
        given = [GroupPlacement(kind, group) for kind, group in groups]
        given += [p for matrix in matrices for p in matrix.placements]
        known = {(p.kind, p.ranks): p.group for p in given if len(p.ranks) > 1}
        # One order on all ranks: by kind, then larger groups first.
        self.order = [
            (*name, known[name])
            for name in sorted(
                known, key=lambda k: (KINDS.index(k[0]), -len(k[1]), sorted(k[1]))
            )
        ]

    def run(self, error: BaseException | None) -> tuple[list[Layout], list[str]]:
        for kind, ranks, group in self.order:
            error = self.merge_over(kind, ranks, group, error)
        layouts: list[Layout] = []
        if error is None:
            try:
                layouts = self.layouts()
            except Exception as found:
                error = found
        # Forth, back, forth: what a rank found reaches all that it is linked to through the groups.
        for kind, ranks, group in (*reversed(self.order), *self.order):
            error = self.compare(kind, ranks, group, layouts, error)
        if error is not None:
            raise error
        return layouts, self.warnings

    def shared_over(
        self, kind: str, ranks: tuple[int, ...]
    ) -> dict[_Name, tuple[int, GroupPlacement]]:
        """This rank's matrices that a group shares, with its placement over the group."""
        counts: Counter[int | None] = Counter()
        found: dict[_Name, tuple[int, GroupPlacement]] = {}
        for number, matrix in enumerate(self.matrices):
            for placement in matrix.placements:
                if placement.kind == kind and placement.ranks == ranks:
                    expert = matrix.key.expert
                    found[expert, counts[expert]] = number, placement
                    counts[expert] += 1
                    break
        return found

    def merge_over(
        self,
        kind: str,
        ranks: tuple[int, ...],
        group: ProcessGroup,
        error: BaseException | None,
    ) -> BaseException | None:
        """Exchanges over one group, and puts together what its members hold."""
        shared = self.shared_over(kind, ranks)
        mine: dict[_Name, _Told] = {}
        for name, (number, placement) in shared.items():
            matrix = self.matrices[number]
            mine[name] = _Told(
                # Experts go by their ids: ranks may name their modules each in its own way.
                matrix.key.name if matrix.key.expert is None else None,
                str(matrix.dtype),
                self.parts[number],
                placement.dim,
            )
        names = self.names(shared)
        reports, error = exchange(group, (self.ep_ranks, mine), error, names)
        if error is not None:
            return error
        try:
            for name, (number, placement) in shared.items():
                members = self.members(name, number, placement, ranks, reports)
                self.join(number, placement, members)
            self.check_counts(ranks, reports)
        except Exception as found:
            # Whatever it is: the others go on to the next exchange.
            return found
        return None

    def members(
        self,
        name: _Name,
        number: int,
        placement: GroupPlacement,
        ranks: tuple[int, ...],
        reports: Sequence[tuple],
    ) -> list[tuple[int, _Told]]:
        """The ranks of a group that hold a shard of the same matrix, with what they tell of it.

        A group that replicates never has a replica of an expert on a rank of this rank's own
        expert-parallel group.
        """
        holders = [
            (rank, ep_ranks, told[name])
            for rank, (ep_ranks, told) in zip(ranks, reports, strict=True)
            if name in told
        ]
        expert = self.matrices[number].key.expert
        one_place = len({ep_ranks for _, ep_ranks, _ in holders}) == 1
        if expert is None or (placement.cuts and one_place):
            return [(rank, told) for rank, _, told in holders]
        if not placement.cuts:
            me = dist.get_rank()
            holders = [h for h in holders if h[0] == me or h[0] not in self.ep_ranks]
        seen: dict[tuple[int, ...], int] = {}
        for rank, ep_ranks, _ in holders:
            other = seen.setdefault(ep_ranks, rank)
            if other != rank:
                raise ValueError(
                    f"{self.describe(number)}: ranks {other} and {rank} both say that they hold expert {expert}, "
                    "but are in one ep_process_group, whose ranks hold different experts. Number the experts "
                    "through over that group in expert_assignments"
                )
        return [(rank, told) for rank, _, told in holders]

    def check_counts(self, ranks: tuple[int, ...], reports: Sequence[tuple]) -> None:
        """Raises unless all members of a group share as many matrices that are no expert's."""
        counts = [sum(expert is None for expert, _ in told) for _, told in reports]
        for rank, count in zip(ranks, counts, strict=True):
            if count != counts[0]:
                raise names_ranks(
                    ValueError(
                        f"ranks disagree about the number of parameters that they share: {counts[0]} on rank "
                        f"{ranks[0]} and {count} on rank {rank}. Ranks of a process group have to build their Muon "
                        "from the same ones; those of experts are told apart by expert_assignments"
                    )
                )

    def names(self, shared: dict[_Name, tuple[int, GroupPlacement]]) -> list[str]:
        """The matrices in ``shared``; all, where a group shares what other groups put together."""
        numbers = [number for number, _ in shared.values()]
        return [self.describe(at) for at in numbers or range(len(self.matrices))]

    def describe(self, number: int) -> str:
        return self.matrices[number].key.describe(self.parts[number].shape)

    def join(
        self,
        number: int,
        placement: GroupPlacement,
        members: Sequence[tuple[int, _Told]],
    ) -> None:
        """Replaces the part that is known of a matrix by what ``members`` hold together."""
        where = f"{self.describe(number)}, over {placement.kind}_process_group (ranks {list(placement.ranks)})"
        first_rank, first = members[0]
        for rank, told in members[1:]:
            for field, in_words in _IN_WORDS.items():
                mine, its = getattr(first, field), getattr(told, field)
                if mine != its:
                    raise names_ranks(
                        ValueError(
                            f"ranks disagree about {where}: {in_words} is {mine} on rank {first_rank} and {its} on "
                            f"rank {rank}"
                        )
                    )
        parts = [told.part for _, told in members]
        try:
            if placement.dim is None:
                # The ranks that share a context may be among those that FSDP shards over.
                again = placement.lenient or placement.kind == "cp"
                part = overlay(parts, again=again)
            else:
                part = stack(parts, placement.dim)
            # Pickled once for all matrices that are cut alike.
            self.parts[number] = self.same_parts.setdefault(part, part)
        except ValueError as found:
            if not placement.lenient:
                raise ValueError(f"{where}: {found}") from None
            self.warnings.append(
                f"{where}: {found}. The DTensor's placements count: {self.matrices[number].source}"
            )

    def layouts(self) -> list[Layout]:
        layouts = []
        known: dict[tuple, Shards] = {}
        for matrix, part in zip(self.matrices, self.parts, strict=True):
            # Of matrices that are cut alike, join() kept one part.
            alike = id(part), matrix.contributions
            shards = known.get(alike)
            if shards is None:
                ranks = tuple(rank for rank, _ in part.holders)
                regions = tuple(shard for _, shard in part.holders)
                shards = Shards(ranks, regions, matrix.contributions)
            layout = Layout(matrix.key, part.shape, matrix.dtype, shards, matrix.source)
            if alike not in known:
                check_cover(layout)
                known[alike] = shards
            layouts.append(layout)
        return layouts

    def compare(
        self,
        kind: str,
        ranks: tuple[int, ...],
        group: ProcessGroup,
        layouts: Sequence[Layout],
        error: BaseException | None,
    ) -> BaseException | None:
        """Returns an error of this rank or another, or that holders came to different layouts."""
        shared = self.shared_over(kind, ranks) if layouts else {}
        mine = {
            name: (_digest(layouts[number]), _some_of(layouts[number].group))
            for name, (number, _) in shared.items()
        }
        names = self.names(shared)
        reports, error = exchange(group, mine, error, names)
        if error is not None:
            return error
        me = dist.get_rank()
        for name, (digest, holders) in mine.items():
            shards = layouts[shared[name][0]].shards
            for rank, its in zip(ranks, reports, strict=True):
                # Of other ranks' experts, only those that this rank shares are its business.
                if name not in its or rank not in shards:
                    continue
                if its[name][0] != digest:
                    return ValueError(
                        f"{self.describe(shared[name][0])}: the process groups contradict each other. As rank {me} "
                        f"sees it, ranks {holders} hold it, but as rank {rank} does, ranks {its[name][1]}. Give groups "
                        "of one grid of ranks, for example those of a DeviceMesh's dimensions"
                    )
        return None


def _digest(layout: Layout) -> tuple[tuple[int, int], str]:
    return layout.shape, layout.shards.digest


def _some_of(ranks: tuple[int, ...]) -> str:
    """``ranks`` in a text whose length does not grow with them."""
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"{list(ranks[:16])}{more}"


def stack(parts: Sequence[Part], dim: int) -> Part:
    """Shards along ``dim``, one after the other."""
    other = 1 - dim
    sizes = {part.shape[other] for part in parts}
    if len(sizes) != 1:
        raise ValueError(
            f"pieces of shapes {[part.shape for part in parts]} cannot be put together along dimension {dim}: they "
            f"differ in dimension {other} too"
        )
    holders: list[tuple[int, tuple[Region, ...]]] = []
    offset = 0
    for part in parts:
        for rank, regions in part.holders:
            moved = tuple(
                region._replace(
                    row=region.row + (offset if dim == 0 else 0),
                    column=region.column + (offset if dim == 1 else 0),
                )
                for region in regions
            )
            holders.append((rank, moved))
        offset += part.shape[dim]
    _check_each_once(holders)
    size = sizes.pop()
    return Part((offset, size) if dim == 0 else (size, offset), tuple(holders))


def overlay(parts: Sequence[Part], *, again: bool = False) -> Part:
    """Replicas; with ``again`` a replica may be what is known of those ranks already."""
    shapes = [part.shape for part in parts]
    if len(set(shapes)) != 1:
        raise ValueError(f"replicas have different shapes: {shapes}")
    holders = [holder for part in parts for holder in part.holders]
    if again:
        holders = list(dict.fromkeys(holders))
    _check_each_once(holders)
    return Part(shapes[0], tuple(holders))


def _check_each_once(holders: Sequence[tuple[int, tuple[Region, ...]]]) -> None:
    counts = Counter(rank for rank, _ in holders)
    doubled = sorted(rank for rank, count in counts.items() if count > 1)
    if doubled:
        raise ValueError(
            f"the process groups contradict each other: ranks {doubled} are in more than one of them. The groups must "
            "form a grid, like the dimensions of a DeviceMesh: two of them have one rank in common"
        )
