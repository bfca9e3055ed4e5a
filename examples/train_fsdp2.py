"""Train a small GPT with FSDP2: Muon for the hidden matrices, AdamW for the rest.

torchrun --nproc-per-node 4 examples/train_fsdp2.py --save out/checkpoint
torchrun --nproc-per-node 2 examples/train_fsdp2.py --resume out/checkpoint --steps 200
torchrun --nproc-per-node 4 examples/train_fsdp2.py --replicate 2    # HSDP
torchrun --nproc-per-node 4 examples/train_fsdp2.py --tp 2           # FSDP2 x TP
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT
from text import load, sample
from torch import nn, Tensor
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
    StateDictOptions,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.muon import partition_named_parameters


COLUMNS = ("attention.query", "attention.key", "attention.value", "up")
ROWS = ("attention.out", "down")


def build_model(args: argparse.Namespace, mesh: DeviceMesh) -> GPT:
    sizes = args.width, args.layers, args.heads, args.context
    with torch.device("meta"):  # shapes without memory
        model = GPT(*sizes)
    data = mesh["replicate", "shard"] if args.replicate > 1 else mesh["shard"]
    dtype = torch.bfloat16 if args.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        if args.tp > 1:
            plan = dict.fromkeys(COLUMNS, ColwiseParallel())
            plan |= dict.fromkeys(ROWS, RowwiseParallel())
            parallelize_module(block, mesh["tp"], plan)
        if args.compile:
            block.compile()
        fully_shard(block, mesh=data, mp_policy=policy)
    fully_shard(model, mesh=data, mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    # Rank 0 initializes the whole model (or reads it from a file) and sends out the shards.
    torch.manual_seed(args.seed)
    whole = GPT(*sizes).state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    return model


def build_optimizers(model: nn.Module, args: argparse.Namespace) -> list[Optimizer]:
    matrices, others = partition_named_parameters(model)
    muon = Muon(
        matrices,
        lr=args.lr,
        weight_decay=0.1,
        # This scale takes the learning rate and the weight decay of AdamW.
        adjust_lr_fn="match_rms_adamw",
        distributed_config="auto",
    )
    return [muon, AdamW(others, lr=args.adamw_lr, weight_decay=0.0)]


def clip(model: nn.Module, limit: float) -> None:
    """Clips the norm of all gradients. Under TP, the parameters are on two meshes."""
    by_mesh: dict[DeviceMesh, list[nn.Parameter]] = {}
    for p in model.parameters():
        by_mesh.setdefault(p.device_mesh, []).append(p)
    norms = [get_total_norm([p.grad for p in ps]) for ps in by_mesh.values()]
    total = torch.stack([norm.full_tensor() for norm in norms]).norm()
    for ps in by_mesh.values():
        clip_grads_with_norm_(ps, limit, total)


def mean(value: Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def show(step: int, steps: int, loss: float) -> None:
    """Draws a bar again on a terminal. A file gets a line for each tenth of the steps."""
    text = f"step {step}, loss {loss:.4f}"
    is_last = step == steps
    if sys.stdout.isatty():
        bar = "#" * (30 * step // steps)
        print(f"{bar:.<30} {text}", end="\n" if is_last else "\r", flush=True)
    elif is_last or 10 * step // steps > 10 * (step - 1) // steps:
        print(text, flush=True)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on Python's documentation with FSDP2 and Muon.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    numbers = {"steps": 100, "batch": 16, "context": 128, "width": 192, "layers": 4}
    numbers |= {"heads": 6, "lr": 3e-3, "adamw-lr": 3e-3, "seed": 0}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help="number")
    parser.add_argument("--replicate", type=int, default=1, help="replicas of HSDP")
    parser.add_argument("--tp", type=int, default=1, help="ranks that cut each layer")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--compile", action="store_true", help="each block")
    parser.add_argument("--save", metavar="FOLDER", help="for a checkpoint")
    parser.add_argument("--resume", metavar="FOLDER", help="of a checkpoint")
    parser.add_argument("--losses", metavar="FILE", help="JSON")
    return parser


def main() -> None:
    args = options().parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, data_ranks = dist.get_rank(), dist.get_world_size() // args.tp
    if args.batch % data_ranks:  # the mean over ranks is that of equal slices
        raise SystemExit(f"--batch {args.batch} does not divide by {data_ranks} ranks")
    shape = (args.replicate, data_ranks // args.replicate, args.tp)
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=names)
    model = build_model(args, mesh)
    optimizers = build_optimizers(model, args)

    def factor(step: int) -> float:  # warm-up, then linear decay
        warmup = max(1, args.steps // 10)
        return min((step + 1) / warmup, 1 - 0.9 * step / args.steps)

    schedules = [LambdaLR(optimizer, factor) for optimizer in optimizers]

    def state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizers)
        return {"model": weights, "optimizers": moments, "step": step}

    first = 0
    if args.resume:
        saved = state(0)  # in this run's shards, which dcp.load fills
        dcp.load(saved, checkpoint_id=args.resume)
        set_state_dict(
            model,
            optimizers,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizers"],
        )
        first = saved["step"]
        for schedule in schedules:
            schedule.last_epoch = first - 1
            schedule.step()

    if first >= args.steps:
        raise SystemExit(f"the checkpoint is from step {first}: ask for more --steps")
    text, held_out = load()

    def loss_of(text: Tensor, seed: int) -> Tensor:
        # The ranks of a TP group take the same slice of the batch.
        inputs, targets = (
            whole.chunk(data_ranks)[rank // args.tp].to(mesh.device_type)
            for whole in sample(text, args.batch, args.context, seed)
        )
        return cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())

    began = time.monotonic()
    history = []
    for step in range(first, args.steps):
        loss = loss_of(text, seed=args.seed + 1 + step)
        loss.backward()
        clip(model, 1.0)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        value = mean(loss)
        history.append({"loss": value, "seconds": time.monotonic() - began})
        if rank == 0:
            show(step + 1, args.steps, value)
    optimizers[0].synchronize()  # raises if ranks differed in the last step
    if args.save:
        dcp.save(state(args.steps), checkpoint_id=args.save)
    with torch.no_grad():
        loss = mean(loss_of(held_out, args.seed))
    if rank == 0:
        print(f"loss on held-out text {loss:.4f}")
        if args.losses:
            figures = {"steps": history, "held_out": loss}
            Path(args.losses).write_text(json.dumps(figures))
    dist.destroy_process_group()
    # A thread of gloo that still drops a tensor when Python ends would abort the process.
    time.sleep(0.2)


if __name__ == "__main__":
    main()
