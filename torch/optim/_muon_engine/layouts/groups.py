"""Process groups: the user says who shares a parameter, the ranks tell each other how.

A DTensor speaks for itself; groups can only add replicas of all of its mesh.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.optim._muon_engine.layouts import (
    Key,
    Layout,
    listed,
    moved,
    process_rank,
    Region,
    whole_regions,
)
from torch.optim._muon_engine.layouts import fsdp1
from torch.optim._muon_engine.layouts.dtensor import (
    current_device,
    cut_out,
    DTensorReader,
    local_part,
    tp_mark_of,
)
from torch.optim._muon_engine.layouts.merge import (
    GroupPlacement,
    LocalMatrix,
    merge,
    Part,
)
from torch.optim._muon_engine.process_groups import spanning_group


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups that this rank is in, one for each kind of parallelism."""

    fsdp: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    ddp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    # The dimension that TP cuts a parameter along, by its index; None where nothing was said.
    tp_dims: Mapping[int, int] | None = None
    tp_dim_default: int | None = None
    experts: Mapping[int, int] = field(default_factory=dict)
    # An FSDP1 model, which alone knows what its original parameters are slices of.
    module: nn.Module | None = None

    def shared_over(self) -> dict[str, ProcessGroup]:
        """The groups of several ranks that share matrices; experts and stages share none."""
        given = {"fsdp": self.fsdp, "tp": self.tp, "ddp": self.ddp, "cp": self.cp}
        return {
            name: group
            for name, group in given.items()
            if group is not None and dist.get_world_size(group) > 1
        }

    def tp_dim(self, index: int) -> int | None:
        """The dimension that TP cuts parameter ``index`` along; None where it does not."""
        return (self.tp_dims or {}).get(index, self.tp_dim_default)

    def check_tp_dim(self, tensor: Tensor, index: int) -> None:
        """Raises IndexError where the TP dimension of ``tensor`` is none of its dimensions."""
        dim = self.tp_dim(index)
        # A flat parameter's matrices have two dimensions each.
        ndim = max(2, tensor.ndim)
        if dim is not None and not -ndim <= dim < ndim:
            raise IndexError(
                f"tp_dim_per_param says dimension {dim} for parameter {index} of shape {tuple(tensor.shape)}, which "
                f"has dimensions 0 to {ndim - 1}"
            )

    def ep_ranks(self) -> tuple[int, ...]:
        return (process_rank(),) if self.ep is None else _ranks(self.ep)


