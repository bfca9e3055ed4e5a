"""Parameters that are DTensors: they say themselves where the pieces are."""

import torch.distributed as dist
from models import batches, MLP
from one_process import OneProcess
from place import device
from runner import recipe
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    distribute_module,
    distribute_tensor,
    Placement,
    Replicate,
    Shard,
)
from torch.nn import functional as F
from torch.optim import AdamW, Muon
from torch.optim.muon import create_dtensor_config, partition_parameters


def place_weights(
    model: nn.Module, mesh: DeviceMesh, placements: list[Placement]
) -> nn.Module:
    """Makes DTensors of all parameters: weights as told, biases replicated.

    To assign to ``param.data`` would destroy the parameter, and a plain bias cannot be added
    to what a DTensor weight gives.
    """

    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            chosen = placements if param.ndim == 2 else [Replicate()] * mesh.ndim
            dtensor = distribute_tensor(param.detach(), mesh, chosen)
            module.register_parameter(key, nn.Parameter(dtensor))

    return distribute_module(model, mesh, place)


def train_placed(
    model: nn.Module,
    optimizers: list,
    mesh: DeviceMesh,
    inputs_placed: list[Placement],
) -> None:
    """The usual loop. Every rank has the whole batch, and takes its piece of it."""
    for batch in batches():
        inputs, targets = (distribute_tensor(t, mesh, inputs_placed) for t in batch)
        # Backward of F.mse_loss would divide by the elements of this rank's piece only.
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@recipe(processes=4)
def automatic() -> OneProcess:
    """A model whose parameters are DTensors already: no groups, no dimensions."""
    model = fully_shard(MLP().to(device()))

    config = create_dtensor_config()
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    alone = OneProcess(MLP().to(device()), model, optimizer)
    for inputs, targets in batches(dist.group.WORLD):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return alone


@recipe(processes=4)
def sharded() -> OneProcess:
    """Weights cut along dimension 0. Biases are no matrices, and so AdamW's."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    model = place_weights(MLP(bias=True).to(device()), mesh, [Shard(0)])

    matrices, others = partition_parameters(model)
    config = create_dtensor_config()
    optimizer = Muon(matrices, lr=0.01, distributed_config=config)

    alone = OneProcess(MLP(bias=True).to(device()), model, optimizer)
    train_placed(model, [optimizer, AdamW(others, lr=1e-3)], mesh, [Replicate()])
    return alone


@recipe(processes=8)
def sharded_twice() -> OneProcess:
    """A mesh of two dimensions: one cuts rows, the other columns."""
    mesh = init_device_mesh(device().type, (2, 4), mesh_dim_names=("fsdp", "tp"))
    model = place_weights(MLP(bias=True).to(device()), mesh, [Shard(0), Shard(1)])

    matrices, others = partition_parameters(model)
    config = create_dtensor_config(async_gpu_parallelism=True, prefetch_count=1)
    optimizer = Muon(matrices, lr=0.01, distributed_config=config)

    alone = OneProcess(MLP(bias=True).to(device()), model, optimizer)
    optimizers = [optimizer, AdamW(others, lr=1e-3)]
    train_placed(model, optimizers, mesh, [Shard(0), Replicate()])
    return alone


@recipe(processes=4)
def replicated() -> OneProcess:
    """Every rank has all weights and a slice of the batch, as under DDP."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    model = place_weights(MLP(bias=True).to(device()), mesh, [Replicate()])

    matrices, others = partition_parameters(model)
    config = create_dtensor_config()
    optimizer = Muon(matrices, lr=0.01, distributed_config=config)

    alone = OneProcess(MLP(bias=True).to(device()), model, optimizer)
    train_placed(model, [optimizer, AdamW(others, lr=1e-3)], mesh, [Shard(0)])
    return alone
