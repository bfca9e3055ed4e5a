"""A model of the user's own: its matrices and its layout."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch.optim._muon_split import Split
from torch.optim.muon import partition_named_parameters, split_of
from tools.bench.models import Model, Shape

from .cases import Case


SOURCES = "a JSON of names and shapes, a transformers config.json, or module:function"
FORMS = "fsdp, ddp, hsdp:AxB (replicas x shards), fsdp-tp:AxB or fsdp-ep:AxB"
NO_EXPERT = -1


class Matrix(NamedTuple):
    """A matrix of Muon, and the number of its expert, or ``NO_EXPERT``."""

    name: str
    shape: Shape
    expert: int


def read(source: str, active_experts: int | None) -> Model:
    """The model of one of ``SOURCES``.

    Raises:
        ValueError: ``source`` is something else, lacks matrices, or does not say how many experts are active.
    """
    try:
        shapes, module = _load(source)
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"--model {source} is not {SOURCES}: {error!r}") from error
    matrices = _matrices_of(shapes)
    if not matrices:
        raise ValueError(f"--model {source} has no matrices")
    dense = [matrix.shape for matrix in matrices if matrix.expert == NO_EXPERT]
    one_expert = [matrix.shape for matrix in matrices if matrix.expert == 0]
    experts = matrices[-1].expert + 1
    if len(matrices) != len(dense) + len(one_expert) * experts:
        raise ValueError(
            f"--model {source} has layers with different numbers of experts"
        )
    splits: dict[str, Any] = {}
    if module is not None:
        splits = split_of(module)
        config = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        known = getattr(config, "num_experts_per_tok", None)
        active_experts = active_experts or known
    if experts and not active_experts:
        raise ValueError("--active-experts K: how many experts does a token use?")
    fused = {}
    for matrix in matrices:
        weight, _, _ = matrix.name.partition("[")
        split = Split.of(splits.get(weight))
        if not split.problem_with(matrix.shape):
            fused[matrix.name] = split
    return Model(
        dense,
        one_expert,
        experts,
        active_experts or 0,
        stacked=any(len(shape) == 3 for shape in shapes.values()),
        names=[matrix.name for matrix in matrices],
        fused=fused,
    )


def _load(
    source: str,
) -> tuple[Mapping[str, Sequence[int]], torch.nn.Module | None]:
    """The shapes of Muon's matrices and stacks by name; and the module that has them, if it is not a JSON."""
    path = Path(source)
    if path.suffix == ".json":
        content = json.loads(path.read_bytes())
        if "model_type" not in content:
            return {name: tuple(shape) for name, shape in content.items()}, None
        make_module = _from_transformers(path)
    else:
        make_module = resolve_name(source)
        if not callable(make_module):
            raise TypeError("no function is named after a colon")
    with torch.device("meta"):
        module = make_module()
    matrices, _ = partition_named_parameters(module, allow_batched_matrices=True)
    return {name: tuple(param.shape) for name, param in matrices}, module


def _from_transformers(path: Path) -> Callable[[], torch.nn.Module]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    architectures = config.architectures or ["AutoModelForCausalLM"]
    architecture = getattr(transformers, architectures[0])
    # Classes that choose a class by the config are not called themselves.
    make_module = getattr(architecture, "from_config", architecture)
    return partial(make_module, config)


def _matrices_of(shapes: Mapping[str, Sequence[int]]) -> list[Matrix]:
    """Those outside of experts first, then those of each expert."""
    matrices = []
    for name, shape in shapes.items():
        if len(shape) == 2:
            numbered = re.search(r"\bexperts\.(\d+)\.", name)
            expert = int(numbered[1]) if numbered else NO_EXPERT
            matrices.append(Matrix(name, tuple(shape), expert))
        elif len(shape) == 3:
            experts, *of_one = shape
            for expert in range(experts):
                matrices.append(Matrix(f"{name}[{expert}]", tuple(of_one), expert))
    return sorted(matrices, key=lambda matrix: matrix.expert)


def summary(model: Model) -> str:
    billions = sum(map(math.prod, model.shapes)) / 1e9
    words = f"{len(model.names):,} matrices with {billions:.3g} billion parameters"
    if model.n_experts:
        words += f"; {model.active} of {model.n_experts} experts are active"
    if model.is_split:
        words += f"; {len(model.fused)} fused weights are split"
    return words


def case_of(model: Model, name: str, layout: str, ranks: int) -> Case:
    """``model`` on one of ``FORMS``."""
    two_dimensions = re.fullmatch(r"(hsdp|fsdp-tp|fsdp-ep):(\d+)x(\d+)", layout)
    kind, outer, inner = "", 0, 0
    if layout in ("fsdp", "ddp"):
        kind, outer, inner = layout, ranks, 1
    elif two_dimensions:
        kind = two_dimensions[1].removeprefix("fsdp-")
        outer, inner = int(two_dimensions[2]), int(two_dimensions[3])
    if ranks < 1 or outer * inner != ranks:
        raise ValueError(f"--layout {layout} is not {FORMS}, where A x B = {ranks}")
    return Case(name, kind, outer, inner, model)


def as_users_have_it(model: Model, shard_dim: int, is_split: bool) -> Model:
    """``model`` with stacks of experts that are cut along ``shard_dim``, and with fused weights that are split.

    Raises:
        ValueError: the model has no such weights.
    """
    if shard_dim == 1:
        if not model.stacked:
            raise ValueError("--shard-dim 1: the model has no stacks of experts")
        model = model._replace(stacked=False)
    if is_split:
        if not model.fused:
            raise ValueError("--split: split_of knows no fused weight of the model")
        model = model._replace(is_split=True)
    return model
