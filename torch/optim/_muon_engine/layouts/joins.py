"""How the pieces of a matrix on several ranks become one layout: pure functions of what the ranks have told."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..process_groups import listed, Ranks
from .layout import Regions, Shards
from .pieces import Cut, Cuts, hashed, in_words, LocalPieces, Piece


_EQUAL_SHARDS = {
    "fsdp": "all ranks hold the same values, but the process groups say that each rank holds a different shard. Replicas, "
    "as DistributedDataParallel makes them, belong to ddp_process_group",
    "tp": "all ranks of tp_process_group hold the same values, but the config says that tensor parallelism cuts it. If it "
    "does not, pass a dict tp_dim_per_param that lacks it: {} if the model's placements say which matrices are cut",
}
_UNEQUAL_REPLICAS = (
    "the ranks of tp_process_group hold different values, but tp_dim_per_param does not say that TP cuts it. If it does, name its "
    "index in a dict: next to parameters with placements, an int does not count for plain ones"
)

_CUT_APART = (
    "the ranks of {}_process_group hold it whole, but FSDP1 cuts it at other places on each of them, because their flat "
    "parameters have different lengths. So each of them orthogonalizes it again. Equal lengths, a unit of its own or "
    "fully_shard avoid that"
)

# How ranks name a matrix that they share: its expert's id, or None, the number of its parameter among those
# of the expert or of none, and its number in the parameter.
Name = tuple["int | None", int, int]


class Facts(NamedTuple):
    """What a rank tells the others of a group."""

    # Its layouts so far.
    layouts: dict[Name, Piece]
    # Hashes of their values; 0 for zeros.
    digests: dict[Name, int]
    # The ranks of its expert-parallel group.
    ep_ranks: Ranks


class Joined(NamedTuple):
    """A matrix's pieces on the ranks of a group, put together."""

    name: Name
    layout: Piece
    # How this group shares it.
    cut: Cut
    # Of the values on each rank that holds a part or a replica.
    digests: tuple[int, ...]
    # Whether the ranks hold replicas that are cut into different pieces, so that each keeps its own layout.
    is_apart: bool


def facts_of(pieces: LocalPieces) -> Facts:
    """The facts before any exchange."""
    layouts = _by_name(pieces.layouts, pieces.expert_of)
    digests: dict[Name, int] = {}
    for name, layout in zip(layouts, pieces.layouts, strict=True):
        digests[name] = pieces.digests.get(layout.key, 0)
    return Facts(layouts, digests, pieces.ep_ranks)


def join(
    rank: int,
    group: tuple[str, Ranks],
    own: Facts,
    answers: Sequence[Facts],
    described: Mapping[Name, str],
) -> tuple[Facts, list[tuple[str, Name]]]:
    """The ``own`` facts of ``rank`` after the ``answers`` of all ranks of a ``group`` (its kind and its ranks) are put
    together, and warnings about matrices. Raises ValueError if they do not fit.
    """
    layouts, digests = dict(own.layouts), dict(own.digests)
    warnings: list[tuple[str, Name]] = []
    for joined in _joined(rank, group, own.layouts, answers, described):
        layouts[joined.name] = joined.layout
        hint = _hint(joined)
        if hint:
            warnings.append((hint, joined.name))
        # Each rank of another group has as many such parts.
        of_ranks = joined.digests
        digests[joined.name] = hashed(of_ranks) if any(of_ranks) else 0
    return Facts(layouts, digests, own.ep_ranks), warnings


def _by_name(
    layouts: Sequence[Piece], expert_of: Mapping[int, int | None]
) -> dict[Name, Piece]:
    """The layouts by their names. Equal ones are one object, so that a message has each once."""
    named: dict[Name, Piece] = {}
    equal: dict[tuple, Piece] = {}
    counts: Counter[int | None] = Counter()
    # Parameter -> its number among those of the same expert, or of none.
    numbers: dict[int, int] = {}
    for index, expert in expert_of.items():
        numbers[index] = counts[expert]
        counts[expert] += 1
    for layout in layouts:
        index, sub, _, expert = layout.key
        name: Name = expert, numbers[index], sub
        # Without cuts, ranks look at nothing else of it.
        content = layout.cuts and (layout.shape, layout.shards.digest, layout.cuts)
        named[name] = equal.setdefault(content, layout)
    return named


def _joined(
    rank: int,
    group: tuple[str, Ranks],
    parts: Mapping[Name, Piece],
    answers: Sequence[Facts],
    described: Mapping[Name, str],
) -> Iterator[Joined]:
    """Those ``parts`` that a group shares, each with the parts of the other ranks. ValueError if they do not fit."""
    # The joined layout, the places of its ranks in the group, and whether the replicas are cut differently.
    joined_of: dict[tuple, tuple[Piece, list[int], bool]] = {}
    ep_ranks_of = {
        holder: facts.ep_ranks for holder, facts in zip(group[1], answers, strict=True)
    }
    for name, part in parts.items():
        cut = next((c for c in part.cuts if (c.kind, c.ranks) == group), None)
        if cut is None:
            continue
        shared = [facts.layouts.get(name) for facts in answers]
        # Pickle keeps equal parts of a rank one object.
        content = name[0] is None, *map(id, shared)
        if content not in joined_of:
            pieces = {r: piece for r, piece in zip(cut.ranks, shared) if piece}
            try:
                _check_cuts(rank, part.cuts, cut, pieces)
                members = _members(rank, cut, [*pieces], ep_ranks_of, name[0])
                of_members = [pieces[r] for r in members]
                joined = _together(part, cut, of_members)
            except ValueError as error:
                raise ValueError(f"{described[name]}: {error}") from None
            is_apart = _are_cut_apart(cut, of_members)
            places = [cut.ranks.index(r) for r in members]
            joined_of[content] = part if is_apart else joined, places, is_apart
        joined, places, is_apart = joined_of[content]
        of_ranks = tuple(answers[place].digests[name] for place in places)
        yield Joined(name, joined, cut, of_ranks, is_apart)


