"""Tensor parallelism with FSDP, HSDP and DDP around it.

TP cuts first, and FSDP cuts the rows of TP's pieces.
"""

from gradients import average
from models import batches, cut_linears, Transformer
from one_process import OneProcess
from place import device
from runner import recipe
from tensor_parallel import parallelize
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    fully_shard,
    FullyShardedDataParallel as FSDP,
    ShardingStrategy,
)
from torch.nn import functional as F
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config


def train(model: nn.Module, optimizer: Muon, *groups: ProcessGroup) -> None:
    for inputs, targets in batches(*groups):  # the ranks of a TP group see the same
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()


@recipe(processes=4)
def by_parameter() -> OneProcess:
    """Weights cut by hand, under FSDP1."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("fsdp", "tp"))
    fsdp_pg, tp_pg = mesh.get_group("fsdp"), mesh.get_group("tp")
    model = cut_linears(Transformer().to(device()), tp_pg)
    # One flat parameter could not be cut along several dimensions.
    model = FSDP(model, process_group=fsdp_pg, device_id=device(), use_orig_params=True)

    config = create_auto_config(
        fsdp_process_group=fsdp_pg,
        tp_process_group=tp_pg,
        tp_dim_per_param={0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1, 6: 0, 7: 1},
        module=model,
    )
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    one = Transformer().to(device())
    alone = OneProcess(one, model, optimizer, fsdp=fsdp_pg, tp=tp_pg)
    train(model, optimizer, fsdp_pg)
    return alone


@recipe(processes=4)
def fsdp1_over_plan() -> OneProcess:
    """FSDP1 over ``parallelize_module``: the plan is known to FSDP, and by it to Muon."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("fsdp", "tp"))
    fsdp_pg, tp_pg = mesh.get_group("fsdp"), mesh.get_group("tp")
    model = parallelize(Transformer().to(device()), mesh["tp"])
    # By its mesh FSDP knows that the parameters are DTensors of the other dimension.
    model = FSDP(model, device_mesh=mesh["fsdp"], device_id=device())

    config = create_auto_config(tp_process_group=tp_pg, fsdp_process_group=fsdp_pg)
    optimizer = Muon(model.parameters(), lr=1e-3, distributed_config=config)

    one = Transformer().to(device())
    alone = OneProcess(one, model, optimizer, fsdp=fsdp_pg, tp=tp_pg)
    train(model, optimizer, fsdp_pg)
    return alone


@recipe(processes=4)
def fsdp2_over_plan() -> OneProcess:
    """The same with ``fully_shard``, and without groups."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = parallelize(Transformer().to(device()), mesh["tp"])
    model = fully_shard(model, mesh=mesh["fsdp"])

    config = create_dtensor_config()
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    alone = OneProcess(Transformer().to(device()), model, optimizer)
    train(model, optimizer, mesh.get_group("fsdp"))
    return alone


@recipe(processes=8)
def tp_hsdp() -> OneProcess:
    """Three ways: TP pairs, shards of their pieces, replicas of the shards."""
    mesh = init_device_mesh(
        device().type, (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp")
    )
    replicate_pg, shard_pg, tp_pg = mesh.get_all_groups()
    model = parallelize(Transformer().to(device()), mesh["tp"])
    model = FSDP(
        model,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh["replicate", "shard"],
        device_id=device(),
    )

    config = create_auto_config(
        tp_process_group=tp_pg,
        shard_process_group=shard_pg,
        replicate_process_group=replicate_pg,
    )
    optimizer = Muon(model.parameters(), lr=1e-3, distributed_config=config)

    one = Transformer().to(device())
    alone = OneProcess(one, model, optimizer, fsdp=shard_pg, tp=tp_pg)
    train(model, optimizer, shard_pg, replicate_pg)
    return alone


@recipe(processes=8)
def three_groups() -> OneProcess:
    """FSDP, TP and DDP, each with a group of its own and no framework but FSDP1."""
    mesh = init_device_mesh(
        device().type, (2, 2, 2), mesh_dim_names=("ddp", "fsdp", "tp")
    )
    ddp_pg, fsdp_pg, tp_pg = mesh.get_all_groups()
    model = cut_linears(Transformer().to(device()), tp_pg)
    model = FSDP(model, process_group=fsdp_pg, device_id=device(), use_orig_params=True)

    config = create_auto_config(
        fsdp_process_group=fsdp_pg,
        tp_process_group=tp_pg,
        ddp_process_group=ddp_pg,
        tp_dim_per_param={0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1, 6: 0, 7: 1},
        prefetch_count=2,  # more exchanges in flight, and more memory
        module=model,
    )
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    one = Transformer().to(device())
    alone = OneProcess(one, model, optimizer, fsdp=fsdp_pg, tp=tp_pg)
    for inputs, targets in batches(fsdp_pg, ddp_pg):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        # FSDP has averaged them over its own group. A rank has none of some matrices.
        here = [p for p in model.parameters() if p.grad is not None]
        average(here, ddp_pg, ddp_pg.size())
        optimizer.step()
    return alone
