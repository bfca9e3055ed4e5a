"""Ranks tell each other over process groups what they hold, and put it together to layouts.

A group does not say how a matrix was cut, so nothing about sizes is assumed. Cuts are undone in the
reverse of the order in which they were made, with the sizes that the members of each group report.

A model has many layers and few kinds of matrices. A rank tells of each kind once, and matrices of which
every rank holds the same kind of part are put together once.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, TYPE_CHECKING

import torch.distributed as dist
from torch.optim._muon_engine.layouts import (
    check_cover,
    Key,
    Layout,
    Region,
    Shards,
)
from torch.optim._muon_engine.layouts.reports import (
    Answers,
    Entry,
    Name,
    report_of,
    some_of,
    tell,
)


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch.distributed import ProcessGroup


# The order in which cuts are undone. FSDP cuts last, the shard that TP left; what remains are replicas.
KINDS = ("fsdp", "tp", "ddp", "cp")


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
    # One object for all matrices that this rank holds alike, by which it is told once.
    part: Part
    placements: tuple[GroupPlacement, ...]
    source: str = ""
    contributions: tuple[int, ...] = ()


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
        self.warnings: list[str] = []
        given = [GroupPlacement(kind, group) for kind, group in groups]
        given += [p for matrix in matrices for p in matrix.placements]
        # Asked once for each group, since the answer is as long as there are ranks.
        each = {(p.kind, id(p.group)): p for p in given}.values()
        self.ranks = {id(p.group): p.ranks for p in each}
        known = {(p.kind, p.ranks): p.group for p in each}
        # One order on all ranks: by kind, then larger groups first.
        self.order = [
            (*name, known[name])
            for name in sorted(
                known, key=lambda k: (KINDS.index(k[0]), -len(k[1]), sorted(k[1]))
            )
            if len(name[1]) > 1
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
    ) -> dict[Name, tuple[int, GroupPlacement]]:
        """This rank's matrices that a group shares, with its placement over the group."""
        counts: Counter[int | None] = Counter()
        found: dict[Name, tuple[int, GroupPlacement]] = {}
        for number, matrix in enumerate(self.matrices):
            for placement in matrix.placements:
                if placement.kind == kind and self.ranks[id(placement.group)] == ranks:
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
        table = []
        for name, (number, placement) in shared.items():
            matrix = self.matrices[number]
            # Experts go by their ids: ranks may name their modules each in its own way.
            called = matrix.key.name if matrix.key.expert is None else None
            table.append(Entry(name, called, str(matrix.dtype), placement.dim))
        parts = [self.parts[number] for number, _ in shared.values()]
        mine = report_of(table, parts, self.ep_ranks)
        answers, error = tell(group, mine, table, error, self.names(shared))
        if error is not None:
            return error
        try:
            self.join(shared, table, answers)
            answers.check_counts()
        except Exception as found:
            # Whatever it is: the others go on to the next exchange.
            return found
        return None

    def join(
        self,
        shared: dict[Name, tuple[int, GroupPlacement]],
        table: list[Entry],
        answers: Answers,
    ) -> None:
        """Replaces the part that is known of each matrix by what its members hold together."""
        members: dict[tuple, list[int]] = {}
        joined: dict[tuple, Part] = {}
        for entry, column in zip(table, answers.columns(table), strict=True):
            number, placement = shared[entry.name]
            where = f"{self.describe(number)}, over {placement.kind}_process_group "
            where += f"(ranks {some_of(answers.ranks)})"
            expert = self.matrices[number].key.expert
            alike = expert is None, placement.dim, placement.lenient, column
            if alike not in members:
                members[alike] = self.members(number, placement, answers, column)
            at = members[alike]
            answers.check_entries(entry.name, at, where)
            try:
                if alike not in joined:
                    parts = [
                        answers.reports[i].values[which]
                        for i in at
                        if (which := column[i]) is not None
                    ]
                    joined[alike] = _joined(placement, parts)
                self.parts[number] = joined[alike]
            except ValueError as found:
                if not placement.lenient:
                    raise ValueError(f"{where}: {found}") from None
                self.warnings.append(
                    f"{where}: {found}. The DTensor's placements count: {self.matrices[number].source}"
                )

    def members(
        self,
        number: int,
        placement: GroupPlacement,
        answers: Answers,
        column: tuple[int | None, ...],
    ) -> list[int]:
        """Where in a group those ranks are that hold a shard of the same matrix.

        A group that replicates never has a replica of an expert on a rank of this rank's own
        expert-parallel group.

        Args:
            column: the matrix's; see :meth:`Answers.columns`.
        """
        ranks, reports = answers.ranks, answers.reports
        found = [i for i, which in enumerate(column) if which is not None]
        expert = self.matrices[number].key.expert
        one_place = len({reports[i].ep_ranks for i in found}) == 1
        if expert is None or (placement.cuts and one_place):
            return found
        if not placement.cuts:
            me = dist.get_rank()
            found = [
                i for i in found if ranks[i] == me or ranks[i] not in self.ep_ranks
            ]
        seen: dict[tuple[int, ...], int] = {}
        for i in found:
            other = seen.setdefault(reports[i].ep_ranks, ranks[i])
            if other != ranks[i]:
                raise ValueError(
                    f"{self.describe(number)}: ranks {other} and {ranks[i]} both say that they hold expert {expert}, "
                    "but are in one ep_process_group, whose ranks hold different experts. Number the experts "
                    "through over that group in expert_assignments"
                )
        return found

    def names(self, shared: dict[Name, tuple[int, GroupPlacement]]) -> list[str]:
        """The matrices in ``shared``; all, where a group shares what other groups put together."""
        numbers = [number for number, _ in shared.values()]
        return [self.describe(at) for at in numbers or range(len(self.matrices))]

    def describe(self, number: int) -> str:
        return self.matrices[number].key.describe(self.parts[number].shape)

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
        said: dict[tuple, tuple] = {}
        values = []
        for number, _ in shared.values():
            shape, shards = layouts[number].shape, layouts[number].shards
            told = (shape, shards.digest), some_of(shards.group)
            values.append(said.setdefault((shape, id(shards)), told))
        table = [Entry(name) for name in shared]
        mine = report_of(table, values, self.ep_ranks)
        answers, error = tell(group, mine, table, error, self.names(shared))
        if error is not None or answers.alike:
            return error
        columns = answers.columns(table)
        for entry, (ours, known), column in zip(table, values, columns, strict=True):
            number, _ = shared[entry.name]
            for rank, report, which in zip(ranks, answers.reports, column, strict=True):
                # Of other ranks' experts, only those that this rank shares are its business.
                if which is None or rank not in layouts[number].shards:
                    continue
                digest, holders = report.values[which]
                if digest != ours:
                    return ValueError(
                        f"{self.describe(number)}: the process groups contradict each other. As rank {dist.get_rank()} "
                        f"sees it, ranks {known} hold it, but as rank {rank} does, ranks {holders}. Give groups "
                        "of one grid of ranks, for example those of a DeviceMesh's dimensions"
                    )
        return None


def _joined(placement: GroupPlacement, parts: Sequence[Part]) -> Part:
    if placement.dim is not None:
        return stack(parts, placement.dim)
    # The ranks that share a context may be among those that FSDP shards over.
    return overlay(parts, again=placement.lenient or placement.kind == "cp")


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
