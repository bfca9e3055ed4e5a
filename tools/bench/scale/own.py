"""A model of the user's own: its matrices and its layout."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch.optim._muon_engine.process_groups import listed
from torch.optim._muon_split import Split
from torch.optim.muon import partition_named_parameters, split_of
from tools.bench.models import Model, Shape

from .cases import Case
from .costs import TRAINING_BYTES
from .hardware import Hardware


SOURCES = "a JSON of names and shapes, a transformers config.json, or module:function"
FORMS = "fsdp, ddp, hsdp:AxB (replicas x shards), fsdp-tp:AxB or fsdp-ep:AxB"
# Embeddings, heads, routers and biases of experts in a JSON: two dimensions, but AdamW's.
DOUBTFUL = re.compile(
    r"emb|tok|wte|wpe|head$|^output$|classifier|score|router|^gate$|bias"
)
NO_EXPERT = -1

MakeModule = Callable[[], torch.nn.Module]


class Parameters(NamedTuple):
    """The parameters of a model, as a source describes them.

    Args:
        candidates: the shapes of those that may be Muon's, by name.
        everything: the shapes of all parameters, by name.
        is_module: whether a module has them, whose classes say which are Muon's.
        fused: how to cut the weights of these names.
        active_experts: how many experts a token passes through, if the source knows it.
    """

    candidates: Mapping[str, Sequence[int]]
    everything: Mapping[str, Sequence[int]]
    is_module: bool
    fused: Mapping[str, Any] = {}
    active_experts: int | None = None


class Matrix(NamedTuple):
    """A matrix of Muon, and the number of its expert, or ``NO_EXPERT``."""

    name: str
    shape: Shape
    expert: int


def read(source: str, active: int | None) -> tuple[Model, str]:
    """The model of one of ``SOURCES``, and remarks on it.

    Raises:
        ValueError: ``source`` is something else, lacks matrices, or does not say how many experts are active.
    """
    parameters = _parameters_of(source)
    matrices = _matrices_of(parameters)
    dense = [matrix.shape for matrix in matrices if matrix.expert == NO_EXPERT]
    one_expert = [matrix.shape for matrix in matrices if matrix.expert == 0]
    experts = 0
    if matrices:
        experts = matrices[-1].expert + 1
    expected = len(dense) + len(one_expert) * experts
    if not matrices:
        raise ValueError(f"--model {source} has no matrices")
    if len(matrices) != expected:
        raise ValueError(
            f"--model {source} has layers with different numbers of experts"
        )
    active = active or parameters.active_experts
    if experts and not active:
        raise ValueError("--active-experts K: how many experts does a token use?")
    model = Model(
        dense,
        one_expert,
        experts,
        active or 0,
        stacked=any(len(shape) == 3 for shape in _of_muon(parameters).values()),
        names=[matrix.name for matrix in matrices],
        fused=_fitting_splits(parameters, matrices),
    )
    return model, _notes(model, parameters)


def _parameters_of(source: str) -> Parameters:
    """Reads names and shapes, or makes a module without memory for its weights."""
    try:
        make_module, shapes = _load(source)
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"--model {source} is not {SOURCES}: {error!r}") from error
    if make_module is None:
        return Parameters(shapes, shapes, is_module=False)
    with torch.device("meta"):
        module = make_module()
    matrices, _ = partition_named_parameters(module, allow_batched_matrices=True)
    everything = module.named_parameters()
    config = getattr(module, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return Parameters(
        {name: param.shape for name, param in matrices},
        {name: param.shape for name, param in everything},
        is_module=True,
        fused=split_of(module),
        active_experts=getattr(config, "num_experts_per_tok", None),
    )


def _load(source: str) -> tuple[MakeModule | None, dict[str, Shape]]:
    """A function that makes the module of ``source``; or else the shapes that a JSON has by name."""
    path = Path(source)
    if path.suffix != ".json":
        make_module = resolve_name(source)
        if not callable(make_module):
            raise TypeError("no function is named after a colon")
        return make_module, {}
    content = json.loads(path.read_bytes())
    if "model_type" in content:
        return _from_transformers(path), {}
    shapes = {}
    for name, shape in content.items():
        shapes[name] = tuple(map(int, shape))
    return None, shapes


def _from_transformers(path: Path) -> MakeModule:
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    architectures = config.architectures or ["AutoModelForCausalLM"]
    architecture = getattr(transformers, architectures[0])
    # Classes that choose a class by the config are not called themselves.
    make_module = getattr(architecture, "from_config", architecture)
    return partial(make_module, config)


def _of_muon(parameters: Parameters) -> dict[str, Sequence[int]]:
    """The shapes of matrices, and of stacks of them."""
    shapes = {}
    for name, shape in parameters.candidates.items():
        is_stack = len(shape) == 3 and (parameters.is_module or "expert" in name)
        if len(shape) == 2 or is_stack:
            shapes[name] = shape
    return shapes


def _matrices_of(parameters: Parameters) -> list[Matrix]:
    """Those outside of experts first, then those of each expert."""
    matrices = []
    for name, shape in _of_muon(parameters).items():
        if len(shape) == 2:
            numbered = re.search(r"\bexperts\.(\d+)\.", name)
            expert = int(numbered[1]) if numbered else NO_EXPERT
            matrices.append(Matrix(name, tuple(shape), expert))
            continue
        experts, *of_one = shape
        for expert in range(experts):
            matrices.append(Matrix(f"{name}[{expert}]", tuple(of_one), expert))
    return sorted(matrices, key=lambda matrix: matrix.expert)


def _fitting_splits(
    parameters: Parameters, matrices: Iterable[Matrix]
) -> dict[str, Split]:
    """The splits that fit the shapes of their matrices, by name of the matrix."""
    splits = {}
    for matrix in matrices:
        weight, _, _ = matrix.name.partition("[")
        split = Split.of(parameters.fused.get(weight))
        if not split.problem_with(matrix.shape):
            splits[matrix.name] = split
    return splits


def _notes(model: Model, parameters: Parameters) -> str:
    ours = sum(map(math.prod, model.shapes)) / 1e9
    total = sum(map(math.prod, parameters.everything.values())) / 1e9
    count = len(model.names)
    parameters_of = f"{_rounded(ours)} of {_rounded(total)} billion parameters"
    notes = f"{count:,} matrices with {parameters_of}"
    if model.n_experts:
        notes += f"; {model.active} of {model.n_experts} experts are active"
    # Names without the numbers of layers.
    layers = set()
    for name in model.names:
        layer = name.removesuffix(".weight")
        layers.add(re.sub(r"\.\d+\.", ".*.", layer))
    doubtful = []
    for layer in sorted(layers):
        _, _, last_word = layer.rpartition(".")
        if DOUBTFUL.search(last_word):
            doubtful.append(layer)
    if doubtful and not parameters.is_module:
        names = listed(doubtful, 3)
        notes += f".\nAmong them are some that look like AdamW's: {names}"
    return notes


def _rounded(number: float) -> str:
    """With three digits or more, and without an exponent."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def case_of(
    model: Model, name: str, layout: str, ranks: int, tokens: int | None = None
) -> Case:
    """``model`` on one of ``FORMS``, with ``tokens`` in a training step."""
    one_dimension = re.fullmatch(r"fsdp|ddp", layout)
    two_dimensions = re.fullmatch(r"(hsdp|fsdp-tp|fsdp-ep):(\d+)x(\d+)", layout)
    kind, outer, inner = "", 0, 0
    if one_dimension:
        kind, outer, inner = layout, ranks, 1
    elif two_dimensions:
        kind = two_dimensions[1].removeprefix("fsdp-")
        outer, inner = int(two_dimensions[2]), int(two_dimensions[3])
    if ranks < 1 or outer * inner != ranks:
        raise ValueError(f"--layout {layout} is not {FORMS}, where A x B = {ranks}")
    model = model._replace(tokens=tokens or model.tokens)
    return Case(name, kind, outer, inner, model)


