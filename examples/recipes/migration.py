"""From one way to train to another: before, after, and that the training is the same."""

import torch
import torch.distributed as dist
from dtensor import place_weights, train_placed
from models import batch, batches, Block, cut_linears, MLP, Transformer
from one_process import OneProcess
from place import device
from runner import check, recipe
from tensor_parallel import parallelize
from torch import nn, Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    DistributedConfig,
)


def train(model: nn.Module, optimizer: Optimizer, *groups: ProcessGroup) -> list[float]:
    """The same loop before and after. Returns the losses of this rank's slices."""
    losses = []
    for inputs, targets in batches(*groups):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(before: list[float], after: list[float]) -> str:
    """Of the whole batches. Gradients round otherwise, and so not to the last bit."""
    apart = max(abs(a - b) / b for a, b in zip(before, after, strict=True))
    check(apart < 1e-3, f"losses before: {before}, after: {after}")
    return f"losses as before to {apart:.0e}"


@recipe(processes=4)
def one_process_to_dtensor() -> tuple[str, OneProcess]:
    """From one process to DTensor parameters."""
    # Before
    model = MLP().to(device())
    optimizer = Muon(model.parameters(), lr=0.01)
    losses = train(model, optimizer)

    # After: parameters and inputs become DTensors, and the optimizer gets a config.
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    model = place_weights(MLP().to(device()), mesh, [Shard(0)])
    config = create_dtensor_config()
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    alone = OneProcess(MLP().to(device()), model, optimizer)
    train_placed(model, [optimizer], mesh, [Replicate()])
    return compare(losses, alone.losses), alone


@recipe(processes=4)
def one_process_to_fsdp() -> tuple[str, OneProcess]:
    """From one process to FSDP."""
    # Before
    model = Transformer().to(device())
    optimizer = Muon(model.parameters(), lr=0.01)
    losses = train(model, optimizer)

    # After
    model = FSDP(Transformer(), device_id=device())
    config = create_auto_config(fsdp_process_group=model.process_group)
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    one = Transformer().to(device())
    alone = OneProcess(one, model, optimizer, fsdp=model.process_group)
    train(model, optimizer, model.process_group)
    return compare(losses, alone.losses), alone


@recipe(processes=4)
def one_process_to_fsdp_units() -> tuple[str, OneProcess]:
    """The same with an FSDP unit, and so a flat parameter, for each block."""
    # Before
    model = Transformer().to(device())
    optimizer = Muon(model.parameters(), lr=1e-3)
    losses = train(model, optimizer)

    # After
    fsdp_pg = dist.group.WORLD
    blocks = ModuleWrapPolicy({Block})
    model = FSDP(Transformer(), auto_wrap_policy=blocks, device_id=device())
    config = create_auto_config(fsdp_process_group=fsdp_pg)
    optimizer = Muon(model.parameters(), lr=1e-3, distributed_config=config)

    one = Transformer().to(device())
    alone = OneProcess(one, model, optimizer, fsdp=fsdp_pg)
    train(model, optimizer, fsdp_pg)
    return compare(losses, alone.losses), alone


@recipe(processes=4)
def adamw_to_muon() -> tuple[str, OneProcess]:
    """From AdamW to Muon, under FSDP. The loop stays; the learning rate does not."""
    # Before
    model = FSDP(MLP(), device_id=device())
    optimizer = AdamW(model.parameters(), lr=0.001)
    first = loss_of_first_batch(model)
    train(model, optimizer, model.process_group)
    with_adamw = loss_of_first_batch(model)

    # After
    model = FSDP(MLP(), device_id=device())
    config = create_auto_config(fsdp_process_group=model.process_group)
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    one = MLP().to(device())
    alone = OneProcess(one, model, optimizer, fsdp=model.process_group)
    train(model, optimizer, model.process_group)
    with_muon = loss_of_first_batch(model)
    words = f"loss {first:.4f}, then {with_adamw:.4f} by AdamW, {with_muon:.4f} by Muon"
    check(max(with_adamw, with_muon) < first, words)
    return words, alone


@torch.no_grad()
def loss_of_first_batch(model: nn.Module) -> float:
    inputs, targets = (tensor.to(device()) for tensor in batch(0))
    return F.mse_loss(model(inputs), targets).item()


@recipe(processes=4)
def groups_to_dtensor() -> tuple[OneProcess, OneProcess, str]:
    """From FSDP1 with its process group to ``fully_shard``, whose parameters are DTensors."""
    # Before
    model = FSDP(MLP(), device_id=device())
    config = create_auto_config(fsdp_process_group=model.process_group)
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    one = MLP().to(device())
    before = OneProcess(one, model, optimizer, fsdp=model.process_group)
    train(model, optimizer, dist.group.WORLD)

    # After: no groups, and no biases to be kept apart from matrices either.
    model = fully_shard(MLP().to(device()))
    config = create_dtensor_config()
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    after = OneProcess(MLP().to(device()), model, optimizer)
    train(model, optimizer, dist.group.WORLD)
    return before, after, compare(before.losses, after.losses)


