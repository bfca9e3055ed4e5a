"""What a model knows about its parameters that the parameters do not show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim._muon_engine.local import as_dtensor_if_imported


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn, Tensor


def logical_shapes(
    module: nn.Module,
) -> dict[Tensor, tuple[tuple[str, Sequence[int]], ...]]:
    """For each parameter that FSDP1 flattened: name and unsharded shape of what is in it.

    One entry where the original parameters are kept (each a slice of its unit's flat storage),
    several for a flat parameter itself.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return {}
    from torch.optim._muon_engine.fsdp1_reader import units

    shapes: dict[Tensor, tuple[tuple[str, Sequence[int]], ...]] = {}
    for _, flat in units(module):
        named = tuple(zip(flat._fqns, flat._shapes, strict=True))
        originals = flat._params
        if originals is None:
            shapes[flat] = named
            continue
        for param, one in zip(originals, named, strict=True):
            shapes[param] = (one,)
    return shapes


def split_by_shape(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of ``module`` that are matrices, and the others."""
    known = logical_shapes(module)
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for param in module.parameters():
        inside = known.get(param, (("", tuple(param.shape)),))
        are_matrices = [len(shape) == 2 for _, shape in inside]
        if any(are_matrices) and not all(are_matrices):
            raise ValueError(
                f"a flat parameter holds matrices ({_names(inside, are_matrices, True)}) together with other "
                f"parameters ({_names(inside, are_matrices, False)}). Wrap with use_orig_params=True, or wrap the "
                "others in units of their own"
            )
        (matrices if all(are_matrices) else others).append(param)
    return matrices, others


def _names(inside: Sequence, are_matrices: Sequence[bool], kind: bool) -> str:
    chosen = [
        name
        for (name, _), is_matrix in zip(inside, are_matrices, strict=True)
        if is_matrix == kind
    ]
    return ", ".join(chosen[:4]) + (", ..." if len(chosen) > 4 else "")


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
