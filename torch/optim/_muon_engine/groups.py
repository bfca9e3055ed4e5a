"""Where an optimizer's parameters are, over process groups, by placements and by FSDP1's metadata.

A group does not say how its ranks cut a matrix. So in each group, ranks tell each other their parts, put them together (see
``joins``), and tell the next group the result. Only here do readers have collectives.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from . import fsdp1
from .agreement import agree, all_gather_object, Meeting, reaching
from .dtensors import (
    Fact,
    in_common_order,
    mesh_ranks,
    ParamInfo,
    Reader,
    whole_matrices,
)
from .joins import Cut, Cuts, in_words, join, KINDS, Name, Part, Told
from .local import local_part, traits_of
from .process_groups import (
    grid_groups,
    group_ranks,
    is_dry_run,
    listed,
    process_rank,
    Ranks,
)
from .regions import (
    checked,
    describe,
    Layout,
    Matrix,
    not_2d,
    place_in_order,
    ranks_of,
    Regions,
)
from .tp_dims import tp_mark_of, TPDims


Groups = Mapping[str, ProcessGroup]


class GroupsReader(Reader):
    """Asks the process groups of a config's ``state``, DTensors and FSDP1 where the shards of an optimizer's parameters
    are. A plain tensor that no group shares is a whole matrix of each rank.
    """

    def __init__(self, state: Mapping[str, Any], takes_stacks: bool = False) -> None:
        super().__init__()
        self.takes_stacks = takes_stacks
        self.problem = ""
        self.given: dict[str, ProcessGroup | None] = {}
        # Those with several ranks, by kind.
        self.shared: dict[str, ProcessGroup] = {}
        for kind in (*KINDS, "ep"):
            group = state.get(f"{kind}_process_group")
            # new_group() returns something else on ranks that are not in the group.
            if group is not None and not isinstance(group, ProcessGroup):
                self.problem = f"{kind}_process_group is not a ProcessGroup with this rank but {group!r}"
                group = None
            self.given[kind] = group
            if group is not None and kind in KINDS and group.size() > 1:
                self.shared[kind] = group
        self.tp_dims = TPDims(state, self.shared.get("tp"))
        self.experts = state.get("expert_assignments", {})
        # The FSDP1 model. Only it knows what its original parameters are slices of.
        self.module: nn.Module | None = state.get("module")
        # A later reading is of an optimizer that may have lost parameters, which the config's dicts still name.
        self._has_read = False
        self.candidates = [*self.shared.values()]

    def check_tp_dim(self, tensor: Tensor, index: int) -> None:
        """Raises IndexError if ``tensor`` does not have its TP dimension."""
        self.tp_dims.check(self.info(index).config_index, tensor, index)

    def _check_indices(self, count: int) -> None:
        """Raises ValueError if a dict of the config names a parameter that is none of ``count``."""
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
        self,
        params: Sequence[Tensor],
        infos: Sequence[ParamInfo] = (),
        check: Callable[[], None] = lambda: None,
    ) -> list[Matrix]:
        """All matrices in ``params``, in an order that all ranks share. The ranks of the groups
        exchange their parts, and all of them raise an error of ``check`` on one of them. ``infos`` are about each
        parameter (default: its index is its config index).
        """
        is_first = not self._has_read
        self._has_read = True
        self._begin(params, infos)
        of_meshes = self.candidates
        named = [self._named_by_expert(fact) for fact in self.facts]
        self.facts = [fact for _, fact in sorted(named, key=itemgetter(0))]
        parts = OwnParts(self)
        try:
            parts.look_at_module()
            self.tp_dims.look_at(params, parts.views)
            check()
            if is_first:
                self._check_indices(len(params))
            for index, param in enumerate(params):
                parts.add(index, param)
        except Exception as error:
            # The other ranks are on their way into the exchange, so they hear of it there.
            parts.error = error
        matrices = parts.completed(of_meshes if parts.group_of else ())
        for matrix in matrices:
            of_param, _ = self.by_param.setdefault(
                matrix.index, ([], params[matrix.index])
            )
            of_param.append(matrix)
        self.candidates = [*parts.group_of.values(), *of_meshes]
        joined = [m for m, cuts in zip(matrices, parts.cuts, strict=True) if cuts]
        self.facts += self._facts(joined)
        return in_common_order(matrices, self.facts)

    def _named_by_expert(self, fact: Fact) -> tuple[int, Fact]:
        """The id of a parameter's expert, -1 for none, and the ``fact`` with that name."""
        expert = self.experts.get(self.info(fact.index).config_index)
        if expert is None:
            return -1, fact
        return expert, fact._replace(fields={**fact.fields, "name": f"expert {expert}"})

    def _facts(self, matrices: Sequence[Matrix]) -> list[Fact]:
        """The facts about matrices that groups share. Their ranks know the grids, and meet in their rows and columns."""
        facts: list[Fact] = []
        # The ranks of several grids meet in the first one.
        groups: dict[Ranks, list[ProcessGroup]] = {}
        for grid in sorted({m.layout.grid for m in matrices}, key=place_in_order):
            of_grid = grid_groups(grid, self.candidates).several
            groups.setdefault(ranks_of(grid), of_grid)
        for matrix in in_common_order(matrices):
            layout = matrix.layout
            name = str(matrix.name)
            if matrix.expert is not None:
                # Ranks may name the modules of an expert differently.
                name = f"expert {matrix.expert}"
            fields = {
                "name": name,
                "shape": str(matrix.shape),
                "placement": matrix.placement,
                "shards": layout.digest,
            }
            of_ranks, described = groups[layout.ranks], matrix.described
            facts.append(Fact(layout.ranks, of_ranks, matrix.index, described, fields))
        return facts

    def matrices_of(self, tensor: Tensor, index: int) -> list[Matrix]:
        """The matrices of a plain ``tensor``, which takes the place of parameter ``index``. The ranks of the
        groups exchange their parts.
        """
        _, flatten = self.info(index).form
        if tensor.ndim > 2 and not flatten and "fsdp" in self.shared:
            raise ValueError(
                f"gather_fn cannot put together parameter {index} outside of step(): ranks of fsdp_process_group hold other "
                "matrices of a stack. Call it with a DTensor"
            )
        parts = OwnParts(self)
        parts.look_at_module()
        parts.add(index, tensor)
        return parts.completed()


