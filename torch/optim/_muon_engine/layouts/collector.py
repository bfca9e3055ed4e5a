"""What this rank knows of an optimizer's parameters: its pieces of their matrices, and which groups share these."""

import math
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..process_groups import group_ranks
from . import dtensor, fsdp1
from .layout import Key, Layout, matrix_shape, not_2d, Region
from .pieces import KindGroups, LocalPieces, Piece
from .reader import ParamInfo
from .tp_dims import tp_mark_of, TPDims


class PieceCollector:
    """Collects ``pieces``, without a word to other ranks.

    ``shared`` are the process groups of the config by kind, and ``views`` is what FSDP1 manages of the user's module;
    None without a module. ``experts`` maps config indices to the experts' ids.
    """

    def __init__(
        self,
        pieces: LocalPieces,
        shared: KindGroups,
        tp_dims: TPDims,
        dtensors: dtensor.DTensorLayouts,
        views: fsdp1.Views | None,
        experts: Mapping[int, int],
        takes_stacks: bool,
    ) -> None:
        self.pieces = pieces
        self._shared = shared
        self._tp_dims = tp_dims
        self._dtensors = dtensors
        self._views = views
        self._experts = experts
        self._takes_stacks = takes_stacks

    def add_units(self) -> None:
        """Adds the groups of FSDP1's units, in which this rank must report an error that comes first."""
        for param, (tensors, groups) in (self._views or {}).items():
            # A flat parameter has the tensors of its whole unit.
            if not getattr(param, "_is_flat_param", False):
                continue
            self.pieces.cuts_of(groups, {})
            for spec in {tensor.tp for tensor in tensors if tensor.tp is not None}:
                if spec.mesh.ndim == 1:
                    self.pieces.cuts_of({"tp": spec.mesh.get_group()}, {})

    def add(
        self,
        index: int,
        param: Tensor,
        info: ParamInfo,
        fsdp_group: ProcessGroup | None,
    ) -> None:
        """Adds the matrices in a parameter. Raises ValueError or IndexError if Muon cannot take it. ``fsdp_group`` is
        the one that the user gave.
        """
        config_index = info.config_index
        self._tp_dims.check(config_index, param, index)
        key = Key(index, 0, info.name, self._experts.get(config_index))
        self.pieces.expert_of[index] = key.expert
        described = key.describe(param.shape)
        _, flatten = info.form
        view = fsdp1.view_of(param, described, self._views, fsdp_group)
        if view is not None:
            tensors, groups = view
            matrices = fsdp1.matrices_of(
                tensors, described, self._takes_stacks, flatten
            )
            for sub, matrix in enumerate(matrices):
                of_matrix = key._replace(sub=sub)
                self._add_flat(of_matrix, config_index, param, matrix, groups)
        elif param.ndim < 2:
            raise not_2d(described)
        elif isinstance(param, DTensor):
            self._add_dtensor(key, config_index, param, flatten)
        else:
            self._add_plain(key, config_index, param, flatten)

    def _add_dtensor(
        self, key: Key, config_index: int, tensor: DTensor, flatten: bool
    ) -> None:
        """Adds the DTensor's own layouts. Groups can only add replicas of its whole mesh."""
        kinds = [kind for kind in ("ddp", "cp") if kind in self._shared]
        if any(placement.is_partial() for placement in tensor.placements):
            # The contributions to a sum are no replicas.
            kinds = []
        groups: dict[str, ProcessGroup] = {}
        if kinds:
            ranks = dtensor.mesh_ranks(tensor.device_mesh)
            for kind in kinds:
                if _has_no_other_of(self._shared[kind], ranks):
                    groups[kind] = self._shared[kind]
        cuts = self.pieces.cuts_of(groups, {})
        layouts = self._dtensors.of(key, tensor, flatten)
        self.pieces.layouts += [Piece.of(layout, cuts) for layout in layouts]
        if layouts:
            self._compare_with_groups(layouts[0], config_index, tensor)

    def _compare_with_groups(
        self, layout: Layout, config_index: int, tensor: DTensor
    ) -> None:
        """Warns if a group or dimension contradicts the placements."""
        mesh, described = tensor.device_mesh, layout.describe()
        verdict = f"The DTensor's placements count: {layout.placement}"
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
                text = f"{kind}_process_group says that ranks {list(ranks)} cut it{along}, but its placement is {actual}"
                self.pieces.warnings[f"{text}. {verdict}"].append(described)
        if "ddp" not in self._shared:
            return
        replicas = group_ranks(self._shared["ddp"])
        inside = sorted({*replicas} & {*layout.holders})
        if len({layout.shards.of(rank) for rank in inside}) > 1:
            text = f"ddp_process_group says that ranks {list(replicas)} hold replicas, but ranks {inside} hold different shards"
            self.pieces.warnings[f"{text}. {verdict}"].append(described)

    def _add_plain(
        self, key: Key, config_index: int, param: Tensor, flatten: bool
    ) -> None:
        """Adds the matrices in a plain tensor. Raises ValueError if they cannot be told from its cut."""
        groups = dict(self._shared)
        if self._views:
            # FSDP1 did not flatten it, so each rank has it whole. TP may have cut it nevertheless.
            groups.clear()
            is_cut = self._tp_dims.of_plain(config_index) is not None
            if "tp" in self._shared and (is_cut or tp_mark_of(param) is not None):
                groups["tp"] = self._shared["tp"]
        tp_dim = None
        if "tp" in groups:
            tp_dim = self._tp_dims.of_plain_or_mark(config_index, key, param)
        stack_dims = 0 if flatten else param.ndim - 2
        if flatten and tp_dim is not None and tp_dim > 1:
            raise ValueError(
                f"{key.describe(param.shape)}: tensor parallelism cuts dimension {tp_dim} of it; flatten takes only 0 or 1"
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
        cuts = self.pieces.cuts_of(groups, dims)
        rows, columns = matrix_shape(param.shape, flatten)
        numel = rows * columns
        for sub in range(math.prod(param.shape[:stack_dims])):
            region = Region(0, 0, rows, columns, sub * numel, columns)
            regions = (region,) if numel else ()
            of_matrix = key._replace(sub=sub)
            self.pieces.add_piece(of_matrix, param, (rows, columns), regions, cuts)

    def _add_flat(
        self,
        key: Key,
        config_index: int,
        param: Tensor,
        matrix: fsdp1.FlatMatrix,
        groups: KindGroups,
    ) -> None:
        """Adds a matrix that FSDP1 flattened. Its own ``groups`` count, not other ones of the config."""
        tensor, shape, regions = matrix
        key = key._replace(name=key.name or tensor.name)
        described = key.describe(shape)
        tp_dim = None
        if tensor.tp is not None:
            group, tp_dim = self.tp_of_spec(config_index, described, tensor.tp)
            groups = {**groups, "tp": group}
        elif "tp" in self._shared:
            tp_dim = self._tp_dims.of_plain_or_mark(config_index, key, param)
        for kind in groups.keys() & self._shared.keys():
            given, ranks = group_ranks(self._shared[kind]), group_ranks(groups[kind])
            if given != ranks:
                text = f"{kind}_process_group has ranks {list(given)}, but FSDP1 has {list(ranks)}, which count"
                self.pieces.warnings[text].append(described)
        # Each rank has its regions of the whole matrix, so FSDP's cut has no dimension.
        cuts = self.pieces.cuts_of({**self._shared, **groups}, {"tp": tp_dim})
        self.pieces.add_piece(key, param, shape, regions, cuts)

    def tp_of_spec(
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
            self.pieces.warnings[text].append(described)
        return spec.mesh.get_group(), dim


def _has_no_other_of(group: ProcessGroup, ranks: Sequence[int]) -> bool:
    """Whether ``group`` has no other rank of ``ranks`` than this one."""
    return not set(group_ranks(group)) & (set(ranks) - {dist.get_rank()})
