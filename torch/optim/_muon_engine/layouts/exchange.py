"""The data that ranks exchange about tensors that process groups share, and the layouts that follow.

A group does not say how a matrix was cut, so each rank tells the size of its piece. The ranks go through
their groups once, and pass on what they have learned from earlier groups. After that, each rank knows
the pieces of the whole grid and undoes the cuts in the reverse of the order in which they were made.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.optim._muon_engine.agreement import common, exchange
from torch.optim._muon_engine.layouts import (
    check_cover,
    Key,
    Layout,
    listed,
    process_rank,
    Region,
    Shards,
)


Holders = tuple[tuple[int, tuple[Region, ...]], ...]


# The order in which cuts are undone. FSDP cuts last, the shard that TP left. DDP and CP replicate.
KINDS = ("fsdp", "tp", "ddp", "cp")
# In a Piece, the rank that sends it. With a number in its place, equal pieces of different ranks are equal.
SPEAKER = -1

# How ranks name a matrix that they share: its expert's id and its number among the expert's matrices, or
# None, the number of its parameter among those of no expert, and its number in the parameter. (Ranks may
# hold different numbers of a stack's matrices.)
Name = tuple["int | None", int, int]


class Cut(NamedTuple):
    """A group over which a matrix is cut along ``dim``, or replicated if ``dim`` is None.

    The regions of FSDP1 already count in the whole matrix. Its cut has no dimension either.
    """

    kind: str
    ranks: tuple[int, ...]
    dim: int | None = None

    @property
    def cuts(self) -> bool:
        return self.kind == "fsdp" or self.dim is not None


class Piece(NamedTuple):
    """A rank's own view of a matrix: the regions of each holder that it knows, in ``shape``."""

    shape: tuple[int, int]
    holders: Holders
    cuts: tuple[Cut, ...]

    @property
    def grid(self) -> tuple:
        return tuple((cut.kind, len(cut.ranks), cut.dim) for cut in self.cuts)

    def in_words(self, with_ranks: bool) -> str:
        words = [
            cut.kind
            + (f" along dimension {cut.dim}" if cut.kind == "tp" else "")
            + (f" over ranks {listed(cut.ranks, 16)}" if with_ranks else "")
            for cut in self.cuts
        ]
        return f"process groups: {', '.join(words)}" if words else "no process groups"


