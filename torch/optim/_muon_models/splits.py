"""The split of each fused weight of a model, as far as the weight's name and the sizes around it tell.

A wrong split is worse than none: a weight stays whole unless it has as many rows as the sizes say.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from .._muon_engine.layouts import fsdp1
from .._muon_split import Split
from .layers import unwrapped


Shape = tuple[int, ...]

# Attributes of a module, or of its config.
_HEADS = (
    "num_heads",
    "num_attention_heads",
    "num_attn_heads",
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
    "dim_heads",
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
    for _, _, tensors in fsdp1.logical_matrices(module):
        for tensor_name, shape in tensors:
            owner_name, weight_name = _owner_and_weight(tensor_name)
            owner = owners[owner_name]
            is_matrix = len(shape) == 2
            is_stack = len(shape) == 3 and weight_name == "gate_up_proj"
            split = Split()
            if weight_name in _LAYOUTS and (is_matrix or is_stack):
                split = _LAYOUTS[weight_name](owner, shape)
            if heads and split.sizes and weight_name != "gate_up_proj":
                split = _heads_of_fused(owner, split)
            if split.sizes:
                splits[tensor_name] = split.option
            elif heads and is_matrix and _is_projection(tensor_name):
                size = _size_in_projection(owner, weight_name, shape[0])
                # A matrix of one head is the head.
                if size != shape[0]:
                    known = (size,) * (shape[0] // size) if size else None
                    splits[tensor_name] = known
    return splits


def is_fused(tensor_name: str) -> bool:
    """Whether a weight is named as if it had several matrices."""
    owner_name, weight_name = _owner_and_weight(tensor_name)
    _, _, owner_own_name = owner_name.rpartition(".")
    return any(part in f"{owner_own_name}.{weight_name}" for part in _FUSED)


def _is_projection(tensor_name: str) -> bool:
    """Whether a weight is named as if it had queries, keys or values only. Sparse indexers have such names, too."""
    owner_name, weight_name = _owner_and_weight(tensor_name)
    is_weight = tensor_name.endswith("weight")
    return is_weight and weight_name in _PROJECTIONS and "indexer" not in owner_name


def _owner_and_weight(tensor_name: str) -> tuple[str, str]:
    """The names of a layer and of the module that has it; for a bare parameter, its own name and its module's."""
    layer_name, _, own_name = unwrapped(tensor_name).rpartition(".")
    if not own_name.startswith("weight"):
        return layer_name, own_name
    owner_name, _, weight_name = layer_name.rpartition(".")
    return owner_name, weight_name


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
    if not heads or rows % heads:
        return 0
    size = rows // heads
    is_confirmed = any(_size(owner, attribute) == size for attribute in _HEAD_SIZES)
    # A width of all heads, as diffusers has it.
    return size if is_confirmed or _size(owner, "inner_dim") == rows else 0


def _size_in_projection(owner: Any, weight_name: str, rows: int) -> int:
    """The rows of a head in a weight of queries, keys or values only; 0 if they are not known."""
    heads = _size(owner, *_HEADS)
    if "q" not in weight_name:
        heads = _size(owner, *_KEY_HEADS) or heads
    return _head_size(owner, rows, heads)


