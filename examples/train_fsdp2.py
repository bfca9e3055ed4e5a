"""Train a small GPT with FSDP2: Muon for the hidden matrices, AdamW for the rest.

torchrun --nproc-per-node 4 examples/train_fsdp2.py --folder out
torchrun --nproc-per-node 4 examples/train_fsdp2.py --replicate 2    # HSDP
torchrun --nproc-per-node 4 examples/train_fsdp2.py --tp 2           # FSDP2 x TP

With --folder it saves checkpoints. Started again with more --steps, it goes on from the last one,
on any number of ranks and on any mesh.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import load, loss_of, sample, start, stop
from gpt import GPT
from torch import nn, Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.muon import partition_named_parameters


COLUMNS = ("attention.query", "attention.key", "attention.value", "up")
ROWS = ("attention.out", "down")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    numbers = {"steps": 100, "batch": 16, "context": 128, "width": 192, "layers": 4}
    numbers |= {"heads": 6, "lr": 3e-3, "replicate": 1, "tp": 1}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help="number")
    parser.add_argument("--folder", type=Path, help="for checkpoints")
    return parser


def build(
    args: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, list[Optimizer]]:
    data_ranks = dist.get_world_size() // args.tp
    shape = (args.replicate, data_ranks // args.replicate, args.tp)
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    data = mesh["replicate", "shard"] if args.replicate > 1 else mesh["shard"]
    torch.manual_seed(0)
    model = GPT(args.width, args.layers, args.heads, args.context).to(device)
    for block in model.blocks:
        if args.tp > 1:
            plan = dict.fromkeys(COLUMNS, ColwiseParallel())
            plan |= dict.fromkeys(ROWS, RowwiseParallel())
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)

    # After sharding, because Muon reads the shards.
    matrices, others = partition_named_parameters(model)
    muon = Muon(
        matrices,
        lr=args.lr,
        # This scale takes the learning rate and the weight decay of AdamW.
        adjust_lr_fn="match_rms_adamw",
        distributed_config="auto",
    )
    return model, [muon, AdamW(others, lr=args.lr, weight_decay=0.0)]


def clip(model: nn.Module, limit: float) -> None:
    """Clips the norm of all gradients. Under TP, the parameters are on two meshes."""
    by_mesh: dict[DeviceMesh, list[nn.Parameter]] = {}
    for p in model.parameters():
        by_mesh.setdefault(p.device_mesh, []).append(p)
    norms = [get_total_norm([p.grad for p in ps]) for ps in by_mesh.values()]
    total = torch.stack([norm.full_tensor() for norm in norms]).norm()
    for ps in by_mesh.values():
        clip_grads_with_norm_(ps, limit, total)


def train(args: argparse.Namespace, device: torch.device) -> tuple[list[float], float]:
    """Returns the loss of each step, and the loss on held-out text."""
    rank, data_ranks = dist.get_rank(), dist.get_world_size() // args.tp
    model, optimizers = build(args, device)
    schedules = [LambdaLR(o, lambda step: min(1, (step + 1) / 10)) for o in optimizers]
    text, held_out = load()

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizers)
        paces = dict(zip(("muon schedule", "adamw schedule"), schedules))
        return {"model": weights, "optimizers": moments, **paces}

    def slice_loss(text: Tensor, seed: int) -> Tensor:
        """Of this rank's slice of a batch. The ranks of a TP group take the same slice."""
        batch = sample(text, args.batch, args.context, seed)
        inputs, targets = (part.chunk(data_ranks)[rank // args.tp] for part in batch)
        return loss_of(model, (inputs, targets))

    def mean(loss: Tensor) -> float:
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    saved = list(args.folder.glob("*/.metadata")) if args.folder else []
    if saved:
        last = max(int(path.parent.name) for path in saved)
        found = state()  # in this run's shards, which dcp.load fills
        dcp.load(found, checkpoint_id=args.folder / str(last))
        set_state_dict(
            model,
            optimizers,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizers"],
        )
    losses = []
    for step in range(schedules[0].last_epoch, args.steps):
        loss = slice_loss(text, seed=step + 1)
        loss.backward()
        clip(model, 1.0)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(mean(loss))
        if (step + 1) % 10 == 0:
            if rank == 0:
                print(f"step {step + 1}, loss {losses[-1]:.4f}", flush=True)
            if args.folder:
                dcp.save(state(), checkpoint_id=args.folder / str(step + 1))
    optimizers[0].synchronize()  # raises if ranks differed in the last step
    with torch.no_grad():
        return losses, mean(slice_loss(held_out, seed=0))


def main() -> None:
    args = options().parse_args()
    _, held_out = train(args, start())
    if dist.get_rank() == 0:
        print(f"loss on held-out text {held_out:.4f}")
    stop()


if __name__ == "__main__":
    main()
