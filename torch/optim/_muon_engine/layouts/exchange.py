"""The data that ranks exchange about tensors that process groups share, and the layouts that follow.

A group does not say how a matrix was cut, so each rank tells its ranks what it holds. The ranks go through
their groups in the reverse of the order in which the cuts were made. In each group they put their pieces
together, and tell the next group the result.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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
# Bits of a digest of values.
_DIGEST = 2**31 - 1

# The order in which cuts are undone. FSDP cuts last, the shard that TP left. DDP and CP replicate.
KINDS = ("fsdp", "tp", "ddp", "cp")

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
    """The part of a matrix that a rank knows, of ``shape``, with each holder's regions in this part."""

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


# The message of a rank to a group: its pieces so far, digests of their values (0 for zeros), and its
# expert-parallel group.
Told = tuple[Mapping[Name, Piece], Mapping[Name, int], tuple[int, ...]]


def layouts_of(
    matrices: Sequence[LocalMatrix],
    groups: Mapping[tuple[str, tuple[int, ...]], ProcessGroup],
    ep_ranks: tuple[int, ...],
    values: Sequence[int],
    error: BaseException | None,
) -> tuple[list[Layout], dict[str, list[str]]]:
    """Puts the pieces together over all groups. Returns the layout of each matrix.

    Args:
        groups: by kind and ranks.
        ep_ranks: the ranks of this rank's expert-parallel group.
        values: for each matrix a digest of the values that this rank stores; 0 for zeros.
        error: this rank's error so far. It is raised on every rank of the grid.

    Returns:
        The layouts; and for each kind of group the matrices that it is said to cut, but of which all its
        ranks hold equal values.
    """
    shared = [m.key.describe(m.piece.shape) for m in matrices]
    names = list(_names(matrices))
    described = dict(zip(names, shared, strict=True))
    pieces = {name: m.piece for name, m in zip(names, matrices)}
    digests = dict(zip(names, values))
    equal: dict[str, list[str]] = {}
    layouts: list[Layout] = []
    # The one order in which all ranks go through groups: by kind, then larger groups first.
    order = sorted(groups, key=lambda k: (KINDS.index(k[0]), -len(k[1]), sorted(k[1])))
    for key in order:
        told: Told = pieces, digests, ep_ranks
        answers, error = exchange(groups[key], told, error, shared)
        try:
            for name, piece, of_ranks in (
                () if error else _joined(key, pieces, answers, described)
            ):
                pieces[name] = piece
                if len(of_ranks) > 1 and len({*of_ranks}) == 1 and of_ranks[0]:
                    equal.setdefault(key[0], []).append(described[name])
                # Each rank of another group has as many such parts.
                digests[name] = hash(of_ranks) & _DIGEST if any(of_ranks) else 0
        except Exception as problem:
            error = problem
    try:
        layouts = [] if error else _layouts(matrices, list(pieces.values()))
    except Exception as problem:
        error = problem
    # Ranks of the grid may see different contradictions, or none. All of them must raise.
    for key in order:
        _, error = exchange(groups[key], None, error, shared)
    if error is not None:
        raise error
    return layouts, equal


def _layouts(matrices: Sequence[LocalMatrix], pieces: Sequence[Piece]) -> list[Layout]:
    layouts = []
    shards_of: dict[tuple, Shards] = {}
    for m, piece in zip(matrices, pieces, strict=True):
        source = m.source or piece.in_words(with_ranks=False)
        # Matrices that are cut in the same way have one object of shards.
        alike = id(piece), m.contributions
        is_new = alike not in shards_of
        if is_new:
            # Ranks of one grid may have put it together in different orders.
            holders = sorted(piece.holders) if piece.cuts else piece.holders
            ranks, regions = zip(*holders)
            shards_of[alike] = Shards(ranks, regions, m.contributions)
        layouts.append(Layout(m.key, piece.shape, m.dtype, shards_of[alike], source))
        if is_new:
            check_cover(layouts[-1])
    return layouts


def _names(matrices: Sequence[LocalMatrix]) -> Iterator[Name]:
    of_experts = sorted({m.key.index for m in matrices if m.key.expert is not None})
    counts: Counter[int] = Counter()
    for index, sub, _, expert, _ in (m.key for m in matrices):
        if expert is None:
            yield None, index - bisect(of_experts, index), sub
        else:
            yield expert, counts[expert], 0
            counts[expert] += 1


