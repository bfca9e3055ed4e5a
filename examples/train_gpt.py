"""Train a small GPT with Muon, on one process or on many.

    python examples/train_gpt.py
    torchrun --nproc-per-node 4 examples/train_gpt.py

Both see the same batches. With several processes FSDP2 (``fully_shard``) leaves each
with a piece of every matrix, and ``distributed_config`` lets Muon orthogonalize each
matrix as a whole, once, on one of them.
"""

import argparse
import json
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from gpt import GPT
from text import load, sample
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    StateDictOptions,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.muon import create_dtensor_config


def build_model(
    args: argparse.Namespace, mesh: DeviceMesh | None, device: torch.device
) -> GPT:
    torch.manual_seed(args.seed)  # the same start on every process
    model = GPT(args.width, args.layers, args.heads, args.context).to(device)
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def build_optimizers(
    model: GPT, args: argparse.Namespace, mesh: DeviceMesh | None
) -> tuple[Muon, AdamW]:
    """Muon for the blocks' matrices; AdamW for the rest: embeddings, head and norms."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    config = create_dtensor_config() if mesh is not None else None
    muon = Muon(matrices, lr=args.lr, distributed_config=config)
    return muon, AdamW(others, lr=args.adamw_lr)


def train(
    model: GPT,
    optimizers: tuple[Optimizer, ...],
    args: argparse.Namespace,
    mesh: DeviceMesh | None,
    report: Callable[[int, float], None],
) -> float:
    """Take ``args.steps`` steps, report each one's loss, return the loss on held-out text."""
    text, held_out = load()

    def pace(step: int) -> float:  # up over the first tenth, then down to a tenth
        warmup = max(1, args.steps // 10)
        return min((step + 1) / warmup, 1 - 0.9 * step / args.steps)

    schedules = [LambdaLR(optimizer, pace) for optimizer in optimizers]
    for step in range(args.steps):
        loss = loss_of(model, *batch(text, args, mesh, seed=args.seed + 1 + step))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        report(step, mean(loss, mesh))

    with torch.no_grad():
        loss = loss_of(model, *batch(held_out, args, mesh, seed=args.seed))
    return mean(loss, mesh)


def batch(
    text: Tensor, args: argparse.Namespace, mesh: DeviceMesh | None, seed: int
) -> tuple[Tensor, Tensor]:
    """This process's slice of the global batch."""
    inputs, targets = sample(text, args.batch, args.context, seed)
    if mesh is None:
        return inputs, targets
    rank, size = mesh.get_local_rank(), mesh.size()
    # Only of equal slices is the mean gradient that of the whole batch.
    if args.batch % size:
        raise ValueError(f"--batch {args.batch} does not divide among {size} processes")
    return inputs.chunk(size)[rank], targets.chunk(size)[rank]


def loss_of(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    device = model.token.weight.device
    logits = model(inputs.to(device))
    return F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())


def mean(value: Tensor, mesh: DeviceMesh | None) -> float:
    """The mean over all processes."""
    value = value.detach().clone()
    if mesh is not None:
        dist.all_reduce(value, group=mesh.get_group())
        value /= mesh.size()
    return value.item()


def full_parameters(model: GPT) -> dict[str, Tensor]:
    """The whole parameters, on the first process; every process has to call it."""
    return get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


def connect() -> tuple[DeviceMesh | None, torch.device]:
    """The mesh of the processes that torchrun started, if it did, and this one's device."""
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # as many as torchrun gives to each of many processes
    if "RANK" not in os.environ:
        return None, device
    dist.init_process_group("nccl" if cuda else "gloo")
    return init_device_mesh(device.type, (dist.get_world_size(),)), device


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on Python's own documentation with Muon.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="windows, all processes")
    parser.add_argument("--context", type=int, default=128, help="bytes in a window")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.02, help="of Muon")
    parser.add_argument("--adamw-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    # Not "--log": torchrun takes that for an abbreviation of an option of its own.
    parser.add_argument("--losses", metavar="FILE", help="write one JSON line a step")
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters")
    return parser


def main() -> None:
    args = options().parse_args()
    mesh, device = connect()
    first = mesh is None or mesh.get_rank() == 0
    model = build_model(args, mesh, device)
    optimizers = build_optimizers(model, args, mesh)
    started = time.monotonic()

    with open(args.losses if args.losses and first else os.devnull, "w") as log:

        def report(step: int, loss: float) -> None:
            seconds = time.monotonic() - started
            line = {"step": step, "loss": loss, "seconds": seconds}
            print(json.dumps(line), file=log, flush=True)
            if first and (step % 10 == 0 or step == args.steps - 1):
                print(f"step {step:4d}  loss {loss:.4f}  {seconds:6.1f} s", flush=True)

        held_out = train(model, optimizers, args, mesh, report)
    if first:
        print(f"loss on held-out text {held_out:.4f}")
    if args.save:
        parameters = full_parameters(model)
        if first:
            torch.save(parameters, args.save)
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