class OwnParts:
    """This rank's parts of matrices, as ``reader`` finds them, and how process groups share these."""

    def __init__(self, reader: GroupsReader) -> None:
        self._reader = reader
        self._shared, self._tp_dims = reader.shared, reader.tp_dims
        # What FSDP1 manages of the user's module, if the user gave one.
        self.views: fsdp1.Views | None = None
        # A unit of FSDP1 may have other groups than those that were given.
        self.group_of: dict[tuple[str, Ranks], ProcessGroup] = {}
        for kind, group in reader.shared.items():
            self.group_of[kind, group_ranks(group)] = group
        # Why this rank could not find its parts.
        self.error: Exception | None = None
        # Each matrix has this rank's part as its layout.
        self._matrices: list[Matrix] = []
        self.cuts: list[Cuts] = []
        # The sum of the values that this rank stores of each; 0 if it is unknown.
        self._sums: list[float] = []
        # Index -> the expert's id, also of a stack of which this rank has no matrix.
        self._expert_of: dict[int, int | None] = {}
        # Text -> the matrices that it is about.
        self._warnings: defaultdict[str, list[str]] = defaultdict(list)

    def look_at_module(self) -> None:
        """Reads what FSDP1 manages, and adds the groups of its units, in which this rank must report a later error."""
        if self._reader.module is not None:
            self.views = fsdp1.views(self._reader.module)
        for param, (tensors, groups) in (self.views or {}).items():
            # A flat parameter has the tensors of its whole unit.
            if not getattr(param, "_is_flat_param", False):
                continue
            self._cuts_of(groups, {})
            for spec in {tensor.tp for tensor in tensors if tensor.tp is not None}:
                if spec.mesh.ndim == 1:
                    self._cuts_of({"tp": spec.mesh.get_group()}, {})

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

    def add(self, index: int, param: Tensor) -> None:
        """Adds the matrices in a parameter. Raises ValueError or IndexError if Muon cannot take it."""
        reader = self._reader
        if reader.problem:
            raise ValueError(reader.problem)
        config_index, name, (split, flatten) = reader.info(index)
        self._tp_dims.check(config_index, param, index)
        expert = reader.experts.get(config_index)
        self._expert_of[index] = expert
        described = describe(index, param.shape, name, expert=expert)
        traits = traits_of(param)
        # A matrix without a place.
        template = Matrix(
            index,
            (0, 0),
            traits.momentum_dtype,
            Layout(((process_rank(),),), ((),)),
            "",
            traits.frozen,
            name=name,
            expert=expert,
            split=split,
        )
        view = fsdp1.view_of(param, described, self.views, reader.given["fsdp"])
        if view is not None:
            tensors, groups = view
            matrices = fsdp1.matrices_of(
                tensors, described, reader.takes_stacks, flatten
            )
            for sub, matrix in enumerate(matrices):
                of_matrix = replace(template, sub=sub)
                self._add_flat(of_matrix, config_index, param, matrix, groups)
        elif param.ndim < 2:
            raise not_2d(described)
        elif isinstance(param, DTensor):
            self._add_dtensor(template, config_index, param, flatten)
        else:
            self._add_plain(template, config_index, param, flatten)

    def _add_dtensor(
        self, template: Matrix, config_index: int, tensor: DTensor, flatten: bool
    ) -> None:
        """Adds the DTensor's own layouts. Groups can only add replicas of its whole mesh."""
        groups: dict[str, ProcessGroup] = {}
        # The contributions to a sum are no replicas.
        if not any(placement.is_partial() for placement in tensor.placements):
            ranks = mesh_ranks(tensor.device_mesh)
            for kind in ("ddp", "cp"):
                if kind in self._shared and _has_no_other_of(self._shared[kind], ranks):
                    groups[kind] = self._shared[kind]
        cuts = self._cuts_of(groups, {})
        form = template.split, flatten
        matrices = self._reader.dtensors.of(template.index, template.name, tensor, form)
        for matrix in matrices:
            self._append(replace(matrix, expert=template.expert), cuts)
        if matrices:
            self._compare_with_groups(matrices[0], config_index, tensor)

    def _compare_with_groups(
        self, matrix: Matrix, config_index: int, tensor: DTensor
    ) -> None:
        """Warns if a group or dimension contradicts the placements."""
        mesh, layout = tensor.device_mesh, matrix.layout
        verdict = f"The DTensor's placements count: {matrix.placement}"
        problems: list[str] = []
        placed = dict(zip(map(group_ranks, mesh.get_all_groups()), tensor.placements))
        for kind in self._shared.keys() & {"fsdp", "tp"}:
            ranks = group_ranks(self._shared[kind])
            is_on_mesh = ranks in placed
            dim = getattr(placed.get(ranks), "dim", None)
            along, agrees = "", dim is not None
            if kind == "tp":
                config_dim = self._tp_dims.of_plain(config_index)
                if is_on_mesh:
                    config_dim = self._tp_dims.of(config_index)
                if config_dim is None:
                    continue  # The user says nothing about it.
                along = f" along dimension {config_dim}"
                agrees = dim == config_dim % tensor.ndim
            if not is_on_mesh or not agrees:
                actual = placed.get(ranks, f"on {mesh}")
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

    def _add_plain(
        self, template: Matrix, config_index: int, param: Tensor, flatten: bool
    ) -> None:
        """Adds the matrices in a plain tensor. Raises ValueError if they cannot be told from its cut."""
        described = replace(template, shape=tuple(param.shape)).described
        groups = dict(self._shared)
        if self.views:
            # FSDP1 did not flatten it, so each rank has it whole. TP may have cut it nevertheless.
            groups.clear()
            is_cut = self._tp_dims.of_plain(config_index) is not None
            if "tp" in self._shared and (is_cut or tp_mark_of(param) is not None):
                groups["tp"] = self._shared["tp"]
        tp_dim = None
        if "tp" in groups:
            tp_dim = self._tp_dims.of_plain_or_mark(config_index, described, param)
        stack_dims = 0 if flatten else param.ndim - 2
        if flatten and tp_dim is not None and tp_dim > 1:
            raise ValueError(
                f"{described}: tensor parallelism cuts dimension {tp_dim} of it; flatten takes only 0 or 1"
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
        form = template.split, flatten
        for matrix in whole_matrices(template.index, template.name, param, form):
            (regions,) = matrix.layout.shards
            matrix = replace(matrix, expert=template.expert)
            self._add_part(matrix, param, regions, cuts)

    def _add_flat(
        self,
        template: Matrix,
        config_index: int,
        param: Tensor,
        flat: fsdp1.FlatMatrix,
        groups: Groups,
    ) -> None:
        """Adds a matrix that FSDP1 flattened. Its own ``groups`` count, not other ones of the config."""
        tensor, shape, regions = flat
        name = template.name or tensor.name
        matrix = replace(template, name=name, shape=shape)
        described = matrix.described
        tp_dim = None
        if tensor.tp is not None:
            group, tp_dim = self._tp_of_spec(config_index, described, tensor.tp)
            groups = {**groups, "tp": group}
        elif "tp" in self._shared:
            whole = replace(matrix, shape=tuple(param.shape)).described
            tp_dim = self._tp_dims.of_plain_or_mark(config_index, whole, param)
        for kind in groups.keys() & self._shared.keys():
            given, ranks = group_ranks(self._shared[kind]), group_ranks(groups[kind])
            if given != ranks:
                text = f"{kind}_process_group has ranks {list(given)}, but FSDP1 has {list(ranks)}, which count"
                self._warnings[text].append(described)
        # Each rank has its regions of the whole matrix, so FSDP's cut has no dimension.
        cuts = self._cuts_of({**self._shared, **groups}, {"tp": tp_dim})
        self._add_part(matrix, param, regions, cuts)

    def _tp_of_spec(
        self, config_index: int, described: str, spec: DTensorSpec
    ) -> tuple[ProcessGroup, int | None]:
        """Group and dimension of the TP that FSDP1 found when it flattened a matrix."""
        if spec.mesh.ndim != 1:
            raise ValueError(
                f"{described}: FSDP1 over a mesh of {spec.mesh.ndim} dimensions is not supported; use fully_shard"
            )
        (placement,) = spec.placements
        config_dim = self._tp_dims.of(config_index)
        dim = getattr(placement, "dim", None)
        if config_dim is not None and config_dim % 2 != dim:
            text = f"tp_dim_per_param says dimension {config_dim}, but its placement is {placement}, which counts"
            self._warnings[text].append(described)
        return spec.mesh.get_group(), dim

    def _add_part(
        self, matrix: Matrix, param: Tensor, regions: Regions, cuts: Cuts
    ) -> None:
        """Adds a ``matrix`` of whose part this rank stores ``regions``."""
        layout = Layout(((process_rank(),),), (regions,))
        total = 0.0
        has_values = not param.is_meta and not is_dry_run()
        if has_values and any(cut.is_sharded for cut in cuts):
            local = local_part(param)
            for region in regions:
                values = region.of_local(local).abs()
                total += values.sum(dtype=torch.float64).item()
        matrix = replace(matrix, layout=layout, placement=in_words(cuts))
        self._append(matrix, cuts, total)

    def _append(self, matrix: Matrix, cuts: Cuts, total: float = 0.0) -> None:
        self._matrices.append(matrix)
        self.cuts.append(cuts)
        self._sums.append(total)

    def completed(self, mesh_groups: Sequence[ProcessGroup] = ()) -> list[Matrix]:
        """The matrices, with the parts of all ranks put together. All ranks of the groups raise the error of one of them,
        and so do those of ``mesh_groups``, the groups of DTensors.
        """
        # By kind, then larger groups first: the order of all ranks.
        order = sorted(
            self.group_of, key=lambda g: (KINDS.index(g[0]), -len(g[1]), sorted(g[1]))
        )
        groups = [self.group_of[group] for group in order]
        groups += [group for group in mesh_groups if group.size() > 1]
        matrices: list[Matrix] = []
        try:
            if parts := self._joined(order):
                matrices += checked([*self._with_parts(parts)])
        except Exception as error:
            # Ranks of the grid may see different contradictions, or none.
            self.error = error
        agree([Meeting(group_ranks(g), [g], ()) for g in groups], self.error)
        if all(min(ranks) == process_rank() for _, ranks in order):
            for text, named in self._warnings.items():
                warnings.warn(f"{listed(named)}: {text}", stacklevel=2)
        return matrices

    def _joined(self, order: Sequence[tuple[str, Ranks]]) -> list[Part]:
        """The part of each matrix after the exchange in each group. Raises an error of this rank after the last one."""
        names = self._names()
        described = dict(zip(names, (matrix.described for matrix in self._matrices)))
        # Equal parts are one object, so that a message has each once.
        equal: dict[tuple, Part] = {}
        parts: dict[Name, Part] = {}
        for name, matrix, cuts in zip(names, self._matrices, self.cuts, strict=True):
            content = matrix.shape, matrix.layout.digest, cuts
            part = Part(matrix.shape, matrix.layout, cuts)
            parts[name] = equal.setdefault(content, part)
        ep_group = self._reader.given["ep"]
        ep_ranks = (process_rank(),) if ep_group is None else group_ranks(ep_group)
        own: Told | None = Told(parts, dict(zip(names, self._sums)), ep_ranks)
        for group in order:
            told = own if self.error is None else None
            with reaching(group[1], [*described.values()]):
                answers = all_gather_object(told, self.group_of[group])
            if own is None or None in answers:
                # A rank without an answer has an error, which all of them raise.
                own = None
                continue
            try:
                own, hints = join(process_rank(), group, own, answers, described)
                for hint, name in hints:
                    self._warnings[hint].append(described[name])
            except Exception as error:
                self.error = error
        if self.error is not None:
            raise self.error
        return [] if own is None else [*own.parts.values()]

    def _names(self) -> list[Name]:
        """How ranks name the matrices."""
        counts: Counter[int | None] = Counter()
        # Parameter -> its number among those of the same expert, or of none.
        numbers: dict[int, int] = {}
        for index, expert in self._expert_of.items():
            numbers[index] = counts[expert]
            counts[expert] += 1
        return [(m.expert, numbers[m.index], m.sub) for m in self._matrices]

    def _with_parts(self, parts: Sequence[Part]) -> list[Matrix]:
        """The matrices, with the layouts that the ranks have put together."""
        # Equal layouts are one object.
        layouts: dict[str, Layout] = {}
        matrices: list[Matrix] = []
        for matrix, part in zip(self._matrices, parts, strict=True):
            layout = layouts.setdefault(part.layout.digest, part.layout)
            matrices.append(replace(matrix, shape=part.shape, layout=layout))
        return matrices


def _has_no_other_of(group: ProcessGroup, ranks: Sequence[int]) -> bool:
    """Whether ``group`` has no other rank of ``ranks`` than this one."""
    return not set(group_ranks(group)) & (set(ranks) - {dist.get_rank()})
