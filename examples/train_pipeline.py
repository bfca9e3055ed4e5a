"""Train a small GPT in two pipeline stages, each of them with a Muon of its own.

    torchrun --nproc-per-node 4 examples/train_pipeline.py

The processes are a grid, stages x data parallel. Along pp the stages hand activations
and their gradients to each other; along dp stand replicas of a stage, each with its own
slice of the batch.

Stages share no matrix: Muon orthogonalizes each on one of its stage's replicas, and the
stages need not even know of each other. At the end, the first process trains the whole
model alone, and a table compares. The exit code is 1 if what has to be equal is not.
"""

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
import train_gpt
from gpt import GPT
from gradients import average
from measure import (
    by_kind,
    conclude,
    exact_steps,
    Meter,
    print_loss,
    Wire,
)
from text import load, sample
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F
from torch.optim import AdamW, Muon
from torch.optim.muon import create_auto_config, partition_parameters


class Part(nn.Module):
    """One stage's blocks of a GPT; the first has the embeddings too, the last the head.

    Parameters keep the names that they have in the whole model.
    """

    def __init__(self, model: GPT, stage: int, stages: int) -> None:
        super().__init__()
        count = len(model.blocks)
        here = range(stage * count // stages, (stage + 1) * count // stages)
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in here})
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        if self.is_first:
            self.token, self.position = model.token, model.position
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.token(x) + self.position(places)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def build_part(
    args: argparse.Namespace, grid: DeviceMesh, device: torch.device
) -> tuple[Part, Muon, AdamW]:
    """This stage's part of the model that one process would have."""
    pipe = grid.get_group("pp")
    stage, stages = grid.get_local_rank("pp"), pipe.size()
    part = Part(train_gpt.build_model(args, None, device), stage, stages)
    matrices, _ = partition_parameters(part.blocks)
    chosen = set(matrices)
    others = [p for p in part.parameters() if p not in chosen]
    # One stage after the other, for no better reason than to show that it can be so:
    # making an optimizer is the business of a stage's replicas alone.
    turn = torch.zeros(1, device=device)
    if stage:
        dist.recv(turn, group=pipe, group_src=stage - 1)
    config = create_auto_config(
        ddp_process_group=grid.get_group("dp"),
        pp_process_group=pipe,
        pp_stage_id=stage,
        pp_num_stages=stages,
    )
    muon = Muon(matrices, lr=args.lr, distributed_config=config)
    if stage + 1 < stages:
        dist.send(turn, group=pipe, group_dst=stage + 1)
    return part, muon, AdamW(others, lr=args.adamw_lr)


class Pipeline:
    """Runs batches through all stages, each process with its slice of them."""

    def __init__(
        self,
        part: Part,
        args: argparse.Namespace,
        grid: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.part, self.args, self.grid, self.device = part, args, grid, device
        pipe = grid.get_group("pp")
        stage = PipelineStage(part, pipe.rank(), pipe.size(), device=device, group=pipe)
        self.schedule = ScheduleGPipe(stage, args.microbatches, loss_fn=loss_of_logits)

    def run(self, text: Tensor, seed: int, backward: bool = True) -> float:
        """The mean loss of one batch, on every process; gradients with ``backward``."""
        args, replicas = self.args, self.grid.get_group("dp")
        inputs, targets = (
            whole.chunk(replicas.size())[replicas.rank()].to(self.device)
            for whole in sample(text, args.batch, args.context, seed)
        )
        losses: list[Tensor] = []
        run = self.schedule.step if backward else self.schedule.eval
        run(
            *((inputs,) if self.part.is_first else ()),
            target=targets if self.part.is_last else None,
            losses=losses if self.part.is_last else None,
        )
        if backward:
            average(self.part.parameters(), replicas, replicas.size())
        # The stages before the last one know no loss.
        total = torch.zeros(1, device=self.device)
        for loss in losses:
            total += loss.detach() / (args.microbatches * replicas.size())
        dist.all_reduce(total)
        return total.item()


def loss_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_pipelined(
    args: argparse.Namespace, grid: DeviceMesh, device: torch.device
) -> dict[str, Any]:
    part, *optimizers = build_part(args, grid, device)
    pipeline = Pipeline(part, args, grid, device)
    meter = Meter(optimizers[0])
    schedules = train_gpt.schedules_of(optimizers, args)
    text, held_out = load()
    losses = []
    for step in range(args.steps):
        losses.append(pipeline.run(text, args.seed + 1 + step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        print_loss(f"{grid.size()} processes", args.steps, step, losses[-1])
    kinds = {
        "dp (replicas of a stage)": grid.get_group("dp"),
        "pp": grid.get_group("pp"),
    }
    with Wire() as wire:
        pipeline.run(text, args.seed)
    return {
        "losses": losses,
        "held_out": pipeline.run(held_out, args.seed, backward=False),
        "sent": by_kind(meter.wire, kinds, meter.steps),
        "batch_sent": by_kind(wire, kinds),
        **meter.figures(),
    }


def train_alone(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The whole model on this process; it is never asked what others do."""
    model = train_gpt.build_model(args, None, device)
    optimizers = train_gpt.build_optimizers(model, args, None)
    meter = Meter(optimizers[0])
    losses: list[float] = []

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        print_loss("one process", args.steps, step, loss)

    held_out = train_gpt.train(model, optimizers, args, None, report)
    return {"losses": losses, "held_out": held_out, **meter.figures()}


def run_exact(
    args: argparse.Namespace, grid: DeviceMesh, device: torch.device
) -> dict[str, Any]:
    """The same gradients for the whole model on one process and for this stage's part."""
    part, muon, _ = build_part(args, grid, device)
    whole = train_gpt.build_model(args, None, device)
    muon_of_whole, _ = train_gpt.build_optimizers(whole, args, None)
    return exact_steps((part, muon), (whole, muon_of_whole), args.exact_steps)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small GPT in pipeline stages, each with a Muon of its own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--exact-steps", type=int, default=3, help="same gradients")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2, help="of each batch")
    parser.add_argument("--batch", type=int, default=16, help="windows, all processes")
    parser.add_argument("--context", type=int, default=64, help="bytes in a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3, help="in all stages")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.02, help="of Muon")
    parser.add_argument("--adamw-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> int:
    parser = options()
    args = parser.parse_args()
    mesh, device = train_gpt.connect()
    if mesh is None:
        parser.error("start it with torchrun; examples/train_gpt.py needs one process")
    if mesh.size() % args.stages:
        parser.error(f"--stages {args.stages} has to divide {mesh.size()} processes")
    shape = (args.stages, mesh.size() // args.stages)
    if args.batch % (shape[1] * args.microbatches):
        parser.error(
            f"--batch has to be a multiple of {shape[1]} replicas x --microbatches"
        )
    if args.layers < args.stages:
        parser.error("--layers has to be at least --stages")
    grid = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp"))
    figures = train_pipelined(args, grid, device) | run_exact(args, grid, device)
    title = f"GPT of {args.layers} blocks, {shape[0]} stages x {shape[1]} replicas"
    return conclude(title, figures, lambda: train_alone(args, device), silent="pp")


if __name__ == "__main__":
    sys.exit(main())
