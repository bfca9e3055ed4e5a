"""This rank's part of a parameter, its gradient and its momentum, as plain tensors."""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING

import torch
from torch import Tensor


if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def as_dtensor_if_imported(tensor: Tensor) -> DTensor | None:
    """``tensor`` as a DTensor, or None; a plain tensor does not pull in ``torch.distributed``."""
    if type(tensor) in (Tensor, torch.nn.Parameter) and type(tensor.data) is Tensor:
        return None
    from torch.optim._muon_engine.layouts.dtensor import as_dtensor

    return as_dtensor(tensor)


def local_part(tensor: Tensor) -> Tensor:
    """The storage behind ``tensor`` on this rank, to be read or written in place."""
    dtensor = as_dtensor_if_imported(tensor)
    if dtensor is None:
        return tensor.detach()
    local = dtensor._local_tensor
    # A functional collective's result is a wrapper until somebody waits for it.
    wait = getattr(local, "wait", None)
    return (wait() if wait is not None else local).detach()


def provenance(param: Tensor) -> tuple:
    """What the layout of ``param`` is read from; where it differs later, the layout is another."""
    dtensor = as_dtensor_if_imported(param)
    if dtensor is None:
        return (param.shape, param.dtype, param.device)
    return (
        dtensor.device_mesh,
        dtensor.placements,
        dtensor.shape,
        dtensor.dtype,
        dtensor._local_tensor.shape,
        dtensor._local_tensor.device,
    )


def local_gradient(param: Tensor, grad: Tensor) -> Tensor:
    """``grad`` on this rank, placed and typed as ``param`` is.

    Placing it otherwise is the framework's collective: every rank has the same placements.
    """
    own, its = as_dtensor_if_imported(param), as_dtensor_if_imported(grad)
    counts = True
    if own is not None and its.placements != own.placements:
        placements, counts = _target(own, its)
        grad = its.redistribute(own.device_mesh, placements)
    local = local_part(grad)
    local = local if local.dtype == param.dtype else local.to(param.dtype)
    return local if counts else torch.zeros_like(local)


def _target(own: DTensor, its: DTensor) -> tuple[tuple[Placement, ...], bool]:
    """Where a gradient is to be placed, and whether this rank's part of it counts.

    Autograd gives the terms of a sum (a Partial parameter) one replicated gradient. It is the sum's,
    so one of the terms takes it and the others take zeros; DTensor has no redistribution for that.
    """
    from torch.distributed.tensor import Replicate

    placements = list(own.placements)
    counts = True
    coordinate = own.device_mesh.get_coordinate()
    for dim, (wanted, found) in enumerate(zip(placements, its.placements, strict=True)):
        if wanted.is_partial() and not found.is_partial():
            placements[dim] = Replicate()
            counts = counts and coordinate[dim] == 0
    return tuple(placements), counts


def problem_with_gradient(param: Tensor, grad: Tensor) -> str:
    """Why ``grad`` cannot be used for ``param``; "" where it can."""
    own, its = as_dtensor_if_imported(param), as_dtensor_if_imported(grad)
    if grad.is_sparse:
        return "Muon does not support sparse gradients"
    if (own is None) != (its is None):
        return (
            f"the parameter is a {type(param).__name__} and its gradient a {type(grad).__name__}; both or none have to "
            "be DTensors"
        )
    if own is not None and own.device_mesh != its.device_mesh:
        return f"the parameter is on {own.device_mesh} and its gradient on {its.device_mesh}"
    shapes = (param.shape, grad.shape)
    if own is not None and own.placements == its.placements:
        shapes = (own._local_tensor.shape, its._local_tensor.shape)
    if shapes[0] != shapes[1]:
        return f"the parameter has shape {tuple(shapes[0])} on this rank and its gradient {tuple(shapes[1])}"
    return ""


class GradientPlacing(NamedTuple):
    """How a gradient came, which is how the other ranks' gradients of that parameter come."""

    placements: tuple[Placement, ...]
    dtype: torch.dtype


def placing_of(grad: Tensor) -> GradientPlacing | None:
    dtensor = as_dtensor_if_imported(grad)
    return None if dtensor is None else GradientPlacing(dtensor.placements, grad.dtype)


def join_gradient_placing(param: Tensor, placing: GradientPlacing | None) -> None:
    """Takes part, with nothing to give, where other ranks bring a gradient to ``param``'s placement."""
    own = as_dtensor_if_imported(param)
    if own is None or placing is None or placing.placements == own.placements:
        return
    from torch.distributed.tensor import zeros

    nothing = zeros(
        own.shape,
        dtype=placing.dtype,
        device_mesh=own.device_mesh,
        placements=placing.placements,
    )
    nothing.redistribute(own.device_mesh, _target(own, nothing)[0])


def like_param(param: Tensor, local: Tensor) -> Tensor:
    """``local`` as a tensor of ``param``'s own type and placement."""
    dtensor = as_dtensor_if_imported(param)
    if dtensor is None:
        return local
    from torch.optim._muon_engine.layouts.dtensor import from_local

    return from_local(
        local,
        {
            "device_mesh": dtensor.device_mesh,
            "placements": dtensor.placements,
            "shape": dtensor.shape,
            "stride": dtensor.stride(),
        },
    )


def new_momentum_buffer(param: Tensor) -> Tensor:
    """Zeros of ``param``'s type, placement and dtype."""
    return like_param(param, torch.zeros_like(local_part(param)))


def placed_like(param: Tensor, buffer: Tensor) -> bool:
    """Whether ``buffer`` is of ``param``'s own type and placement."""
    own, its = as_dtensor_if_imported(param), as_dtensor_if_imported(buffer)
    if own is None or its is None:
        return own is its and param.shape == buffer.shape
    return (
        own.placements == its.placements
        and own.device_mesh == its.device_mesh
        and own.shape == its.shape
    )


def place_like(param: Tensor, buffer: Tensor, description: str) -> Tensor:
    """A loaded momentum ``buffer`` in ``param``'s own type and placement.

    Every rank has loaded the same kind of state, so all of them come here, or none.
    """
    own, its = as_dtensor_if_imported(param), as_dtensor_if_imported(buffer)
    if param.shape != buffer.shape:
        raise ValueError(
            f"the momentum buffer of {description} has shape {tuple(buffer.shape)}: load the whole one, or a DTensor "
            "of it"
        )
    if own is None:
        return its.full_tensor()
    if its is None:
        from torch.optim._muon_engine.layouts.dtensor import DTensorReader
        from torch.optim._muon_engine.layouts import Key

        layout = DTensorReader().read(Key(0), own)
        rank = torch.distributed.get_rank()
        local = torch.zeros_like(local_part(param), dtype=buffer.dtype)
        if layout.contribution_of(rank) == 0:
            for region in layout.shard_of(rank):
                region.of_local(local).copy_(region.of_matrix(buffer))
        return like_param(param, local)
    if own.device_mesh != its.device_mesh:
        return place_like(param, its.full_tensor(), description)
    return its.redistribute(own.device_mesh, own.placements)
