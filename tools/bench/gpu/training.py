"""Training of a language model under FSDP2, with compiled blocks, in which the optimizers' step is timed."""

import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.muon import partition_named_parameters

from .. import contestants, fleet
from ..layouts import Laid


sys.path.append(str(Path(__file__).parents[3] / "examples"))

from gpt import GPT


class Size(NamedTuple):
    """Sizes of the model and of a micro-batch. A training step of more tokens accumulates gradients."""

    width: int
    layers: int
    heads: int
    length: int
    # Micro-batches of a training step.
    micro_batches: Sequence[int]


BILLION = Size(2048, 20, 32, 2048, (1, 4, 16))
TINY = Size(64, 1, 1, 16, (1, 2))


def train(
    rank: int, world: int, job: tuple[Size, Sequence[str], str, int]
) -> dict[str, dict[int, tuple[float, float]]]:
    """By contestant and by the tokens of a training step on a rank: the median seconds of the step, and those of the
    optimizers in it.
    """
    size, names, device, repetitions = job
    torch.manual_seed(0)
    model = GPT(size.width, size.layers, size.heads, size.length).to(device)
    mesh = init_device_mesh(device, (world,))
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if device != "cpu":
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    named_matrices, named_others = partition_named_parameters(model)
    matrices = [param for _, param in named_matrices]
    others = [param for _, param in named_others]
    tokens = torch.randint(256, (4, size.length), device=device)
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for name in names:
        # AdamW has the other parameters.
        optimizers = [
            contestants.make(name, Laid(matrices, "auto")),
            contestants.make("adamw", Laid(others, "auto")),
        ]
        step = partial(_train_step, model, optimizers, tokens, device)
        # The first step makes the state, and compilers and libraries choose kernels.
        step(1)
        found[name] = {}
        for count in size.micro_batches:
            times = zip(*(step(count) for _ in range(repetitions)), strict=True)
            whole, of_optimizers = map(statistics.median, times)
            found[name][count * tokens.numel()] = whole, of_optimizers
    return found


def _train_step(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    tokens: Tensor,
    device: str,
    micro_batches: int,
) -> tuple[float, float]:
    """Begins and ends with an idle device. Returns the seconds of all, and of the optimizers."""
    began = time.perf_counter()
    for _ in range(micro_batches):
        logits = model(tokens)
        cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    fleet.synchronize(device)
    has_gradients = time.perf_counter()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    fleet.synchronize(device)
    ended = time.perf_counter()
    return ended - began, ended - has_gradients
