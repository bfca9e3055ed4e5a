"""Where an optimizer's parameters are, over process groups, by placements and by FSDP1's metadata."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..process_groups import group_ranks, larger_first
from . import dtensor, fsdp1
from .layout import Key, Layout, matrix_shape, not_2d, Region
from .pieces import KindGroups, KINDS, LocalPieces
from .exchange import complete
from .reader import cut_into_parts, flat_indices, info_of, ParamInfo


class GroupsReader:
    """Asks the process groups of a config's ``state``, DTensors and FSDP1 where the shards of an optimizer's parameters
    are. A plain tensor that no group shares is a whole matrix of each rank.
    """

    def __init__(self, state: Mapping[str, Any], takes_stacks: bool = False) -> None:
        self.takes_stacks = takes_stacks
        kinds = *KINDS, "ep"
        self.given = {kind: state.get(f"{kind}_process_group") for kind in kinds}
        self.problem = ""
        for kind, group in self.given.items():
            # new_group() returns something else on ranks that are not in the group.
            if group is not None and not isinstance(group, ProcessGroup):
                self.problem = f"{kind}_process_group is not a ProcessGroup with this rank but {group!r}"
                self.given[kind] = None
        groups = {kind: self.given[kind] for kind in KINDS}
        self.shared: Mapping[str, ProcessGroup] = {
            kind: group for kind, group in groups.items() if group and group.size() > 1
        }
        # Config index -> the dimension that TP cuts; None if the user said nothing.
        self.tp_dims: Mapping[int, int] | None = state.get("tp_dim_per_param")
        self.tp_dim_default: int | None = state.get("tp_dim_default")
        # Whether the parameters that were read last show which of them PyTorch's tensor parallelism cut.
        self.shows_tp = False
        self.experts: Mapping[int, int] = state.get("expert_assignments", {})
        # The FSDP1 model. Only it knows what its original parameters are slices of.
        self.module: nn.Module | None = state.get("module")
        self._infos: Sequence[ParamInfo] = ()
        # A later reading is of an optimizer that may have lost parameters, which the config's dicts still name.
        self._has_read = False
        self.dtensors = dtensor.DTensorLayouts()
        # From the parameters that were read last; after a failure, what all ranks know without reading.
        self.sharing: dtensor.Sharing = {}
        # Index -> the layouts in a parameter, and a tensor with its type and local shape.
        self.by_param: dict[int, tuple[list[Layout], Tensor]] = {}

    def info(self, index: int) -> ParamInfo:
        """The info with which parameter ``index`` was read, or its default."""
        return info_of(self._infos, index)

    def tp_dim(self, index: int) -> int | None:
        """The dimension along which TP cuts parameter ``index``; None if it does not."""
        dims = self.tp_dims or {}
        return dims.get(self.info(index).config_index, self.tp_dim_default)

    def tp_dim_of_plain(self, index: int) -> int | None:
        """Like :meth:`tp_dim`, for a parameter without placements. An int is for models in which no parameter has
        them. PyTorch's tensor parallelism leaves such a parameter whole.
        """
        names_it = self.info(index).config_index in (self.tp_dims or {})
        return None if self.shows_tp and not names_it else self.tp_dim(index)

    def _finds_tp(self, params: Sequence[Tensor], views: fsdp1.Views | None) -> bool:
        """Whether DTensors or FSDP1's metadata show which parameters tensor parallelism cut."""
        if "tp" not in self.shared:
            return False
        tensors = [tensor for inside, _ in (views or {}).values() for tensor in inside]
        for param in params:
            if getattr(param, "_is_flat_param", False):
                tensors += fsdp1.tensors_of(param)
        if any(tensor.tp is not None for tensor in tensors):
            return True
        ranks = group_ranks(self.shared["tp"])
        meshes = {param.device_mesh for param in params if isinstance(param, DTensor)}
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        return any(group_ranks(group) == ranks for group in groups)

    def check_tp_dim(self, tensor: Tensor, index: int) -> None:
        """Raises IndexError if ``tensor`` does not have its TP dimension."""
        dim = self.tp_dim(index)
        # The matrices in a flat parameter have two dimensions.
        ndim = max(2, tensor.ndim)
        if dim is not None and not -ndim <= dim < ndim:
            raise IndexError(
                f"tp_dim_per_param says dimension {dim} of parameter {index}, which has {ndim} and shape {tuple(tensor.shape)}"
            )

    def _check_indices(self, count: int) -> None:
        tp_dims = self.tp_dims if "tp" in self.shared else None
        dicts = {"expert_assignments": self.experts, "tp_dim_per_param": tp_dims or {}}
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
        error: BaseException | None = None,
    ) -> list[Layout]:
        """The layouts of all matrices in ``params``, in an order that all ranks share. The ranks of the groups
        exchange their parts, and all of them raise an ``error`` of this rank. ``infos`` are about each
        parameter (default: its index is its config index).
        """
        self._infos = infos
        # Another mesh may get the address of a former one.
        self.dtensors = dtensor.DTensorLayouts()
        is_first, self._has_read, self.by_param = not self._has_read, True, {}
        local = _LocalReader(self)
        try:
            self.sharing = self.dtensors.sharing(params, flat_indices(self._infos))
            local.add_units()
            self.shows_tp = self._finds_tp(params, local.views)
            if error is None and is_first:
                self._check_indices(len(params))
            for index, param in enumerate(params if error is None else ()):
                local.add(index, param)
        except Exception as problem:
            # The other ranks are on their way into the exchange, so they hear of it there.
            error = error or problem
        pieces = local.pieces
        for ranks in larger_first(self.sharing) if pieces.group_of else ():
            groups = [g for g in self.sharing[ranks] if {*group_ranks(g)} <= {*ranks}]
            pieces.mesh_groups += [group for group in groups if group.size() > 1]
        layouts = complete(pieces, error)
        self.sharing = self._sharing_of(params, layouts, pieces)
        for layout in layouts:
            index = layout.key.index
            self.by_param.setdefault(index, ([], params[index]))[0].append(layout)
        parts = cut_into_parts(layouts, self._infos)
        # Ranks may list the same experts in different orders, and must share one order.
        return sorted(parts, key=lambda l: -1 if l.key.expert is None else l.key.expert)

    def _sharing_of(
        self, params: Sequence[Tensor], layouts: Sequence[Layout], pieces: LocalPieces
    ) -> dtensor.Sharing:
        of_meshes, groups = self.sharing, pieces.group_of.items()
        # Without groups, the ranks of a mesh agree even if they hold different matrices of a stack.
        sharing = {} if self.shared else dict(of_meshes)
        tensors = (params[layout.key.index] for layout in layouts)
        meshes = (getattr(tensor, "device_mesh", None) for tensor in tensors)
        for ranks, mesh in dict.fromkeys(zip((l.holders for l in layouts), meshes)):
            # Replicas along other groups make a mesh one part of several. A mesh of other parameters does
            # not count: not all of these ranks may be on one.
            of_mesh = of_meshes.get(dtensor.mesh_ranks(mesh), []) if mesh else []
            within = [g for (_, part), g in groups if {*part} <= {*ranks}]
            sharing[ranks] = [*within, *sharing.get(ranks, []), *of_mesh]
        return sharing

    def rendezvous_groups(self, params: Sequence[Tensor]) -> dtensor.Sharing:
        """Sorted ranks that must read ``params`` together -> their groups; known before reading."""
        shared = {tuple(sorted(group_ranks(g))): [g] for g in self.shared.values()}
        return {**self.dtensors.sharing(params, flat_indices(self._infos)), **shared}

    def layouts_of(self, tensor: Tensor, index: int) -> list[Layout]:
        """The layouts of the matrices of a plain ``tensor``, which takes the place of parameter ``index``. The ranks of the
        groups exchange their parts.
        """
        _, flatten = self.info(index).form
        if tensor.ndim > 2 and not flatten and "fsdp" in self.shared:
            raise ValueError(
                f"gather_fn cannot put together parameter {index} outside of step(): ranks of fsdp_process_group hold other "
                "matrices of a stack. Call it with a DTensor"
            )
        local = _LocalReader(self)
        local.add(index, tensor)
        return complete(local.pieces)


