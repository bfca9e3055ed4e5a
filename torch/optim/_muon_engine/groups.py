"""Where an optimizer's parameters are, over process groups, by placements and by FSDP1's metadata.

A group does not say how its ranks cut a matrix. So ranks tell each other their parts, in one group after another, and then
put together what they know, by pure functions. Only here do readers have collectives.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from . import fsdp
from .agreement import agree, gathered_along, Meeting
from .dtensors import Fact, matrices_of_dtensor, mesh_ranks, Reader
from .params import (
    checked,
    local_part,
    Matrix,
    not_2d,
    own_layout,
    Param,
    shared_name,
    whole_matrices,
)
from .process_groups import (
    grid_groups,
    group_ranks,
    listed,
    naming,
    process_rank,
    Ranks,
)
from .regions import digest_of, Layout, place_in_order, ranks_of, Regions, Shape
from .tp_dims import tp_mark_of, TPDims


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
    """A rank's message to the others of its groups: its parts, a digest of the values that it stores of each (0 if unknown or zero),
    the number of its parameters of each expert and of none, and the ranks of its expert-parallel group.
    """

    parts: dict[Name, Part]
    digests: dict[Name, int]
    counts: Counter[int | None]
    ep_ranks: Ranks


# A column of a layout: its regions, and the ranks that hold them.
Column = tuple[Regions, Ranks]


def in_words(cuts: Cuts, with_ranks: bool = False) -> str:
    """How the process groups cut or replicate a matrix, for error messages."""
    texts: list[str] = []
    for cut in cuts:
        text = cut.kind
        if cut.kind == "tp":
            text += f" along dimension {cut.dim}"
        if with_ranks:
            text += f" over ranks {listed(cut.ranks, 16)}"
        texts.append(text)
    return f"process groups: {', '.join(texts) or 'none'}"


def layout_of(rank: int, name: Name, told: Mapping[int, Told]) -> tuple[Shape, Layout]:
    """The shape and the layout of a matrix of ``rank``, by what it and the ranks of its groups have ``told``. Raises
    ValueError if the parts do not fit.
    """
    cuts = told[rank].parts[name].cuts
    shape, layout = _joined(rank, name, cuts, told)
    everyone = [*chain(*layout.grid)]
    if len({*everyone}) < len(everyone):
        raise ValueError(
            f"the process groups contradict each other: {in_words(cuts, True)} are no grid, like the dimensions of a DeviceMesh. "
            "Two of them have one rank in common"
        )
    # Ranks of one grid may put it together in different orders, and matrices may be cut in different orders of its ranks.
    rows = sorted(layout.grid, key=min)
    columns = zip(layout.shards, zip(*rows))
    return shape, _layout(sorted(columns, key=lambda column: column[1]))


def _layout(columns: Sequence[Column]) -> Layout:
    shards, ranks = zip(*columns)
    return Layout(tuple(zip(*ranks, strict=True)), shards)


def _joined(
    rank: int, name: Name, cuts: Cuts, told: Mapping[int, Told]
) -> tuple[Shape, Layout]:
    """The shape and the layout of what ``rank`` and others have along ``cuts``. The columns are in the order of regions, so
    that replicas have equal shards.
    """
    if not cuts:
        part = told[rank].parts[name]
        columns = zip(part.layout.shards, zip(*part.layout.grid))
        return part.shape, _layout(sorted(columns))
    *inner, cut = cuts
    joined: dict[int, tuple[Shape, Layout]] = {}
    for member in _members(rank, name, cut, told):
        others = told[member].parts[name].cuts[: len(inner)]
        joined[member] = _joined(member, name, others, told)
    shapes, layouts = zip(*joined.values())
    if cut.dim is None and len({*shapes}) > 1:
        raise ValueError(
            f"over {cut.kind}_process_group (ranks {listed(cut.ranks, 16)}) the ranks have different shapes: {shapes}"
        )
    # FSDP1's NO_SHARD replicates.
    have_equal_shards = len({layout.shards for layout in layouts}) == 1
    if cut.dim is not None or (cut.is_sharded and not have_equal_shards):
        return _end_to_end(shapes, layouts, cut.dim)
    if not have_equal_shards:
        # FSDP1 cuts these replicas at other places. Each of them is orthogonalized.
        return joined[rank]
    rows = [row for layout in layouts for row in layout.grid]
    if cut.kind == "cp":
        # The ranks that share a context may be among those that FSDP shards over, and so have joined already.
        rows = dict.fromkeys(rows)
    return shapes[0], Layout(tuple(rows), layouts[0].shards)


def _end_to_end(
    shapes: Sequence[Shape], layouts: Sequence[Layout], dim: int | None
) -> tuple[Shape, Layout]:
    """Shards along ``dim`` as one; regions of one matrix if it is None."""
    columns: list[Column] = []
    whole, start = [*shapes[0]], 0
    for shape, layout in zip(shapes, layouts):
        for regions, ranks in zip(layout.shards, zip(*layout.grid)):
            if dim is not None:
                regions = tuple(region.shifted(dim, start) for region in regions)
            columns.append((regions, ranks))
        if dim is not None:
            start += shape[dim]
            whole[dim] = start
    return (whole[0], whole[1]), _layout(sorted(columns))


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
    if expert is not None:
        # A rank has all parameters of an expert, or none.
        missing = {r for r in missing if r in told and told[r].counts[expert]}
    if missing:
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
    """Warnings about a matrix of ``rank``: ranks with different shards hardly have equal values."""
    found: list[str] = []
    for cut in told[rank].parts[name].cuts:
        digests = [told[r].digests[name] for r in cut.ranks if name in told[r].parts]
        are_equal = len(digests) > 1 and len({*digests}) == 1
        # FSDP1, whose cuts have no dimension, knows itself which ranks hold replicas.
        if cut.dim is not None and are_equal and any(digests):
            found.append(_EQUAL_SHARDS[cut.kind])
    return found


Groups = Mapping[str, ProcessGroup]


class GroupsReader(Reader):
    """Asks the process groups of a config's ``state``, DTensors and FSDP1 where the shards of an optimizer's parameters
    are. A plain tensor that no group shares is a whole matrix of each rank.
    """

    def __init__(self, state: Mapping[str, Any], takes_stacks: bool = False) -> None:
        super().__init__()
        self.takes_stacks = takes_stacks
        self.problem = ""
        self.given: dict[str, ProcessGroup] = {}
        # Those with several ranks, by kind.
        self.shared: dict[str, ProcessGroup] = {}
        for kind in (*KINDS, "ep"):
            group = state.get(f"{kind}_process_group")
            if isinstance(group, ProcessGroup):
                self.given[kind] = group
                if kind in KINDS and group.size() > 1:
                    self.shared[kind] = group
            elif group is not None:
                # new_group() returns something else on ranks that are not in the group.
                self.problem = f"{kind}_process_group is not a ProcessGroup with this rank but {group!r}"
        self.tp_dims = TPDims(state)
        self.experts = state.get("expert_assignments", {})
        # The FSDP1 model. Only it knows what its original parameters are slices of.
        self.module: nn.Module | None = state.get("module")
        self.candidates = [*self.shared.values()]

    def check_tp_dim(self, param: Param) -> None:
        """Raises IndexError if a parameter does not have its TP dimension."""
        self.tp_dims.check(param)

    def _check_indices(self, count: int) -> None:
        """Raises ValueError if a dict of the config names a parameter that is not one of ``count``."""
        dicts = {"expert_assignments": self.experts}
        if "tp" in self.shared:
            dicts["tp_dim_per_param"] = self.tp_dims.by_index or {}
        for name, indices in dicts.items():
            unknown = [index for index in indices if index not in range(count)]
            if unknown:
                raise ValueError(
                    f"{name} names parameters {unknown}. Indices count the optimizer's {count} parameters, not the model's"
                )

    def read(
        self, params: Sequence[Param], check: Callable[[], None] = lambda: None
    ) -> list[Matrix]:
        """The matrices in ``params``, in an order that all ranks share. The ranks of the groups exchange their parts, and all
        of them raise an error of ``check`` on one of them.
        """
        # A later reading is of an optimizer that may have lost parameters, which the config's dicts still name.
        is_first = not self.params
        self._begin(params)
        of_meshes = self.candidates
        parts = OwnParts(self)
        try:
            shown = parts.look_at_fsdp(params) | {*map(group_ranks, of_meshes)}
            if "tp" in self.shared:
                self.tp_dims.are_shown = group_ranks(self.shared["tp"]) in shown
            check()
            if is_first:
                self._check_indices(len(params))
            for param in self.params.values():
                parts.add(param)
        except Exception as error:
            # The other ranks are on their way into the exchange, so they hear of it there.
            parts.error = error
        matrices = parts.completed(of_meshes if parts.group_of else ())
        self.candidates = [*parts.group_of.values(), *of_meshes]
        # The ranks of a grid meet in its row and column, and those of several grids in the first one's.
        for grid in sorted({m.layout.grid for m in parts.joined}, key=place_in_order):
            groups = grid_groups(grid, self.candidates).several
            self.groups_of.setdefault(ranks_of(grid), groups)
        for matrix in parts.joined:
            layout = matrix.layout
            fields = {
                "name": shared_name(matrix.param, matrix.name),
                "shape": str(matrix.shape),
                "placement": matrix.placement,
                "shards": layout.digest,
            }
            fact = Fact(layout.ranks, matrix.param, matrix.described, fields)
            self.facts.append(fact)
        # A user may make errors of warnings, which the other ranks must hear of.
        parts.warn()
        return self._taken(matrices)

    def matrices_of(self, param: Param) -> list[Matrix]:
        """The matrices of a parameter that takes the place of one that was read. The ranks of the groups exchange their
        parts.
        """
        if param.tensor.ndim > 2 and not param.flatten and "fsdp" in self.shared:
            raise ValueError(
                f"gather_fn cannot put together parameter {param.index} outside of step(): ranks of fsdp_process_group hold other "
                "matrices of a stack. Call it with a DTensor"
            )
        parts = OwnParts(self)
        parts.look_at_fsdp([param])
        parts.add(param)
        return parts.completed()


class OwnParts:
    """This rank's parts of matrices, as ``reader`` finds them, and how process groups share these."""

    def __init__(self, reader: GroupsReader) -> None:
        self._reader = reader
        self._shared, self._tp_dims = reader.shared, reader.tp_dims
        # What FSDP1 manages of the user's module, if the user gave one.
        self.views: fsdp.Views | None = None
        # A unit of FSDP1 may have other groups than those that were given.
        self.group_of: dict[tuple[str, Ranks], ProcessGroup] = {}
        for kind, group in reader.shared.items():
            self.group_of[kind, group_ranks(group)] = group
        # Why this rank could not find its parts.
        self.error: Exception | None = None
        ep_group = reader.given.get("ep")
        ep_ranks = (process_rank(),) if ep_group is None else group_ranks(ep_group)
        # The message about the matrices that groups share. Equal parts are one object, so that it has each once.
        self._own = Told({}, {}, Counter(), ep_ranks)
        self._equal: dict[tuple, Part] = {}
        # Each matrix with this rank's part as its layout.
        self._found: dict[Name, Matrix] = {}
        # Those that groups share, once the parts of all ranks are put together.
        self.joined: list[Matrix] = []
        # Text -> the matrices that it is about.
        self._warnings: defaultdict[str, list[str]] = defaultdict(list)

    def look_at_fsdp(self, params: Sequence[Param]) -> set[Ranks]:
        """Reads what FSDP1 manages, and adds its groups, in which this rank must report a later error. Returns the ranks of
        each group of tensor parallelism that had cut a tensor before FSDP1 flattened it.
        """
        if self._reader.module is not None:
            self.views = fsdp.views(self._reader.module)
        tensors: list[fsdp.FlatTensor] = []
        for inside, groups in (self.views or {}).values():
            tensors += inside
            # This adds the groups.
            self._cuts_of(groups, {})
        for param in params:
            if getattr(param.tensor, "_is_flat_param", False):
                tensors += fsdp.tensors_of(param.tensor)
        shown: set[Ranks] = set()
        for mesh in {tensor.tp.mesh for tensor in tensors if tensor.tp is not None}:
            shown |= {cut.ranks for cut in self._cuts_of({"tp": mesh.get_group()}, {})}
        return shown

    def _cuts_of(self, groups: Groups, dims: Mapping[str, int | None]) -> Cuts:
        """How ``groups``, by kind, share a matrix. Those with a dimension in ``dims`` cut it."""
        cuts: list[Cut] = []
        for kind in KINDS:
            group = groups.get(kind)
            if group is not None and group.size() > 1:
                cut = Cut(kind, group_ranks(group), dims.get(kind))
                self.group_of[kind, cut.ranks] = group
                cuts.append(cut)
        return tuple(cuts)

    def add(self, param: Param) -> None:
        """Adds the matrices in a parameter. Raises ValueError or IndexError if Muon cannot take it."""
        reader = self._reader
        if reader.problem:
            raise ValueError(reader.problem)
        self._tp_dims.check(param)
        # Also a stack of which this rank has no matrix.
        self._own.counts[param.expert] += 1
        given = reader.given.get("fsdp")
        view = fsdp.view_of(param.tensor, param.described, self.views, given)
        if view is not None:
            self._add_flat(param, *view)
        elif param.tensor.ndim < 2:
            raise not_2d(param.described)
        elif param.is_dtensor:
            self._add_dtensor(param)
        else:
            self._add_plain(param)

    def _add_dtensor(self, param: Param) -> None:
        """Adds the DTensor's own layouts. Groups can only add replicas of its whole mesh."""
        tensor = cast(DTensor, param.tensor)
        groups: dict[str, ProcessGroup] = {}
        # The contributions to a sum are no replicas.
        if not param.is_sum:
            ranks = mesh_ranks(tensor.device_mesh)
            for kind in ("ddp", "cp"):
                if kind in self._shared and _has_no_other_of(self._shared[kind], ranks):
                    groups[kind] = self._shared[kind]
        cuts = self._cuts_of(groups, {})
        matrices = matrices_of_dtensor(param, self._reader.layouts)
        for matrix in matrices:
            self._add_part(matrix, cuts)
        if matrices:
            self._compare_with_groups(matrices[0], tensor)

    def _compare_with_groups(self, matrix: Matrix, tensor: DTensor) -> None:
        """Warns if a group or dimension contradicts the placements."""
        mesh, layout = tensor.device_mesh, matrix.layout
        verdict = f"The DTensor's placements count: {matrix.placement}"
        problems: list[str] = []
        placed = dict(zip(map(group_ranks, mesh.get_all_groups()), tensor.placements))
        for kind in self._shared.keys() & {"fsdp", "tp"}:
            ranks = group_ranks(self._shared[kind])
            placement = placed.get(ranks)
            dim = getattr(placement, "dim", None)
            along, agrees = "", dim is not None
            if kind == "tp":
                config_dim = self._tp_dims.of(matrix.param)
                if placement is None:
                    config_dim = self._tp_dims.of_plain(matrix.param)
                if config_dim is None:
                    continue  # The user says nothing about it.
                along = f" along dimension {config_dim}"
                agrees = dim == config_dim % tensor.ndim
            if not agrees:
                actual = placement or f"on {mesh}"
                problems.append(
                    f"{kind}_process_group says that ranks {list(ranks)} cut it{along}, but its placement is {actual}"
                )
        if "ddp" in self._shared:
            replicas = group_ranks(self._shared["ddp"])
            inside = sorted({*replicas} & {*layout.ranks})
            if len({layout.regions_of(rank) for rank in inside}) > 1:
                problems.append(
                    f"ddp_process_group says that ranks {list(replicas)} hold replicas, but ranks {inside} hold different shards"
                )
        for problem in problems:
            self._warnings[f"{problem}. {verdict}"].append(matrix.described)

    def _add_plain(self, param: Param) -> None:
        """Adds the matrices in a plain tensor. Raises ValueError if they cannot be told from its cut."""
        groups = dict(self._shared)
        if self.views:
            # FSDP1 did not flatten it, so each rank has it whole. TP may have cut it nevertheless.
            groups.clear()
            is_cut = self._tp_dims.of_plain(param) is not None
            if "tp" in self._shared and (
                is_cut or tp_mark_of(param.tensor) is not None
            ):
                groups["tp"] = self._shared["tp"]
        tp_dim = None
        if "tp" in groups:
            tp_dim = self._tp_dims.of_plain_or_mark(param)
        stack_dims = 0 if param.flatten else param.tensor.ndim - 2
        if param.flatten and tp_dim is not None and tp_dim > 1:
            raise ValueError(
                f"{param.described}: tensor parallelism cuts dimension {tp_dim} of it; flatten takes only 0 or 1"
            )
        if stack_dims:
            # FSDP cuts a stack along its first dimension, so no rank of its group is a replica of another.
            cutting = group_ranks(groups["fsdp"]) if "fsdp" in groups else ()
            for kind, group in list(groups.items()):
                if not _has_no_other_of(group, cutting):
                    del groups[kind]
            if tp_dim is not None and tp_dim < stack_dims:
                groups.pop("tp", None)
        dims = {"fsdp": 0, "tp": None if tp_dim is None else tp_dim - stack_dims}
        cuts = self._cuts_of(groups, dims)
        for matrix in whole_matrices(param):
            self._add_part(matrix, cuts)

    def _add_flat(
        self, param: Param, tensors: Sequence[fsdp.FlatTensor], groups: Groups
    ) -> None:
        """Adds the matrices that FSDP1 flattened. Its own ``groups`` count, not other ones of the config."""
        takes_stacks, flatten = self._reader.takes_stacks, param.flatten
        flats = fsdp.matrices_of(tensors, param.described, takes_stacks, flatten)
        for sub, (tensor, shape, regions) in enumerate(flats):
            layout = own_layout(regions)
            matrix = Matrix(param, shape, layout, sub=sub, inside=tensor.name)
            groups_of_tensor, tp_dim = dict(groups), None
            if tensor.tp is not None:
                groups_of_tensor["tp"], tp_dim = self._tp_of_spec(matrix, tensor.tp)
            elif "tp" in self._shared:
                tp_dim = self._tp_dims.of_plain_or_mark(param)
            for kind in groups_of_tensor.keys() & self._shared.keys():
                given = group_ranks(self._shared[kind])
                ranks = group_ranks(groups_of_tensor[kind])
                if given != ranks:
                    text = f"{kind}_process_group has ranks {list(given)}, but FSDP1 has {list(ranks)}, which count"
                    self._warnings[text].append(matrix.described)
            # Each rank has its regions of the whole matrix, so FSDP's cut has no dimension.
            cuts = self._cuts_of({**self._shared, **groups_of_tensor}, {"tp": tp_dim})
            self._add_part(matrix, cuts)

    def _tp_of_spec(
        self, matrix: Matrix, spec: DTensorSpec
    ) -> tuple[ProcessGroup, int | None]:
        """Group and dimension of the TP that FSDP1 found when it flattened a matrix."""
        (placement,) = spec.placements
        config_dim = self._tp_dims.of(matrix.param)
        dim = getattr(placement, "dim", None)
        if config_dim is not None and config_dim % 2 != dim:
            text = f"tp_dim_per_param says dimension {config_dim}, but its placement is {placement}, which counts"
            self._warnings[text].append(matrix.described)
        return spec.mesh.get_group(), dim

    def _add_part(self, matrix: Matrix, cuts: Cuts) -> None:
        """Adds a ``matrix`` of which this rank has a part."""
        expert, tensor = matrix.param.expert, matrix.param.tensor
        name = expert, self._own.counts[expert], matrix.sub
        # A DTensor has placements.
        placement = matrix.placement or in_words(cuts)
        self._found[name] = replace(matrix, placement=placement)
        if not cuts:
            return
        content = matrix.shape, matrix.layout.digest, cuts
        part = Part(matrix.shape, matrix.layout, cuts)
        self._own.parts[name] = self._equal.setdefault(content, part)
        digest = 0
        if not tensor.is_meta and any(cut.dim is not None for cut in cuts):
            regions = matrix.layout.regions_of(process_rank())
            digest = int(digest_of(regions, local_part(tensor)))
        self._own.digests[name] = digest

    def completed(self, mesh_groups: Sequence[ProcessGroup] = ()) -> list[Matrix]:
        """The matrices, with the parts of all ranks put together. All ranks of the groups raise the error of one of them,
        and so do those of ``mesh_groups``, the groups of DTensors.
        """
        # By kind, then larger groups first: the order of all ranks.
        order = sorted(
            self.group_of, key=lambda g: (KINDS.index(g[0]), -len(g[1]), sorted(g[1]))
        )
        groups = [self.group_of[group] for group in order]
        matrices: list[Matrix] = []
        try:
            matrices += checked(self._put_together(groups))
        except Exception as error:
            # Ranks of the grid may see different contradictions, or none.
            self.error = error
        groups += [group for group in mesh_groups if group.size() > 1]
        agree([Meeting([g], ()) for g in groups], self.error)
        return matrices

    def warn(self) -> None:
        """Warns of what looks wrong, on one rank of those that share matrices."""
        if all(min(ranks) == process_rank() for _, ranks in self.group_of):
            for text, named in self._warnings.items():
                warnings.warn(f"{listed(named)}: {text}", stacklevel=2)

    def _put_together(self, groups: Sequence[ProcessGroup]) -> list[Matrix]:
        """The matrices, with the layouts that this rank and those of its groups make of their parts. Raises an error of this
        rank after the exchange.
        """
        rank = process_rank()
        own = self._own if self.error is None else None
        described = (matrix.described for matrix in self._found.values())
        with naming("exchange of parts", groups, described):
            told = gathered_along(groups, own)
        if self.error is not None:
            raise self.error
        if None in told.values():
            # A rank without an answer has an error, which all of them raise.
            return []
        # Equal parts on all ranks have one layout.
        layouts: dict[tuple, tuple[Shape, Layout]] = {}
        matrices: list[Matrix] = []
        for name, matrix in self._found.items():
            if name not in self._own.parts:
                matrices.append(matrix)
                continue
            shared = (id(of_rank.parts.get(name)) for of_rank in told.values())
            content = name[0] is None, *shared
            if content not in layouts:
                try:
                    layouts[content] = layout_of(rank, name, told)
                except ValueError as error:
                    raise ValueError(f"{matrix.described}: {error}") from None
            for hint in hints(rank, name, told):
                self._warnings[hint].append(matrix.described)
            shape, layout = layouts[content]
            joined = replace(matrix, shape=shape, layout=layout)
            self.joined.append(joined)
            matrices.append(joined)
        return matrices


def _has_no_other_of(group: ProcessGroup, ranks: Sequence[int]) -> bool:
    """Whether ``group`` has no other rank of ``ranks`` than this one."""
    return not set(group_ranks(group)) & (set(ranks) - {dist.get_rank()})
