"""The fused weights of well-known models, by the names and attributes of their classes."""

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.optim._muon_engine.layouts import fsdp1
from torch.optim._muon_partition import unwrapped
from torch.optim._muon_split import Split


def _equal(parts: int, lines: int, dim: int = 0) -> Split:
    return Split((lines // parts,) * parts, 1, dim)


def _grouped(lines: int, queries: int, size: int) -> Split:
    """For each group of heads, its queries, its key and its value."""
    return Split((queries * size, size, size), lines // (queries * size + 2 * size))


def _falcon(m: Any, shape: tuple[int, ...]) -> Split:
    is_grouped = m.new_decoder_architecture or m.multi_query
    queries = m.num_heads // m.num_kv_heads if is_grouped else 1
    return _grouped(shape[0], queries, m.head_dim)


def _phi3(m: Any, shape: tuple[int, ...]) -> Split:
    key = m.num_key_value_heads * m.head_dim
    return Split((shape[0] - 2 * key, key, key))


def _experts(m: Any, shape: tuple[int, ...]) -> Split:
    dim = int(m.is_transposed)
    lines = shape[dim - 2]
    return (
        _equal(2, lines, dim) if m.is_concatenated else Split((1, 1), lines // 2, dim)
    )


def _megatron_qkv(m: Any, shape: tuple[int, ...]) -> Split:
    c = m.config
    if getattr(c, "attention_output_gate", False):
        return Split()
    groups, size = c.num_query_groups, c.kv_channels
    return Split((c.num_attention_heads // groups * size, size, size), groups)


def _megatron_fc1(m: Any, shape: tuple[int, ...]) -> Split:
    """Each rank of tensor parallelism has rows of the gate, then rows of the other part."""
    c, group = m.config, getattr(m, "tp_group", None)
    ranks = group.size() if group else getattr(c, "tensor_model_parallel_size", 1)
    return Split((shape[0] // 2,) * 2, ranks) if c.gated_linear_unit else Split()


# The module and class that has a weight, the weight's name there, and its split by the module and the shape.
_Rule = tuple[str, str, Callable[[Any, tuple[int, ...]], Split]]
_KNOWN: tuple[_Rule, ...] = (
    ("torch.nn.*.MultiheadAttention", "in_proj_weight", lambda m, s: _equal(3, s[0])),
    # Columns; cross-attention has no query.
    ("*GPT2Attention", "c_attn.weight", lambda m, s: _equal(s[1] // s[0], s[1], 1)),
    ("*.GPTNeoXAttention", "query_key_value.weight", lambda m, s: _grouped(s[0], 1, m.head_size)),
    ("*.BloomAttention", "query_key_value.weight", lambda m, s: _grouped(s[0], 1, m.head_dim)),
    ("*.FalconAttention", "query_key_value.weight", _falcon),
    ("*.Phi3Attention", "qkv_proj.weight", _phi3),
    ("*MLP", "gate_up_proj.weight", lambda m, s: _equal(2, s[0])),
    ("*Attention", "kv_b_proj.weight", lambda m, s: Split((m.qk_nope_head_dim, m.v_head_dim), m.num_heads)),
    ("*.GptOssExperts", "gate_up_proj", lambda m, s: Split((1, 1), s[2] // 2, 1)),
    ("*.Llama4TextExperts", "gate_up_proj", lambda m, s: _equal(2, s[2], 1)),
    ("*Experts", "gate_up_proj", _experts),
    ("*.FusedQKVLinear", "wqkv.weight", lambda m, s: _grouped(s[0], m.heads_per_kv, m.head_dim)),
    # (width, 2, in) is flattened to (width, 2 x in).
    ("*.FusedSwiGLU", "w13", lambda m, s: _equal(2, 2 * s[2], 1)),
    ("torchtitan.*", "w13.weight", lambda m, s: Split((1, 1), s[0] // 2)),
    ("*.SelfAttention", "linear_qkv.weight", _megatron_qkv),
    ("*MLP", "linear_fc1.weight*", _megatron_fc1),
)  # fmt: skip


def split_of(module: nn.Module) -> dict[str, Any]:
    """The splits by name: :func:`torch.optim.muon.split_of`."""
    modules = {unwrapped(f"{n}.")[:-1]: m for n, m in module.named_modules()}
    splits = {}
    for _, _, inside in fsdp1.logical_matrices(module):
        for name, shape in inside:
            parts = unwrapped(name).split(".")
            # A weight of the module itself, or of a layer in it.
            for depth in (1, 2):
                owner = modules.get(".".join(parts[:-depth]))
                split = _split_of(owner, ".".join(parts[-depth:]), shape)
                if split.sizes:
                    splits[name] = split.option
    return splits


def _split_of(module: nn.Module | None, leaf: str, shape: tuple[int, ...]) -> Split:
    """The split of a weight of ``module``; without sizes if it is not known."""
    # FSDP2 gives each module a class of its own.
    classes = [f"{c.__module__}.{c.__qualname__}" for c in type(module).__mro__]
    for kind, weight, rule in _KNOWN:
        if fnmatch(leaf, weight) and any(fnmatch(c, kind) for c in classes):
            try:
                split = rule(module, shape)
            # A class of the same name in another package, or a shard of a weight.
            except (AttributeError, IndexError, ZeroDivisionError):
                continue
            # Shards of tensor parallelism have fewer lines.
            if split.lines % shape[split.dim - 2] == 0:
                return split
    return Split()