def sensible_layouts(model: Model, ranks: int, hardware: Hardware) -> list[str]:
    """FSDP over all ranks; HSDP over whole nodes, four times as many each; DDP; and expert parallelism. Weights,
    gradients and momentum of Muon's matrices take at most half of a GPU's memory, except under FSDP.
    """
    total = TRAINING_BYTES * sum(map(math.prod, model.shapes))
    layouts = ["fsdp"]
    sizes = []
    size = hardware.gpus_per_node
    while size < ranks and size > 1:
        if ranks % size == 0:
            sizes.append(size)
        size *= 4
    for size in sizes:
        if total / size <= hardware.memory / 2:
            layouts.append(f"hsdp:{ranks // size}x{size}")
    if ranks > 1 and total <= hardware.memory / 2:
        layouts.append("ddp")
    for size in _expert_sizes(model.n_experts, ranks, hardware.gpus_per_node):
        layouts.append(f"fsdp-ep:{ranks // size}x{size}")
    return layouts


def _expert_sizes(experts: int, ranks: int, node: int) -> list[int]:
    """The usual numbers of ranks with different experts, as far as they divide the experts and the ranks: whole nodes,
    twice as many each; or else as many ranks of a node as possible.
    """
    common = math.gcd(experts, ranks)
    if not experts:
        return []
    sizes = []
    size = node
    while size <= common:
        if common % size == 0:
            sizes.append(size)
        size *= 2
    inside_node = math.gcd(common, node)
    if not sizes and inside_node > 1:
        sizes.append(inside_node)
    return sizes


def as_users_have_it(
    model: Model, notes: str, shard_dim: int, is_split: bool
) -> tuple[Model, str]:
    """``model`` and ``notes`` with stacks of experts that are cut along ``shard_dim``, and with fused weights that are
    split.

    Raises:
        ValueError: the model has no such weights.
    """
    done = []
    if shard_dim == 1:
        if not model.stacked:
            raise ValueError("--shard-dim 1: the model has no stacks of experts")
        model = model._replace(stacked=False)
        done.append("stacks of experts are Shard(1)")
    if is_split:
        if not model.fused:
            raise ValueError("--split: split_of knows no fused weight of the model")
        model = model._replace(is_split=True)
        done.append(f"{len(model.fused)} fused weights are split")
    if done:
        notes += f".\nAs you have it, {' and '.join(done)}"
    return model, notes
