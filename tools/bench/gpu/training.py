"""Training of a model like Llama under FSDP2, with compiled blocks, in which the optimizers' step is timed."""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.optim.muon import create_dtensor_config, partition_named_parameters

from .. import contestants, fleet
from ..layouts import Laid


class Size(NamedTuple):
    """Sizes of the model and of a micro-batch. A training step of more tokens accumulates gradients."""

    layers: int
    hidden: int
    inner: int
    heads: int
    vocabulary: int
    sequences: int
    length: int
    # Micro-batches of a training step.
    micro_batches: Sequence[int]


# A small vocabulary leaves memory for one GPU.
BILLION = Size(16, 2048, 8192, 32, 16384, 4, 2048, (1, 4, 16))
TINY = Size(1, 64, 128, 2, 128, 1, 16, (1, 2))


class Block(nn.Module):
    """Attention, and a gated feed-forward network."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden, inner = size.hidden, size.inner
        linear = partial(nn.Linear, bias=False)
        self.heads = size.heads
        self.attention_norm = nn.RMSNorm(hidden)
        self.q_proj = linear(hidden, hidden)
        self.k_proj = linear(hidden, hidden)
        self.v_proj = linear(hidden, hidden)
        self.o_proj = linear(hidden, hidden)
        self.feed_forward_norm = nn.RMSNorm(hidden)
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        by_head = []
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            projected = projection(normed).unflatten(2, (self.heads, -1))
            by_head.append(projected.transpose(1, 2))
        mixed = F.scaled_dot_product_attention(*by_head, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        normed = self.feed_forward_norm(x)
        gated = F.silu(self.gate_proj(normed)) * self.up_proj(normed)
        return x + self.down_proj(gated)


class Model(nn.Module):
    """Blocks between an embedding and the same weights as output head. It has no positions, which cost little."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
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
    shapes = [tuple(matrix.shape) for matrix in matrices]
    shape = size.sequences, size.length
    tokens = torch.randint(size.vocabulary, shape, device=device)
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for name in names:
        # AdamW has the other parameters.
        optimizers = [
            contestants.make(name, Laid(shapes, matrices, create_dtensor_config)),
            contestants.make("adamw", Laid([], others, create_dtensor_config)),
        ]
        # The first step makes the state, and compilers and libraries choose kernels.
        _train_step(model, optimizers, tokens, 1, device)
        found[name] = {}
        for count in size.micro_batches:
            whole, of_optimizers = [], []
            for _ in range(repetitions):
                began = time.perf_counter()
                of_optimizers.append(
                    _train_step(model, optimizers, tokens, count, device)
                )
                whole.append(time.perf_counter() - began)
            medians = statistics.median(whole), statistics.median(of_optimizers)
            found[name][count * tokens.numel()] = medians
    return found


def _train_step(
    model: nn.Module,
    optimizers: Sequence[Any],
    tokens: Tensor,
    micro_batches: int,
    device: str,
) -> float:
    """Begins and ends with an idle device. Returns the seconds of the optimizers."""
    for _ in range(micro_batches):
        model(tokens).backward()
    fleet.synchronize(device)
    began = time.perf_counter()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    fleet.synchronize(device)
    return time.perf_counter() - began
