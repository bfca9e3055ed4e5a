"""The three settings that matter for speed. They change no bit of the result."""

import torch.distributed as dist
from models import batches, cut_linears, Transformer
from one_process import OneProcess
from place import device
from runner import recipe
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn import functional as F
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    detect_tp_dims_from_model,
    DistributedConfig,
)


@recipe(processes=4)
def debug() -> OneProcess:
    """One owner after the other, nothing in flight: to find out what goes wrong."""
    fsdp_pg = dist.group.WORLD
    model = FSDP(Transformer(), process_group=fsdp_pg, device_id=device())
    config = create_auto_config(
        fsdp_process_group=fsdp_pg,
        async_gpu_parallelism=False,  # in rank order
        prefetch_count=0,
    )
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    one = Transformer().to(device())
    alone = OneProcess(one, model, optimizer, fsdp=fsdp_pg)
    for inputs, targets in batches(fsdp_pg):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return alone


@recipe(processes=4)
def production() -> OneProcess:
    """All owners at once, and one exchange in flight behind each computation."""
    model, fsdp_pg, tp_pg = cut_both_ways()
    config = create_auto_config(
        fsdp_process_group=fsdp_pg,
        tp_process_group=tp_pg,
        tp_dim_per_param=detect_tp_dims_from_model(model),
        async_gpu_parallelism=True,
        prefetch_count=1,
    )
    return train_with(config, model, fsdp_pg, tp_pg)


@recipe(processes=4)
def aggressive() -> OneProcess:
    """More in flight, which takes more memory: for slow networks and many matrices."""
    model, fsdp_pg, tp_pg = cut_both_ways()
    config = create_auto_config(
        fsdp_process_group=fsdp_pg,
        tp_process_group=tp_pg,
        tp_dim_per_param=detect_tp_dims_from_model(model),
        async_gpu_parallelism=True,
        prefetch_count=2,
    )
    return train_with(config, model, fsdp_pg, tp_pg)


def cut_both_ways() -> tuple[nn.Module, ProcessGroup, ProcessGroup]:
    """A model whose weights TP cuts, and FSDP the rows of the pieces."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("fsdp", "tp"))
    fsdp_pg, tp_pg = mesh.get_all_groups()
    model = cut_linears(Transformer().to(device()), tp_pg, fsdp=fsdp_pg)
    return model, fsdp_pg, tp_pg


def train_with(
    config: DistributedConfig,
    model: nn.Module,
    fsdp_pg: ProcessGroup,
    tp_pg: ProcessGroup,
) -> OneProcess:
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)
    one = Transformer().to(device())
    alone = OneProcess(one, model, optimizer, fsdp=fsdp_pg, tp=tp_pg)
    for inputs, targets in batches(fsdp_pg):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return alone