def _are_cut_apart(cut: Cut, parts: Sequence[Piece]) -> bool:
    """Whether the ranks of a group hold replicas that are not cut into the same pieces."""
    pieces = {frozenset(part.shards.regions) for part in parts}
    return not cut.is_sharded and len(pieces) > 1


def _hint(joined: Joined) -> str:
    """A warning about a matrix that a group shares; "" if there is none."""
    cut, digests = joined.cut, joined.digests
    if joined.is_apart:
        return _CUT_APART.format(cut.kind)
    are_equal = len({*digests}) == 1
    if cut.is_sharded:
        is_suspicious = are_equal and len(digests) > 1 and digests[0]
        return _EQUAL_SHARDS[cut.kind] if is_suspicious else ""
    return "" if are_equal or cut.kind != "tp" else _UNEQUAL_REPLICAS


def _check_cuts(rank: int, cuts: Cuts, cut: Cut, parts: Mapping[int, Piece]) -> None:
    """Raises ValueError if the ranks of a group have groups that contradict each other."""
    grid = [(c.kind, len(c.ranks), c.dim) for c in cuts]
    for other, part in parts.items():
        theirs = [(c.kind, len(c.ranks), c.dim) for c in part.cuts]
        if grid != theirs or cut not in part.cuts:
            raise ValueError(
                f"the process groups contradict each other. Rank {rank} has {in_words(cuts, True)}, but rank {other} has "
                f"{in_words(part.cuts, True)}. Pass groups of one grid, as those of a DeviceMesh, and one tp_dim_per_param"
            )


def _members(
    rank: int,
    cut: Cut,
    holders: Sequence[int],
    ep_ranks: Mapping[int, Ranks],
    expert: int | None,
) -> Sequence[int]:
    """Those of ``holders``, ranks of a group, that hold a part or a replica of the matrix of ``rank``."""
    if expert is None:
        missing = set(cut.ranks) - set(holders)
        if missing:
            raise ValueError(
                f"ranks disagree about the number of parameters that they share: rank {min(missing)} of the same "
                f"{cut.kind}_process_group does not have this one. List the same on both; expert_assignments tells experts apart"
            )
        return holders
    if cut.is_sharded and len({ep_ranks[r] for r in holders}) == 1:
        return holders
    if not cut.is_sharded:
        # Ranks of one expert-parallel group never hold replicas of an expert.
        holders = [r for r in holders if r == rank or r not in ep_ranks[rank]]
    seen: dict[Ranks, int] = {}
    for r in holders:
        other = seen.setdefault(ep_ranks[r], r)
        if other != r:
            raise ValueError(
                f"ranks {other} and {r} of one ep_process_group both hold expert {expert}: expert_assignments must number all"
            )
    return holders


def _together(layout: Piece, cut: Cut, parts: Sequence[Piece]) -> Piece:
    """The parts of a group as one: shards along ``cut.dim`` end to end, or replicas."""
    dim, shapes = cut.dim, [part.shape for part in parts]
    where = f"over {cut.kind}_process_group (ranks {listed(cut.ranks, 16)})"
    if dim is None and len(set(shapes)) > 1:
        raise ValueError(f"{where} the ranks have different shapes: {shapes}")
    if dim is not None and len({shape[1 - dim] for shape in shapes}) > 1:
        raise ValueError(
            f"{where} shapes {shapes} cannot be joined along dimension {dim}: they also differ in dimension {1 - dim}"
        )
    holders: list[tuple[int, Regions]] = []
    start = 0
    for part in parts:
        for rank, regions in zip(part.shards.ranks, part.shards.regions, strict=True):
            if dim is not None:
                regions = tuple(r.shifted(dim, start) for r in regions)
            holders.append((rank, regions))
        start += part.shape[dim or 0]
    rows, columns = shapes[0]
    shape = (start if dim == 0 else rows), (start if dim == 1 else columns)
    if cut.kind == "cp":
        # The ranks that share a context may be among those that FSDP shards over.
        holders = list(dict.fromkeys(holders))
    doubled = [r for r, count in Counter(r for r, _ in holders).items() if count > 1]
    if doubled:
        raise ValueError(
            f"{where} the process groups contradict each other: ranks {sorted(doubled)} are in more than one of them. The "
            "groups must form a grid, like the dimensions of a DeviceMesh: two of them have one rank in common"
        )
    # Ranks of one grid may put it together in different orders.
    ranks, regions = zip(*sorted(holders))
    return replace(layout, shape=shape, shards=Shards(ranks, regions))
