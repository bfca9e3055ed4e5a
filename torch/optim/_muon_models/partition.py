"""Which parameters of a model are hidden matrices for Muon, and why the others are not."""

import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

from torch import nn

from .._muon_engine.layouts import fsdp1, fsdp2
from .._muon_engine.layouts.layout import matrix_shape
from .._muon_engine.process_groups import listed, process_rank
from .._muon_split import Split
from .model import Model
from .names import is_fused, NUMBER


def partition(
    module: nn.Module,
    exclude: str | Sequence[str],
    verbose: bool,
    split: Mapping[str, Any] | None,
    takes_stacks: bool,
) -> tuple[list, list]:
    """The parameters for Muon and the rest: :func:`torch.optim.muon.partition_named_parameters`."""
    fsdp2.check_resharded(module)
    tensors = list(fsdp1.logical_matrices(module))
    shapes = {name: tuple(shape) for _, _, inside in tensors for name, shape in inside}
    patterns = [exclude] if isinstance(exclude, str) else exclude
    excluded = {name for pattern in patterns for name in _matches(pattern, shapes)}
    forms = dict.fromkeys(shapes, (Split(), False))
    for pattern, value in (split or {}).items():
        for name in _matches(pattern, shapes) - excluded:
            forms[name] = _form(Split.of(value), shapes[name])
    model, groups, others = Model(module, shapes, takes_stacks), {}, []
    unused: list[str] = []
    for name, param, inside in tensors:
        reasons = {n: model.why_not(n, forms[n][1]) for n, _ in inside}
        reasons |= dict.fromkeys(reasons.keys() & excluded, "excluded")
        if id(param) in model.tied:
            reasons = dict.fromkeys(reasons, "embedding")
        unused += [n for n, why in reasons.items() if why and forms[n][0].sizes]
        kinds = {() if why else forms[n] for n, why in reasons.items()}
        if len(kinds) > 1:
            kind_of = {w or _described(n, *forms[n]): n for n, w in reasons.items()}
            raise fsdp1.mixed(name, kind_of)
        (kind,) = kinds
        (groups.setdefault(kind, []) if kind else others).append((name, param))
        for n, shape in inside if verbose and process_rank() == 0 else ():
            why = f"rest: {reasons[n]}"
            if not reasons[n]:
                # A head that its size does not give away. The user knows.
                mark = ", few rows" * (n in model.few)
                why = _described(n, *forms[n]) + mark
            print(f"{n} {tuple(shape)} -> {why}")
    if unused and process_rank() == 0:
        warnings.warn(f"not for Muon, so not split: {listed(unused)}", stacklevel=3)
    kernels = [name for name in shapes if model.is_kernel(name)]
    if kernels and not groups and process_rank() == 0:
        warnings.warn(
            f"this model has no hidden matrix, but kernels: {listed(kernels)}. For Muon, put kernels into a parameter group with "
            "flatten=True, which makes each one matrix",
            stacklevel=3,
        )
    if split is None:
        return [pair for group in groups.values() for pair in group], others
    matrices = [
        {"params": params, "split": of_group.option or None, "flatten": flatten}
        for (of_group, flatten), params in groups.items()
    ]
    return matrices, others


def _form(split: Split, shape: tuple[int, ...]) -> tuple[Split, bool]:
    """``split``, and whether it is for the flattened parameter and not for the matrices of a stack."""
    if len(shape) < 2:
        return Split(), False
    is_stack = len(shape) == 2 or not split.problem_with(shape[-2:])
    return split, not is_stack and not split.problem_with(matrix_shape(shape, True))


def _described(name: str, split: Split, flatten: bool) -> str:
    suffix = f", split {split.option}" if split.sizes else ""
    if not suffix and is_fused(name):
        suffix = ", left whole: named like a fused weight"
    return f"Muon{suffix}" + ", flattened" * flatten


def _matches(pattern: str, names: Mapping[str, object]) -> set[str]:
    """The names that a pattern matches, with or without torch.compile's part of them."""
    if pattern in names:
        return {pattern}
    plain = {name: name.replace("_orig_mod.", "") for name in names}
    hits = {n for n in names if fnmatch(n, pattern) or fnmatch(plain[n], pattern)}
    if not hits:
        patterns = {NUMBER.sub("*", name) for name in plain.values()}
        near = get_close_matches(pattern, sorted(patterns), cutoff=0.0)
        raise ValueError(f"no parameter matches {pattern!r}; near names are {near}")
    return hits
