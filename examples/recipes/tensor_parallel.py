"""Tensor parallelism: by PyTorch's plans, and as frameworks like Megatron cut weights."""

import torch.distributed as dist
from models import batches, cut_linears, tp_dim_of, Transformer
from one_process import OneProcess
from place import device
from runner import check, recipe
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.nn import functional as F
from torch.optim import Muon
from torch.optim.muon import create_auto_config, detect_tp_dims_from_model


# ColwiseParallel cuts dimension 0 of a weight, whose shape is (out, in); RowwiseParallel 1.
PLAN = {
    "attention.qkv_proj": ColwiseParallel(),
    "attention.out_proj": RowwiseParallel(),
    "ffn.w1": ColwiseParallel(),
    "ffn.w2": RowwiseParallel(),
}


def parallelize_layer(layer: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(layer, mesh, PLAN)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:
        parallelize_layer(layer, mesh)
    return model


def train(model: nn.Module, *optimizers: Muon) -> None:
    for inputs, targets in batches():  # all ranks see the whole batch
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@recipe(processes=4)
def by_parameter() -> OneProcess:
    """Plain tensors, cut by hand: some along dimension 0 and some along 1."""
    tp_pg = dist.group.WORLD
    model = cut_linears(Transformer().to(device()), tp_pg)

    # Indices count what Muon is given. An embedding is no matrix for Muon, cut or not.
    tp_dim_per_param = {
        0: 0,  # layers.0.attention.qkv_proj: its outputs are shared out
        1: 1,  # layers.0.attention.out_proj: its inputs are
        2: 0,  # layers.0.ffn.w1
        3: 1,  # layers.0.ffn.w2
        4: 0,  # layers.1 likewise
        5: 1,
        6: 0,
        7: 1,
    }
    config = create_auto_config(
        tp_process_group=tp_pg, tp_dim_per_param=tp_dim_per_param
    )
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    alone = OneProcess(Transformer().to(device()), model, optimizer, tp=tp_pg)
    train(model, optimizer)
    return alone


@recipe(processes=4)
def one_dimension() -> OneProcess:
    """One dimension for all, where a framework cuts all weights alike."""
    tp_pg = dist.group.WORLD
    model = Transformer().to(device())
    for layer in model.layers:
        cut_linears(layer.ffn, tp_pg, dim=1)

    config = create_auto_config(tp_process_group=tp_pg, tp_dim_per_param=1)
    matrices = [p for layer in model.layers for p in layer.ffn.parameters()]
    optimizer = Muon(matrices, lr=0.01, distributed_config=config)

    alone = OneProcess(
        Transformer().to(device()),
        model,
        optimizer,
        tp=tp_pg,
        tp_dims={"w1": 1, "w2": 1},
    )
    train(model, optimizer)
    return alone


@recipe(processes=4)
def detected() -> OneProcess:
    """The framework's marks say along which dimension each parameter is cut."""
    tp_pg = dist.group.WORLD
    model = cut_linears(Transformer().to(device()), tp_pg)  # which sets ``tp_dim``

    tp_dims = detect_tp_dims_from_model(model)
    check(tp_dims == dict(enumerate([0, 1, 0, 1] * 2)), f"found {tp_dims}")
    config = create_auto_config(tp_process_group=tp_pg, tp_dim_per_param=tp_dims)
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    alone = OneProcess(Transformer().to(device()), model, optimizer, tp=tp_pg)
    train(model, optimizer)
    return alone


@recipe(processes=4)
def by_plan() -> OneProcess:
    """``parallelize_module`` makes DTensors; ``create_dtensor_config()`` would do as well."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    model = parallelize(Transformer().to(device()), mesh)

    config = create_auto_config(
        tp_process_group=mesh.get_group(),
        tp_dim_per_param=detect_tp_dims_from_model(model),
    )
    optimizer = Muon(model.parameters(), lr=1e-3, distributed_config=config)

    alone = OneProcess(Transformer().to(device()), model, optimizer)
    train(model, optimizer)
    return alone


@recipe(processes=4)
def two_optimizers() -> OneProcess:
    """One Muon for each dimension, with a config each. A dict of dimensions spares that."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    model = parallelize(Transformer().to(device()), mesh)
    named = dict(model.named_parameters())

    optimizers = []
    for dim in (0, 1):
        params = [p for name, p in named.items() if tp_dim_of(name) == dim]
        config = create_auto_config(tp_process_group=mesh.get_group(), tp_shard_dim=dim)
        optimizers.append(Muon(params, lr=1e-3, distributed_config=config))

    alone = OneProcess(Transformer().to(device()), model, *optimizers)
    train(model, *optimizers)
    return alone
