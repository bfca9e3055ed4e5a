"""The heads of attention: how many rows each one has, and the parts of a weight that are heads."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from .._muon_split import Split
from .parameters import Shape


# A weight that gives queries, keys or values only. Its rows are the first head, then the second one and so on. In
# some latent attention, a second projection (_b) makes the queries.
_PROJECTION = re.compile(
    r"""
    (to_|add_|linear_|w)? (?P<letter>[qkv]) (_proj|_lin|_b_proj|_b)? \.weight
    | (?P<word>query|key|value) (_proj|_layer)? \.weight
    | (?P<torch_letter>[qkv]) _proj_weight
    """,
    re.VERBOSE,
)

# Attributes of a module for the size of a head.
_HEAD_SIZES = (
    "head_dim",
    "head_size",
    "attention_head_size",
    "key_value_proj_dim",
    "dim_head",
)
# Attributes for the width of all heads together, and for how many heads there are.
_WIDTHS_AND_COUNTS = (
    ("inner_dim", "heads"),
    ("split_size", "n_head"),
)


def heads_of_projection(module: nn.Module, weight_name: str, shape: Shape) -> Split:
    """The heads of a weight that gives queries, keys or values only; without sizes for other weights."""
    match = _PROJECTION.fullmatch(weight_name)
    if match is None or not _is_attention(module):
        return Split()
    word_of_kind = match["letter"] or match["word"] or match["torch_letter"]
    head_size = _head_size(module, is_value=word_of_kind.startswith("v"))
    if not head_size or len(shape) != 2:
        return Split()
    head_count, remaining_rows = divmod(shape[0], head_size)
    # A matrix of one head is the head.
    if remaining_rows or head_count <= 1:
        return Split()
    return Split((head_size,) * head_count)


def heads_of_fused(module: nn.Module, split: Split) -> Split:
    """The heads of a fused weight, each a part of its own, in the order of the lines."""
    repeated_sizes = split.sizes * split.repeats
    if hasattr(module, "qk_nope_head_dim"):
        # In latent attention, a repeat is one head, and its parts are keys and values.
        return Split(repeated_sizes, 1, split.dim)
    head_size = _head_size(module, is_value=False)
    if not head_size:
        return split
    for lines in repeated_sizes:
        if lines % head_size:
            return split
    head_count = split.lines // head_size
    return Split((head_size,) * head_count, 1, split.dim)


def _is_attention(module: nn.Module) -> bool:
    if hasattr(module, "qk_head_dim"):
        return True
    return any("Attention" in base.__name__ for base in type(module).__mro__)


def _head_size(module: nn.Module, is_value: bool) -> int:
    """The rows of one head; 0 if the module does not say."""
    for size in _sizes_of_module(module, is_value):
        if type(size) is int and size > 0:
            return size
    return 0


def _sizes_of_module(module: nn.Module, is_value: bool) -> Iterator[Any]:
    """The attributes of the module that may be the size of a head: None if one is missing."""
    # With latent attention, values have a size of their own.
    yield getattr(module, "v_head_dim" if is_value else "qk_head_dim", None)
    for attribute in _HEAD_SIZES:
        yield getattr(module, attribute, None)
    for width_attribute, count_attribute in _WIDTHS_AND_COUNTS:
        width = getattr(module, width_attribute, None)
        head_count = getattr(module, count_attribute, None)
        if width and head_count:
            yield width // head_count
    config = getattr(module, "config", None)
    # Megatron's name.
    yield getattr(config, "kv_channels", None)