def _joined(
    key: tuple[str, tuple[int, ...]],
    pieces: Mapping[Name, Piece],
    answers: Sequence[Told],
    described: Mapping[Name, str],
) -> list[tuple[Name, Piece, tuple[int, ...]]]:
    """Those of ``pieces`` that a group shares, put together from what its ranks told.

    Returns:
        The name and piece of each, and the digests of its parts' values: one for replicas.

    Raises:
        ValueError: the ranks' pieces or groups contradict each other.
    """
    known: dict[tuple, tuple[Piece, list[int]]] = {}
    result = []
    for name, mine in pieces.items():
        cut = next((cut for cut in mine.cuts if cut[:2] == key), None)
        if cut is None:
            continue
        theirs = [of_rank.get(name) for of_rank, _, _ in answers]
        # Pickle keeps equal pieces of a rank one object.
        alike = name[0] is None, *map(id, theirs)
        if alike not in known:
            found = {r: piece for r, piece in zip(cut.ranks, theirs) if piece}
            ep_ranks = {r: of_rank for r, (_, _, of_rank) in zip(cut.ranks, answers)}
            try:
                _check_members(mine, cut, found)
                members = _members(cut, [*found], ep_ranks, name[0])
                together = _together(cut, [found[r] for r in members])
            except ValueError as error:
                raise common(ValueError(f"{described[name]}: {error}")) from None
            places = [cut.ranks.index(r) for r in members]
            known[alike] = Piece(*together, mine.cuts), places
        piece, places = known[alike]
        parts = places if cut.cuts else places[:1]
        result.append((name, piece, tuple(answers[at][1][name] for at in parts)))
    return result


def _check_members(mine: Piece, cut: Cut, found: Mapping[int, Piece]) -> None:
    """Raises ValueError if the ranks of a group have groups that contradict each other."""
    rank = process_rank()
    for other, theirs in found.items():
        if theirs.grid != mine.grid or cut not in theirs.cuts:
            raise ValueError(
                f"the process groups contradict each other. Rank {rank} has {mine.in_words(True)}, but rank {other} has "
                f"{theirs.in_words(True)}. Pass groups of one grid of ranks, for example those "
                "of a DeviceMesh's dimensions, and the same tp_dim_per_param on all ranks"
            )


def _members(
    cut: Cut,
    found: Sequence[int],
    ep_ranks: Mapping[int, tuple[int, ...]],
    expert: int | None,
) -> Sequence[int]:
    """Those of ``found``, the holders in a group, that hold a part or a replica of this rank's matrix."""
    rank = process_rank()
    if expert is None:
        missing = set(cut.ranks) - set(found)
        if missing:
            raise ValueError(
                f"ranks disagree about the number of parameters that they share: rank {rank} has this one, rank "
                f"{min(missing)} of the same {cut.kind}_process_group does not. Ranks of a process group must build their "
                "Muon from the same parameters in the same order; expert_assignments tells experts apart"
            )
        return found
    if cut.cuts and len({ep_ranks[r] for r in found}) == 1:
        return found
    if not cut.cuts:
        # Ranks of one expert-parallel group never hold replicas of an expert.
        found = [r for r in found if r == rank or r not in ep_ranks[rank]]
    seen: dict[tuple[int, ...], int] = {}
    for r in found:
        other = seen.setdefault(ep_ranks[r], r)
        if other != r:
            raise ValueError(
                f"ranks {other} and {r} both hold expert {expert}, but are in one ep_process_group, whose ranks "
                "hold different experts. Number the experts across that group in expert_assignments"
            )
    return found


def _together(cut: Cut, parts: Sequence[Piece]) -> tuple[tuple[int, int], Holders]:
    """Shape and holders of the parts of a group: shards along ``cut.dim`` end to end, or replicas."""
    dim, shapes = cut.dim, [part.shape for part in parts]
    where = f"over {cut.kind}_process_group (ranks {listed(cut.ranks, 16)})"
    if dim is None and len(set(shapes)) > 1:
        raise ValueError(f"{where} the ranks have different shapes: {shapes}")
    if dim is not None and len({shape[1 - dim] for shape in shapes}) > 1:
        raise ValueError(
            f"{where} pieces of shapes {shapes} cannot be joined along dimension {dim}: they also differ in dimension "
            f"{1 - dim}"
        )
    holders: list[tuple[int, tuple[Region, ...]]] = []
    size = 0
    for part in parts:
        for rank, regions in part.holders:
            if dim is not None:
                along = Region._fields[dim]
                starts = [getattr(region, along) + size for region in regions]
                moved = zip(regions, starts)
                regions = tuple(r._replace(**{along: at}) for r, at in moved)
            holders.append((rank, regions))
        size += part.shape[dim or 0]
    if cut.kind == "cp":
        # The ranks that share a context may be among those that FSDP shards over.
        holders = list(dict.fromkeys(holders))
    doubled = [r for r, count in Counter(r for r, _ in holders).items() if count > 1]
    if doubled:
        raise ValueError(
            f"{where} the process groups contradict each other: ranks {sorted(doubled)} are in more than one of them. The "
            "groups must form a grid, like the dimensions of a DeviceMesh: two of them have one rank in common"
        )
    rows, columns = shapes[0]
    shape = {None: (rows, columns), 0: (size, columns), 1: (rows, size)}[dim]
    return shape, tuple(holders)