class LocalMatrix(NamedTuple):
    """A matrix as this rank knows it by itself; ``source`` says where a DTensor's piece comes from."""

    key: Key
    dtype: torch.dtype
    piece: Piece
    source: str = ""
    contributions: tuple[int, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Whether process groups cut a plain tensor."""
        return not self.source and any(cut.cuts for cut in self.piece.cuts)


class Told(NamedTuple):
    """One rank's matrices. ``which`` has the index of each one's piece."""

    pieces: tuple[Piece, ...]
    which: tuple[int, ...]
    names: tuple[Name, ...]


class Record(NamedTuple):
    """One rank: its matrices, its expert-parallel group, a digest of its values."""

    told: Told
    ep_ranks: tuple[int, ...]
    values: int


def layouts_of(
    matrices: Sequence[LocalMatrix],
    groups: Mapping[tuple[str, tuple[int, ...]], ProcessGroup],
    ep_ranks: tuple[int, ...],
    values: int,
    error: BaseException | None,
) -> tuple[list[Layout], list[str]]:
    """Exchanges the pieces over all groups. Returns the layout of each matrix.

    Args:
        groups: by kind and ranks.
        ep_ranks: the ranks of this rank's expert-parallel group.
        values: digest of the values that this rank stores of matrices that are cut.
        error: this rank's error so far. It is raised on every rank of the grid.

    Returns:
        The layouts, and the matrices of which all ranks hold equal values in different shards.
    """
    described = [m.key.describe(m.piece.shape) for m in matrices]
    known = _tell(matrices, groups, ep_ranks, values, error, described)
    found: tuple[list[Layout], list[str]] = [], []
    try:
        found = _assembled(matrices, known, values, described)
    except ValueError as problem:
        error = problem
    # Ranks of the grid may see different contradictions, or none. All of them must raise.
    for key in _in_order(groups):
        _, error = exchange(groups[key], None, error, described)
    if error is not None:
        raise error
    return found


def _in_order(
    groups: Iterable[tuple[str, tuple[int, ...]]],
) -> list[tuple[str, tuple[int, ...]]]:
    """The one order in which all ranks go through groups: by kind, then larger groups first."""
    return sorted(groups, key=lambda k: (KINDS.index(k[0]), -len(k[1]), sorted(k[1])))


def _assembled(
    matrices: Sequence[LocalMatrix],
    known: Mapping[int, Record],
    values: int,
    described: Sequence[str],
) -> tuple[list[Layout], list[str]]:
    grid, rank = _Grid(known), process_rank()
    layouts, equal = [], []
    shards_of: dict[tuple, Shards] = {}
    for m, name, text in zip(matrices, known[rank].told.names, described, strict=True):
        shape, holders = grid.assemble(name, rank, text)
        source = m.source or m.piece.in_words(with_ranks=False)
        # Matrices that are cut in the same way have one object of holders.
        alike = id(holders), m.contributions
        shards = shards_of.get(alike)
        if shards is None:
            ranks, regions = zip(*holders)
            shards = shards_of[alike] = Shards(ranks, regions, m.contributions)
            check_cover(Layout(m.key, shape, m.dtype, shards, source))
        layouts.append(Layout(m.key, shape, m.dtype, shards, source))
        if m.is_cut and values and len(shards.replica_sets) > 1:
            if all(known[r].values == values for r in shards.ranks):
                equal.append(text)
    return layouts, equal


def _tell(
    matrices: Sequence[LocalMatrix],
    groups: Mapping[tuple[str, tuple[int, ...]], ProcessGroup],
    ep_ranks: tuple[int, ...],
    values: int,
    error: BaseException | None,
    described: Sequence[str],
) -> dict[int, Record]:
    """The records of all ranks of the grid."""
    # By identity: equal pieces are one object, and hashing a DTensor's piece is slow.
    different = {id(m.piece): m.piece for m in matrices}
    place = {key: at for at, key in enumerate(different)}
    which = tuple(place[id(m.piece)] for m in matrices)
    told = Told(tuple(different.values()), which, tuple(_names(matrices)))
    known = {process_rank(): Record(told, ep_ranks, values)}
    same = {told: told}
    for key in _in_order(groups):
        answers, error = exchange(groups[key], known, error, described)
        for answer in answers:
            for rank, record in answer.items():
                # Pickle writes one object once, so equal ones must become one.
                one = same.setdefault(record.told, record.told)
                known[rank] = record._replace(told=one)
    if error is not None:
        raise error
    return known


def _names(matrices: Sequence[LocalMatrix]) -> Iterator[Name]:
    of_experts = sorted({m.key.index for m in matrices if m.key.expert is not None})
    counts: Counter[int] = Counter()
    for index, sub, _, expert, _ in (m.key for m in matrices):
        if expert is None:
            yield None, index - bisect(of_experts, index), sub
        else:
            yield expert, counts[expert], 0
            counts[expert] += 1


class _Grid:
    """The pieces that all ranks of the grid hold."""

    def __init__(self, known: Mapping[int, Record]) -> None:
        self._ep = {rank: record.ep_ranks for rank, record in known.items()}
        # Ranks that told the same are looked up together.
        self._tellers: dict[int, tuple[dict[Name, Piece], list[int]]] = {}
        for rank, record in known.items():
            told = record.told
            if id(told) not in self._tellers:
                pieces = [told.pieces[at] for at in told.which]
                self._tellers[id(told)] = dict(zip(told.names, pieces)), []
            self._tellers[id(told)][1].append(rank)
        self._joined: dict[Any, tuple[tuple[int, int], Holders]] = {}

    def assemble(
        self, name: Name, rank: int, described: str
    ) -> tuple[tuple[int, int], Holders]:
        """The shape and the holders of the matrix that ``rank`` calls ``name``.

        Matrices with equal pieces get the same objects.

        Raises:
            ValueError: the ranks' pieces or groups contradict each other.
        """
        expert, *_ = name
        found = [
            (mine.get(name), tuple(ranks)) for mine, ranks in self._tellers.values()
        ]
        alike = expert is None, rank, tuple((id(p), ranks) for p, ranks in found if p)
        if alike not in self._joined:
            pieces = {r: p for p, ranks in found if p is not None for r in ranks}
            try:
                join = _Join(pieces, self._ep, expert)
                self._joined[alike] = join.of(rank, len(KINDS))
            except ValueError as error:
                raise common(ValueError(f"{described}: {error}")) from None
        return self._joined[alike]


class _Join:
    """Puts one matrix together."""

    def __init__(
        self,
        pieces: Mapping[int, Piece],
        ep_ranks: Mapping[int, tuple[int, ...]],
        expert: int | None,
    ) -> None:
        self.pieces = pieces
        self.ep_ranks = ep_ranks
        self.expert = expert
        self._found: dict[tuple[int, int], tuple[tuple[int, int], Holders]] = {}

    def of(self, rank: int, depth: int) -> tuple[tuple[int, int], Holders]:
        """Joins the pieces of the ranks in ``rank``'s first ``depth`` kinds of groups."""
        if (rank, depth) not in self._found:
            self._found[rank, depth] = self._of(rank, depth)
        return self._found[rank, depth]

    def _of(self, rank: int, depth: int) -> tuple[tuple[int, int], Holders]:
        piece = self.pieces[rank]
        if depth == 0:
            holders = tuple(
                (rank if who == SPEAKER else who, held) for who, held in piece.holders
            )
            return piece.shape, holders
        kind = KINDS[depth - 1]
        cut = next((cut for cut in piece.cuts if cut.kind == kind), None)
        if cut is None:
            return self.of(rank, depth - 1)
        parts = [self.of(member, depth - 1) for member in self._members(rank, cut)]
        try:
            if cut.dim is not None:
                return _stack(parts, cut.dim)
            # The ranks that share a context may be among those that FSDP shards over.
            return _overlay(parts, again=kind == "cp")
        except ValueError as error:
            raise ValueError(
                f"over {kind}_process_group (ranks {listed(cut.ranks, 16)}) {error}"
            ) from None

    def _members(self, rank: int, cut: Cut) -> list[int]:
        """The ranks of a group that hold a piece of this matrix. Raises ValueError for contradictions."""
        found = [r for r in cut.ranks if r in self.pieces]
        if self.expert is None and len(found) < len(cut.ranks):
            missing = min(set(cut.ranks) - set(found))
            raise ValueError(
                f"ranks disagree about the number of parameters that they share: rank {rank} has this one, rank "
                f"{missing} of the same {cut.kind}_process_group does not. Ranks of a process group must build their "
                "Muon from the same parameters in the same order; expert_assignments tells experts apart"
            )
        mine = self.pieces[rank]
        for other in found:
            theirs = self.pieces[other]
            if theirs.grid != mine.grid or cut not in theirs.cuts:
                raise ValueError(
                    f"the process groups contradict each other. Rank {rank} has {mine.in_words(True)}, but rank {other} has "
                    f"{theirs.in_words(True)}. Pass groups of one grid of ranks, for example those "
                    "of a DeviceMesh's dimensions"
                )
        if self.expert is None:
            return found
        if cut.cuts and len({self.ep_ranks[r] for r in found}) == 1:
            return found
        if not cut.cuts:
            # Ranks of one expert-parallel group never hold replicas of an expert.
            own = set(self.ep_ranks[rank]) - {rank}
            found = [r for r in found if r not in own]
        seen: dict[tuple[int, ...], int] = {}
        for r in found:
            other = seen.setdefault(self.ep_ranks[r], r)
            if other != r:
                raise ValueError(
                    f"ranks {other} and {r} both hold expert {self.expert}, but are in one ep_process_group, whose ranks "
                    "hold different experts. Number the experts across that group in expert_assignments"
                )
        return found


def _stack(
    parts: Sequence[tuple[tuple[int, int], Holders]], dim: int
) -> tuple[tuple[int, int], Holders]:
    """Puts shards along ``dim`` end to end."""
    others = {shape[1 - dim] for shape, _ in parts}
    if len(others) != 1:
        raise ValueError(
            f"pieces of shapes {[shape for shape, _ in parts]} cannot be joined along dimension {dim}: they also differ in "
            f"dimension {1 - dim}"
        )
    found = []
    size = 0
    for shape, holders in parts:
        down, right = (size, 0) if dim == 0 else (0, size)
        for rank, regions in holders:
            moved = [
                r._replace(row=r.row + down, column=r.column + right) for r in regions
            ]
            found.append((rank, tuple(moved)))
        size += shape[dim]
    (other,) = others
    return (size, other) if dim == 0 else (other, size), _each_once(found)


def _overlay(
    parts: Sequence[tuple[tuple[int, int], Holders]], *, again: bool
) -> tuple[tuple[int, int], Holders]:
    """Adds replicas. With ``again``, a replica may be a holder that is known already."""
    shapes = [shape for shape, _ in parts]
    if len(set(shapes)) != 1:
        raise ValueError(f"replicas have different shapes: {shapes}")
    found = [holder for _, holders in parts for holder in holders]
    return shapes[0], _each_once(list(dict.fromkeys(found)) if again else found)


def _each_once(holders: list[tuple[int, tuple[Region, ...]]]) -> Holders:
    doubled = [r for r, count in Counter(r for r, _ in holders).items() if count > 1]
    if doubled:
        raise ValueError(
            f"the process groups contradict each other: ranks {sorted(doubled)} are in more than one of them. The groups "
            "must form a grid, like the dimensions of a DeviceMesh: two of them have one rank in common"
        )
    return tuple(holders)
