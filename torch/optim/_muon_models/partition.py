"""Which parameters of a model Muon gets, and in which parameter groups."""

import warnings
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatch
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from .._muon_engine.layouts import fsdp1, fsdp2
from .._muon_engine.layouts.layout import matrix_shape
from .._muon_engine.process_groups import listed, process_rank
from .._muon_split import Split
from .layers import embedding_ids, reasons_by_layer
from .splits import is_fused


NamedParameter = tuple[str, nn.Parameter]
Shape = tuple[int, ...]


class _Options(NamedTuple):
    """The options of a parameter group that say which matrices are in a parameter."""

    split: Split = Split()
    flatten: bool = False


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
    reasons = reasons_by_layer(module)
    tied_to_embedding = embedding_ids(module, reasons)
    is_first_rank = process_rank() == 0
    groups: dict[_Options, list[NamedParameter]] = {}
    others: list[NamedParameter] = []
    unused_splits = []
    for parameter_name, parameter, tensors in parameters:
        # None for the rest.
        found: set[_Options | None] = set()
        examples: dict[str, str] = {}
        for name, shape in tensors:
            options = _options_of(Split.of(splits.get(name)), shape)
            layer_name, _, _ = name.rpartition(".")
            reason = _why_no_matrix(name, shape, options, takes_stacks)
            reason = reason or reasons[layer_name]
            if id(parameter) in tied_to_embedding:
                reason = "embedding"
            if name in excluded:
                reason = "excluded"
            elif reason and options.split.sizes:
                unused_splits.append(name)
            destination = f"rest: {reason}" if reason else _described(name, options)
            if not reason and name in splits and splits[name] is None:
                destination += ", left whole: head size unknown"
            found.add(None if reason else options)
            examples[destination] = name
            if verbose and is_first_rank:
                frozen = "" if parameter.requires_grad else ", frozen"
                print(f"{name} {shape} -> {destination}{frozen}")
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
        {"params": named, "split": options.split.option, "flatten": options.flatten}
        for options, named in groups.items()
    ]
    return parameter_groups, others


def _why_no_matrix(
    name: str, shape: Shape, options: _Options, takes_stacks: bool
) -> str:
    """Why a tensor has no matrix for Muon; "" if it has one."""
    is_stack = len(shape) == 3 and takes_stacks and "expert" in name
    if len(shape) != 2 and not is_stack and not options.flatten:
        return f"{len(shape)}D"
    if 1 in matrix_shape(shape, options.flatten):
        return "one row or column"
    # A table, a gain of each head, a state: nothing says that a layer multiplies by it.
    is_weight = "weight" in ".".join(name.split(".")[-2:])
    if not is_weight and not is_stack and not options.split.sizes:
        return "not named a weight"
    return ""


def _described(name: str, options: _Options) -> str:
    """What Muon does with a tensor."""
    words = "Muon"
    if options.split.sizes:
        words += f", split {options.split.option}"
    elif is_fused(name):
        words += ", left whole: named like a fused weight"
    if options.flatten:
        words += ", flattened"
    return words


def _options_of(split: Split, shape: Shape) -> _Options:
    """A split that fits the matrices of a stack is for these. One that fits the flattened parameter is for this."""
    if not split.sizes or len(shape) < 2:
        return _Options()
    flattened_shape = matrix_shape(shape, flatten=True)
    if split.problem_with(shape[-2:]) and not split.problem_with(flattened_shape):
        return _Options(split, flatten=True)
    return _Options(split)


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
        near_names = get_close_matches(pattern, list(names), cutoff=0.0)
        raise ValueError(
            f"no parameter matches {pattern!r}; near names are {near_names}"
        )
    return matched
