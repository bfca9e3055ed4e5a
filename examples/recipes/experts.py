"""Expert parallelism: ranks hold different experts of a mixture, and tokens travel."""

import torch.distributed as dist
from gradients import average
from models import batches, MoE
from one_process import OneProcess
from place import device
from runner import recipe
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.nn import functional as F
from torch.optim import AdamW, Muon
from torch.optim.muon import (
    create_auto_config,
    detect_tp_dims_from_model,
    DistributedConfig,
)


def average_router(model: MoE, group: dist.ProcessGroup) -> None:
    """All ranks have the router, and each has seen other tokens go through it."""
    average(model.mixture.router.parameters(), group, group.size())


def divide(model: MoE, count: int) -> None:
    """The gradient of an expert is a sum over the losses of as many ranks already."""
    for param in model.mixture.experts.parameters():
        param.grad /= count


def numbers_of(model: MoE, matrices: list[nn.Parameter]) -> dict[int, int]:
    """Index among Muon's matrices -> number of the expert, for the experts that are here."""
    index = {param: i for i, param in enumerate(matrices)}
    return {
        index[param]: int(number)
        for number, expert in model.mixture.experts.items()
        for param in expert.parameters()
    }


@recipe(processes=4)
def independent() -> OneProcess:
    """Each rank's experts are its own business, without a config."""
    ep_pg = dist.group.WORLD
    model = MoE(ep_pg).to(device())
    optimizer = Muon(model.parameters(), lr=1e-3)

    # The router is orthogonalized on every rank, which a config would spare.
    alone = OneProcess(MoE().to(device()), model, optimizer, once=False)
    for inputs, targets in batches(ep_pg):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        average_router(model, ep_pg)
        divide(model, ep_pg.size())
        optimizer.step()
    return alone


@recipe(processes=4)
def with_replicas() -> OneProcess:
    """Two replicas of each expert, and four of the router."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "ep"))
    dp_pg, ep_pg = mesh.get_all_groups()
    model = MoE(ep_pg).to(device())
    matrices = list(model.parameters())

    config = create_auto_config(
        ep_process_group=ep_pg,
        # All ranks: those that name another expert hold no replica of this one.
        ddp_process_group=dist.group.WORLD,
        expert_assignments=numbers_of(model, matrices),
    )
    optimizer = Muon(matrices, lr=0.01, distributed_config=config)

    alone = OneProcess(MoE().to(device()), model, optimizer)
    for inputs, targets in batches(dp_pg, ep_pg):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        average_router(model, dist.group.WORLD)
        average(model.mixture.experts.parameters(), dp_pg, mesh.size())
        optimizer.step()
    return alone


@recipe(processes=4)
def sharded() -> OneProcess:
    """Each expert is whole on no rank: FSDP shards it over the ranks that share it."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("fsdp", "ep"))
    fsdp_pg, ep_pg = mesh.get_all_groups()
    model = MoE(ep_pg).to(device())
    experts = model.mixture.experts
    for number, expert in experts.items():
        experts[number] = FSDP(expert, process_group=fsdp_pg, device_id=device())

    matrices = list(experts.parameters())  # one flat parameter for each expert
    config = create_auto_config(
        ep_process_group=ep_pg,
        fsdp_process_group=fsdp_pg,
        expert_assignments=numbers_of(model, matrices),
    )
    muon = Muon(matrices, lr=0.01, distributed_config=config)
    adamw = AdamW(model.mixture.router.parameters(), lr=1e-3)

    alone = OneProcess(MoE().to(device()), model, muon, fsdp=fsdp_pg)
    for inputs, targets in batches(fsdp_pg, ep_pg):
        F.mse_loss(model(inputs), targets).backward()
        average_router(model, dist.group.WORLD)
        divide(model, ep_pg.size())  # FSDP has averaged over its own group
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return alone


def on_pairs(mesh: DeviceMesh) -> tuple[MoE, list[nn.Parameter]]:
    """A model of which this rank's TP pair has one expert, and that expert's matrices."""
    model = MoE(mesh.get_group("ep")).to(device())
    for expert in model.mixture.experts.values():
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(expert, mesh["tp"], plan)
    return model, list(model.mixture.experts.parameters())


def train_on_pairs(
    model: MoE,
    matrices: list[nn.Parameter],
    config: DistributedConfig,
    ep_pg: dist.ProcessGroup,
) -> OneProcess:
    muon = Muon(matrices, lr=1e-3, distributed_config=config)
    adamw = AdamW(model.mixture.router.parameters(), lr=1e-3)
    alone = OneProcess(MoE().to(device()), model, muon)
    for inputs, targets in batches(ep_pg):  # the ranks of a TP group see the same
        F.mse_loss(model(inputs), targets).backward()
        average_router(model, ep_pg)
        divide(model, ep_pg.size())
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return alone


@recipe(processes=8)
def tensor_parallel() -> tuple[OneProcess, OneProcess]:
    """Each expert is on a TP pair of its own. The config is for TP, not for EP."""
    mesh = init_device_mesh(device().type, (4, 2), mesh_dim_names=("ep", "tp"))
    ep_pg, tp_pg = mesh.get_all_groups()

    # An expert's pieces meet within its pair, and experts never meet.
    model, matrices = on_pairs(mesh)
    config = create_auto_config(
        tp_process_group=tp_pg, tp_dim_per_param=detect_tp_dims_from_model(matrices)
    )
    tp_only = train_on_pairs(model, matrices, config, ep_pg)

    # Whoever names the experts too gets the same bits.
    model, matrices = on_pairs(mesh)
    config = create_auto_config(
        tp_process_group=tp_pg,
        tp_dim_per_param=detect_tp_dims_from_model(matrices),
        ep_process_group=ep_pg,
        expert_assignments=numbers_of(model, matrices),
    )
    return tp_only, train_on_pairs(model, matrices, config, ep_pg)
