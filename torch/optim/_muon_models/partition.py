"""Which parameters of a model Muon gets, and in which parameter groups."""

import warnings
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from itertools import chain
from typing import Any

from torch import nn

from .._muon_engine import fsdp1, fsdp2
from .._muon_engine.process_groups import listed, process_rank
from .._muon_split import Split
from .layers import EMBEDDING, reasons_by_layer, unwrapped
from .splits import is_fused


NamedParameter = tuple[str, nn.Parameter]
Shape = tuple[int, ...]


def partition(
    module: nn.Module,
    exclude: str | Iterable[str],
    verbose: bool,
    split: Mapping[str, Any] | None,
    takes_stacks: bool,
) -> tuple[list[Any], list[NamedParameter]]:
    """The parameters for Muon and the rest: :func:`torch.optim.muon.partition_named_parameters`."""
    fsdp2.check_resharded(module)
    parameters = list(fsdp1.logical_matrices(module))
    shapes: dict[str, Shape] = {}
    for _, _, tensors in parameters:
        shapes.update(tensors)
    excluded = set()
    for pattern in [exclude] if isinstance(exclude, str) else exclude:
        excluded |= _matching(pattern, shapes)
    splits: dict[str, Any] = {}
    for pattern, option in (split or {}).items():
        splits |= dict.fromkeys(_matching(pattern, shapes), option)
    reasons, tables = reasons_by_layer(module)
    is_first_rank = process_rank() == 0
    groups: dict[Split, list[NamedParameter]] = {}
    others: list[NamedParameter] = []
    unused_splits = []
    for parameter_name, parameter, tensors in parameters:
        # None for the rest.
        found: set[Split | None] = set()
        examples: dict[str, str] = {}
        for name, shape in tensors:
            layer_name, _, own_name = unwrapped(name).rpartition(".")
            reason = _why_no_matrix(own_name, shape, takes_stacks)
            reason = reason or reasons[layer_name]
            if parameter in tables:
                reason = EMBEDDING
            if name in excluded:
                reason = "excluded"
            elif reason and splits.get(name):
                unused_splits.append(name)
            destination = f"rest: {reason}" if reason else _described(name, splits)
            found.add(None if reason else Split.of(splits.get(name)))
            examples[destination] = name
            if verbose and is_first_rank:
                print(f"{name} {shape} -> {destination}")
        if len(found) > 1:
            raise fsdp1.mixed(parameter_name, examples)
        (group,) = found
        named = others if group is None else groups.setdefault(group, [])
        named.append((parameter_name, parameter))
    if unused_splits and is_first_rank:
        unused = listed(unused_splits)
        warnings.warn(f"not for Muon, so not split: {unused}", stacklevel=3)
    if split is None:
        return list(chain.from_iterable(groups.values())), others
    parameter_groups = [
        {"params": named, "split": group.option} for group, named in groups.items()
    ]
    return parameter_groups, others


def _why_no_matrix(own_name: str, shape: Shape, takes_stacks: bool) -> str:
    """Why a tensor has no matrix for Muon; "" if it has one."""
    is_stack = takes_stacks and len(shape) == 3 and shape[0] > 1
    if len(shape) != 2 and not is_stack:
        return f"{len(shape)}D"
    if 1 in shape[-2:]:
        return "one row or column"
    if "bias" in own_name:
        return "bias"
    return EMBEDDING if "embed" in own_name else ""


def _described(name: str, splits: Mapping[str, Any]) -> str:
    """What Muon does with a tensor."""
    if splits.get(name):
        return f"Muon, split {Split.of(splits[name]).option}"
    if name in splits:
        return "Muon, left whole: head size unknown"
    if is_fused(name):
        return "Muon, left whole: named like a fused weight"
    return "Muon"


def _matching(pattern: str, names: Collection[str]) -> set[str]:
    """The names that a pattern matches, with or without what torch.compile puts into them. Raises ValueError if it matches
    no name.
    """
    if pattern in names:
        return {pattern}
    matched = set()
    for name in names:
        if fnmatch(name, pattern) or fnmatch(name.replace("_orig_mod.", ""), pattern):
            matched.add(name)
    if not matched:
        raise ValueError(f"no parameter matches {pattern!r}")
    return matched
