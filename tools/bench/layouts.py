"""Parameters as the frameworks lay them over the ranks."""

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.muon import create_auto_config, DistributedConfig

from .models import MODELS


Shape = tuple[int, ...]
Config = DistributedConfig | Literal["auto"]
SMALL_BLOCK: list[Shape] = [(64, 64)] * 4 + [(176, 64), (176, 64), (64, 176)]
# The shapes are (out, in), as torch.nn.Linear holds its weight.
WORKLOADS: dict[str, list[Shape]] = {
    "pairs": [(512, 512), (512, 2048)] * 12,
    "gpt2": MODELS["GPT-2 124M"].shapes,
    "llama1b": MODELS["Llama 3.2 1B"].shapes,
    # A block's attention and feed-forward network. A model of 16 blocks has as many matrices.
    "small112": SMALL_BLOCK * 16,
    "tiny": [(32, 64), (64, 64), (64, 32)] * 2,  # for tests
}
LAYOUTS = {
    "shard": "FSDP2: Shard(0)",
    "hsdp": "HSDP: (Replicate, Shard(0)), 2 replicas",
    "fsdp_tp": "FSDP2 x TP: (_StridedShard(0), Shard(0)) and (Shard(0), Shard(1))",
    "fsdp1": "FSDP1: FULL_SHARD, use_orig_params=True",
    "ddp": "DDP",
}


class Laid(NamedTuple):
    """The parameters of one rank, with gradients, and the config that fits them."""

    params: list[nn.Parameter]
    config: Config


def fits(layout: str, world: int) -> bool:
    """Each dimension of a mesh needs at least two ranks."""
    return layout not in ("hsdp", "fsdp_tp") or (world >= 4 and world % 2 == 0)


def lay(layout: str, workload: str, world: int, device: str = "cpu") -> Laid:
    """Makes random parameters with random gradients, equal on all replicas."""
    linears = nn.ModuleList()
    for rows, columns in WORKLOADS[workload]:
        linears.append(nn.Linear(columns, rows, bias=False, device=device))
    config = _wrap(layout, linears, world, device)
    torch.manual_seed(0 if layout in ("hsdp", "ddp") else dist.get_rank())
    params = list(linears.parameters())
    for param in params:
        local_of(param).normal_()
        param.grad = torch.empty_like(param)
        local_of(param.grad).normal_()
    return Laid(params, config)


def local_of(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _wrap(layout: str, linears: nn.ModuleList, world: int, device: str) -> Config:
    if layout == "ddp":
        DistributedDataParallel(linears)
        return create_auto_config(ddp_process_group=dist.group.WORLD)
    if layout == "fsdp1":
        for index, linear in enumerate(linears):
            linears[index] = FullyShardedDataParallel(
                linear,
                device_id=torch.device(device),
                use_orig_params=True,
            )
        group = linears[0].process_group
        return create_auto_config(fsdp_process_group=group, module=linears)
    if layout == "shard":
        mesh = init_device_mesh(device, (world,), mesh_dim_names=("outer",))
    else:
        sizes = 2, world // 2
        mesh = init_device_mesh(device, sizes, mesh_dim_names=("outer", "inner"))
    for index, linear in enumerate(linears):
        if layout == "fsdp_tp":
            # Column- and row-parallel in turn, as in an attention or feed-forward block.
            style = RowwiseParallel() if index % 2 else ColwiseParallel()
            parallelize_module(linear, mesh["inner"], style)
            fully_shard(linear, mesh=mesh["outer"])
        else:
            fully_shard(linear, mesh=mesh)
    return "auto"
