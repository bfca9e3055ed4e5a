"""Training of a language model under FSDP2, with compiled blocks, in which the optimizers' step is timed."""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.optim import Optimizer
from torch.optim.muon import partition_named_parameters

from .. import contestants, fleet
from ..layouts import Laid


class Size(NamedTuple):
    """Sizes of the model and of a micro-batch. A training step of more tokens accumulates gradients."""

    layers: int
    hidden: int
    vocabulary: int
    length: int
    # Micro-batches of a training step.
    micro_batches: Sequence[int]


# A small vocabulary leaves memory for one GPU.
BILLION = Size(20, 2048, 16384, 2048, (1, 4, 16))
TINY = Size(1, 64, 128, 16, (1, 2))


class Model(nn.Module):
    """Blocks between an embedding and the same weights as output head. It has no positions, which cost little."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = size.hidden
        self.embedding = nn.Embedding(size.vocabulary, hidden)
        make_block = partial(
            nn.TransformerEncoderLayer,
            hidden,
            hidden // 64,
            4 * hidden,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
            bias=False,
        )
        self.blocks = nn.ModuleList(make_block() for _ in range(size.layers))
        self.norm = nn.RMSNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], tokens.device, x.dtype
        )
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(
    rank: int, world: int, job: tuple[Size, Sequence[str], str, int]
) -> dict[str, dict[int, tuple[float, float]]]:
    """By contestant and by the tokens of a training step on a rank: the median seconds of the step, and those of the
    optimizers in it.
    """
    size, names, device, repetitions = job
    torch.manual_seed(0)
    model = Model(size).to(device)
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
    tokens = torch.randint(size.vocabulary, (4, size.length), device=device)
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
        model(tokens).backward()
    fleet.synchronize(device)
    has_gradients = time.perf_counter()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    fleet.synchronize(device)
    ended = time.perf_counter()
    return ended - began, ended - has_gradients
