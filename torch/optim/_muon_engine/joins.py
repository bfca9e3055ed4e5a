"""How the parts of a matrix on several ranks become one layout. The functions are pure: they take what ranks have told."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .process_groups import listed, Ranks
from .regions import Layout, Regions, Shape


# The order in which cuts are undone. FSDP cuts last, the shard that TP left. DDP and CP replicate.
KINDS = ("fsdp", "tp", "ddp", "cp")
_EQUAL_SHARDS = {
    "fsdp": "all ranks hold the same values, but the process groups say that each rank holds a different shard. Replicas, "
    "as DistributedDataParallel makes them, belong to ddp_process_group",
    "tp": "all ranks of tp_process_group hold the same values, but the config says that tensor parallelism cuts it. If it "
    "does not, pass a dict tp_dim_per_param that lacks it: {} if the model's placements say which matrices are cut",
}
# How ranks name a matrix that they share: its expert's id, or None, the number of its parameter among those
# of the expert or of none, and its number in the parameter.
Name = tuple["int | None", int, int]


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


class Part(NamedTuple):
    """A part of a matrix, of this ``shape``, that some ranks have. The ranks of ``cuts`` have the rest."""

    shape: Shape
    layout: Layout
    cuts: Cuts


class Told(NamedTuple):
    """A rank's message to the others of a group: its parts, the sums of the values that it stores of each (0 if unknown),
    and the ranks of its expert-parallel group.
    """

    parts: dict[Name, Part]
    sums: dict[Name, float]
    ep_ranks: Ranks


def in_words(cuts: Cuts, with_ranks: bool = False) -> str:
    """How the process groups cut or replicate a matrix, for error messages."""
    if not cuts:
        return "no process groups"
    texts: list[str] = []
    for cut in cuts:
        text = cut.kind
        if cut.kind == "tp":
            text += f" along dimension {cut.dim}"
        if with_ranks:
            text += f" over ranks {listed(cut.ranks, 16)}"
        texts.append(text)
    return f"process groups: {', '.join(texts)}"


def join(
    rank: int,
    group: tuple[str, Ranks],
    own: Told,
    answers: Sequence[Told],
    described: Mapping[Name, str],
) -> tuple[Told, list[tuple[str, Name]]]:
    """The knowledge of ``rank`` after the ``answers`` of all ranks of a ``group`` (its kind and its ranks), and warnings about
    matrices. Raises ValueError if the parts do not fit.
    """
    parts = dict(own.parts)
    warnings: list[tuple[str, Name]] = []
    ep_ranks_of = dict(zip(group[1], (told.ep_ranks for told in answers)))
    # Many matrices have parts that are equal on all ranks, and that a message has once.
    joined_of: dict[tuple, tuple[Part, list[int]]] = {}
    for name, part in own.parts.items():
        cut = next((c for c in part.cuts if (c.kind, c.ranks) == group), None)
        if cut is None:
            continue
        shared = [told.parts.get(name) for told in answers]
        content = name[0] is None, *map(id, shared)
        if content not in joined_of:
            found = {r: other for r, other in zip(cut.ranks, shared) if other}
            try:
                _check_cuts(rank, part.cuts, cut, found)
                members = _members(rank, cut, [*found], ep_ranks_of, name[0])
                joined = _together(part, cut, [found[r] for r in members])
                joined_of[content] = joined, members
            except ValueError as error:
                raise ValueError(f"{described[name]}: {error}") from None
        parts[name], members = joined_of[content]
        sums = {answers[cut.ranks.index(r)].sums[name] for r in members}
        # Ranks with different shards hardly have values of one sum.
        if cut.is_sharded and len(members) > 1 and len(sums) == 1 and any(sums):
            warnings.append((_EQUAL_SHARDS[cut.kind], name))
    return own._replace(parts=parts), warnings


def _check_cuts(rank: int, cuts: Cuts, cut: Cut, parts: Mapping[int, Part]) -> None:
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
    holders: list[int],
    ep_ranks: Mapping[int, Ranks],
    expert: int | None,
) -> list[int]:
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


def _together(part: Part, cut: Cut, parts: Sequence[Part]) -> Part:
    """The parts of a group as one: shards along ``cut.dim`` end to end are further columns of the grid, and replicas are
    further rows.
    """
    dim, shapes = cut.dim, [other.shape for other in parts]
    all_shards = [other.layout.shards for other in parts]
    if not cut.is_sharded and len({*map(frozenset, all_shards)}) > 1:
        if len(set(shapes)) == 1:
            # FSDP1 cuts these replicas at other places. Each of them is orthogonalized.
            return part
    where = f"over {cut.kind}_process_group (ranks {listed(cut.ranks, 16)})"
    if dim is None and len(set(shapes)) > 1:
        raise ValueError(f"{where} the ranks have different shapes: {shapes}")
    if dim is not None and len({shape[1 - dim] for shape in shapes}) > 1:
        raise ValueError(
            f"{where} shapes {shapes} cannot be joined along dimension {dim}: they also differ in dimension {1 - dim}"
        )
    # FSDP1's NO_SHARD replicates.
    are_equal = dim is None and len(set(all_shards)) == 1
    columns: list[tuple[Ranks, Regions]] = []
    start = 0
    if cut.is_sharded and not are_equal:
        for other in parts:
            for ranks, regions in _columns(other.layout):
                if dim is not None:
                    regions = tuple(region.shifted(dim, start) for region in regions)
                columns.append((ranks, regions))
            start += other.shape[dim or 0]
    else:
        columns = _with_replicas(cut, parts)
    counts = Counter(rank for ranks, _ in columns for rank in ranks)
    doubled = sorted(rank for rank, count in counts.items() if count > 1)
    if doubled or len({len(ranks) for ranks, _ in columns}) > 1:
        raise ValueError(
            f"{where} the process groups contradict each other: ranks {doubled} are in more than one of them. The "
            "groups must form a grid, like the dimensions of a DeviceMesh: two of them have one rank in common"
        )
    rows, width = shapes[0]
    shape = (start if dim == 0 else rows), (start if dim == 1 else width)
    # Ranks of one grid may put it together in different orders.
    columns.sort()
    grid = tuple(sorted(zip(*(ranks for ranks, _ in columns))))
    layout = Layout(grid, tuple(regions for _, regions in columns))
    return part._replace(shape=shape, layout=layout)


def _columns(layout: Layout) -> Iterator[tuple[Ranks, Regions]]:
    """The ranks of each shard, and its regions."""
    for shard, regions in enumerate(layout.shards):
        yield tuple(row[shard] for row in layout.grid), regions


def _with_replicas(cut: Cut, parts: Sequence[Part]) -> list[tuple[Ranks, Regions]]:
    """The columns of parts that have equal shards, joined."""
    if cut.kind == "cp":
        # The ranks that share a context may be among those that FSDP shards over, and so have joined already.
        parts = list({(p.layout.grid, p.layout.shards): p for p in parts}.values())
    columns = [*_columns(parts[0].layout)]
    for other in parts[1:]:
        remaining = [*_columns(other.layout)]
        for place, (ranks, regions) in enumerate(columns):
            # Groups may list the same shards in different orders.
            match = next((c for c in remaining if c[1] == regions), None)
            if match is None:
                break
            remaining.remove(match)
            columns[place] = ranks + match[0], regions
    return columns
