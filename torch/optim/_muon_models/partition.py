"""Which parameters of a model Muon gets, and in which parameter groups."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn

from .._muon_engine import fsdp
from .._muon_engine.process_groups import process_rank
from .._muon_split import Split
from .layers import EMBEDDING, reasons_by_layer, unwrapped


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
    fsdp.check_resharded(module)
    parameters = list(fsdp.logical_matrices(module))
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
    prints = verbose and process_rank() == 0
    groups: dict[Split, list[NamedParameter]] = {}
    others: list[NamedParameter] = []
    for parameter_name, parameter, tensors in parameters:
        # The split of a matrix, or None for the rest -> a tensor, and where it goes.
        found: dict[Split | None, str] = {}
        for name, shape in tensors:
            layer_name, _, own_name = unwrapped(name).rpartition(".")
            reason = _why_no_matrix(own_name, shape, takes_stacks)
            reason = reason or reasons[layer_name]
            if parameter in tables:
                reason = EMBEDDING
            if name in excluded:
                reason = "excluded"
            split_of_name = Split.of(splits.get(name))
            destination = "Muon"
            if reason:
                destination = f"rest: {reason}"
            elif split_of_name.sizes:
                destination = f"Muon, split {split_of_name.option}"
            elif name in splits:
                destination = "Muon, left whole: head size unknown"
            line = f"{name} {shape} -> {destination}"
            found[None if reason else split_of_name] = line
            if prints:
                print(line)
        if len(found) > 1:
            raise fsdp.mixed(parameter_name, [*found.values()])
        (group,) = found
        named = others if group is None else groups.setdefault(group, [])
        named.append((parameter_name, parameter))
    if split is None:
        return groups.get(Split(), []), others
    parameter_groups: list[dict[str, Any]] = []
    for group, named in groups.items():
        parameter_groups.append({"params": named, "split": group.option})
    return parameter_groups, others


def _why_no_matrix(own_name: str, shape: Shape, takes_stacks: bool) -> str:
    """Why a tensor has no matrix for Muon; "" if it has one."""
    most_dims = 3 if takes_stacks else 2
    if not 2 <= len(shape) <= most_dims:
        return f"{len(shape)}D"
    if 1 in shape:
        return "a dimension of 1"
    if "bias" in own_name:
        return "bias"
    return EMBEDDING if "embed" in own_name else ""


def _matching(pattern: str, names: Collection[str]) -> set[str]:
    """The names that a pattern matches, with or without what wrappers put into them. Raises ValueError if it matches no
    name.
    """
    if pattern in names:
        return {pattern}
    matched = set()
    for name in names:
        if fnmatch(name, pattern) or fnmatch(unwrapped(name), pattern):
            matched.add(name)
    if not matched:
        raise ValueError(f"no parameter matches {pattern!r}")
    return matched
