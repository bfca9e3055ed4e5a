"""Train a small mixture-of-experts GPT with Muon under expert parallelism.

    torchrun --nproc-per-node 4 examples/train_moe.py
    python examples/train_moe.py

The processes are a grid, data parallel x expert parallel. Along ep each holds other
experts, and tokens travel; along dp stand replicas. Everything but the experts is
replicated on all. Each process has its own slice of the batch.

Muon orthogonalizes each matrix on one of the ranks that hold it: an expert's on one of
its replicas along dp, any other on one of all. At the end, the first process trains
alone, and a table compares. The exit code is 1 if what has to be equal is not.
"""

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from gradients import average
from measure import (
    by_kind,
    conclude,
    exact_steps,
    Meter,
    print_loss,
    Wire,
)
from moe import MixtureGPT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW, Muon
from torch.optim.muon import (
    create_auto_config,
    DistributedConfig,
    partition_parameters,
)
from text import load
from train_gpt import batch, connect, loss_of, train


def build(
    args: argparse.Namespace, grid: DeviceMesh | None, device: torch.device
) -> tuple[MixtureGPT, Muon, AdamW]:
    """With no ``grid``, all of the experts and a Muon that needs no other process."""
    torch.manual_seed(args.seed)  # the same start on every process
    sizes = (args.width, args.layers, args.heads, args.context, args.experts)
    group = grid.get_group("ep") if grid is not None else None
    model = MixtureGPT(*sizes, group).to(device)
    matrices, _ = partition_parameters(model.blocks)
    chosen = set(matrices)
    others = [p for p in model.parameters() if p not in chosen]
    config = None if grid is None else config_of(model, matrices, grid)
    muon = Muon(matrices, lr=args.lr, distributed_config=config)
    return model, muon, AdamW(others, lr=args.adamw_lr)


def experts_of(model: MixtureGPT) -> dict[nn.Parameter, int]:
    """The parameters of the experts that are here, and each one's number among all."""
    return {
        parameter: int(number)
        for block in model.blocks
        for number, expert in block.mixture.experts.items()
        for parameter in expert.parameters()
    }


def config_of(
    model: MixtureGPT, matrices: list[nn.Parameter], grid: DeviceMesh
) -> DistributedConfig:
    experts = experts_of(model)
    return create_auto_config(
        ep_process_group=grid.get_group("ep"),
        # All ranks: what is no expert's is replicated on all of them. Of an expert only
        # those hold a replica that give it the same number.
        ddp_process_group=dist.group.WORLD,
        expert_assignments={
            index: experts[p] for index, p in enumerate(matrices) if p in experts
        },
    )


def average_gradients(model: MixtureGPT, grid: DeviceMesh) -> None:
    """Makes them those of the mean loss over all processes."""
    experts = experts_of(model)
    rest = [p for p in model.parameters() if p not in experts]
    average(rest, dist.group.WORLD, grid.size())
    # All ranks' losses go into an expert's gradient: along ep its own backward pass has
    # added them up, and along dp this does.
    average(experts, grid.get_group("dp"), grid.size())


def run_training(
    args: argparse.Namespace,
    mesh: DeviceMesh | None,
    grid: DeviceMesh | None,
    device: torch.device,
) -> dict[str, Any]:
    model, muon, adamw = build(args, grid, device)
    if grid is not None:
        # Muon is the first to step.
        muon.register_step_pre_hook(lambda *_: average_gradients(model, grid))
    meter = Meter(muon)
    losses: list[float] = []
    who = "one process" if mesh is None else f"{mesh.size()} processes"

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        print_loss(who, args.steps, step, loss)

    held_out = train(model, (muon, adamw), args, mesh, report)
    figures = {"losses": losses, "held_out": held_out, **meter.figures()}
    if grid is not None:
        kinds = {
            "all ranks (no expert)": dist.group.WORLD,
            "dp (experts)": grid.get_group("dp"),
            "ep": grid.get_group("ep"),
        }
        with Wire() as wire:
            loss_of(model, *batch(load()[0], args, mesh, args.seed)).backward()
        figures["sent"] = by_kind(meter.wire, kinds, meter.steps)
        figures["batch_sent"] = by_kind(wire, kinds)
    return figures


def run_exact(
    args: argparse.Namespace, grid: DeviceMesh, device: torch.device
) -> dict[str, Any]:
    """The same gradients for all of the experts on one process and for this rank's part."""
    many, one = (build(args, on, device)[:2] for on in (grid, None))
    return exact_steps(many, one, args.exact_steps)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small mixture-of-experts GPT with Muon under expert parallelism.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--exact-steps", type=int, default=3, help="same gradients")
    parser.add_argument(
        "--ep", type=int, default=2, help="ranks that share experts out"
    )
    parser.add_argument("--experts", type=int, default=4, help="in each block")
    parser.add_argument("--batch", type=int, default=16, help="windows, all processes")
    parser.add_argument("--context", type=int, default=64, help="bytes in a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.02, help="of Muon")
    parser.add_argument("--adamw-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> int:
    parser = options()
    args = parser.parse_args()
    mesh, device = connect()
    if mesh is None:
        figures = run_training(args, None, None, device)
        print(f"loss on held-out text {figures['held_out']:.4f}")
        return 0
    if mesh.size() % args.ep or args.experts % args.ep:
        parser.error(
            f"--ep {args.ep} has to divide {mesh.size()} processes and --experts"
        )
    shape = (mesh.size() // args.ep, args.ep)
    grid = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "ep"))
    figures = run_training(args, mesh, grid, device)
    figures |= run_exact(args, grid, device)
    title = f"GPT of {args.layers} blocks of {args.experts} experts, {shape[0]} x {shape[1]} (dp x ep)"
    return conclude(
        title, figures, lambda: run_training(args, None, None, device), silent="ep"
    )


if __name__ == "__main__":
    sys.exit(main())
