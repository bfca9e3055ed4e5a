"""HSDP: shards within a node, replicas of them across nodes."""

from models import batches, Transformer
from one_process import OneProcess
from place import device
from runner import recipe
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
    for inputs, targets in batches(*groups):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()


@recipe(processes=4)
def two_groups() -> OneProcess:
    """FSDP's group and DDP's are two dimensions of a mesh."""
    nodes = init_device_mesh(device().type, (2, 2), mesh_dim_names=("ddp", "fsdp"))
    fsdp_pg, ddp_pg = nodes.get_group("fsdp"), nodes.get_group("ddp")
    model = FSDP(
        Transformer(),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=nodes,
        device_id=device(),
    )

    config = create_auto_config(fsdp_process_group=fsdp_pg, ddp_process_group=ddp_pg)
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    alone = OneProcess(Transformer().to(device()), model, optimizer, fsdp=fsdp_pg)
    train(model, optimizer, fsdp_pg, ddp_pg)
    return alone


@recipe(processes=4)
def hybrid_shard() -> OneProcess:
    """The groups are handed to FSDP and to Muon. A mesh makes all of them on all ranks."""
    nodes = init_device_mesh(
        device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    shard_pg, replicate_pg = nodes.get_group("shard"), nodes.get_group("replicate")
    model = FSDP(
        Transformer(),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        process_group=(shard_pg, replicate_pg),
        device_id=device(),
    )

    config = create_auto_config(
        shard_process_group=shard_pg, replicate_process_group=replicate_pg
    )
    optimizer = Muon(model.parameters(), lr=1e-3, distributed_config=config)

    alone = OneProcess(Transformer().to(device()), model, optimizer, fsdp=shard_pg)
    train(model, optimizer, shard_pg, replicate_pg)
    return alone


@recipe(processes=4)
def fsdp2() -> OneProcess:
    """With ``fully_shard`` the mesh says it all."""
    nodes = init_device_mesh(
        device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    model = fully_shard(Transformer().to(device()), mesh=nodes)

    config = create_dtensor_config()
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    alone = OneProcess(Transformer().to(device()), model, optimizer)
    train(model, optimizer, nodes.get_group("shard"), nodes.get_group("replicate"))
    return alone
