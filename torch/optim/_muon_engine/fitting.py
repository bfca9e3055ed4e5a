"""Gradients and momentum that do not fit their parameter: whether and how they can be brought to its placement, dtype
and device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from .dtensors import matrices_of_dtensor
from .local import (
    fitting_part,
    is_placed_like,
    is_sum,
    like_param,
    local_part,
    takes_update,
)
from .params import Matrix, Param
from .process_groups import process_rank


def local_gradient(param: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad`` on this rank, with the placement of ``param`` and of ``dtype``. Changing the placement is the
    framework's collective, which every rank of the mesh must join. The contributions to a sum may have one
    replicated gradient, that of the sum. The first one takes it.
    """
    takes = True
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        if grad.placements != param.placements:
            placements = list(param.placements)
            coordinate = param.device_mesh.get_coordinate() or ()
            for dim, placement in enumerate(grad.placements):
                if placements[dim].is_partial() and not placement.is_partial():
                    placements[dim] = Replicate()
                    takes = takes and coordinate[dim] == 0
            grad = grad.redistribute(param.device_mesh, placements)
    local = local_part(grad).to(dtype)
    return local if takes else torch.zeros_like(local)


def problem_with(param: Tensor, grad: Tensor) -> str:
    """Why ``grad`` cannot be used for ``param``; "" if it can."""
    if grad.layout != torch.strided:
        return "Muon does not support sparse gradients"
    has_numbers = param.is_complex() == grad.is_complex()
    if has_numbers and isinstance(param, DTensor) and isinstance(grad, DTensor):
        is_on_mesh = param.device_mesh == grad.device_mesh and param.shape == grad.shape
        if is_on_mesh and param.placements != grad.placements:
            problem = _problem_with_move(grad, param.placements)
            return problem and f"its gradient's {problem}"
    if not has_numbers or fitting_part(param, grad) is None:
        return (
            f"the parameter is {_in_words(param)}, but its gradient {_in_words(grad)}"
        )
    return ""


def _in_words(tensor: Tensor) -> str:
    """The properties that a parameter and its gradient share, in words."""
    local = local_part(tensor)
    text = f"of shape {tuple(tensor.shape)}, {tensor.dtype}, on {local.device}"
    if isinstance(tensor, DTensor):
        text = f"a DTensor {text}, here of shape {tuple(local.shape)}, on {tensor.device_mesh}"
    return text


def _problem_with_move(tensor: DTensor, placements: Sequence[Placement]) -> str:
    """Why DTensor cannot bring ``tensor`` to ``placements``; "" if it can."""
    for dim, (old, new) in enumerate(zip(tensor.placements, placements)):
        sums = old.is_partial() and (new.is_partial() or new.is_replicate())
        if old == new or old.is_replicate() or sums:
            continue
        with unset_fake_temporarily():
            ascends = bool((tensor.device_mesh.mesh.diff(dim=dim) > 0).all())
        if not ascends:
            return (
                f"placements {tensor.placements} cannot become {tuple(placements)}: the mesh's ranks do not ascend, so DTensor's "
                "redistribute() would mix up the shards. Make the mesh of ascending ranks"
            )
    return ""


def problem_with_momentum(param: Tensor, buffer: Any) -> str:
    """Why the momentum ``buffer``, which does not fit ``param``, cannot be made to; "" if it can."""
    if not isinstance(buffer, Tensor):
        return f"the momentum buffer must be a Tensor but is a {type(buffer).__name__}"
    if buffer.is_meta and not param.is_meta:
        return "the momentum buffer has no data, because it is on the meta device; delete it or load it"
    if param.shape != buffer.shape:
        return f"the momentum buffer has shape {tuple(buffer.shape)}: load the whole one, or a DTensor of it"
    if isinstance(buffer, DTensor) and not is_placed_like(param, buffer):
        problem = _problem_with_move(buffer, _replicated(buffer))
        return problem and f"the momentum buffer: {problem}"
    return ""


def fitting_momentum(param: Tensor, buffer: Any, dtype: torch.dtype | None) -> Tensor:
    """A momentum ``buffer`` that a checkpoint, a framework or an earlier parameter left, as ``param`` needs it. All
    ranks must make this call, because a change of the placement is a collective. :func:`problem_with_momentum` must
    have found no problem.
    """
    if not is_placed_like(param, buffer):
        if isinstance(buffer, DTensor):
            mesh, whole = buffer.device_mesh, _replicated(buffer)
            buffer = buffer.redistribute(mesh, whole).to_local()
        if isinstance(param, DTensor):
            buffer = cut_out(matrices_of_dtensor(Param(0, param), {}), buffer, param)
    if fitting_part(param, buffer, dtype) is None:
        moved = local_part(buffer).to(local_part(param).device, dtype or buffer.dtype)
        buffer = like_param(param, moved)
    return buffer


def _replicated(tensor: DTensor) -> Sequence[Placement]:
    """The placements of the whole ``tensor``."""
    return [Replicate()] * tensor.device_mesh.ndim


def cut_out(matrices: Sequence[Matrix], full: Tensor, like: Tensor) -> Tensor:
    """This rank's shards of ``full``, placed like ``like``. One contribution to a sum takes all of it."""
    rank, part = process_rank(), local_part(like)
    local = full.new_zeros(part.shape, device=part.device)
    if is_sum(like) and not takes_update(like):
        return like_param(like, local)
    for matrix in matrices:
        if rank in matrix.layout.ranks:
            # A matrix without elements has no regions.
            for region in matrix.layout.regions_of(rank):
                whole = full.reshape(-1, *matrix.shape)[matrix.sub]
                region.of_local(local).copy_(region.of_matrix(whole))
    return like_param(like, local)
