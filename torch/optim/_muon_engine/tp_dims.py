"""The dimension along which tensor parallelism cuts a parameter: as users say it, or as placements and marks show it."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from . import fsdp
from .params import Param


class TPDims:
    """The dimensions that a config's ``state`` gives for the parameters that tensor parallelism cuts."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        # Config index -> dimension; None if the user said nothing.
        self.by_index: Mapping[int, int] | None = state.get("tp_dim_per_param")
        self.default: int | None = state.get("tp_dim_default")
        # Whether the group is a mesh dimension of the parameters that were read last, so that their placements, or FSDP1's
        # metadata, say which of them it cuts.
        self.are_shown = False

    def of(self, param: Param) -> int | None:
        """The dimension along which TP cuts a parameter; None if it does not."""
        return (self.by_index or {}).get(param.config_index, self.default)

    def of_plain(self, param: Param) -> int | None:
        """Like :meth:`of`, for a parameter without placements. An int is for models in which no parameter has
        them. PyTorch's tensor parallelism leaves such a parameter whole.
        """
        is_named = param.config_index in (self.by_index or {})
        return None if self.are_shown and not is_named else self.of(param)

    def of_plain_or_mark(self, param: Param) -> int | None:
        """Like :meth:`of_plain`, or else by the framework's mark. Raises ValueError if neither says anything."""
        dim = self.of_plain(param)
        mark = tp_mark_of(param.tensor)
        if dim is not None:
            return dim % max(2, param.tensor.ndim)
        if self.by_index is not None or mark == -1:
            return None
        if mark is not None:
            return mark
        if self.are_shown:
            return None
        raise ValueError(
            f"{param.described}: tp_process_group needs tp_dim_per_param, a dict of parameter index -> dimension "
            "that lacks those that are not cut (see detect_tp_dims_from_model), or an int for all"
        )

    def check(self, param: Param) -> None:
        """Raises IndexError if a parameter does not have its TP dimension."""
        dim, tensor = self.of(param), param.tensor
        # The matrices in a flat parameter have two dimensions.
        ndim = max(2, tensor.ndim)
        if dim is not None and not -ndim <= dim < ndim:
            raise IndexError(
                f"tp_dim_per_param says dimension {dim} of parameter {param.index}, which has {ndim} and shape {tuple(tensor.shape)}"
            )


def tp_mark_of(param: Tensor) -> int | None:
    """The dimension along which a framework says that TP cuts ``param``; -1 for none."""
    for mark in ("tp_dim", "partition_dim"):
        dim = getattr(param, mark, None)
        if isinstance(dim, int):
            return max(dim, -1)
    return None


def detected_tp_dims(model: nn.Module | Iterable[Tensor]) -> dict[int, int | None]:
    """For each parameter of ``model``, the dimension along which TP cuts it; -1 for none; None if nothing says so."""
    views: fsdp.Views = {}
    if isinstance(model, nn.Module):
        views, model = fsdp.views(model), model.parameters()
    dims: dict[int, int | None] = {}
    has_placements = False
    for index, param in enumerate(model):
        placements: list[Any] = []
        if isinstance(param, DTensor):
            # TP is the innermost mesh dimension, because fully_shard puts its own before it.
            placements += reversed(param.placements)
        tensors, _ = views.get(param, ((), {}))
        for tensor in tensors:
            if tensor.tp is not None:
                placements += tensor.tp.placements
        has_placements = has_placements or bool(placements)
        dims[index] = tp_mark_of(param)
        sharded = [p.dim for p in placements if hasattr(p, "dim")]
        # A flat parameter has no dimension of its own. FSDP1 knows how TP cut each tensor in it.
        if dims[index] is None and sharded and len(tensors) < 2:
            dims[index] = sharded[0] % max(2, param.ndim)
    if has_placements:
        return {index: -1 if dim is None else dim for index, dim in dims.items()}
    return dims
