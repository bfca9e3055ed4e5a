"""The data that ranks exchange about tensors that process groups share, and the layouts that follow."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..agreement import common, gather_values, raise_everywhere
from ..process_groups import group_ranks, is_dry_run, listed, process_rank, Ranks
from .layout import check_cover, Cut, Cuts, Key, Layout, Regions, Shape, Shards
from .local import gradient_dtype, is_frozen, local_part


_HASH_MASK = 2**31 - 1
# The order in which cuts are undone. FSDP cuts last, the shard that TP left. DDP and CP replicate.
KINDS = ("fsdp", "tp", "ddp", "cp")

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
KindGroups = Mapping[str, ProcessGroup]
# A rank's layouts so far, digests of their values (0 for zeros), and its expert-parallel group.
Message = tuple[Mapping[Name, Layout], Mapping[Name, int], Ranks]


def in_words(cuts: Cuts, with_ranks: bool = False) -> str:
    """How the process groups cut or replicate a matrix, for error messages."""
    words = [
        cut.kind
        + (f" along dimension {cut.dim}" if cut.kind == "tp" else "")
        + (f" over ranks {listed(cut.ranks, 16)}" if with_ranks else "")
        for cut in cuts
    ]
    return f"process groups: {', '.join(words)}" if words else "no process groups"


class Joined(NamedTuple):
    """A matrix's pieces on the ranks of a group, put together."""

    name: Name
    layout: Layout
    # How this group shares it.
    cut: Cut
    # Of the values on each rank that holds a part or a replica.
    digests: tuple[int, ...]
    # Whether the ranks hold replicas that are cut into different pieces, so that each keeps its own layout.
    is_apart: bool


class LocalPieces:
    """This rank's pieces of matrices that groups share. A group does not say how they were cut. So in each
    group, ranks tell each other their pieces, put them together, and tell the next group the result.
    """

    def __init__(self, shared: KindGroups, ep_group: ProcessGroup | None) -> None:
        # A unit of FSDP1 may have other groups than those that were given.
        self.group_of = {(kind, group_ranks(g)): g for kind, g in shared.items()}
        self.ep_ranks = (process_rank(),) if ep_group is None else group_ranks(ep_group)
        # Those of the DTensors' meshes, whose ranks must hear of an error, too.
        self.mesh_groups: list[ProcessGroup] = []
        self.layouts: list[Layout] = []
        # Index -> the expert's id, also of a stack of which this rank has no matrix.
        self.expert_of: dict[int, int | None] = {}
        # Digests of the values that this rank stores of cut matrices; 0 for zeros.
        self.digests: dict[Key, int] = {}
        # Text -> the matrices that it is about.
        self.warnings: defaultdict[str, list[str]] = defaultdict(list)

    def cuts_of(self, groups: KindGroups, dims: Mapping[str, int | None]) -> Cuts:
        """How ``groups``, by kind, share a matrix. Those with a dimension in ``dims`` cut it."""
        shared = {k: groups[k] for k in KINDS if k in groups and groups[k].size() > 1}
        cuts = tuple(Cut(k, group_ranks(g), dims.get(k)) for k, g in shared.items())
        self.group_of |= {(cut.kind, cut.ranks): shared[cut.kind] for cut in cuts}
        return cuts

    def add_piece(
        self, key: Key, param: Tensor, shape: Shape, regions: Regions, cuts: Cuts
    ) -> None:
        """Adds a matrix of which this rank has a piece of ``shape``, and stores ``regions`` of the piece."""
        shards = Shards((process_rank(),), (regions,))
        words, frozen = in_words(cuts), is_frozen(param)
        dtype = gradient_dtype(param) or param.dtype
        layout = Layout(key, shape, dtype, shards, words, frozen, cuts)
        self.layouts.append(layout)
        has_values = not param.is_meta and not is_dry_run()
        # Replicas along TP may be shards that the user forgot.
        if has_values and any(c.is_sharded or c.kind == "tp" for c in cuts):
            local = local_part(param)
            sums = (r.of_local(local).abs().sum(dtype=torch.float64) for r in regions)
            total = sum(part.item() for part in sums)
            # The low bits of a number's own hash lack most of its fraction.
            self.digests[key] = hash((total,)) & _HASH_MASK if total else 0

    def complete(self, error: BaseException | None = None) -> list[Layout]:
        """The layouts, with the pieces of all ranks put together. Raises the error of any rank of the grid."""
        layouts, parts = self.layouts, _by_name(self.layouts, self.expert_of)
        described = {name: l.describe() for name, l in zip(parts, layouts, strict=True)}
        digests = {name: self.digests.get(l.key, 0) for name, l in zip(parts, layouts)}
        shared = list(described.values())
        complete: list[Layout] = []
        # The one order in which all ranks go through groups: by kind, then larger groups first.
        order = sorted(
            self.group_of, key=lambda k: (KINDS.index(k[0]), -len(k[1]), sorted(k[1]))
        )
        for key in order:
            message: Message = parts, digests, self.ep_ranks
            answers, error = gather_values(self.group_of[key], message, error, shared)
            if error is not None:
                continue
            try:
                for joined in _joined(key, parts, answers, described):
                    name, of_ranks = joined.name, joined.digests
                    parts[name] = joined.layout
                    hint = _hint(joined)
                    if hint:
                        self.warnings[hint].append(described[name])
                    # Each rank of another group has as many such parts.
                    digests[name] = hash(of_ranks) & _HASH_MASK if any(of_ranks) else 0
            except Exception as problem:
                error = problem
        try:
            if error is None:
                complete = [
                    replace(l, shape=p.shape, shards=p.shards, cuts=()) if l.cuts else l
                    for l, p in zip(layouts, parts.values(), strict=True)
                ]
                for layout in {l.shards: l for l in reversed(complete)}.values():
                    check_cover(layout)
        except Exception as problem:
            error = problem
        # Ranks of the grid may see different contradictions, or none. All of them must raise.
        groups = [self.group_of[key] for key in order] + self.mesh_groups
        raise_everywhere(error, groups, shared)
        if all(min(ranks) == process_rank() for _, ranks in order):
            for text, named in self.warnings.items():
                warnings.warn(f"{listed(named)}: {text}", stacklevel=2)
        return complete