class GroupReader:
    """Reads parameters that process groups share; see :class:`Reader`."""

    takes_flat_params = True
    takes_stacks = False

    def __init__(self, groups: ParallelGroups) -> None:
        self.groups = groups
        self.dtensors = DTensorReader()
        # Ranks that share a matrix, as last read, and their groups; each parameter's. None where reading
        # raised: of a stack a rank may hold no matrix, and then shares none.
        self._sharing: dict[tuple[int, ...], list[ProcessGroup]] | None = None
        self._holders: dict[Tensor, set[tuple[int, ...]]] = {}
        self._last: list[Tensor] = []
        # By index: the layouts in a plain tensor, and the shape of this rank's part.
        self._plain: dict[int, tuple[list[Layout], torch.Size]] = {}

    def read(
        self,
        params: Sequence[Tensor],
        names: Sequence[str | None],
        error: BaseException | None = None,
    ) -> list[Layout]:
        self.dtensors.forget()
        self._sharing, self._holders, self._plain = None, {}, {}
        found: list[LocalMatrix] = []
        try:
            if error is None:
                self._check_order(params)
                found = self._local_matrices(params, names)
        except Exception as problem:
            # Told to the others before it is raised: they are on their way into the exchange.
            error = problem
        layouts = self._merge(found, error)
        sharing = self._sharing = {}
        for matrix, layout in zip(found, layouts, strict=True):
            param = params[layout.key.index]
            self._holders.setdefault(param, set()).add(layout.group)
            groups = sharing.setdefault(layout.group, [])
            groups += [p.group for p in matrix.placements if p.group not in groups]
            if not isinstance(param, DTensor):
                shape = local_part(param).shape
                self._plain.setdefault(layout.key.index, ([], shape))[0].append(layout)
        # Ranks may hold the same experts in other orders, and all that share some count them alike.
        return sorted(
            layouts, key=lambda l: -1 if l.key.expert is None else l.key.expert
        )

    def _check_order(self, params: Sequence[Tensor]) -> None:
        """What the user said by index does not follow a parameter to another index."""
        former = {id(param): index for index, param in enumerate(self._last)}
        said = {*(self.groups.tp_dims or {}), *self.groups.experts}
        for index, param in enumerate(params):
            before = former.get(id(param), index)
            if before != index and said & {before, index}:
                raise ValueError(
                    f"{Key(index).describe(param.shape)} was parameter {before} before, and tp_dim_per_param and "
                    "expert_assignments go by index. Build a new Muon with a new create_auto_config for this order"
                )
        self._last = list(params)

    def _local_matrices(
        self, params: Sequence[Tensor], names: Sequence[str | None]
    ) -> list[LocalMatrix]:
        local = _LocalReader(self.groups, len(params), self.takes_stacks)
        found: list[LocalMatrix] = []
        for index, (param, name) in enumerate(zip(params, names, strict=True)):
            key = Key(index, 0, name, self.groups.experts.get(index))
            if isinstance(param, DTensor):
                layouts = self.dtensors.read_all(key, param)
                if layouts:
                    local.check_dtensor(layouts[0], param)
                found += [local.of_dtensor(layout, param) for layout in layouts]
            else:
                found.extend(local.of_plain(key, param))
        self._warn_once(local.warnings)
        return found

    def _warn_once(self, found: Sequence[tuple[str, str]]) -> None:
        """One warning for all parameters of which there is one thing to say, on the first of the ranks."""
        shared = self.groups.shared_over().values()
        if any(min(_ranks(group)) < process_rank() for group in shared):
            return
        named: dict[str, list[str]] = {}
        for who, what in found:
            named.setdefault(what, []).append(who)
        for what, who in named.items():
            warnings.warn(f"{listed(who)}: {what}", stacklevel=2)

    def _merge(
        self, matrices: Sequence[LocalMatrix], error: BaseException | None
    ) -> list[Layout]:
        layouts, texts = merge(
            matrices, self.groups.shared_over().items(), self.groups.ep_ranks(), error
        )
        for text in texts:
            warnings.warn(text, stacklevel=2)
        return layouts

    def sharing(
        self, params: Sequence[Tensor]
    ) -> dict[tuple[int, ...], list[ProcessGroup]]:
        shared = self.dtensors.sharing(params)
        if self._sharing is None:
            return shared
        found = {ranks for param in params for ranks in self._holders.get(param, ())}
        # A DTensor's replicas along other groups make its own mesh one of several parts.
        return {
            ranks: [
                *(
                    group
                    for mesh in shared
                    if set(mesh) <= set(ranks)
                    for group in shared[mesh]
                ),
                *self._sharing[ranks],
            ]
            for ranks in found
        }

    def meeting(
        self, params: Sequence[Tensor]
    ) -> dict[tuple[int, ...], list[ProcessGroup]]:
        # The ranks tell sizes over all groups, whichever parameter changed.
        given = self.groups.shared_over().values()
        known = {tuple(sorted(_ranks(group))): [group] for group in given}
        return {**self.dtensors.meeting(params), **known}

    def device_of(self, params: Sequence[Tensor]) -> torch.device:
        device = self.dtensors.device_of(params)
        for groups in (self._sharing or {}).values():
            for group in groups:
                kinds = [torch.device(kind).type for kind in group._device_types]
                if device.type not in kinds:
                    # Offloaded parameters, of which only another device's copies can travel.
                    return current_device(
                        next((kind for kind in kinds if kind != "cpu"), "cpu")
                    )
        return device

    def describe_state(self, state: dict[str, Any]) -> None:
        self.dtensors.describe_state(state)

    def check_index(self, tensor: Tensor, index: int) -> None:
        self.groups.check_tp_dim(tensor, index)

    # The round trip outside of step()

    def whole(self, tensor: Tensor, index: int) -> Tensor:
        if isinstance(tensor, DTensor):
            return self.dtensors.whole(tensor, index)
        layout = self._layout_of(tensor, index)
        if len(layout.group) == 1:
            return tensor
        group = spanning_group(layout.group, self.groups.shared_over().values())
        full = tensor.new_empty(layout.shape)
        for rank, local in _everyones(tensor.detach(), group).items():
            for region in layout.shards.of(rank):
                region.of_matrix(full).copy_(region.of_local(local))
        return full

    def _layout_of(self, tensor: Tensor, index: int) -> Layout:
        """What is known of parameter ``index``, else what the ranks find out about ``tensor``."""
        layouts, shape = self._plain.get(index, ([], None))
        if not layouts or (shape != tensor.shape and len(layouts) == 1):
            local = _LocalReader(self.groups, None, self.takes_stacks)
            layouts = self._merge([*local.of_plain(Key(index), tensor)], None)
            self._plain[index] = (layouts, tensor.shape)
        if len(layouts) > 1:
            raise ValueError(
                f"parameter {index} is one of {len(layouts)} matrices, which gather_fn and redistribute_fn "
                "cannot hand over as one; of a flat parameter they work where every FSDP unit holds a single matrix"
            )
        return layouts[0]

    def piece(self, full: Tensor, index: int) -> Tensor:
        if index not in self._plain:
            return self.dtensors.piece(full, index)
        layouts, shape = self._plain[index]
        return cut_out(layouts, full, full.new_zeros(shape))


