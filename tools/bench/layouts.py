"""Parameters as the frameworks lay them over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.muon import create_auto_config, create_dtensor_config


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.muon import DistributedConfig

    from .catalog import Shape

    MakeConfig = Callable[[int], DistributedConfig]


# Integers up to here are exact in float32, so that an element can carry its own position.
EXACT_INTEGERS = 2**24


@dataclass(frozen=True)
class Held:
    """One matrix on this rank: the parameter with its gradient, and which part is here."""

    param: nn.Parameter
    shape: Shape
    rows: slice
    columns: slice
    make_config: Callable[[int], DistributedConfig]

    @property
    def local(self) -> Tensor:
        """This rank's part of the parameter, of two dimensions, to be read or written in place."""
        return self.part_of(self.param)

    @property
    def local_grad(self) -> Tensor:
        return self.part_of(self.param.grad)

    def part_of(self, tensor: Tensor) -> Tensor:
        """This rank's part of the parameter, its gradient or its momentum, of two dimensions."""
        height = self.rows.stop - self.rows.start
        return local_of(tensor).view(height, self.columns.stop - self.columns.start)

    @property
    def placed(self) -> str:
        if isinstance(self.param, DTensor):
            return f"{self.param.placements} on {tuple(self.param.device_mesh.shape)}"
        return f"{type(self.param).__name__} of shape {tuple(self.param.shape)}"


def local_of(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_parameters(layout: str, shapes: Sequence[Shape], world: int) -> list[Held]:
    """Random parameters with random gradients of the same placements.

    Where the shards are is not asked of the placements: each element starts as its own position in
    its matrix, and what a framework leaves on this rank is then plain to see.
    """
    linears = nn.ModuleList(nn.Linear(c, r, bias=False) for r, c in shapes)
    for linear in linears:
        weight = linear.weight
        if weight.numel() > EXACT_INTEGERS:
            raise ValueError(f"{tuple(weight.shape)} is too large to number in float32")
        with torch.no_grad():
            weight.copy_(torch.arange(weight.numel()).view_as(weight))
    make_config = _WRAP[layout](linears, world)
    torch.manual_seed(0)
    return [
        _held(param, shape, make_config)
        for param, shape in zip(linears.parameters(), shapes, strict=True)
    ]


def _held(
    param: nn.Parameter, shape: Shape, make_config: Callable[[int], DistributedConfig]
) -> Held:
    local = local_of(param)
    positions = local.to(torch.int64).flatten()
    rows = _as_slice((positions // shape[1]).unique())
    columns = _as_slice((positions % shape[1]).unique())
    if len(positions) != (rows.stop - rows.start) * (columns.stop - columns.start):
        raise NotImplementedError("the bench needs shards of whole rows")
    held = Held(param, shape, rows, columns, make_config)
    grad = torch.randn_like(local)
    with torch.no_grad():
        local.normal_()
    if isinstance(param, DTensor):
        grad = DTensor.from_local(
            grad,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    elif local.shape == shape:
        # Replicas have one gradient, as DDP leaves it.
        dist.broadcast(grad, 0)
    param.grad = grad
    return held


def _as_slice(indices: Tensor) -> slice:
    first, last = int(indices[0]), int(indices[-1])
    if not torch.equal(indices, torch.arange(first, last + 1)):
        raise NotImplementedError("the bench needs shards of consecutive rows, columns")
    return slice(first, last + 1)


def _shard(linears: nn.ModuleList, world: int) -> MakeConfig:
    return _fully_shard_each(linears, init_device_mesh("cpu", (world,)))


def _replicate(linears: nn.ModuleList, world: int) -> MakeConfig:
    mesh = init_device_mesh("cpu", (world,))
    for linear in linears:
        linear.weight = nn.Parameter(
            distribute_tensor(linear.weight.data, mesh, [Replicate()])
        )
    return _dtensor_config


def _hsdp(linears: nn.ModuleList, world: int) -> MakeConfig:
    mesh = init_device_mesh(
        "cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")
    )
    return _fully_shard_each(linears, mesh)


def _fsdp_tp(linears: nn.ModuleList, world: int) -> MakeConfig:
    """Column- and row-parallel in turn, as in an attention or feed-forward block."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("fsdp", "tp"))
    for index, linear in enumerate(linears):
        style = RowwiseParallel() if index % 2 else ColwiseParallel()
        parallelize_module(linear, mesh["tp"], style)
    return _fully_shard_each(linears, mesh["fsdp"])


def _fully_shard_each(linears: nn.ModuleList, mesh: DeviceMesh) -> MakeConfig:
    for linear in linears:
        fully_shard(linear, mesh=mesh)
    return _dtensor_config


def _dtensor_config(prefetch: int) -> DistributedConfig:
    return create_dtensor_config(prefetch_count=prefetch)


def _fsdp1(linears: nn.ModuleList, world: int) -> MakeConfig:
    for index, linear in enumerate(linears):
        linears[index] = FullyShardedDataParallel(
            linear, device_id=torch.device("cpu"), use_orig_params=True
        )
    group = linears[0].process_group
    return lambda prefetch: create_auto_config(
        fsdp_process_group=group, module=linears, prefetch_count=prefetch
    )


def _ddp(linears: nn.ModuleList, world: int) -> MakeConfig:
    DistributedDataParallel(linears)
    return lambda prefetch: create_auto_config(
        ddp_process_group=dist.group.WORLD, prefetch_count=prefetch
    )


_WRAP: dict[str, Callable[[nn.ModuleList, int], MakeConfig]] = {
    "shard": _shard,
    "replicate": _replicate,
    "hsdp": _hsdp,
    "fsdp_tp": _fsdp_tp,
    "fsdp1": _fsdp1,
    "ddp": _ddp,
}
