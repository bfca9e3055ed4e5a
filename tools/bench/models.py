"""Shapes of the matrices that Muon gets of public models.

A shape is (out, in), as ``torch.nn.Linear`` holds its weight. A shape (experts, out, in) is a stack of experts. AdamW has
embeddings, output heads, norms and biases.
"""

import math
from typing import NamedTuple


class Model(NamedTuple):
    """``tokens`` are those of a training step, each of which goes through ``active`` experts of a stack."""

    shapes: list[tuple[int, ...]]
    active: int = 0
    tokens: int = 2**22

    @property
    def active_numel(self) -> int:
        """The elements that a token is multiplied with."""
        numel = 0
        for *experts, rows, columns in self.shapes:
            numel += rows * columns * (self.active if experts else 1)
        return numel

    @property
    def summary(self) -> str:
        matrices = sum(math.prod(shape[:-2]) for shape in self.shapes)
        billions = sum(map(math.prod, self.shapes)) / 1e9
        millions = self.tokens / 1e6
        return f"{matrices:,} matrices, {billions:.3g} billion elements, {millions:.3g} million tokens a step"


def gpt2(layers: int, hidden: int) -> Model:
    attention = [(3 * hidden, hidden), (hidden, hidden)]
    block = [*attention, (4 * hidden, hidden), (hidden, 4 * hidden)]
    return Model(block * layers, tokens=512 * 1024)


def feed_forward(hidden: int, inner: int, *experts: int) -> list[tuple[int, ...]]:
    """Gate, up and down; with a number of ``experts``, a stack of each."""
    widening, narrowing = (*experts, inner, hidden), (*experts, hidden, inner)
    return [widening, widening, narrowing]


def grouped_attention(hidden: int, q: int, kv: int) -> list[tuple[int, ...]]:
    """Query, key, value and output; ``q`` and ``kv`` are rows of all heads."""
    return [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]


def latent_attention(hidden: int, heads: int) -> list[tuple[int, ...]]:
    """Multi-head latent attention: queries through 1536, keys and values through 512 + 64."""
    return [
        (1536, hidden),
        (heads * (128 + 64), 1536),
        (512 + 64, hidden),
        (heads * (128 + 128), 512),
        (hidden, heads * 128),
    ]


def llama(layers: int, hidden: int, kv: int, inner: int, tokens: int = 2**22) -> Model:
    attention = grouped_attention(hidden, hidden, kv)
    block = [*attention, *feed_forward(hidden, inner)]
    return Model(block * layers, tokens=tokens)


def deepseek(
    layers: int, heads: int, experts: int, dense_layers: int, tokens: int
) -> Model:
    """The first layers dense, the others with a shared expert and a router."""
    hidden, inner = 7168, 2048
    attention = latent_attention(hidden, heads)
    dense = [*attention, *feed_forward(hidden, 18432)]
    sparse = [*attention, *feed_forward(hidden, inner), (experts, hidden)]
    sparse += feed_forward(hidden, inner, experts)
    shapes = dense * dense_layers + sparse * (layers - dense_layers)
    return Model(shapes, active=8, tokens=tokens)


def qwen3_235b() -> Model:
    block = [*grouped_attention(4096, 64 * 128, 4 * 128), (128, 4096)]
    block += feed_forward(4096, 1536, 128)
    return Model(block * 94, active=8, tokens=2**24)


# By the config.json of these model cards: openai-community/gpt2, meta-llama/Llama-3.2-1B,
# meta-llama/Meta-Llama-3-8B, meta-llama/Meta-Llama-3-70B, meta-llama/Llama-3.1-405B, Qwen/Qwen3-235B-A22B,
# deepseek-ai/DeepSeek-V3 (without its multi-token prediction), moonshotai/Kimi-K2-Instruct.
# The tokens of GPT-2, Llama 3 405B, DeepSeek-V3 and Kimi K2 are those of their reports; the others are assumed.
MODELS = {
    "GPT-2 124M": gpt2(12, 768),
    "Llama 3.2 1B": llama(16, 2048, 8 * 64, 8192),
    "Llama 3 8B": llama(32, 4096, 8 * 128, 14336),
    "Llama 3 70B": llama(80, 8192, 8 * 128, 28672, tokens=2**23),
    "Llama 3 405B": llama(126, 16384, 8 * 128, 53248, tokens=2**24),
    "Qwen3-235B-A22B": qwen3_235b(),
    "DeepSeek-V3": deepseek(61, 128, 256, 3, tokens=15360 * 4096),
    "Kimi K2": deepseek(61, 64, 384, 1, tokens=67_000_000),
}
