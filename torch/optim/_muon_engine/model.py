"""What a model knows about its parameters that the parameters do not show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.optim._muon_engine.layouts.fsdp1 import few, views
from torch.optim._muon_engine.local import as_dtensor_if_imported


if TYPE_CHECKING:
    from torch import nn, Tensor


def split_by_shape(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of ``module`` that are matrices, and the others."""
    known = views(module) if torch.distributed.is_available() else {}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for param in module.parameters():
        view = known.get(param)
        named = (
            [(m.name, m.shape) for m in view.matrices] if view else [("", param.shape)]
        )
        are_matrices = [len(shape) == 2 for _, shape in named]
        if any(are_matrices) and not all(are_matrices):
            inside = [name for name, shape in named if len(shape) == 2]
            beside = [name for name, shape in named if len(shape) != 2]
            raise ValueError(
                f"a flat parameter holds matrices ({few(inside)}) together with other parameters ({few(beside)}). "
                "Wrap with use_orig_params=True, or wrap the others in units of their own"
            )
        (matrices if all(are_matrices) else others).append(param)
    return matrices, others


def tp_mark_of(param: Tensor) -> int | None:
    """The dimension that a framework has marked ``param`` as cut along by TP; -1 for not cut at all."""
    for mark in ("tp_dim", "partition_dim"):
        dim = getattr(param, mark, None)
        if isinstance(dim, int):
            return max(dim, -1)
    return None


def tp_dim_of(param: Tensor) -> int | None:
    """The dimension that TP cuts ``param`` along: its framework's mark, its placement, else 0.

    None for what Megatron marks with -1: a parameter that it does not cut.
    """
    marked = tp_mark_of(param)
    if marked is not None:
        return marked if marked >= 0 else None
    dtensor = as_dtensor_if_imported(param)
    if dtensor is not None:
        # TP is the innermost mesh dimension: what fully_shard adds stands before it.
        for placement in reversed(dtensor.placements):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                return dim % param.ndim
    return 0
