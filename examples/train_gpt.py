"""Train a small GPT with Muon, on one process or on many.

    python examples/train_gpt.py
    torchrun --nproc-per-node 4 examples/train_gpt.py
    torchrun --nproc-per-node 4 examples/train_gpt.py --parallel ddp

All see the same batches. With several processes FSDP2 (``fully_shard``) or FSDP1 leaves
each with a piece of every matrix, DDP with a replica. ``distributed_config`` lets Muon
orthogonalize each matrix as a whole, once, on one of them.
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
from torch import nn, Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    StateDictOptions,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    DistributedConfig,
    partition_parameters,
)


def wrap_in_fsdp2(model: GPT, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap_in_fsdp1(model: GPT, mesh: DeviceMesh) -> nn.Module:
    def wrap(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module,
            process_group=mesh.get_group(),
            device_id=model.head.weight.device,
            # One flat parameter for a whole block could not be Muon's and AdamW's.
            use_orig_params=True,
        )

    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block)
    return wrap(model)


def wrap_in_ddp(model: GPT, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


WRAPPERS = {"fsdp2": wrap_in_fsdp2, "fsdp1": wrap_in_fsdp1, "ddp": wrap_in_ddp}


def build_model(
    args: argparse.Namespace, mesh: DeviceMesh | None, device: torch.device
) -> nn.Module:
    torch.manual_seed(args.seed)  # the same start on every process
    model = GPT(args.width, args.layers, args.heads, args.context).to(device)
    return model if mesh is None else WRAPPERS[args.parallel](model, mesh)


def config_of(model: nn.Module) -> DistributedConfig:
    """Tells Muon who holds what of a wrapped model."""
    if isinstance(model, FullyShardedDataParallel):
        # The parameters are slices of flat storage; only the model knows their shapes.
        return create_auto_config(fsdp_process_group=model.process_group, module=model)
    if isinstance(model, DistributedDataParallel):
        return create_auto_config(ddp_process_group=model.process_group)
    return create_dtensor_config()  # FSDP2's DTensors say it themselves


def build_optimizers(
    model: nn.Module, args: argparse.Namespace, mesh: DeviceMesh | None
) -> tuple[Muon, AdamW]:
    """Muon for the blocks' matrices; AdamW for the rest: embeddings, head and norms."""
    unwrapped = getattr(model, "module", model)  # FSDP1 and DDP are modules around it
    matrices, _ = partition_parameters(unwrapped.blocks)
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    config = config_of(model) if mesh is not None else None
    muon = Muon(matrices, lr=args.lr, distributed_config=config)
    return muon, AdamW(others, lr=args.adamw_lr)


def train(
    model: nn.Module,
    optimizers: tuple[Optimizer, ...],
    args: argparse.Namespace,
    mesh: DeviceMesh | None,
    report: Callable[[int, float], None],
) -> float:
    """Take ``args.steps`` steps, report each one's loss, return the loss on held-out text."""
    text, held_out = load()
    schedules = schedules_of(optimizers, args)
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


def schedules_of(
    optimizers: tuple[Optimizer, ...], args: argparse.Namespace
) -> list[LambdaLR]:
    def pace(step: int) -> float:  # up over the first tenth, then down to a tenth
        warmup = max(1, args.steps // 10)
        return min((step + 1) / warmup, 1 - 0.9 * step / args.steps)

    return [LambdaLR(optimizer, pace) for optimizer in optimizers]


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


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    device = next(model.parameters()).device
    logits = model(inputs.to(device))
    return F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())


def mean(value: Tensor, mesh: DeviceMesh | None) -> float:
    """The mean over all processes."""
    value = value.detach().clone()
    if mesh is not None:
        dist.all_reduce(value, group=mesh.get_group())
        value /= mesh.size()
    return value.item()


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters, on the first process; every process has to call it."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    # Of parameters that are on the CPU anyway FSDP1 would free what it is about to copy.
    offload = not (on_cpu and isinstance(model, FullyShardedDataParallel))
    return get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload)
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
    # Not an option here: compare_gpt.py takes all of these, and compares FSDP2.
    parser.set_defaults(parallel="fsdp2")
    return parser


def main() -> None:
    parser = options()
    parser.add_argument(
        "--parallel", choices=WRAPPERS, default="fsdp2", help="with several processes"
    )
    # Not "--log": torchrun takes that for an abbreviation of an option of its own.
    parser.add_argument("--losses", metavar="FILE", help="write one JSON line a step")
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters")
    args = parser.parse_args()
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