def _by_name(
    layouts: Sequence[Layout], expert_of: Mapping[int, int | None]
) -> dict[Name, Layout]:
    """The layouts by their names. Equal ones are one object, so that a message has each once."""
    named: dict[Name, Layout] = {}
    equal: dict[tuple, Layout] = {}
    counts: defaultdict[int | None, count] = defaultdict(count)
    numbers = {index: next(counts[expert]) for index, expert in expert_of.items()}
    for layout in layouts:
        index, sub, _, expert, _ = layout.key
        name: Name = expert, numbers[index], sub
        # Without cuts, ranks look at nothing else of it.
        content = layout.cuts and (layout.shape, layout.shards.digest, layout.cuts)
        named[name] = equal.setdefault(content, layout)
    return named


def _joined(
    key: tuple[str, Ranks],
    parts: Mapping[Name, Layout],
    answers: Sequence[Message],
    described: Mapping[Name, str],
) -> Iterator[Joined]:
    """Those ``parts`` that a group shares, each with the parts of the other ranks. ValueError if they do not fit."""
    # The joined layout, the places of its ranks in the group, and whether the replicas are cut differently.
    joined_of: dict[tuple, tuple[Layout, list[int], bool]] = {}
    layouts, digests, ep_ranks = zip(*answers)
    ep_ranks_of = dict(zip(key[1], ep_ranks, strict=True))
    for name, part in parts.items():
        cut = next((c for c in part.cuts if (c.kind, c.ranks) == key), None)
        if cut is None:
            continue
        shared = [of_rank.get(name) for of_rank in layouts]
        # Pickle keeps equal parts of a rank one object.
        content = name[0] is None, *map(id, shared)
        if content not in joined_of:
            pieces = {r: piece for r, piece in zip(cut.ranks, shared) if piece}
            try:
                _check_cuts(part.cuts, cut, pieces)
                members = _members(cut, [*pieces], ep_ranks_of, name[0])
                of_members = [pieces[r] for r in members]
                joined = _together(part, cut, of_members)
            except ValueError as error:
                raise common(ValueError(f"{described[name]}: {error}")) from None
            is_apart = _are_cut_apart(cut, of_members)
            places = [cut.ranks.index(r) for r in members]
            joined_of[content] = part if is_apart else joined, places, is_apart
        joined, places, is_apart = joined_of[content]
        of_ranks = tuple(digests[at][name] for at in places)
        yield Joined(name, joined, cut, of_ranks, is_apart)


def _are_cut_apart(cut: Cut, parts: Sequence[Layout]) -> bool:
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


def _check_cuts(cuts: Cuts, cut: Cut, parts: Mapping[int, Layout]) -> None:
    """Raises ValueError if the ranks of a group have groups that contradict each other."""
    grid = [(c.kind, len(c.ranks), c.dim) for c in cuts]
    for other, part in parts.items():
        theirs = [(c.kind, len(c.ranks), c.dim) for c in part.cuts]
        if grid != theirs or cut not in part.cuts:
            raise ValueError(
                f"the process groups contradict each other. Rank {process_rank()} has {in_words(cuts, True)}, but rank {other} has "
                f"{in_words(part.cuts, True)}. Pass groups of one grid, as those of a DeviceMesh, and one tp_dim_per_param"
            )


def _members(
    cut: Cut, holders: Sequence[int], ep_ranks: Mapping[int, Ranks], expert: int | None
) -> Sequence[int]:
    """Those of ``holders``, ranks of a group, that hold a part or a replica of this rank's matrix."""
    rank = process_rank()
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


def _together(layout: Layout, cut: Cut, parts: Sequence[Layout]) -> Layout:
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
