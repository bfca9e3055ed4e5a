"""The split of each fused weight of a model, as far as the classes of its modules are known."""

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

from torch import nn

from .._muon_engine.layouts import fsdp1
from .._muon_split import Split
from .attention_heads import heads_of_fused, heads_of_projection
from .known_classes import ATTENTION_RULES, OTHER_RULES, Rule
from .names import unwrapped
from .parameters import named_modules, Shape


def split_of(module: nn.Module, heads: bool) -> dict[str, Any]:
    """The splits by name: :func:`torch.optim.muon.split_of`."""
    modules = dict(named_modules(module))
    splits = {}
    for _, _, tensors in fsdp1.logical_matrices(module):
        for tensor_name, shape in tensors:
            name_parts = unwrapped(tensor_name).split(".")
            # A rule is for a parameter of the module, or of a layer in the module.
            for depth in (1, 2):
                owner = modules.get(".".join(name_parts[:-depth]))
                if owner is None:
                    continue
                weight_name = ".".join(name_parts[-depth:])
                split = _split_of_weight(owner, weight_name, shape, heads)
                if split.sizes:
                    splits[tensor_name] = split.option
    return splits


def _split_of_weight(
    module: nn.Module, weight_name: str, shape: Shape, heads: bool
) -> Split:
    """The split of a weight of ``module``; without sizes if it is not known."""
    if heads:
        split = heads_of_projection(module, weight_name, shape)
        if split.sizes:
            return split
    split = _split_by_rules(ATTENTION_RULES, module, weight_name, shape)
    if split.sizes:
        return heads_of_fused(module, split) if heads else split
    return _split_by_rules(OTHER_RULES, module, weight_name, shape)


def _split_by_rules(
    rules: Sequence[Rule], module: nn.Module, weight_name: str, shape: Shape
) -> Split:
    """The split by the first rule that fits the class, the weight and its shape."""
    class_names = _class_names(module)
    for class_pattern, weight_pattern, split_of_shape in rules:
        if not fnmatch(weight_name, weight_pattern):
            continue
        if not any(fnmatch(class_name, class_pattern) for class_name in class_names):
            continue
        try:
            split = split_of_shape(module, shape)
        # A class of the same name in another package, or a shard of a weight.
        except (AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError):
            continue
        # Shards of tensor parallelism have fewer lines than the split.
        if split.lines and split.lines % shape[split.dim - 2] == 0:
            return split
    return Split()


def _class_names(module: nn.Module) -> list[str]:
    """The names of a module's class and its bases: FSDP2 gives each module a class of its own."""
    return [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]
