"""What this rank knows by itself of parameters that process groups share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.optim._muon_engine.layouts import fsdp1 as fsdp1_reader
from torch.optim._muon_engine.functions import process_rank
from torch.optim._muon_engine.layouts import whole_regions
from torch.optim._muon_engine.model import tp_mark_of


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from torch.optim._muon_engine.layouts.merge import Crossing, Piece
    from torch.optim._muon_engine.layouts.fsdp1 import FlatMatrix, FlatView
    from torch.optim._muon_engine.group_functions import ParallelGroups
    from torch.optim._muon_engine.layouts import Key, Layout, Region


class PieceReader:
    """Reads one optimizer's parameters.

    Args:
        groups: the groups and dimensions that the user gave.
        count: the number of parameters; None where a single one is looked at.
    """

    def __init__(self, groups: ParallelGroups, count: int | None) -> None:
        self.groups = groups
        self.shared = groups.shared_over()
        self.warnings: list[str] = []
        self._views: dict[Tensor, FlatView] | None = None
        self._check_indices(count)

    def _check_indices(self, count: int | None) -> None:
        given = {"expert_assignments": self.groups.experts}
        if "tp" in self.shared:
            given["tp_dim_per_param"] = self.groups.tp_dims or {}
        for name, indices in given.items():
            unknown = sorted(i for i in indices if count is not None and i >= count)
            if unknown:
                raise ValueError(
                    f"{name} names parameters {unknown}, but the optimizer's are 0 to {count - 1}. Indices count what "
                    "the optimizer is given, in that order, and not all of the model's parameters"
                )

    @staticmethod
    def check_tp_dim(dim: int | None, tensor: Tensor, index: int) -> None:
        """Raises IndexError where the TP dimension of ``tensor`` is none of its dimensions."""
        # A flat parameter's matrices have two dimensions each.
        ndim = max(2, tensor.ndim)
        if dim is not None and not -ndim <= dim < ndim:
            raise IndexError(
                f"tp_dim_per_param says dimension {dim} for parameter {index} of shape {tuple(tensor.shape)}, which "
                f"has dimensions 0 to {ndim - 1}"
            )

    # DTensors

    def of_dtensor(self, layout: Layout, dtensor: DTensor) -> Piece:
        """The DTensor's own layout; groups can only add replicas of all of its mesh."""
        from torch.optim._muon_engine.layouts.merge import Crossing, Part, Piece

        self.check_tp_dim(
            self.groups.tp_dim(layout.key.index), dtensor, layout.key.index
        )
        self._warn_about_dtensor(layout, dtensor)
        crossings = []
        if not layout.contributions:
            crossings = [
                Crossing(kind, self.shared[kind], lenient=True)
                for kind in ("ddp", "cp")
                if kind in self.shared
            ]
        return Piece(
            layout.key,
            layout.dtype,
            Part(layout.shape, tuple(zip(layout.ranks, layout.shards, strict=True))),
            tuple(crossings),
            layout.source,
            layout.contributions,
        )

    def _warn_about_dtensor(self, layout: Layout, dtensor: DTensor) -> None:
        """Notes where a group or dimension says otherwise than the placements."""
        mesh = dtensor.device_mesh
        placed = {
            _ranks(mesh.get_group(dim)): placement
            for dim, placement in enumerate(dtensor.placements)
        }
        for kind in ("fsdp", "tp"):
            if kind not in self.shared:
                continue
            ranks = _ranks(self.shared[kind])
            if mesh.size() == 1 or ranks not in placed:
                self._warn(
                    layout,
                    f"{kind}_process_group has ranks {list(ranks)}, which no dimension of {mesh} does",
                )
                continue
            dim = getattr(placed[ranks], "dim", None)
            wanted = self.groups.tp_dim(layout.key.index)
            if kind == "tp" and dim != (None if wanted is None else wanted % 2):
                self._warn(
                    layout,
                    f"tp_dim_per_param says that TP "
                    f"{'does not cut it' if wanted is None else f'cuts it along dimension {wanted}'}, its placement over "
                    f"ranks {list(ranks)} is {placed[ranks]}",
                )
            if kind == "fsdp" and dim is None:
                self._warn(
                    layout,
                    f"fsdp_process_group says that ranks {list(ranks)} shard it, its placement over them is "
                    f"{placed[ranks]}",
                )

        replicas = set(_ranks(self.shared["ddp"])) if "ddp" in self.shared else set()
        inside = replicas & set(layout.ranks)
        if len({layout.shard_of(rank) for rank in inside}) > 1:
            self._warn(
                layout,
                f"ddp_process_group says that ranks {sorted(replicas)} hold replicas, its placements that ranks "
                f"{sorted(inside)} hold different pieces",
            )

    def _warn(self, layout: Layout, what: str) -> None:
        self.warnings.append(
            f"{layout.describe()}: {what}. The DTensor is believed: {layout.source}"
        )

    # Plain tensors

    def of_plain(self, key: Key, param: Tensor) -> Iterable[Piece]:
        """The pieces of all matrices in ``param``."""
        self.check_tp_dim(self.groups.tp_dim(key.index), param, key.index)
        view = self._view_of(key, param)
        if view is not None:
            described = key.describe(param.shape)
            for sub, matrix in enumerate(fsdp1_reader.matrices_only(view, described)):
                yield self._of_flat(key._replace(sub=sub), param, matrix, view)
            return
        if param.ndim != 2:
            raise ValueError(
                f"Muon only supports 2D parameters whereas we found a parameter with size: {param.size()} "
                f"({key.describe(param.shape)})"
            )
        rows, columns = param.shape
        kinds: tuple[str, ...] = ("fsdp", "tp", "ddp", "cp")
        if self._is_ignored(param):
            # FSDP does nothing for it, but TP may have cut it all the same.
            kinds = ("tp",) if key.index in (self.groups.tp_dims or {}) else ()
        groups = {kind: self.shared.get(kind) for kind in kinds}
        tp_dim = self._tp_dim(key, param) if groups.get("tp") is not None else None
        crossings = self._crossings(groups, 0, tp_dim)
        yield self._piece(
            key, param, (rows, columns), whole_regions(rows, columns), crossings
        )

    def _piece(
        self,
        key: Key,
        param: Tensor,
        shape: tuple[int, int],
        regions: tuple[Region, ...],
        crossings: list[Crossing],
    ) -> Piece:
        from torch.optim._muon_engine.layouts.merge import Part, Piece

        words = [
            f"{c.kind}" + (f" along dimension {c.dim}" if c.kind == "tp" else "")
            for c in crossings
        ]
        return Piece(
            key,
            param.dtype,
            Part(shape, ((process_rank(), regions),)),
            tuple(crossings),
            f"process groups: {', '.join(words)}" if words else "a plain tensor",
        )

    @staticmethod
    def _crossings(
        groups: dict[str, ProcessGroup | None],
        fsdp_dim: int | None,
        tp_dim: int | None,
    ) -> list[Crossing]:
        from torch.optim._muon_engine.layouts.merge import Crossing

        dims = {"fsdp": fsdp_dim, "tp": tp_dim}
        return [
            Crossing(kind, group, dims.get(kind))
            for kind, group in groups.items()
            if group is not None and torch.distributed.get_world_size(group) > 1
        ]

    def _tp_dim(self, key: Key, param: Tensor) -> int | None:
        """The dimension that TP cuts ``param`` along, as the user or the framework's mark says."""
        said, marked = self.groups.tp_dim(key.index), tp_mark_of(param)
        nothing_said = self.groups.tp_dims is None and said is None
        if nothing_said and marked is None:
            raise ValueError(
                f"{key.describe(param.shape)}: tp_process_group is given, but not how it cuts this. Give "
                "tp_dim_per_param: a dict of parameter index -> dimension, without those that are not cut (see "
                "detect_tp_dims_from_model), or an int for all"
            )
        if nothing_said:
            return None if marked == -1 else marked
        said = None if said is None else said % 2
        if marked is not None and marked != (-1 if said is None else said):
            self.warnings.append(
                f"{key.describe(param.shape)}: tp_dim_per_param says "
                f"{'that TP does not cut it' if said is None else f'dimension {said}'}, its own tp_dim or partition_dim "
                f"says {marked}. tp_dim_per_param is believed"
            )
        return said

    # FSDP1

    def _known_views(self) -> dict[Tensor, FlatView]:
        if self._views is None:
            module = self.groups.module
            self._views = {} if module is None else fsdp1_reader.views(module)
        return self._views

    def _is_ignored(self, param: Tensor) -> bool:
        """Whether an FSDP1 model leaves ``param`` alone: each rank then has it whole, for itself."""
        return self.groups.module is not None and bool(self._known_views())

    def _view_of(self, key: Key, param: Tensor) -> FlatView | None:
        if not fsdp1_reader.is_flattened(param):
            return None
        view = self._known_views().get(param)
        if view is not None:
            return view
        described = key.describe(param.shape)
        if not fsdp1_reader.is_flat_param(param):
            raise ValueError(
                f"{described} is an original parameter of an FSDP1 model, which does not say what it is a slice of. "
                "Give create_auto_config the wrapped model: module=model"
                if self.groups.module is None
                else f"{described} is a parameter of another FSDP1 model than the one that module= names"
            )
        if self.groups.fsdp is None:
            raise ValueError(
                f"{described} is a flat parameter of an FSDP1 model; give create_auto_config "
                "fsdp_process_group=model.process_group, or module=model"
            )
        return fsdp1_reader.view_of_flat_param(param)

    def _of_flat(
        self, key: Key, param: Tensor, matrix: FlatMatrix, view: FlatView
    ) -> Piece:
        groups: dict[str, ProcessGroup | None] = {
            kind: self.shared.get(kind) for kind in ("fsdp", "tp", "ddp", "cp")
        }
        for kind, own in (("fsdp", view.shards), ("ddp", view.replicas)):
            if own is None:
                continue
            given = groups[kind]
            if given is not None and _ranks(given) != _ranks(own):
                self.warnings.append(
                    f"{key.describe(matrix.shape)}: {kind}_process_group has ranks {list(_ranks(given))}, its FSDP "
                    f"unit's group has {list(_ranks(own))}. The unit is believed"
                )
            groups[kind] = own
        tp_dim = None
        if matrix.tp is not None:
            groups["tp"], tp_dim = self._tp_of_spec(key, matrix)
        elif groups["tp"] is not None:
            tp_dim = self._tp_dim(key, param)
        key = key._replace(name=key.name or matrix.name)
        return self._piece(
            key,
            param,
            matrix.shape,
            matrix.regions,
            # Each rank tells its part of the same matrix: nothing has to be put end to end.
            self._crossings(groups, None, tp_dim),
        )

    def _tp_of_spec(
        self, key: Key, matrix: FlatMatrix
    ) -> tuple[ProcessGroup, int | None]:
        """Group and dimension of the TP that FSDP1 found when it flattened ``matrix``."""
        spec = matrix.tp
        described = key._replace(name=key.name or matrix.name).describe(matrix.shape)
        if spec.mesh.ndim != 1:
            raise ValueError(
                f"{described}: FSDP1 over DTensors of a mesh of {spec.mesh.ndim} dimensions is not supported; use "
                "fully_shard"
            )
        group, (placement,) = spec.mesh.get_group(), spec.placements
        dim = getattr(placement, "dim", None)
        given = self.shared.get("tp")
        if given is not None and _ranks(given) != _ranks(group):
            self.warnings.append(
                f"{described}: tp_process_group has ranks {list(_ranks(given))}, its placement {placement} is over "
                f"{list(_ranks(group))}. The placement is believed"
            )
        said = self.groups.tp_dim(key.index)
        if said is not None and said % 2 != dim:
            self.warnings.append(
                f"{described}: tp_dim_per_param says dimension {said}, its placement over ranks {list(_ranks(group))} "
                f"is {placement}. The placement is believed"
            )
        return group, dim


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))
