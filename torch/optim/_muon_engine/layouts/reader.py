"""The reader of DTensors: where an optimizer's parameters are, by their placements."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from ..._muon_split import Split
from ..process_groups import process_rank
from . import dtensor
from .layout import check_cover, Key, Layout, matrix_shape, not_2d, Region, Shards
from .local import traits_of


class ParamInfo(NamedTuple):
    """A parameter's index in the dicts of the config, and its name. ``form`` has its options ``split`` and ``flatten``."""

    config_index: int
    name: str | None = None
    form: tuple[Split, bool] = (Split(), False)


def info_of(infos: Sequence[ParamInfo], index: int) -> ParamInfo:
    """The info of parameter ``index``, or its default."""
    return infos[index] if index < len(infos) else ParamInfo(index)


def flat_indices(infos: Sequence[ParamInfo]) -> list[int]:
    """The parameters that are one matrix, dimension 0 by all others."""
    return [index for index, info in enumerate(infos) if info.form[1]]


class Reader(Protocol):
    """The questions of an engine. ``sharing`` has the framework's groups for each set of ranks that share parameters, from
    the parameters that were read last; after a failure, what all ranks know without reading.
    """

    sharing: dtensor.Sharing
    # Index in the config -> the expert's id.
    experts: Mapping[int, int]
    # By kind, the process groups of the config that have several ranks.
    shared: dict[str, ProcessGroup]
    dtensors: dtensor.DTensorLayouts
    # Index -> the layouts in a parameter, and a tensor with its type and local shape.
    by_param: dict[int, tuple[list[Layout], Tensor]]

    def read(
        self,
        params: Sequence[Tensor],
        infos: Sequence[ParamInfo] = (),
        check: Callable[[], None] = lambda: None,
    ) -> list[Layout]: ...

    def info(self, index: int) -> ParamInfo: ...

    def check_tp_dim(self, tensor: Tensor, index: int) -> None: ...

    def layouts_of(self, tensor: Tensor, index: int) -> list[Layout]: ...


class DTensorReader:
    """Asks DTensors where their shards are. A plain tensor is a whole matrix of each rank."""

    def __init__(self) -> None:
        self.sharing: dtensor.Sharing = {}
        self.experts: Mapping[int, int] = {}
        self.shared: dict[str, ProcessGroup] = {}
        self.dtensors = dtensor.DTensorLayouts()
        self.by_param: dict[int, tuple[list[Layout], Tensor]] = {}
        self._infos: Sequence[ParamInfo] = ()

    def info(self, index: int) -> ParamInfo:
        """The info with which parameter ``index`` was read, or its default."""
        return info_of(self._infos, index)

    def read(
        self,
        params: Sequence[Tensor],
        infos: Sequence[ParamInfo] = (),
        check: Callable[[], None] = lambda: None,
    ) -> list[Layout]:
        """The layouts of all matrices in ``params``, in the order of their indices. Raises the error of ``check``, or a
        ValueError for a parameter that cannot be read. The ranks agree later. ``infos`` are about each parameter
        (default: its index is its config index).
        """
        self._infos = infos
        self.by_param = {}
        # Another mesh may get the address of a former one.
        self.dtensors = dtensor.DTensorLayouts()
        self.sharing = self.dtensors.sharing(params, flat_indices(infos))
        check()
        layouts: list[Layout] = []
        for index, param in enumerate(params):
            of_param = self.layouts_of(param, index)
            # This rank may have no matrix of a stack.
            if of_param:
                self.by_param[index] = of_param, param
                layouts += of_param
        for layout in {layout.shards: layout for layout in reversed(layouts)}.values():
            check_cover(layout)
        for layout in layouts:
            self.sharing.setdefault(layout.holders, [])
        layouts = cut_into_parts(layouts, self._infos)
        return layouts

    def check_tp_dim(self, tensor: Tensor, index: int) -> None:
        """Placements say what TP cuts."""

    def layouts_of(self, tensor: Tensor, index: int) -> list[Layout]:
        """The layouts of the matrices in parameter ``index``, or in a ``tensor`` in its place."""
        info = self.info(index)
        _, flatten = info.form
        key = Key(index, 0, info.name)
        if tensor.ndim < 2:
            raise not_2d(key.describe(tensor.shape))
        if isinstance(tensor, DTensor):
            return self.dtensors.of(key, tensor, flatten)
        return whole_layouts(key, tensor, flatten)


def whole_layouts(key: Key, tensor: Tensor, flatten: bool) -> list[Layout]:
    """The layouts of the matrices of a plain ``tensor`` that this rank has alone."""
    rows, columns = matrix_shape(tensor.shape, flatten)
    count = 1 if flatten else math.prod(tensor.shape[:-2])
    traits = traits_of(tensor)
    dtype = traits.grad_dtype or traits.dtype
    layouts = []
    for sub in range(count):
        region = Region(0, 0, rows, columns, sub * rows * columns, columns)
        regions = (region,) if region.numel else ()
        shards = Shards((process_rank(),), (regions,))
        layouts.append(
            Layout(
                key._replace(sub=sub),
                (rows, columns),
                dtype,
                shards,
                placement="no process groups",
                frozen=traits.frozen,
            )
        )
    return layouts


def cut_into_parts(
    layouts: Sequence[Layout], infos: Sequence[ParamInfo]
) -> list[Layout]:
    """The layouts of the parts of fused weights, in the place of the weights."""
    parts: list[Layout] = []
    for layout in layouts:
        split, _ = info_of(infos, layout.key.index).form
        if split.sizes:
            from .divide import split_fused

            parts += split_fused(layout, split)
        else:
            parts.append(layout)
    return parts


def describe_state(reader: Reader, state: dict[str, Any]) -> None:
    """Writes the entries into a config's ``state`` that users are promised."""
    state["param_metadata"] = {
        index: {"device_mesh": like.device_mesh, "placements": like.placements}
        for index, (_, like) in reader.by_param.items()
        if isinstance(like, DTensor)
    }