@recipe(processes=4)
def ddp_to_dtensor() -> tuple[OneProcess, OneProcess, str]:
    """From DDP to replicated DTensors."""
    # Before
    model = DDP(MLP().to(device()))
    config = create_auto_config(ddp_process_group=dist.group.WORLD)
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    before = OneProcess(MLP().to(device()), model, optimizer)
    train(model, optimizer, dist.group.WORLD)

    # After: the batch is a DTensor too, of which each rank has a slice.
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    model = place_weights(MLP().to(device()), mesh, [Replicate()])
    config = create_dtensor_config()
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    after = OneProcess(MLP().to(device()), model, optimizer)
    train_placed(model, [optimizer], mesh, [Shard(0)])
    return before, after, compare(before.losses, after.losses)


@recipe(processes=4)
def fsdp_to_tp_and_fsdp() -> tuple[OneProcess, OneProcess, str]:
    """Tensor parallelism is added under FSDP."""
    # Before
    fsdp_pg = dist.group.WORLD
    model = FSDP(Transformer(), process_group=fsdp_pg, device_id=device())
    config = create_auto_config(fsdp_process_group=fsdp_pg)
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    one = Transformer().to(device())
    before = OneProcess(one, model, optimizer, fsdp=fsdp_pg)
    train(model, optimizer, fsdp_pg)

    # After: the plan says which dimension of which weight.
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("fsdp", "tp"))
    fsdp_pg, tp_pg = mesh.get_all_groups()
    model = parallelize(Transformer().to(device()), mesh["tp"])
    model = FSDP(model, device_mesh=mesh["fsdp"], device_id=device())
    config = create_auto_config(fsdp_process_group=fsdp_pg, tp_process_group=tp_pg)
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    one = Transformer().to(device())
    after = OneProcess(one, model, optimizer, fsdp=fsdp_pg, tp=tp_pg)
    train(model, optimizer, fsdp_pg)
    return before, after, compare(before.losses, after.losses)


def my_assign(params: list[Tensor], state: dict) -> dict[int, list[int]]:
    count = dist.get_world_size()
    return {rank: list(range(rank, len(params), count)) for rank in range(count)}


def my_gather(piece: Tensor, rank: int, state: dict) -> Tensor:
    # FSDP has cut what TP had left, and so its pieces are joined first.
    rows = [torch.empty_like(piece) for _ in range(state["fsdp"].size())]
    dist.all_gather(rows, piece.contiguous(), group=state["fsdp"])
    part = torch.cat(rows)
    parts = [torch.empty_like(part) for _ in range(state["tp"].size())]
    dist.all_gather(parts, part, group=state["tp"])
    return torch.cat(parts, state["tp_dims"][state["current_param_idx"]])


def my_redistribute(update: Tensor, rank: int, state: dict) -> Tensor:
    dist.broadcast(update, src=rank)  # more than every rank needs
    fsdp, tp = state["fsdp"], state["tp"]
    part = update.chunk(tp.size(), state["tp_dims"][state["current_param_idx"]])
    return part[tp.rank()].chunk(fsdp.size())[fsdp.rank()]


@recipe(processes=4)
def own_functions_to_auto_config() -> tuple[OneProcess, OneProcess, str]:
    """Three functions of one's own give way to two groups."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("fsdp", "tp"))
    fsdp_pg, tp_pg = mesh.get_all_groups()
    tp_dims = dict(enumerate([0, 1, 0, 1, 0, 1, 0, 1]))

    def run(config: DistributedConfig) -> OneProcess:
        model = cut_linears(Transformer().to(device()), tp_pg, fsdp=fsdp_pg)
        optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)
        one = Transformer().to(device())
        alone = OneProcess(one, model, optimizer, fsdp=fsdp_pg, tp=tp_pg)
        train(model, optimizer, fsdp_pg)
        return alone

    before = DistributedConfig(
        assign_fn=my_assign,
        gather_fn=my_gather,
        redistribute_fn=my_redistribute,
        state={"fsdp": fsdp_pg, "tp": tp_pg, "tp_dims": tp_dims},
    )
    after = create_auto_config(
        fsdp_process_group=fsdp_pg, tp_process_group=tp_pg, tp_dim_per_param=tp_dims
    )
    proofs = run(before), run(after)
    return *proofs, compare(proofs[0].losses, proofs[1].losses)
