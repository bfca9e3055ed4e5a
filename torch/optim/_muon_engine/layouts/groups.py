"""Where an optimizer's parameters are, over process groups, by placements and by FSDP1's metadata."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn, Tensor
from torch.distributed import ProcessGroup

from ..process_groups import group_ranks, larger_first
from . import dtensor, fsdp1
from .collector import PieceCollector
from .exchange import complete
from .layout import Layout
from .pieces import KINDS, LocalPieces
from .reader import cut_into_parts, flat_indices, info_of, ParamInfo
from .tp_dims import TPDims


class GroupsReader:
    """Asks the process groups of a config's ``state``, DTensors and FSDP1 where the shards of an optimizer's parameters
    are. A plain tensor that no group shares is a whole matrix of each rank.
    """

    def __init__(self, state: Mapping[str, Any], takes_stacks: bool = False) -> None:
        self.takes_stacks = takes_stacks
        self.problem = ""
        self.given: dict[str, ProcessGroup | None] = {}
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
        self.experts: Mapping[int, int] = state.get("expert_assignments", {})
        # The FSDP1 model. Only it knows what its original parameters are slices of.
        self.module: nn.Module | None = state.get("module")
        # A later reading is of an optimizer that may have lost parameters, which the config's dicts still name.
        self._has_read = False
        self._infos: Sequence[ParamInfo] = ()
        self.dtensors = dtensor.DTensorLayouts()
        # From the parameters that were read last; after a failure, what all ranks know without reading.
        self.sharing: dtensor.Sharing = {}
        # Index -> the layouts in a parameter, and a tensor with its type and local shape.
        self.by_param: dict[int, tuple[list[Layout], Tensor]] = {}

    def info(self, index: int) -> ParamInfo:
        """The info with which parameter ``index`` was read, or its default."""
        return info_of(self._infos, index)

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
    ) -> list[Layout]:
        """The layouts of all matrices in ``params``, in an order that all ranks share. The ranks of the groups
        exchange their parts, and all of them raise an error of ``check`` on one of them. ``infos`` are about each
        parameter (default: its index is its config index).
        """
        is_first = not self._has_read
        self._has_read = True
        self._infos = infos
        self.by_param = {}
        # Another mesh may get the address of a former one.
        self.dtensors = dtensor.DTensorLayouts()
        pieces = LocalPieces(self.shared, self.given["ep"])
        try:
            self.sharing = self.dtensors.sharing(params, flat_indices(infos))
            views = self._views()
            collector = self._collector(pieces, views)
            collector.add_units()
            self.tp_dims.look_at(params, views)
            check()
            if is_first:
                self._check_indices(len(params))
            self._add_all(collector, params)
        except Exception as error:
            # The other ranks are on their way into the exchange, so they hear of it there.
            pieces.error = error
        if pieces.group_of:
            pieces.mesh_groups = self._groups_of_meshes()
        layouts = complete(pieces)
        self.sharing = self._sharing_of(params, layouts, pieces)
        for layout in layouts:
            index = layout.key.index
            of_param, _ = self.by_param.setdefault(index, ([], params[index]))
            of_param.append(layout)
        layouts = cut_into_parts(layouts, self._infos)
        # Ranks may list the same experts in different orders, and must share one order.
        return sorted(layouts, key=_dense_first)

    def _views(self) -> fsdp1.Views | None:
        """What FSDP1 manages of the user's module, if the user gave one."""
        return None if self.module is None else fsdp1.views(self.module)

    def _collector(
        self, pieces: LocalPieces, views: fsdp1.Views | None
    ) -> PieceCollector:
        return PieceCollector(
            pieces,
            self.shared,
            self.tp_dims,
            self.dtensors,
            views,
            self.experts,
            self.takes_stacks,
        )

    def _add_all(self, collector: PieceCollector, params: Sequence[Tensor]) -> None:
        for index, param in enumerate(params):
            self._add(collector, index, param)

    def _add(self, collector: PieceCollector, index: int, param: Tensor) -> None:
        if self.problem:
            raise ValueError(self.problem)
        collector.add(index, param, self.info(index), self.given["fsdp"])

    def _groups_of_meshes(self) -> list[ProcessGroup]:
        """The groups within the DTensors' meshes, in the order of all ranks."""
        within: list[ProcessGroup] = []
        for ranks in larger_first(self.sharing):
            for group in self.sharing[ranks]:
                if group.size() > 1 and {*group_ranks(group)} <= {*ranks}:
                    within.append(group)
        return within

    def _sharing_of(
        self, params: Sequence[Tensor], layouts: Sequence[Layout], pieces: LocalPieces
    ) -> dtensor.Sharing:
        """The groups of each set of ranks that share one of the ``layouts``."""
        of_meshes = self.sharing
        # Without groups, the ranks of a mesh agree even if they hold different matrices of a stack.
        sharing = {} if self.shared else dict(of_meshes)
        seen: dict[tuple, None] = {}
        for layout in layouts:
            mesh = getattr(params[layout.key.index], "device_mesh", None)
            seen[layout.holders, mesh] = None
        for ranks, mesh in seen:
            # Replicas along other groups make a mesh one part of several. A mesh of other parameters does
            # not count: not all of these ranks may be on one.
            of_mesh = of_meshes.get(dtensor.mesh_ranks(mesh), []) if mesh else []
            within = [
                group
                for (_, of_group), group in pieces.group_of.items()
                if {*of_group} <= {*ranks}
            ]
            sharing[ranks] = [*within, *sharing.get(ranks, []), *of_mesh]
        return sharing

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
        pieces = LocalPieces(self.shared, self.given["ep"])
        self._add(self._collector(pieces, self._views()), index, tensor)
        return complete(pieces)


def _dense_first(layout: Layout) -> int:
    """The place of a layout: experts come last, by their ids."""
    return -1 if layout.key.expert is None else layout.key.expert
