"""Shapes of the matrices that Muon gets of public models; the tests and the bench share them.

A shape is (out, in), as ``torch.nn.Linear`` holds its weight. Experts are matrices of their own.
Embeddings, output heads, norms and biases are AdamW's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch.optim._muon_split import Split


Shape = tuple[int, int]


class Model(NamedTuple):
    """``dense`` are the matrices outside of experts, ``expert`` those of one routed expert.

    Args:
        active: how many of ``n_experts`` a token passes through.
        tokens: those of a training step.
        stacked: whether experts are stacks, of which FSDP gives each rank other experts, not other rows.
        names: those of ``shapes``, if known.
        fused: how to cut the weights of these names.
        is_split: whether they are cut.
    """

    dense: list[Shape]
    expert: list[Shape] = []
    n_experts: int = 0
    active: int = 0
    tokens: int = 2**22
    stacked: bool = False
    names: Sequence[str] = ()
    fused: Mapping[str, Split] = {}
    is_split: bool = False

    @property
    def shapes(self) -> list[Shape]:
        return self.dense + self.expert * self.n_experts

    @property
    def active_numel(self) -> int:
        """The elements that a token is multiplied with."""
        shapes = self.dense + self.expert * self.active
        return sum(map(math.prod, shapes))


def gpt2(layers: int, hidden: int) -> Model:
    inner = 4 * hidden
    block = [
        (3 * hidden, hidden),
        (hidden, hidden),
        (inner, hidden),
        (hidden, inner),
    ]
    return Model(block * layers, tokens=512 * 1024)


def feed_forward(hidden: int, inner: int) -> list[Shape]:
    """Gate, up and down."""
    return [(inner, hidden), (inner, hidden), (hidden, inner)]


def grouped_attention(hidden: int, q: int, kv: int) -> list[Shape]:
    """Query, key, value and output; ``q`` and ``kv`` are rows of all heads."""
    return [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]


def latent_attention(hidden: int, heads: int) -> list[Shape]:
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
    sparse_layers = layers - dense_layers
    router = (experts, hidden)
    attention = latent_attention(hidden, heads) * layers
    dense = feed_forward(hidden, 18432) * dense_layers
    shared = [*feed_forward(hidden, inner), router] * sparse_layers
    return Model(
        attention + dense + shared,
        feed_forward(hidden, inner) * sparse_layers,
        experts,
        active=8,
        tokens=tokens,
    )


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
    "Qwen3-235B-A22B": Model(
        [*grouped_attention(4096, 64 * 128, 4 * 128), (128, 4096)] * 94,
        feed_forward(4096, 1536) * 94,
        128,
        active=8,
        tokens=2**24,
    ),
    "DeepSeek-V3": deepseek(61, 128, 256, 3, tokens=15360 * 4096),
    "Kimi K2": deepseek(61, 64, 384, 1, tokens=67_000_000),
}
