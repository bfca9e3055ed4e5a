"""Parameters as the frameworks lay them over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from .catalog import Shape


# Integers up to here are exact in float32, so that an element can carry its own position.
EXACT_INTEGERS = 2**24


@dataclass(frozen=True)
class Held:
    """One matrix on this rank: the parameter with its gradient, and which part is here."""

    param: nn.Parameter
    rows: slice
    columns: slice

    @property
    def local(self) -> Tensor:
        """This rank's part of the parameter, to be read or written in place."""
        return local_of(self.param)

    @property
    def local_grad(self) -> Tensor:
        return local_of(self.param.grad)


def local_of(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local()


def make_parameters(layout: str, shapes: Sequence[Shape], world: int) -> list[Held]:
    """Random parameters with random gradients of the same placements.

    Where the pieces are is not asked of the placements: each element starts as its own position in
    its matrix, and what a framework leaves on this rank is then plain to see.
    """
    linears = nn.ModuleList(nn.Linear(c, r, bias=False) for r, c in shapes)
    for linear in linears:
        weight = linear.weight
        if weight.numel() > EXACT_INTEGERS:
            raise ValueError(f"{tuple(weight.shape)} is too large to number in float32")
        with torch.no_grad():
            weight.copy_(torch.arange(weight.numel()).view_as(weight))
    _WRAP[layout](linears, world)
    torch.manual_seed(torch.distributed.get_rank())
    return [_held(linear.weight) for linear in linears]


def _held(param: nn.Parameter) -> Held:
    local = local_of(param)
    positions = local.to(torch.int64)
    rows = (positions // param.shape[1])[:, 0]
    columns = (positions % param.shape[1])[0]
    held = Held(param, _as_slice(rows), _as_slice(columns))
    with torch.no_grad():
        local.normal_()
    grad = DTensor.from_local(
        torch.randn_like(local),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    param.grad = grad
    return held


def _as_slice(indices: Tensor) -> slice:
    first, last = int(indices[0]), int(indices[-1])
    if not torch.equal(indices, torch.arange(first, last + 1)):
        raise NotImplementedError("the bench needs shards of consecutive rows, columns")
    return slice(first, last + 1)


def _shard(linears: nn.ModuleList, world: int) -> None:
    _fully_shard_each(linears, init_device_mesh("cpu", (world,)))


def _replicate(linears: nn.ModuleList, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for linear in linears:
        linear.weight = nn.Parameter(
            distribute_tensor(linear.weight.data, mesh, [Replicate()])
        )


def _hsdp(linears: nn.ModuleList, world: int) -> None:
    mesh = init_device_mesh(
        "cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")
    )
    _fully_shard_each(linears, mesh)


def _fsdp_tp(linears: nn.ModuleList, world: int) -> None:
    """Column- and row-parallel in turn, as in an attention or feed-forward block."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("fsdp", "tp"))
    for index, linear in enumerate(linears):
        style = RowwiseParallel() if index % 2 else ColwiseParallel()
        parallelize_module(linear, mesh["tp"], style)
    _fully_shard_each(linears, mesh["fsdp"])


def _fully_shard_each(linears: nn.ModuleList, mesh: DeviceMesh) -> None:
    for linear in linears:
        fully_shard(linear, mesh=mesh)


_WRAP: dict[str, Callable[[nn.ModuleList, int], None]] = {
    "shard": _shard,
    "replicate": _replicate,
    "hsdp": _hsdp,
    "fsdp_tp": _fsdp_tp,
}
