"""What the optimizer's step is of a training step: a model like Llama under FSDP2, with compiled blocks."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy

from .. import contestants, fleet
from ..layouts import dtensor_config, Laid


class Size(NamedTuple):
    """Of the model, and of a micro-batch: a training step of more tokens accumulates gradients."""

    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    vocabulary: int
    # Of a micro-batch.
    sequences: int
    length: int
    # Micro-batches of a training step.
    micro_batches: Sequence[int]

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.sequences * self.length


# The matrices of Llama 3.2 1B. A small vocabulary leaves memory for one GPU.
BILLION = Size(16, 2048, 8192, 32, 8, 16384, 4, 2048, (1, 4, 16))
TINY = Size(1, 64, 128, 2, 1, 128, 1, 16, (1, 2))


class Block(nn.Module):
    """Attention with grouped keys and values, and a gated feed-forward network."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.key_heads = size.heads, size.key_heads
        self.head = size.hidden // size.heads
        linear = partial(nn.Linear, bias=False)
        self.attention_norm = nn.RMSNorm(size.hidden)
        self.q_proj = linear(size.hidden, size.hidden)
        self.k_proj = linear(size.hidden, size.key_heads * self.head)
        self.v_proj = linear(size.hidden, size.key_heads * self.head)
        self.o_proj = linear(size.hidden, size.hidden)
        self.feed_forward_norm = nn.RMSNorm(size.hidden)
        self.gate_proj = linear(size.hidden, size.inner)
        self.up_proj = linear(size.hidden, size.inner)
        self.down_proj = linear(size.inner, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        queries = self._by_head(self.q_proj(normed), self.heads)
        keys = self._by_head(self.k_proj(normed), self.key_heads)
        values = self._by_head(self.v_proj(normed), self.key_heads)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        normed = self.feed_forward_norm(x)
        gated = F.silu(self.gate_proj(normed)) * self.up_proj(normed)
        return x + self.down_proj(gated)

    def _by_head(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(2, (heads, self.head)).transpose(1, 2)


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


class Seconds(NamedTuple):
    """The medians of a training step: all of it, and the step of the optimizers."""

    training: float
    optimizers: float


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of Muon."""
    return [param for param in model.blocks.parameters() if param.ndim == 2]


def _optimizers(name: str, model: nn.Module) -> list[Any]:
    """The contestant ``name`` for the matrices, and AdamW for the rest."""
    matrices = _matrices(model)
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    shapes = [tuple(matrix.shape) for matrix in matrices]
    laid = Laid(shapes, matrices, dtensor_config)
    return [
        contestants.make(name, laid),
        contestants.make("fused", laid._replace(params=others)),
    ]


def train(
    rank: int, world: int, job: tuple[Size, Sequence[str], str, int]
) -> dict[str, dict[int, Seconds]]:
    """Trains with each of the contestants. Returns the seconds by its name and by the tokens of a training step on a rank."""
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
    shape = size.sequences, size.length
    tokens = torch.randint(size.vocabulary, shape, device=device)
    found: dict[str, dict[int, Seconds]] = {}
    for name in names:
        optimizers = _optimizers(name, model)
        # The first step makes the state, and compilers and libraries choose kernels.
        _train_step(model, optimizers, tokens, 1, device)
        found[name] = {}
        for count in size.micro_batches:
            steps = []
            for _ in range(repetitions):
                steps.append(_train_step(model, optimizers, tokens, count, device))
            training = statistics.median(step.training for step in steps)
            of_optimizers = statistics.median(step.optimizers for step in steps)
            found[name][count * size.tokens] = Seconds(training, of_optimizers)
    return found


def _train_step(
    model: nn.Module,
    optimizers: Iterable[Any],
    tokens: Tensor,
    micro_batches: int,
    device: str,
) -> Seconds:
    def elapsed(work: Callable[[], None]) -> float:
        fleet.synchronize(device)
        began = time.perf_counter()
        work()
        fleet.synchronize(device)
        return time.perf_counter() - began

    def accumulate() -> None:
        for _ in range(micro_batches):
            model(tokens).backward()

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    of_gradients = elapsed(accumulate)
    of_optimizers = elapsed(step)
    return Seconds(of_gradients + of_optimizers, of_optimizers)
