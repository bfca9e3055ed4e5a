"""The heads of attention, by the attributes of its modules."""

import re

from torch import nn

from .._muon_split import Split


# Projections of plain attention, whose rows are one head after the other. Some MLA makes queries in two steps.
_PROJECTION = re.compile(
    r"((to_|add_|linear_|w)?(?P<letter>[qkv])(_proj|_lin|_b_proj|_b)?|(?P<word>query|key|value)(_proj|_layer)?)\.weight"
    r"|(?P<torch>[qkv])_proj_weight"
)
_HEAD_SIZES = (
    "head_dim",
    "head_size",
    "attention_head_size",
    "key_value_proj_dim",
    "dim_head",
)
# The width of all heads, and how many heads there are.
_WIDTHS = ("inner_dim", "heads"), ("split_size", "n_head")


def _head_size(module: nn.Module, kind: str) -> int:
    """The rows of one head of queries, keys or values; 0 if the module does not say."""
    names = [*_HEAD_SIZES]
    # With latent attention, values have a size of their own.
    names.insert(0, "v_head_dim" if kind == "v" else "qk_head_dim")
    config = getattr(module, "config", None)
    found = [getattr(module, name, None) for name in names]
    for width, heads in _WIDTHS:
        if hasattr(module, width) and getattr(module, heads, 0):
            found.append(getattr(module, width) // getattr(module, heads))
    found.append(getattr(config, "kv_channels", None))
    return next((size for size in found if type(size) is int and size > 0), 0)


def projection(module: nn.Module, leaf: str, shape: tuple[int, ...]) -> Split:
    """The heads of a weight that gives queries, keys or values only."""
    match = _PROJECTION.fullmatch(leaf)
    is_attention = any("Attention" in c.__name__ for c in type(module).__mro__)
    if match is None or not (is_attention or hasattr(module, "qk_head_dim")):
        return Split()
    kind = (match["letter"] or match["word"] or match["torch"])[0]
    size = _head_size(module, kind)
    if len(shape) != 2 or not size or shape[0] % size:
        return Split()
    heads = shape[0] // size
    # A matrix of one head is the head.
    return Split((size,) * heads) if heads > 1 else Split()


def per_head(module: nn.Module, split: Split) -> Split:
    """The heads of a fused weight, each a part of its own, in the order of the lines."""
    parts = split.sizes * split.repeats
    if hasattr(module, "qk_nope_head_dim"):
        # In latent attention, a repeat is one head, and its parts are keys and values.
        return Split(parts, 1, split.dim)
    size = _head_size(module, "q")
    if not size or any(lines % size for lines in parts):
        return split
    return Split((size,) * (split.lines // size), 1, split.dim)
