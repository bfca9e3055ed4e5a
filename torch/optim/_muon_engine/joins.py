"""How the parts of a matrix on several ranks become one layout. The functions are pure: they take what ranks have told."""

from collections.abc import Mapping, Sequence
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
    def form(self) -> tuple:
        """The properties that cuts of one grid have in common on all ranks."""
        return self.kind, len(self.ranks), self.dim

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
    """A rank's message to the others of its groups: its parts, the sums of the values that it stores of each (0 if unknown),
    and the ranks of its expert-parallel group.
    """

    parts: dict[Name, Part]
    sums: dict[Name, float]
    ep_ranks: Ranks


# The ranks of one replica and their shards.
Row = tuple[tuple[Regions, int], ...]


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


def layout_of(rank: int, name: Name, told: Mapping[int, Told]) -> tuple[Shape, Layout]:
    """The shape and the layout of a matrix of ``rank``, by what it and the ranks of its groups have ``told``. Raises
    ValueError if the parts do not fit.
    """
    cuts = told[rank].parts[name].cuts
    shape, rows = _joined(rank, name, cuts, told)
    everyone = [holder for row in rows for _, holder in row]
    if len({*everyone}) < len(everyone) or len({*map(len, rows)}) > 1:
        raise ValueError(
            f"the process groups contradict each other: {in_words(cuts, True)} are no grid, like the dimensions of a DeviceMesh. "
            "Two of them have one rank in common"
        )
    # Ranks of one grid may put it together in different orders, and matrices may be cut in different orders of its ranks.
    columns: list[tuple[Ranks, Regions]] = []
    for column in zip(*sorted(rows, key=lambda row: min(holder for _, holder in row))):
        holders = tuple(holder for _, holder in column)
        columns.append((holders, column[0][0]))
    columns.sort()
    grid = tuple(zip(*(holders for holders, _ in columns)))
    return shape, Layout(grid, tuple(regions for _, regions in columns))


def _joined(
    rank: int, name: Name, cuts: Cuts, told: Mapping[int, Told]
) -> tuple[Shape, list[Row]]:
    """The shape of what ``rank`` and others have along ``cuts``, and the replicas of it."""
    part = told[rank].parts[name]
    if not cuts:
        layout = part.layout
        rows = [tuple(sorted(zip(layout.shards, row))) for row in layout.grid]
        return part.shape, rows
    *inner, cut = cuts
    shapes: list[Shape] = []
    replicas: dict[int, list[Row]] = {}
    for member in _members(rank, name, cut, told):
        others = told[member].parts[name].cuts[: len(inner)]
        shape, replicas[member] = _joined(member, name, others, told)
        shapes.append(shape)
    if cut.dim is not None:
        return _end_to_end(shapes, [*replicas.values()], cut.dim)
    if len({*shapes}) > 1:
        raise ValueError(
            f"over {cut.kind}_process_group (ranks {listed(cut.ranks, 16)}) the ranks have different shapes: {shapes}"
        )
    all_rows = [row for rows in replicas.values() for row in rows]
    held = {tuple(regions for regions, _ in row) for row in all_rows}
    # FSDP1's NO_SHARD replicates.
    if cut.is_sharded and len(held) > 1:
        return _end_to_end(shapes, [*replicas.values()], None)
    if len(held) > 1:
        # FSDP1 cuts these replicas at other places. Each of them is orthogonalized.
        return shapes[0], replicas[rank]
    if cut.kind == "cp":
        # The ranks that share a context may be among those that FSDP shards over, and so have joined already.
        all_rows = list(dict.fromkeys(all_rows))
    return shapes[0], all_rows


def _end_to_end(
    shapes: Sequence[Shape], replicas: Sequence[Sequence[Row]], dim: int | None
) -> tuple[Shape, list[Row]]:
    """Shards along ``dim`` as one."""
    rows: list[Row] = []
    for row_of_each in zip(*replicas, strict=True):
        start, shards = 0, []
        for shape, row in zip(shapes, row_of_each):
            for regions, holder in row:
                if dim is not None:
                    regions = tuple(region.shifted(dim, start) for region in regions)
                shards.append((regions, holder))
            start += shape[dim or 0]
        rows.append(tuple(sorted(shards)))
    whole = [*shapes[0]]
    if dim is not None:
        whole[dim] = sum(shape[dim] for shape in shapes)
    return (whole[0], whole[1]), rows


def _members(
    rank: int, name: Name, cut: Cut, told: Mapping[int, Told]
) -> Sequence[int]:
    """The ranks of a group that hold a part or a replica of the matrix of ``rank``."""
    cuts = told[rank].parts[name].cuts
    holders = [r for r in cut.ranks if r in told and name in told[r].parts]
    for other in holders:
        theirs = told[other].parts[name].cuts
        forms = [other_cut.form for other_cut in theirs]
        if cut not in theirs or forms != [own_cut.form for own_cut in cuts]:
            raise ValueError(
                f"the process groups contradict each other. Rank {rank} has {in_words(cuts, True)}, but rank {other} has "
                f"{in_words(theirs, True)}. Pass groups of one grid, as those of a DeviceMesh, and one tp_dim_per_param"
            )
    expert, ep_ranks = name[0], told[rank].ep_ranks
    missing = {*cut.ranks} - {*holders}
    if expert is None and missing:
        raise ValueError(
            f"ranks disagree about the number of parameters that they share: rank {min(missing)} of the same "
            f"{cut.kind}_process_group does not have this one. List the same on both; expert_assignments tells experts apart"
        )
    is_one_ep_group = len({told[r].ep_ranks for r in holders}) == 1
    if expert is None or (cut.is_sharded and is_one_ep_group):
        return holders
    if not cut.is_sharded:
        # Ranks of one expert-parallel group never hold replicas of an expert.
        holders = [r for r in holders if r == rank or r not in ep_ranks]
    seen: dict[Ranks, int] = {}
    for r in holders:
        other = seen.setdefault(told[r].ep_ranks, r)
        if other != r:
            raise ValueError(
                f"ranks {other} and {r} of one ep_process_group both hold expert {expert}: expert_assignments must number all"
            )
    return holders


def hints(rank: int, name: Name, told: Mapping[int, Told]) -> list[str]:
    """Warnings about a matrix of ``rank``: ranks with different shards hardly have values of one sum."""
    found: list[str] = []
    for cut in told[rank].parts[name].cuts:
        sums = [told[r].sums[name] for r in cut.ranks if name in told[r].parts]
        if cut.is_sharded and len(sums) > 1 and len({*sums}) == 1 and any(sums):
            found.append(_EQUAL_SHARDS[cut.kind])
    return found
