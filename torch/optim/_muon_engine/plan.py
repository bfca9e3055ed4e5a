"""The frozen schedule of a step: a pure function of layouts and owners.

Every rank computes it alike for the groups that it is in; no process group is needed.

Vocabulary: a *round* is one exchange group's turn: its matrices are gathered to their owners by one
hop, orthogonalized, and scattered by another. A *segment* is what one rank sends another in a hop:
the rectangles of each matrix in order, row-major and unpadded, then one flag for each matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TYPE_CHECKING

from torch.optim._muon_engine.layout import Layout, Rect, replica_sets
from torch.optim._muon_engine.owners import newton_schulz_flops


if TYPE_CHECKING:
    import torch


# Enough rounds to hide transfers behind orthogonalization; more would only add latency.
MAX_ROUNDS = 4
# What one rank sends or receives in a round stays below this, unless one matrix alone is above.
ROUND_BYTES = 256 * 1024**2


class Chunk(NamedTuple):
    """Rectangle ``rect`` of ``matrix``, held by ``rank``, at element ``offset`` of a hop's buffer."""

    matrix: int
    rank: int
    rect: Rect
    offset: int


class FlagSlot(NamedTuple):
    """The flag that ``rank`` sends (or is sent) about ``matrix``, at element ``offset``."""

    matrix: int
    rank: int
    offset: int


@dataclass(frozen=True)
class Side:
    """One rank's half of a hop: a flat buffer, its split by peer, and what stands where in it."""

    splits: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    flags: tuple[FlagSlot, ...]

    @property
    def numel(self) -> int:
        return sum(self.splits)


@dataclass(frozen=True)
class Program:
    """What one rank does in one round."""

    gather_send: Side
    gather_recv: Side
    scatter_send: Side
    scatter_recv: Side
    # Matrices that this rank owns, and the rectangles of them that it holds itself.
    owned: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """``position`` orders the rounds of all groups; ``index`` counts those of one group."""

    group: tuple[int, ...]
    index: int
    position: tuple
    matrices: tuple[int, ...]
    gather_dtype: torch.dtype
    scatter_dtype: torch.dtype


@dataclass(frozen=True)
class Plan:
    layouts: tuple[Layout, ...]
    owners: tuple[int, ...]
    rounds: tuple[Round, ...]
    one_owner_at_a_time: bool = False

    @cached_property
    def _sources(self) -> tuple[frozenset[int], ...]:
        return tuple(
            frozenset(_sources(layout, owner))
            for layout, owner in zip(self.layouts, self.owners, strict=True)
        )

    def is_source(self, matrix: int, rank: int) -> bool:
        """Whether ``rank`` sends its piece of ``matrix`` to the owner (replicas need not)."""
        return rank in self._sources[matrix]

    def receives(self, matrix: int, rank: int) -> bool:
        """Whether ``rank`` gets the update of ``matrix``; of contributions to a sum, one does."""
        layout = self.layouts[matrix]
        return layout.contribution_of(rank) == layout.contribution_of(
            self.owners[matrix]
        )

    def rounds_of(self, rank: int) -> tuple[Round, ...]:
        return tuple(r for r in self.rounds if rank in r.group)

    def program(
        self, round_: Round, rank: int, group_order: tuple[int, ...]
    ) -> Program:
        """``rank``'s part of ``round_``; buffers are ordered as ``group_order``, the collective's."""
        return Program(
            gather_send=self._side(round_, rank, group_order, gather=True, send=True),
            gather_recv=self._side(round_, rank, group_order, gather=True, send=False),
            scatter_send=self._side(round_, rank, group_order, gather=False, send=True),
            scatter_recv=self._side(
                round_, rank, group_order, gather=False, send=False
            ),
            owned=tuple(m for m in round_.matrices if self.owners[m] == rank),
        )

    def _side(
        self,
        round_: Round,
        rank: int,
        group_order: tuple[int, ...],
        *,
        gather: bool,
        send: bool,
    ) -> Side:
        splits: list[int] = []
        chunks: list[Chunk] = []
        flags: list[FlagSlot] = []
        offset = 0
        for peer in group_order:
            start = offset
            # A gather runs from holder to owner, a scatter from owner to holder.
            owner, holder = (peer, rank) if gather == send else (rank, peer)
            if peer != rank:
                shared = [m for m in round_.matrices if self.owners[m] == owner]
                for matrix in shared:
                    travels = self.is_source if gather else self.receives
                    if not travels(matrix, holder):
                        continue
                    for rect in self.layouts[matrix].held_by(holder):
                        chunks.append(Chunk(matrix, holder, rect, offset))
                        offset += rect.numel
                for matrix in shared:
                    flags.append(FlagSlot(matrix, holder, offset))
                    offset += 1
            splits.append(offset - start)
        return Side(tuple(splits), tuple(chunks), tuple(flags))


def _sources(layout: Layout, owner: int) -> set[int]:
    """The ranks whose pieces go to ``owner``: one for each distinct piece, its own replica's first.

    Ranks that hold the same piece stand in the group's order, so the n-th of each set form the
    n-th replica.
    """
    sets = replica_sets(layout)
    mine = next(holders for holders in sets.values() if owner in holders)
    replica = mine.index(owner)
    return {
        owner if holders is mine else holders[min(replica, len(holders) - 1)]
        for holders in sets.values()
    }


