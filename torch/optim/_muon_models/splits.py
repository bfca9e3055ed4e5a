"""The split of each fused weight of a model, as far as the weight's name and the sizes around it tell.

A wrong split is worse than none: a weight stays whole unless it has as many rows as the sizes say.
"""

from typing import Any

from torch import nn

from .._muon_engine import fsdp
from .._muon_split import Split
from .layers import unwrapped


Shape = tuple[int, ...]

# Attributes of a module, or of its config.
_HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "heads",
)
_KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "num_query_groups",
)
_HEAD_SIZES = (
    "head_dim",
    "head_size",
    "attention_head_size",
    "dim_head",
    "key_value_proj_dim",
    "kv_channels",
    "qk_head_dim",
    "v_head_dim",
)


def split_of(module: nn.Module, heads: bool) -> dict[str, Any]:
    """The splits by name: :func:`torch.optim.muon.split_of`."""
    # A wrapped module replaces its wrapper.
    owners = {unwrapped(name): inner for name, inner in module.named_modules()}
    splits: dict[str, Any] = {}
    for _, _, tensors in fsdp.logical_matrices(module):
        for tensor_name, shape in tensors:
            # A weight has the name of its layer, and a bare parameter its own.
            layer_name = unwrapped(tensor_name).removesuffix(".weight")
            owner_name, _, weight_name = layer_name.rpartition(".")
            owner = owners[owner_name]
            is_stack = len(shape) == 3 and weight_name == "gate_up_proj"
            if len(shape) != 2 and not is_stack:
                continue
            if weight_name in _LAYOUTS:
                split = _LAYOUTS[weight_name](owner, weight_name, shape)
                if split.problem_with(shape[-2:]):
                    continue
                if heads and weight_name != "gate_up_proj":
                    split = _heads_of_fused(owner, split)
                splits[tensor_name] = split.option
                continue
            words = set(weight_name.split("_"))
            # Not a projection to the latents of all heads, and not a sparse indexer.
            has_heads = "a" not in words and "indexer" not in tensor_name
            if heads and has_heads and words & _PROJECTED:
                split = _projection(owner, weight_name, shape)
                is_known = not split.problem_with(shape)
                splits[tensor_name] = split.option if is_known else None
    return splits


def _size(owner: Any, *attributes: str) -> int:
    """The first of several attributes that a module or its config has; 0 without any."""
    for source in (owner, getattr(owner, "config", None)):
        for attribute in attributes:
            try:
                value = getattr(source, attribute, None)
            except Exception:
                # A config of transformers refuses to say what differs between its layers.
                continue
            if type(value) is int and value > 0:
                return value
    return 0


def _head_size(owner: Any, rows: int, heads: int) -> int:
    """The rows of each of ``heads``; 0 if no attribute confirms it."""
    size = rows // max(heads, 1)
    for attribute in _HEAD_SIZES:
        if _size(owner, attribute) == size:
            return size
    return 0


def _projection(owner: Any, weight_name: str, shape: Shape) -> Split:
    """The heads of queries, keys or values."""
    heads = _size(owner, *_HEADS)
    if "q" not in weight_name:
        heads = _size(owner, *_KEY_HEADS) or heads
    return Split((_head_size(owner, shape[0], heads),) * heads)


def _heads_of_fused(owner: Any, split: Split) -> Split:
    """The heads of a fused weight, each a part of its own, in the order of the lines."""
    heads = _size(owner, *_HEADS)
    if split.repeats == heads:
        return Split(split.sizes * heads, 1, split.dim)
    size = split.sizes[0] * split.repeats // max(heads, 1)
    return Split((size,) * (split.lines // size), 1, split.dim)


def _queries_keys_values(owner: Any, weight_name: str, shape: Shape) -> Split:
    """All queries, all keys, all values; or these for each group of heads."""
    # Attention without groups of heads has other layouts under this name.
    if weight_name == "qkv_proj" and not hasattr(owner, "num_key_value_heads"):
        return Split()
    queries = _size(owner, *_HEADS)
    keys = _size(owner, *_KEY_HEADS) or queries
    size = _head_size(owner, shape[0], queries + 2 * keys)
    groups = max(keys, 1) if weight_name in _GROUPED else 1
    # Without a size, these are zeros, which fit no weight.
    key_rows = keys // groups * size
    return Split((queries // groups * size, key_rows, key_rows), groups)


def _c_attn(owner: Any, _weight_name: str, shape: Shape) -> Split:
    """GPT-2 of transformers has (in, out), and nanoGPT (out, in)."""
    dim = 0 if hasattr(owner, "n_embd") else 1
    return Split((shape[1 - dim],) * 3, 1, dim)


def _kv_b_proj(owner: Any, _weight_name: str, _shape: Shape) -> Split:
    """In latent attention: for each head, its key without positions and its value."""
    sizes = _size(owner, "qk_nope_head_dim"), _size(owner, "v_head_dim")
    return Split(sizes, _size(owner, *_HEADS))


def _gate_up_proj(owner: Any, _weight_name: str, shape: Shape) -> Split:
    """A matrix has the rows of the gate first. Stacks are stored in several ways, and transformers says in which one."""
    dim, is_concatenated = 0, True
    if len(shape) == 3:
        if not hasattr(owner, "is_concatenated"):
            return Split()
        dim, is_concatenated = int(owner.is_transposed), owner.is_concatenated
    half = shape[dim - 2] // 2
    return Split((half, half), 1, dim) if is_concatenated else Split((1, 1), half, dim)


# Name of a layer, or of a bare parameter -> the split of its weight, if it fits the shape.
_LAYOUTS = {
    "Wqkv": _queries_keys_values,
    "c_attn": _c_attn,
    "gate_up_proj": _gate_up_proj,
    "in_proj_weight": _queries_keys_values,
    "kv_b_proj": _kv_b_proj,
    "linear_qkv": _queries_keys_values,
    "qkv_proj": _queries_keys_values,
    "query_key_value": _queries_keys_values,
    "wkv_b": _kv_b_proj,
}
_GROUPED = {"linear_qkv", "query_key_value"}
# Words in the names of weights of queries, keys or values; wq_b and q_b_proj have the queries of latent attention.
_PROJECTED = {"q", "k", "v", "query", "key", "value", "wq", "wk", "wv"}
