"""Ranks tell each other over process groups which pieces they hold, and put them together.

Nothing about sizes is assumed: what stands where follows from what the members of each group report.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any, NamedTuple, TYPE_CHECKING

import torch.distributed as dist
from torch.optim._muon_engine.agreement import exchange_objects, failure, reported
from torch.optim._muon_engine.layouts import check_cover, Key, Layout, Region


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch.distributed import ProcessGroup


# The order in which cuts are undone. FSDP cuts last, the piece that TP left; what remains are replicas.
KINDS = ("fsdp", "tp", "ddp", "cp")


class Part(NamedTuple):
    """What a set of ranks holds of one matrix, in coordinates of what they hold together."""

    shape: tuple[int, int]
    holders: tuple[tuple[int, tuple[Region, ...]], ...]


class Crossing(NamedTuple):
    """A group over which a matrix is cut along ``dim``, or replicated where that is None."""

    kind: str
    group: ProcessGroup
    dim: int | None = None
    # Of a DTensor, which is believed rather than the group.
    lenient: bool = False


class Piece(NamedTuple):
    """What this rank knows of one matrix, by itself."""

    key: Key
    dtype: torch.dtype
    part: Part
    crossings: tuple[Crossing, ...]
    source: str = ""
    contributions: tuple[int, ...] = ()


class _Told(NamedTuple):
    """What one rank tells the others of a group about one matrix."""

    name: str | None
    dtype: str
    part: Part
    dim: int | None


def discover(
    pieces: Sequence[Piece],
    groups: Iterable[tuple[str, ProcessGroup]],
    ep_ranks: tuple[int, ...],
    error: BaseException | None,
) -> tuple[list[Layout], list[str]]:
    """The layout of each of ``pieces``, and warnings.

    Args:
        pieces: in the order of their keys.
        groups: kind and group, for those that are crossed even if no piece of this rank asks for it.
        ep_ranks: the ranks of this rank's expert-parallel group, none of which holds a replica of its experts.
        error: what went wrong on this rank so far. It is told to the others, who are waiting.

    Raises:
        ValueError: groups contradict each other, or pieces do not tile a matrix; like ``error``, on
            every rank that is linked to the one that found it.
    """
    return _Discovery(pieces, groups, ep_ranks).run(error)


class _Discovery:
    def __init__(
        self,
        pieces: Sequence[Piece],
        groups: Iterable[tuple[str, ProcessGroup]],
        ep_ranks: tuple[int, ...],
    ) -> None:
        self.shards = pieces
        self.ep_ranks = ep_ranks
        self.parts = [piece.part for piece in pieces]
        self.same_parts: dict[Part, Part] = {}
        self.warnings: list[str] = []
        known = {
            (kind, tuple(dist.get_process_group_ranks(group))): group
            for kind, group in [
                *groups,
                *((c.kind, c.group) for piece in pieces for c in piece.crossings),
            ]
            if dist.get_world_size(group) > 1
        }
        # One order on all ranks: by kind, then larger groups first.
        self.order = [
            (kind, ranks, known[kind, ranks])
            for kind, ranks in sorted(
                known, key=lambda k: (KINDS.index(k[0]), -len(k[1]), sorted(k[1]))
            )
        ]

    def run(self, error: BaseException | None) -> tuple[list[Layout], list[str]]:
        for crossed in self.order:
            error = self.cross(*crossed, error)
        layouts: list[Layout] = []
        if error is None:
            try:
                layouts = self.layouts()
            except Exception as found:
                error = found
        # Forth, back, forth: what a rank found reaches all that it is linked to through the groups.
        for crossed in (*reversed(self.order), *self.order):
            error = self.compare(*crossed, layouts, error)
        if error is not None:
            raise error
        return layouts, self.warnings

    def shared_over(self, kind: str, ranks: tuple[int, ...]) -> dict[tuple, int]:
        """What members of a group call their common matrices -> this rank's number of it.

        Counted among those of the same expert, for ranks may hold others beside these.
        """
        counts: dict[int | None, int] = {}
        found = {}
        for number, piece in enumerate(self.shards):
            if self.crossing(number, kind, ranks) is not None:
                count = counts.get(piece.key.expert, 0)
                counts[piece.key.expert] = count + 1
                found[piece.key.expert, count] = number
        return found

    def crossing(
        self, number: int, kind: str, ranks: tuple[int, ...]
    ) -> Crossing | None:
        for crossing in self.shards[number].crossings:
            if crossing.kind == kind and ranks == tuple(
                dist.get_process_group_ranks(crossing.group)
            ):
                return crossing
        return None

    def cross(
        self,
        kind: str,
        ranks: tuple[int, ...],
        group: ProcessGroup,
        error: BaseException | None,
    ) -> BaseException | None:
        """Exchanges over one group, and puts together what its members hold."""
        shared = self.shared_over(kind, ranks)
        told = {}
        for called, number in shared.items():
            piece = self.shards[number]
            crossing = self.crossing(number, kind, ranks)
            # Experts go by their ids: ranks may name their modules each in its own way.
            name = piece.key.name if piece.key.expert is None else None
            told[called] = _Told(
                name, str(piece.dtype), self.parts[number], crossing.dim
            )
        reports = exchange_objects(group, (reported(error), self.ep_ranks, told))
        failed = failure(group, [report[0] for report in reports])
        if error is not None or failed is not None:
            return error or failed
        try:
            for called, number in shared.items():
                dim = self.crossing(number, kind, ranks).dim
                cuts = kind == "fsdp" or dim is not None
                members = self.members(called, number, ranks, reports, cuts=cuts)
                self.join(number, kind, ranks, members)
            self.check_counts(ranks, reports)
        except Exception as found:
            # Whatever it is: the others go on to the next exchange.
            return found
        return None

    def members(
        self,
        called: tuple,
        number: int,
        ranks: tuple[int, ...],
        reports: list,
        *,
        cuts: bool,
    ) -> list[tuple[int, _Told]]:
        """The ranks of a group that hold a piece of the same matrix, with what they tell of it.

        With ``cuts`` the group shards, else it replicates, which ranks of one expert-parallel group
        never do to an expert.
        """
        holders = [
            (rank, ep_ranks, told[called])
            for rank, (_, ep_ranks, told) in zip(ranks, reports, strict=True)
            if called in told
        ]
        expert = self.shards[number].key.expert
        if expert is None:
            return [(rank, told) for rank, _, told in holders]
        if cuts and len({ep_ranks for _, ep_ranks, _ in holders}) == 1:
            # One expert's shards are all in one place of the expert-parallel group.
            return [(rank, told) for rank, _, told in holders]
        if not cuts:
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

    def check_counts(self, ranks: tuple[int, ...], reports: list) -> None:
        """Raises unless all members of a group share as many matrices that are no expert's."""
        counts = [sum(c[0] is None for c in told) for _, _, told in reports]
        for rank, count in zip(ranks, counts, strict=True):
            if count != counts[0]:
                raise ValueError(
                    f"ranks disagree about the number of parameters that they share: {counts[0]} on rank {ranks[0]} "
                    f"and {count} on rank {rank}. Ranks of a process group have to build their Muon from the same "
                    "ones; those of experts are told apart by expert_assignments"
                )

    def describe(self, number: int) -> str:
        piece = self.shards[number]
        return piece.key.describe(self.parts[number].shape)

    def join(
        self,
        number: int,
        kind: str,
        ranks: tuple[int, ...],
        members: list[tuple[int, _Told]],
    ) -> None:
        where = (
            f"{self.describe(number)}, over {kind}_process_group (ranks {list(ranks)})"
        )
        crossing = self.crossing(number, kind, ranks)
        first_rank, first = members[0]
        for rank, told in members[1:]:
            for field in ("name", "dtype", "dim"):
                mine, its = getattr(first, field), getattr(told, field)
                if mine != its:
                    raise ValueError(
                        f"ranks disagree about {where}: {_IN_WORDS[field]} is {mine} on rank {first_rank} and {its} "
                        f"on rank {rank}"
                    )
        parts = [told.part for _, told in members]
        try:
            if crossing.dim is None:
                # The ranks that share a context may be among those that FSDP shards over.
                again = crossing.lenient or kind == "cp"
                part = overlay(parts, again=again)
            else:
                part = stack(parts, crossing.dim)
            # Pickled once for all matrices that are cut alike.
            self.parts[number] = self.same_parts.setdefault(part, part)
        except ValueError as found:
            if not crossing.lenient:
                raise ValueError(f"{where}: {found}") from None
            self.warnings.append(
                f"{where}: {found}. The DTensor's placements {self.shards[number].source} are believed"
            )

    def layouts(self) -> list[Layout]:
        layouts = []
        for piece, part in zip(self.shards, self.parts, strict=True):
            ranks = tuple(rank for rank, _ in part.holders)
            layout = Layout(
                piece.key,
                part.shape,
                piece.dtype,
                ranks,
                tuple(regions for _, regions in part.holders),
                piece.source,
                piece.contributions,
            )
            check_cover(layout)
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
        """Raises no error of its own, but finds out whether all holders came to the same layouts."""
        shared = self.shared_over(kind, ranks)
        mine = {
            called: (_digest(layouts[number]), list(layouts[number].group))
            for called, number in shared.items()
            if layouts
        }
        reports = exchange_objects(group, (reported(error), mine))
        failed = failure(group, [report[0] for report in reports])
        if error is not None or failed is not None:
            return error or failed
        me = dist.get_rank()
        for called, (digest, holders) in mine.items():
            for rank, (_, its) in zip(ranks, reports, strict=True):
                # Of other ranks' experts, only those that this rank shares are its business.
                if called not in its or rank not in holders:
                    continue
                if its[called][0] != digest:
                    return ValueError(
                        f"{self.describe(shared[called])}: the process groups contradict each other. As rank {me} sees "
                        f"it, ranks {holders} hold it, but as rank {rank} does, ranks {its[called][1]}. Give groups of "
                        "one grid of ranks, for example those of a DeviceMesh's dimensions"
                    )
        return None


_IN_WORDS = {
    "name": "its name",
    "dtype": "its dtype",
    "dim": "the dimension that it is cut along (None: not at all)",
}


def _digest(layout: Layout) -> str:
    content: Any = (layout.shape, layout.ranks, layout.shards, layout.contributions)
    return hashlib.sha256(repr(content).encode()).hexdigest()


def stack(parts: Sequence[Part], dim: int) -> Part:
    """Pieces of one matrix, cut along ``dim``, one after the other."""
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
    """Replicas, side by side; with ``again`` a replica may be what is known of those ranks already."""
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
            f"the process groups contradict each other: along this one ranks {doubled} are peers in a way that "
            "another group already says otherwise. Two groups of one optimizer must have only this rank in common, "
            "as the dimensions of a DeviceMesh do"
        )
