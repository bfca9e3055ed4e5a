"""This rank's part of a tensor: of a DTensor, its local tensor; a plain tensor is its own local part."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .process_groups import current_device, device_of_group


def is_dtensor(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def is_sum(tensor: Tensor) -> bool:
    """Whether ranks hold contributions to a sum (Partial)."""
    if not isinstance(tensor, DTensor):
        return False
    return any(placement.is_partial() for placement in tensor.placements)


def takes_update(tensor: Any) -> bool:
    """Whether this rank's contribution to a sum is the one that takes its update: the first one."""
    where = tensor.device_mesh.get_coordinate() or ()
    placed = zip(where, tensor.placements, strict=True)
    return all(place == 0 for place, placement in placed if placement.is_partial())


def summed(tensor: Any) -> Any:
    """``tensor`` with the sum on each rank that has contributed to it. All ranks of its mesh make this call. The sum of
    floats is made in float64, so that the order of its terms hardly counts.
    """
    wide = torch.float64 if tensor.is_floating_point() else tensor.dtype
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    whole = tensor.to(wide).redistribute(tensor.device_mesh, placements)
    return whole.to(tensor.dtype)


def local_part(tensor: Tensor) -> Tensor:
    """The storage behind ``tensor`` on this rank, to be read or written in place."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    # A functional collective's result is a wrapper until its first use waits for it.
    local = local.wait() if hasattr(local, "wait") else local
    return local.detach() if local.requires_grad else local


def fitting_part(
    param: Tensor, other: Any, dtype: torch.dtype | None = None
) -> Tensor | None:
    """This rank's part of ``other``, if that has the shape, placement and device of ``param``, and ``dtype`` unless it is
    None; None for everything else.
    """
    if not isinstance(other, Tensor) or not is_placed_like(param, other):
        return None
    if other.shape != param.shape:
        return None
    local, own = other, param
    if isinstance(param, DTensor) and isinstance(other, DTensor):
        local, own = other._local_tensor, param._local_tensor
        if local.shape != own.shape:
            return None
    if local.device != own.device or local.layout != torch.strided:
        return None
    if dtype is not None and local.dtype != dtype:
        return None
    return local_part(other)


def is_placed_like(param: Any, other: Any) -> bool:
    """Whether two tensors are DTensors with one placement, or none of them is a DTensor."""
    if not isinstance(param, DTensor) or not isinstance(other, DTensor):
        return isinstance(param, DTensor) == isinstance(other, DTensor)
    if param.placements != other.placements:
        return False
    # A checkpoint may bring a mesh of its own.
    return param.device_mesh == other.device_mesh


class Traits(NamedTuple):
    """The properties from which the layout of a parameter is read, for a later comparison."""

    # Whether it is a Parameter that takes no gradients. That does not depend on ``grad``, which ranks may differ in.
    frozen: bool
    # The dtype of its gradients, and of its momentum; None for any.
    grad_dtype: torch.dtype | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    # Only a contiguous parameter can be flattened.
    is_contiguous: bool
    # Of a DTensor: the shape and device of its local tensor, its mesh and its placements.
    placed: tuple = ()

    @property
    def momentum_dtype(self) -> torch.dtype:
        return self.grad_dtype or self.dtype


def traits_of(param: Tensor) -> Traits:
    placed: tuple = ()
    if isinstance(param, DTensor):
        local = param._local_tensor
        placed = local.shape, local.device, param.device_mesh, param.placements
    # Only leaves have gradients. Functions that are called outside of a step also take other tensors.
    grad_dtype = param.grad_dtype if param.is_leaf else param.dtype
    return Traits(
        isinstance(param, torch.nn.Parameter) and not param.requires_grad,
        grad_dtype,
        param.shape,
        param.dtype,
        param.device,
        param.is_contiguous(),
        placed,
    )


def like_param(param: Tensor, local: Tensor) -> Tensor:
    """``local`` as a tensor of the kind and placement of ``param``, without communication."""
    if not isinstance(param, DTensor):
        return local
    # DTensor.from_local() would move an offloaded one to the mesh's device.
    meta = TensorMeta(param.shape, param.stride(), local.dtype)
    spec = DTensorSpec(param.device_mesh, param.placements, meta)
    return DTensor(local, spec, requires_grad=False)


def device_of(
    params: Sequence[Tensor], groups: Iterable[ProcessGroup] = ()
) -> torch.device:
    """The device of the communication buffers of the ranks that share ``params``, in ``groups`` of theirs."""
    of_meshes = {p.device_mesh.device_type for p in params if isinstance(p, DTensor)}
    if len(of_meshes) > 1:
        raise ValueError(
            f"the parameters are on meshes of different device types: {sorted(of_meshes)}; give each type its own Muon"
        )
    # The first accelerator, or else the first one.
    devices = [param.device for param in params] or [torch.device("cpu")]
    device = max(devices, key=lambda device: device.type not in ("cpu", "meta"))
    for device_type in of_meshes:
        if device.type != device_type:
            # Offloaded parameters are on the CPU, but their mesh communicates between accelerators.
            device = current_device(device_type)
    for group in groups:
        device_types = [torch.device(kind).type for kind in group._device_types]
        if device.type in ("cpu", "meta") and device.type not in device_types:
            # Parameters on the CPU or on meta, in a group of accelerators only.
            return device_of_group(group)
    return device
