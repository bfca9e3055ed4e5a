"""The fused weights and the heads of well-known models, by the names and attributes of their classes."""

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

from torch import nn

from .._muon_engine.layouts import fsdp1
from .._muon_split import Split
from .attention_heads import per_head, projection
from .names import unwrapped


def _equal(parts: int, lines: int, dim: int = 0) -> Split:
    return Split((lines // parts,) * parts, 1, dim)


def _grouped(rows: int, queries: int, size: int) -> Split:
    """For each group of heads, its queries, its key and its value."""
    return Split((queries * size, size, size), rows // (queries * size + 2 * size))


def _falcon(m: Any, shape: tuple[int, ...]) -> Split:
    is_grouped = m.new_decoder_architecture or m.multi_query
    queries = m.num_heads // m.num_kv_heads if is_grouped else 1
    return _grouped(shape[0], queries, m.head_dim)


def _by_heads(m: Any, shape: tuple[int, ...]) -> Split:
    """All queries, all keys, all values."""
    keys = m.num_key_value_heads * m.head_dim
    return _grouped(shape[0], m.num_key_value_groups, keys)


def _gated_queries(m: Any, shape: tuple[int, ...]) -> Split:
    """For each head, its queries and their gate."""
    is_gated = shape[0] == 2 * m.o_proj.in_features
    return Split((m.head_dim,) * 2 * is_gated, shape[0] // m.head_dim // 2)


def _experts(m: Any, shape: tuple[int, ...]) -> Split:
    half = shape[m.is_transposed - 2] // 2
    size = half if m.is_concatenated else 1
    return Split((size, size), half // size, int(m.is_transposed))


def _megatron_qkv(m: Any, shape: tuple[int, ...]) -> Split:
    c = m.config
    queries = c.num_attention_heads // c.num_query_groups * c.kv_channels
    # The gate of the attention follows the queries, with as many rows.
    kinds = 1 + bool(getattr(c, "attention_output_gate", False))
    return Split((queries,) * kinds + (c.kv_channels,) * 2, c.num_query_groups)


def _megatron_fc1(m: Any, shape: tuple[int, ...]) -> Split:
    """Each rank of tensor parallelism has rows of the gate, then rows of the other part."""
    c, group = m.config, getattr(m, "tp_group", None)
    ranks = group.size() if group else getattr(c, "tensor_model_parallel_size", 1)
    size = half = shape[-2] // 2
    if hasattr(m, "num_local_experts"):  # may alternate between blocks of both
        size = getattr(c, "moe_mlp_glu_interleave_size", None) or half
    return Split((size, size) * c.gated_linear_unit, half // size * ranks)


_Rule = tuple[str, str, Callable[..., Split]]
# The module and class that has a weight, the weight's name there, and its split by the module and the shape.
_ATTENTION: tuple[_Rule, ...] = (
    ("torch.nn.*.MultiheadAttention", "in_proj_weight", lambda m, s: _equal(3, s[0])),
    ("*.GPTBigCodeAttention", "c_attn.weight", lambda m, s: _grouped(s[0], m.num_heads if m.multi_query else 1, m.head_dim)),
    # GPT-2 and others: columns; cross-attention has no query.
    ("*Attention", "c_attn.weight", lambda m, s: Split((s[0],) * (s[1] // s[0]), 1, 1)),
    ("*.GPTNeoXAttention", "query_key_value.weight", lambda m, s: _grouped(s[0], 1, m.head_size)),
    ("*.BloomAttention", "query_key_value.weight", lambda m, s: _grouped(s[0], 1, m.head_dim)),
    ("*.FalconAttention", "query_key_value.weight", _falcon),
    ("*.Phi3Attention", "qkv_proj.weight", _by_heads),
    ("*.MptAttention", "Wqkv.weight", lambda m, s: _equal(3, s[0])),
    ("*.DbrxAttention", "Wqkv.weight", _by_heads),
    ("*.Qwen*Attention", "q_proj.weight", _gated_queries),
    ("*", "*kv_b*.weight", lambda m, s: Split(mla := (m.qk_nope_head_dim, m.v_head_dim), s[0] // sum(mla))),
    ("*.FusedQKVLinear", "wqkv.weight", lambda m, s: _grouped(s[0], m.heads_per_kv, m.head_dim)),
    ("*.SelfAttention", "linear_qkv.weight", _megatron_qkv),
)  # fmt: skip
_OTHERS: tuple[_Rule, ...] = (
    ("*.DbrxExpertGLU", "[vw][12]", lambda m, s: _equal(m.moe_num_experts, s[0])),
    ("transformers*MLP", "gate_up_proj.weight", lambda m, s: _equal(2, s[0])),
    ("*.GptOssExperts", "gate_up_proj", lambda m, s: Split((1, 1), s[2] // 2, 1)),
    ("*.Llama4TextExperts", "gate_up_proj", lambda m, s: _equal(2, s[2], 1)),
    ("*Experts", "gate_up_proj", _experts),
    # (width, 2, in) is flattened to (width, 2 x in).
    ("*.FusedSwiGLU", "w13", lambda m, s: _equal(2, 2 * s[2], 1)),
    ("torchtitan.*", "w13.weight", lambda m, s: Split((1, 1), s[0] // 2)),
    ("torchtitan.*", "mlp1_weight*", lambda m, s: Split((1, 1), s[1] // 2)),
    ("*MLP", "linear_fc1.weight*", _megatron_fc1),
)  # fmt: skip


def split_of(module: nn.Module, heads: bool) -> dict[str, Any]:
    """The splits by name: :func:`torch.optim.muon.split_of`."""
    modules = {unwrapped(f"{n}.")[:-1]: m for n, m in module.named_modules()}
    splits = {}
    for _, _, inside in fsdp1.logical_matrices(module):
        for name, shape in inside:
            parts = unwrapped(name).split(".")
            for depth in (1, 2):
                owner = modules.get(".".join(parts[:-depth]))
                if owner is not None:
                    leaf = ".".join(parts[-depth:])
                    split = _split_of(owner, leaf, shape, heads)
                    if split.sizes:
                        splits[name] = split.option
    return splits


def _split_of(
    module: nn.Module, leaf: str, shape: tuple[int, ...], heads: bool
) -> Split:
    """The split of a weight of ``module``; without sizes if it is not known."""
    if heads:
        split = projection(module, leaf, shape)
        if split.sizes:
            return split
        split = _found(_ATTENTION, module, leaf, shape)
        if split.sizes:
            return per_head(module, split)
    return _found(_ATTENTION + _OTHERS, module, leaf, shape)


def _found(
    rules: tuple[_Rule, ...], module: nn.Module, leaf: str, shape: tuple[int, ...]
) -> Split:
    # FSDP2 gives each module a class of its own.
    classes = [f"{c.__module__}.{c.__qualname__}" for c in type(module).__mro__]
    for kind, weight, rule in rules:
        if fnmatch(leaf, weight) and any(fnmatch(c, kind) for c in classes):
            try:
                split = rule(module, shape)
            # A class of the same name in another package, or a shard of a weight.
            except (AttributeError, IndexError, TypeError, ZeroDivisionError):
                continue
            # Shards of tensor parallelism have fewer lines.
            if split.lines and split.lines % shape[split.dim - 2] == 0:
                return split
    return Split()
