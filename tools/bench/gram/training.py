"""The GPT that ``setup_overlay.py verify`` trains, with either algorithm."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from tools.overlay.repo import ROOT


@dataclass(frozen=True)
class Training:
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int


def work(rank: int, world: int, job: Training) -> list[dict[str, Any]]:
    return [
        {"seed": seed, "algorithm": algorithm, "world": world}
        | train(algorithm, seed, job.steps, world)
        for seed in job.seeds
        for algorithm in job.algorithms
    ]


def train(algorithm: str, seed: int, steps: int, world: int) -> dict[str, Any]:
    sys.path.append(str(ROOT / "examples"))
    import train_gpt

    args = train_gpt.options().parse_args([f"--seed={seed}", f"--steps={steps}"])
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    model = train_gpt.build_model(args, mesh, torch.device("cpu"))
    optimizers = train_gpt.build_optimizers(model, args, mesh)
    for group in optimizers[0].param_groups:
        group["ns_algorithm"] = algorithm
    losses: list[float] = []
    held_out = train_gpt.train(
        model, optimizers, args, mesh, lambda step, loss: losses.append(loss)
    )
    return {"losses": losses, "held_out": held_out}