class _LocalReader:
    """Collects the ``pieces`` that this rank has of the matrices of one ``reader``."""

    def __init__(self, reader: GroupsReader) -> None:
        self.pieces = LocalPieces(reader.shared, reader.given["ep"])
        self.reader, self.shared = reader, reader.shared

    @cached_property
    def views(self) -> fsdp1.Views | None:
        """What FSDP1 manages of the user's module, if the user gave one."""
        return None if self.reader.module is None else fsdp1.views(self.reader.module)

    def add_units(self) -> None:
        """Adds the groups of FSDP1's units, in which this rank must report an error that comes first."""
        for param, (tensors, groups) in (self.views or {}).items():
            # A flat parameter has the tensors of its whole unit.
            if not getattr(param, "_is_flat_param", False):
                continue
            self.pieces.cuts_of(groups, {})
            for spec in {tensor.tp for tensor in tensors if tensor.tp is not None}:
                if spec.mesh.ndim == 1:
                    self.pieces.cuts_of({"tp": spec.mesh.get_group()}, {})

    def add(self, index: int, param: Tensor) -> None:
        """Adds the matrices in a parameter. Raises ValueError or IndexError if Muon cannot take it."""
        reader, info = self.reader, self.reader.info(index)
        if reader.problem:
            raise ValueError(reader.problem)
        reader.check_tp_dim(param, index)
        key = Key(index, 0, info.name, reader.experts.get(info.config_index))
        self.pieces.expert_of[index] = key.expert
        described, (_, flatten) = key.describe(param.shape), info.form
        view = fsdp1.view_of(param, described, self.views, reader.given["fsdp"])
        if view is not None:
            tensors, groups = view
            takes_stacks = reader.takes_stacks
            matrices = fsdp1.matrices_of(tensors, described, takes_stacks, flatten)
            for sub, matrix in enumerate(matrices):
                self._add_flat(key._replace(sub=sub), param, matrix, groups)
        elif param.ndim < 2:
            raise not_2d(described)
        elif isinstance(param, DTensor):
            self._add_dtensor(key, param, flatten)
        else:
            self._add_plain(key, param, flatten)

    def _add_dtensor(self, key: Key, tensor: DTensor, flatten: bool) -> None:
        """Adds the DTensor's own layouts. Groups can only add replicas of its whole mesh."""
        # The contributions to a sum are no replicas.
        kinds = () if any(p.is_partial() for p in tensor.placements) else ("ddp", "cp")
        groups = {k: g for k, g in self.shared.items() if k in kinds}
        if groups:
            ranks = dtensor.mesh_ranks(tensor.device_mesh)
            groups = {k: g for k, g in groups.items() if _only_me(g, ranks)}
        cuts = self.pieces.cuts_of(groups, {})
        layouts = self.reader.dtensors.of(key, tensor, flatten)
        self.pieces.layouts += [replace(layout, cuts=cuts) for layout in layouts]
        if layouts:
            self._compare_with_groups(layouts[0], tensor)

    def _compare_with_groups(self, layout: Layout, tensor: DTensor) -> None:
        """Warns if a group or dimension contradicts the placements."""
        mesh, index = tensor.device_mesh, layout.key.index
        verdict = f"The DTensor's placements count: {layout.placement}"
        placed = dict(zip(map(group_ranks, mesh.get_all_groups()), tensor.placements))
        for kind in self.shared.keys() & {"fsdp", "tp"}:
            ranks = group_ranks(self.shared[kind])
            on_mesh = ranks in placed
            dim = getattr(placed.get(ranks), "dim", None)
            along, agrees = "", dim is not None
            if kind == "tp":
                dim_of = self.reader.tp_dim if on_mesh else self.reader.tp_dim_of_plain
                config_dim = dim_of(index)
                if config_dim is None:
                    continue  # The user says nothing about it.
                along = f" along dimension {config_dim}"
                agrees = dim == config_dim % tensor.ndim
            if not on_mesh or not agrees:
                actual = placed.get(ranks, f"on {mesh}")
                text = f"{kind}_process_group says that ranks {list(ranks)} cut it{along}, but its placement is {actual}"
                self.pieces.warnings[f"{text}. {verdict}"].append(layout.describe())
        replicas = group_ranks(self.shared["ddp"]) if "ddp" in self.shared else ()
        inside = sorted({*replicas} & {*layout.holders})
        if len({layout.shards.of(rank) for rank in inside}) > 1:
            text = f"ddp_process_group says that ranks {list(replicas)} hold replicas, but ranks {inside} hold different shards"
            self.pieces.warnings[f"{text}. {verdict}"].append(layout.describe())

    def _add_plain(self, key: Key, param: Tensor, flatten: bool) -> None:
        """Adds the matrices in a plain tensor. Raises ValueError if they cannot be told from its cut."""
        groups = dict(self.shared)
        if self.views:
            # FSDP1 did not flatten it, so each rank has it whole. TP may have cut it nevertheless.
            dim = self.reader.tp_dim_of_plain(key.index)
            is_cut = dim is not None or tp_mark_of(param) is not None
            groups = {k: g for k, g in groups.items() if k == "tp" and is_cut}
        tp_dim = self._tp_dim(key, param) if "tp" in groups else None
        stacked = 0 if flatten else param.ndim - 2
        if flatten and (tp_dim or 0) > 1:
            raise ValueError(
                f"{key.describe(param.shape)}: tensor parallelism cuts dimension {tp_dim} of it; flatten takes only 0 or 1"
            )
        if stacked:
            # FSDP cuts a stack along its first dimension, so no rank of its group is a replica of another.
            cutting = group_ranks(groups["fsdp"]) if "fsdp" in groups else ()
            groups = {k: g for k, g in groups.items() if _only_me(g, cutting)}
            if tp_dim is not None and tp_dim < stacked:
                groups.pop("tp", None)
        dims = {"fsdp": 0, "tp": None if tp_dim is None else tp_dim - stacked}
        cuts, shape = (
            self.pieces.cuts_of(groups, dims),
            matrix_shape(param.shape, flatten),
        )
        first = Region(0, 0, *shape, 0, shape[1])
        for sub in range(math.prod(param.shape[:stacked])):
            region = first._replace(offset=sub * first.numel)
            regions = (region,) if region.numel else ()
            self.pieces.add_piece(key._replace(sub=sub), param, shape, regions, cuts)

    def _tp_dim(self, key: Key, param: Tensor) -> int | None:
        """The dimension along which TP cuts ``param``, from the user or else from the framework's mark."""
        dim = self.reader.tp_dim_of_plain(key.index)
        mark = tp_mark_of(param)
        if dim is not None:
            return dim % max(2, param.ndim)
        if self.reader.tp_dims is not None or mark == -1:
            return None
        if mark is not None:
            return mark
        if self.reader.shows_tp:
            return None
        raise ValueError(
            f"{key.describe(param.shape)}: tp_process_group needs tp_dim_per_param, a dict of parameter index -> dimension "
            "that lacks those that are not cut (see detect_tp_dims_from_model), or an int for all"
        )

    def _add_flat(
        self, key: Key, param: Tensor, matrix: fsdp1.FlatMatrix, groups: KindGroups
    ) -> None:
        """Adds a matrix that FSDP1 flattened. Its own ``groups`` count, not other ones of the config."""
        tensor, shape, regions = matrix
        key, tp_dim = key._replace(name=key.name or tensor.name), None
        described = key.describe(shape)
        if tensor.tp is not None:
            group, tp_dim = self._tp_of_spec(key, described, tensor.tp)
            groups = {**groups, "tp": group}
        elif "tp" in self.shared:
            tp_dim = self._tp_dim(key, param)
        for kind in groups.keys() & self.shared.keys():
            given, ranks = group_ranks(self.shared[kind]), group_ranks(groups[kind])
            if given != ranks:
                text = f"{kind}_process_group has ranks {list(given)}, but FSDP1 has {list(ranks)}, which count"
                self.pieces.warnings[text].append(described)
        # Each rank has its regions of the whole matrix, so FSDP's cut has no dimension.
        cuts = self.pieces.cuts_of({**self.shared, **groups}, {"tp": tp_dim})
        self.pieces.add_piece(key, param, shape, regions, cuts)

    def _tp_of_spec(
        self, key: Key, described: str, spec: DTensorSpec
    ) -> tuple[ProcessGroup, int | None]:
        """Group and dimension of the TP that FSDP1 found when it flattened a matrix."""
        if spec.mesh.ndim != 1:
            raise ValueError(
                f"{described}: FSDP1 over a mesh of {spec.mesh.ndim} dimensions is not supported; use fully_shard"
            )
        (placement,), config_dim = spec.placements, self.reader.tp_dim(key.index)
        dim = getattr(placement, "dim", None)
        if config_dim is not None and config_dim % 2 != dim:
            text = f"tp_dim_per_param says dimension {config_dim}, but its placement is {placement}, which counts"
            self.pieces.warnings[text].append(described)
        return spec.mesh.get_group(), dim