def _heads_of_fused(owner: Any, split: Split) -> Split:
    """The heads of a fused weight, each a part of its own, in the order of the lines."""
    heads = _size(owner, *_HEADS)
    if split.repeats > 1 and split.repeats == heads:
        return Split(split.sizes * heads, 1, split.dim)
    # The last part of a group is one head.
    size = split.sizes[-1]
    if split.repeats == 1:
        if not heads or split.sizes[0] % heads:
            return split
        size = split.sizes[0] // heads
    return Split((size,) * (split.lines // size), 1, split.dim)


def _counts_and_size(owner: Any, rows: int) -> tuple[int, int, int]:
    """How many heads of queries and of keys a fused weight has, and the rows of each; a size of 0 if they do not fit."""
    queries = _size(owner, *_HEADS)
    keys = _size(owner, *_KEY_HEADS) or queries
    return queries, keys, _head_size(owner, rows, queries + 2 * keys)


def _groups_of_heads(owner: Any, shape: Shape) -> Split:
    """For each group of heads, its queries, its key and its value."""
    queries, groups, size = _counts_and_size(owner, shape[0])
    if not size or queries % groups:
        return Split()
    return Split((queries // groups * size, size, size), groups)


def _blocks_of_heads(owner: Any, shape: Shape) -> Split:
    """All queries, all keys, all values."""
    queries, keys, size = _counts_and_size(owner, shape[0])
    return Split((queries * size, keys * size, keys * size)) if size else Split()


def _qkv_proj(owner: Any, shape: Shape) -> Split:
    """Attention without groups of heads has other layouts under this name."""
    has_groups = hasattr(owner, "num_key_value_heads")
    return _blocks_of_heads(owner, shape) if has_groups else Split()


def _c_attn(_owner: Any, shape: Shape) -> Split:
    """The weight is (in, out). Cross-attention has keys and values only."""
    rows, columns = shape
    if columns not in (2 * rows, 3 * rows):
        return Split()
    return Split((rows,) * (columns // rows), dim=1)


def _wqkv(owner: Any, shape: Shape) -> Split:
    queries, size = _size(owner, "heads_per_kv"), _size(owner, "head_dim")
    groups, remaining_rows = divmod(shape[0], (queries + 2) * size or 1)
    if not queries or not size or remaining_rows:
        return Split()
    return Split((queries * size, size, size), groups)


def _q_proj(owner: Any, shape: Shape) -> Split:
    """For each head, its query and its gate, where a head has twice as many rows as a key."""
    heads, key_heads = _size(owner, *_HEADS), _size(owner, *_KEY_HEADS)
    key_rows = _size(getattr(owner, "k_proj", None), "out_features")
    size = _head_size(owner, key_rows, key_heads)
    output_columns = _size(getattr(owner, "o_proj", None), "in_features")
    if not size or output_columns != heads * size or shape[0] != 2 * output_columns:
        return Split()
    return Split((size, size), heads)


def _kv_b_proj(owner: Any, shape: Shape) -> Split:
    """In latent attention: for each head, its key without positions and its value."""
    sizes = _size(owner, "qk_nope_head_dim"), _size(owner, "v_head_dim")
    heads = _size(owner, *_HEADS)
    if 0 in sizes or shape[0] != heads * sum(sizes):
        return Split()
    return Split(sizes, heads)


def _gate_up_proj(owner: Any, shape: Shape) -> Split:
    """A matrix has the rows of the gate first. Stacks are stored in several ways, and transformers says in which one."""
    if len(shape) == 3 and not hasattr(owner, "is_concatenated"):
        return Split()
    dim = 1 if getattr(owner, "is_transposed", False) else 0
    half, odd_line = divmod(shape[dim - 2], 2)
    if odd_line:
        return Split()
    is_concatenated = getattr(owner, "is_concatenated", True)
    return Split((half, half), dim=dim) if is_concatenated else Split((1, 1), half, dim)


# Name of a layer, or of a bare parameter -> the split of its weight.
_LAYOUTS: dict[str, Callable[[Any, Shape], Split]] = {
    "Wqkv": _blocks_of_heads,
    "c_attn": _c_attn,
    "gate_up_proj": _gate_up_proj,
    "in_proj_weight": _blocks_of_heads,
    "kv_b_proj": _kv_b_proj,
    "linear_qkv": _groups_of_heads,
    "q_proj": _q_proj,
    "qkv_proj": _qkv_proj,
    "query_key_value": _groups_of_heads,
    "wkv_b": _kv_b_proj,
    "wqkv": _wqkv,
}
# Parts of the names of fused weights, whose layout may be unknown.
_FUSED = (
    "att_proj",
    "c_attn",
    "gate_up",
    "in_proj",
    "input_linear",
    "key_value",
    "kv",
    "mlp1_weight",
    "w12",
    "w13",
)
# Weights of queries, keys or values; in latent attention, q_b has the queries.
_PROJECTIONS = {
    pattern.format(word)
    for word in ("q", "k", "v", "query", "key", "value", "q_b")
    for pattern in (
        "{}",
        "{}_layer",
        "{}_lin",
        "{}_proj",
        "{}_proj_weight",
        "add_{}_proj",
        "linear_{}",
        "project_{}",
        "to_{}",
        "w{}",
    )
}