def make_plan(
    layouts: list[Layout],
    owners: list[int],
    wire_dtype: torch.dtype,
    *,
    one_owner_at_a_time: bool = False,
    max_rounds: int = MAX_ROUNDS,
    round_bytes: int = ROUND_BYTES,
) -> Plan:
    """Cuts the work of each group into rounds.

    Within a round each owner has about the same FLOPs; a group has no more than ``max_rounds``
    rounds unless ``round_bytes`` asks for more.
    """
    for layout, owner in zip(layouts, owners, strict=True):
        if owner not in layout.ranks:
            raise ValueError(
                f"rank {owner} was assigned {layout.describe()} but holds no piece of it; its ranks are "
                f"{list(layout.group)}"
            )
    families: dict[tuple, list[int]] = {}
    for i, layout in enumerate(layouts):
        # Contributions are summed before they are rounded, so they travel in their own dtype.
        gather_dtype = layout.dtype if layout.partial else wire_dtype
        families.setdefault((layout.group, gather_dtype), []).append(i)

    drafts: list[tuple[tuple, tuple[int, ...], list[int], torch.dtype]] = []
    for (group, gather_dtype), members in sorted(
        families.items(), key=lambda item: (*_group_key(item[0][0]), str(item[0][1]))
    ):
        limit = round_bytes // gather_dtype.itemsize
        if one_owner_at_a_time:
            queues = [[m for m in members if owners[m] == rank] for rank in group]
            turns = [
                (rank, part)
                for rank, queue in zip(group, queues, strict=True)
                for part in _cut(queue, layouts, owners, 1, limit)
            ]
        else:
            turns = list(enumerate(_cut(members, layouts, owners, max_rounds, limit)))
        drafts.extend(
            ((turn, *_group_key(group), i), group, part, gather_dtype)
            for i, (turn, part) in enumerate(turns)
        )
    rounds: list[Round] = []
    counts: dict[tuple[int, ...], int] = {}
    for position, group, part, gather_dtype in sorted(
        drafts, key=lambda draft: (draft[0], str(draft[3]))
    ):
        index = counts.get(group, 0)
        counts[group] = index + 1
        rounds.append(
            Round(group, index, position, tuple(part), gather_dtype, wire_dtype)
        )
    return Plan(tuple(layouts), tuple(owners), tuple(rounds), one_owner_at_a_time)


def _group_key(group: tuple[int, ...]) -> tuple:
    return (-len(group), group)


def _cut(
    members: list[int],
    layouts: list[Layout],
    owners: list[int],
    max_rounds: int,
    round_elements: int,
) -> list[list[int]]:
    """Distributes each owner's matrices over the rounds, by FLOPs, equal shapes side by side."""
    if not members:
        return []
    queues: dict[int, list[int]] = {}
    for m in sorted(
        members,
        key=lambda m: (-newton_schulz_flops(layouts[m].shape), layouts[m].shape, m),
    ):
        queues.setdefault(owners[m], []).append(m)
    longest = max(map(len, queues.values()))
    for n_rounds in range(min(max_rounds, longest), longest + 1):
        rounds = _spread(queues, layouts, n_rounds)
        if all(_busiest(part, layouts, owners) <= round_elements for part in rounds):
            break
    return [
        part
        for whole in rounds
        for part in _within(whole, layouts, owners, round_elements)
    ]


def _within(
    part: list[int], layouts: list[Layout], owners: list[int], round_elements: int
) -> list[list[int]]:
    """``part`` in as many rounds as its bytes ask for, owners in turn."""
    if _busiest(part, layouts, owners) <= round_elements:
        return [part] if part else []
    turn: dict[int, int] = {}
    turns = []
    for m in part:
        turn[owners[m]] = turn.get(owners[m], 0) + 1
        turns.append((turn[owners[m]], m))
    parts: list[list[int]] = [[]]
    for _, m in sorted(turns):
        if parts[-1] and _busiest([*parts[-1], m], layouts, owners) > round_elements:
            parts.append([])
        parts[-1].append(m)
    return parts


def _spread(
    queues: dict[int, list[int]], layouts: list[Layout], n_rounds: int
) -> list[list[int]]:
    rounds: list[list[int]] = [[] for _ in range(n_rounds)]
    for queue in queues.values():
        costs = [newton_schulz_flops(layouts[m].shape) for m in queue]
        total, done = max(sum(costs), 1), 0
        for m, cost in zip(queue, costs, strict=True):
            # The round in whose share of the FLOPs the matrix's middle falls.
            rounds[
                min(n_rounds - 1, n_rounds * (2 * done + cost) // (2 * total))
            ].append(m)
            done += cost
    return rounds


def _busiest(part: list[int], layouts: list[Layout], owners: list[int]) -> int:
    """Elements that the busiest rank sends or receives in a gather of ``part``, about."""
    traffic: dict[int, int] = {}
    for m in part:
        layout = layouts[m]
        traffic[owners[m]] = traffic.get(owners[m], 0) + layout.numel
        for rank, piece in zip(layout.ranks, layout.pieces, strict=True):
            if rank != owners[m]:
                traffic[rank] = traffic.get(rank, 0) + sum(r.numel for r in piece)
    return max(traffic.values(), default=0)