def _only_me(group: ProcessGroup, ranks: Sequence[int]) -> bool:
    """Whether ``group`` has no other rank of ``ranks`` than this one."""
    return not set(group_ranks(group)) & (set(ranks) - {dist.get_rank()})


def tp_mark_of(param: Tensor) -> int | None:
    """The dimension along which a framework says that TP cuts ``param``; -1 for none."""
    for mark in ("tp_dim", "partition_dim"):
        dim = getattr(param, mark, None)
        if isinstance(dim, int):
            return max(dim, -1)
    return None


def detected_tp_dims(model: nn.Module | Iterable[Tensor]) -> dict[int, int | None]:
    """For each parameter of ``model``, the dimension along which TP cuts it; -1 for none; None if nothing says so."""
    views: fsdp1.Views = {}
    params = model.parameters() if isinstance(model, nn.Module) else model
    if isinstance(model, nn.Module):
        views = fsdp1.views(model)
    dims: dict[int, int | None] = {}
    has_placements = False
    for index, param in enumerate(params):
        tensors, _ = views.get(param, ((), {}))
        specs = [tensor.tp for tensor in tensors if tensor.tp is not None]
        if isinstance(param, DTensor):
            # TP is the innermost mesh dimension, because fully_shard puts its own before it.
            placements = [*reversed(param.placements)]
        else:
            placements = [placement for spec in specs for placement in spec.placements]
        has_placements = has_placements or bool(placements)
        dims[index] = tp_mark_of(param)
        if len(tensors) > 1 and specs:
            # A flat parameter has no dimension of its own. FSDP1 knows how TP cut each tensor in it.
            dims[index] = -1
        elif dims[index] is None and placements:
            cuts = [
                placement.dim for placement in placements if hasattr(placement, "dim")
            ]
            dims[index] = cuts[0] % max(2, param.ndim) if cuts else -1
    if has_placements:
        return {index: -1 if dim is None else dim for index, dim in dims.items()}
    return dims