def _everyones(local: Tensor, group: ProcessGroup) -> dict[int, Tensor]:
    """Each rank's local tensor, by rank; they differ in size, and so travel padded."""
    shapes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shapes, tuple(local.shape), group=group)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    padded = local.new_zeros(max(sizes))
    padded[: local.numel()].copy_(local.reshape(-1))
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return {
        rank: flat[:size].view(shape)
        for rank, flat, size, shape in zip(
            _ranks(group), gathered, sizes, shapes, strict=True
        )
    }


class _LocalReader:
    """What this rank knows of one optimizer's parameters by itself.

    Args:
        groups: the groups and dimensions that the user gave.
        count: the number of parameters; None where a single one is looked at.
        takes_stacks: whether FSDP1 may have flattened stacks of matrices.
    """

    def __init__(
        self,
        groups: ParallelGroups,
        count: int | None,
        takes_stacks: bool = False,
    ) -> None:
        self.groups = groups
        self.takes_stacks = takes_stacks
        self.shared = groups.shared_over()
        # Of which matrix, and what.
        self.warnings: list[tuple[str, str]] = []
        self._views: dict[Tensor, fsdp1.FlatView] | None = None
        # One for all matrices of a kind.
        self._parts: dict[tuple, Part] = {}
        self._check_indices(count)

    def _check_indices(self, count: int | None) -> None:
        if count is None:
            return
        given = {"expert_assignments": self.groups.experts}
        if "tp" in self.shared:
            given["tp_dim_per_param"] = self.groups.tp_dims or {}
        for name, indices in given.items():
            unknown = sorted(i for i in indices if i >= count)
            if unknown:
                raise ValueError(
                    f"{name} names parameters {unknown}, but the optimizer's are 0 to {count - 1}. Indices count what "
                    "the optimizer is given, in that order, and not all of the model's parameters"
                )

    # DTensors

    def _replicates(self, kind: str, dtensor: DTensor) -> bool:
        """Whether the ranks of a group hold the same matrices of ``dtensor``, a stack perhaps."""
        if dtensor.ndim == 2:
            return True
        # The ranks of a stack's mesh may hold other matrices of it.
        ranks = dtensor.device_mesh.mesh.flatten().tolist()
        return _only_me(self.shared[kind], ranks)

    def of_dtensor(self, layout: Layout, dtensor: DTensor) -> LocalMatrix:
        """The DTensor's own layout; groups can only add replicas of all of its mesh."""
        placements = []
        shape, shards = layout.shape, layout.shards
        if not shards.contributions:
            placements = [
                GroupPlacement(kind, self.shared[kind], lenient=True)
                for kind in ("ddp", "cp")
                if kind in self.shared and self._replicates(kind, dtensor)
            ]
        if (shape, id(shards)) not in self._parts:
            holders = tuple(zip(shards.ranks, shards.regions, strict=True))
            self._parts[shape, id(shards)] = Part(shape, holders)
        return LocalMatrix(
            layout.key,
            layout.dtype,
            self._parts[shape, id(shards)],
            tuple(placements),
            layout.source,
            layout.shards.contributions,
        )

    def check_dtensor(self, layout: Layout, dtensor: DTensor) -> None:
        """Raises or warns where the user says otherwise than the placements."""
        self.groups.check_tp_dim(dtensor, layout.key.index)
        self._warn_about_dtensor(layout, dtensor)

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
            if kind == "tp" and dim != (
                None if wanted is None else wanted % dtensor.ndim
            ):
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
        inside = replicas & set(layout.group)
        if len({layout.shards.of(rank) for rank in inside}) > 1:
            self._warn(
                layout,
                f"ddp_process_group says that ranks {sorted(replicas)} hold replicas, its placements that ranks "
                f"{sorted(inside)} hold different shards",
            )

    def _warn(self, layout: Layout, what: str) -> None:
        self.warnings.append(
            (
                layout.describe(),
                f"{what}. The DTensor's placements count: {layout.source}",
            )
        )

    # Plain tensors

    def of_plain(self, key: Key, param: Tensor) -> Iterable[LocalMatrix]:
        """All matrices in ``param``."""
        self.groups.check_tp_dim(param, key.index)
        view = self._view_of(key, param)
        if view is not None:
            described = key.describe(param.shape)
            matrices = fsdp1.matrices_only(view, described, self.takes_stacks)
            for sub, matrix in enumerate(matrices):
                yield self._of_flat(key._replace(sub=sub), param, matrix, view)
            return
        if param.ndim < 2:
            raise ValueError(
                f"Muon only supports 2D parameters whereas we found a parameter with size: {param.size()} "
                f"({key.describe(param.shape)})"
            )
        kinds: tuple[str, ...] = ("fsdp", "tp", "ddp", "cp")
        if self._is_ignored(param):
            # FSDP does nothing for it, but TP may have cut it all the same.
            kinds = ("tp",) if key.index in (self.groups.tp_dims or {}) else ()
        groups: dict[str, ProcessGroup | None] = {
            kind: self.shared.get(kind) for kind in kinds
        }
        tp_dim = self._tp_dim(key, param) if groups.get("tp") is not None else None
        stacked = param.ndim - 2
        if stacked:
            # FSDP cuts a stack along its first dimension, so its ranks hold other matrices each, and none
            # of them is a replica, whatever other group it is in.
            cutting = groups.get("fsdp")
            for kind, group in groups.items():
                if cutting is not None and group is not None:
                    apart = _only_me(group, _ranks(cutting))
                    groups[kind] = group if apart else None
            if tp_dim is not None:
                groups["tp"] = groups.get("tp") if tp_dim >= stacked else None
                tp_dim -= stacked
        rows, columns = param.shape[-2:]
        placements = self._placements(groups, 0, tp_dim)
        for sub in range(math.prod(param.shape[:-2])):
            yield self._piece(
                key._replace(sub=sub) if sub else key,
                param,
                (rows, columns),
                moved(whole_regions(rows, columns), sub * rows * columns),
                placements,
            )

    def _piece(
        self,
        key: Key,
        param: Tensor,
        shape: tuple[int, int],
        regions: tuple[Region, ...],
        placements: list[GroupPlacement],
    ) -> LocalMatrix:
        words = [
            f"{c.kind}" + (f" along dimension {c.dim}" if c.kind == "tp" else "")
            for c in placements
        ]
        part = Part(shape, ((process_rank(), regions),))
        return LocalMatrix(
            key,
            param.dtype,
            self._parts.setdefault((part,), part),
            tuple(placements),
            f"process groups: {', '.join(words)}" if words else "a plain tensor",
        )

    @staticmethod
    def _placements(
        groups: dict[str, ProcessGroup | None],
        fsdp_dim: int | None,
        tp_dim: int | None,
    ) -> list[GroupPlacement]:
        dims = {"fsdp": fsdp_dim, "tp": tp_dim}
        return [
            GroupPlacement(kind, group, dims.get(kind))
            for kind, group in groups.items()
            if group is not None and dist.get_world_size(group) > 1
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
        said = None if said is None else said % max(2, param.ndim)
        if marked is not None and marked != (-1 if said is None else said):
            self.warnings.append(
                (
                    key.describe(param.shape),
                    "tp_dim_per_param says "
                    f"{'that TP does not cut it' if said is None else f'dimension {said}'}, its own tp_dim or partition_dim "
                    f"says {marked}. tp_dim_per_param counts",
                )
            )
        return said

    # FSDP1

    def _known_views(self) -> dict[Tensor, fsdp1.FlatView]:
        if self._views is None:
            module = self.groups.module
            self._views = {} if module is None else fsdp1.views(module)
        return self._views

    def _is_ignored(self, param: Tensor) -> bool:
        """Whether an FSDP1 model leaves ``param`` alone: each rank then has it whole, for itself."""
        return self.groups.module is not None and bool(self._known_views())

    def _view_of(self, key: Key, param: Tensor) -> fsdp1.FlatView | None:
        if not fsdp1.is_flattened(param):
            return None
        view = self._known_views().get(param)
        if view is not None:
            return view
        described = key.describe(param.shape)
        if not fsdp1.is_flat_param(param):
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
        return fsdp1.view_of_flat_param(param)

    def _of_flat(
        self, key: Key, param: Tensor, matrix: fsdp1.FlatMatrix, view: fsdp1.FlatView
    ) -> LocalMatrix:
        groups: dict[str, ProcessGroup | None] = {
            kind: self.shared.get(kind) for kind in ("fsdp", "tp", "ddp", "cp")
        }
        for kind, own in (("fsdp", view.shards), ("ddp", view.replicas)):
            if own is None:
                continue
            given = groups[kind]
            if given is not None and _ranks(given) != _ranks(own):
                self.warnings.append(
                    (
                        key.describe(matrix.shape),
                        f"{kind}_process_group has ranks {list(_ranks(given))}, its FSDP "
                        f"unit's group has {list(_ranks(own))}. The unit's group counts",
                    )
                )
            groups[kind] = own
        tp_dim = None
        if matrix.tp is not None:
            groups["tp"], tp_dim = self._tp_of_spec(key, matrix, matrix.tp)
        elif groups["tp"] is not None:
            tp_dim = self._tp_dim(key, param)
        key = key._replace(name=key.name or matrix.name)
        rows, columns = matrix.shape
        return self._piece(
            key,
            param,
            (rows, columns),
            matrix.regions,
            # Each rank tells its part of the same matrix: nothing has to be put end to end.
            self._placements(groups, None, tp_dim),
        )

    def _tp_of_spec(
        self, key: Key, matrix: fsdp1.FlatMatrix, spec: DTensorSpec
    ) -> tuple[ProcessGroup, int | None]:
        """Group and dimension of the TP that FSDP1 found when it flattened ``matrix``."""
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
                (
                    described,
                    f"tp_process_group has ranks {list(_ranks(given))}, its placement {placement} is over "
                    f"{list(_ranks(group))}. The placement counts",
                )
            )
        said = self.groups.tp_dim(key.index)
        if said is not None and said % 2 != dim:
            self.warnings.append(
                (
                    described,
                    f"tp_dim_per_param says dimension {said}, its placement over ranks {list(_ranks(group))} "
                    f"is {placement}. The placement counts",
                )
            )
        return group, dim


def _only_me(group: ProcessGroup, ranks: Sequence[int]) -> bool:
    """Whether ``group`` has none of ``ranks`` but this one."""
    return not set(_ranks(group)) & (set(ranks) - {process_rank()})


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def tp_dim_of(param: Tensor) -> int | None:
    """The dimension that ``param`` itself says TP cuts it along, by its mark or its placement.

    -1 for not cut at all, as Megatron marks it; None where nothing says anything.
    """
    marked = tp_mark_of(param)
    if marked is not None:
        return marked
    if isinstance(param, DTensor):
        # TP is the innermost mesh dimension: what fully_shard adds stands before it.
        for placement in reversed(param.placements):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                return dim % param.ndim
    return None
