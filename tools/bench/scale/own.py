"""A model of the user's own: its matrices, and what Muon costs it, in words."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim._muon_engine.process_groups import listed
from torch.optim._muon_split import Split
from torch.optim._newton_schulz_variants import newton_schulz_bytes
from torch.optim.muon import partition_named_parameters, split_of
from tools.bench.models import Model, Shape

from ..engine_view import batch_size
from .cases import Case
from .hardware import Hardware
from .plan import make_plan
from .report import milliseconds, schedule_of
from .timeline import simulate


SOURCES = "a JSON of names and shapes, a transformers config.json, or module:function"
FORMS = "fsdp, ddp, hsdp:AxB (replicas x shards), fsdp-tp:AxB or fsdp-ep:AxB"
# Embeddings, heads, routers and biases of experts in a JSON: two dimensions, but AdamW's.
DOUBTFUL = re.compile(
    r"emb|tok|wte|wpe|head$|^output$|classifier|score|router|^gate$|bias"
)
# A change that saves a smaller part of the step is not proposed.
WORTH = 0.05
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
    notes = f"{count:,} matrices with {ours:.3g} of {total:.3g} billion parameters"
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


def answer(
    report: dict[str, Any], notes: str, hardware: Hardware, prefetch: int
) -> str:
    """At most 25 lines about the ``report`` of one case, with ``notes`` about its model."""
    case = report["case"]
    busiest = int(report["simulated"].busy.argmax())
    title = f"{case.title}\nMuon has {notes}."
    figures = [
        _waits(report, busiest),
        _limits(report),
        _memory(report, busiest),
        _owners(report, busiest),
    ]
    changes = f"What to change (simulated):\n{_changes(report, hardware, prefetch)}"
    assumptions = _assumptions(hardware, case.model)
    return "\n\n".join([title, "\n".join(figures), changes, assumptions])


def _waits(report: dict[str, Any], rank: int) -> str:
    """The phases of ``rank`` in the step, in their order."""
    begins, ends = [], []
    for event in report["simulated"].events:
        if event.kind == "orthogonalize":
            for place in np.flatnonzero(event.ranks == rank):
                begins.append(float(event.begin[place]))
                ends.append(float(event.end[place]))
    step = report["step"]
    busy = sum(end - begin for begin, end in zip(begins, ends))
    waits = abs(ends[-1] - begins[0] - busy)
    seconds_of = {
        "until its first matrices have arrived": begins[0],
        "Newton-Schulz": busy,
        "waits for other matrices": waits,
        "until all ranks have the last updates": step - ends[-1],
    }
    share = f"{report['of_training']:.2%} of a training step"
    lines = [
        f"A step of Muon takes {milliseconds(step)} ms, {share}. On its busiest rank:"
    ]
    for phase, seconds in seconds_of.items():
        lines.append(f"  {milliseconds(seconds):>6} ms  {phase}")
    return "\n".join(lines)


def _limits(report: dict[str, Any]) -> str:
    """Times that no step undercuts, and the tokens with which Muon is cheap."""
    work = milliseconds(report["share"])
    largest = milliseconds(report["largest"])
    wire = milliseconds(report["wire"])
    rest, case = report["rest"], report["case"]
    tokens = case.model.tokens
    # With these tokens, forward and backward take 99 times as long as Muon.
    enough_tokens = 99 * report["step"] / rest * tokens
    millions, enough_millions = tokens / 1e6, enough_tokens / 1e6
    of_rank = enough_tokens / case.world
    return f"""\
Limits: {work} ms (all work, divided by the ranks), {largest} ms (the largest matrix), {wire} ms (bytes).
The rest of a training step takes {rest:.3g} s, with {millions:.3g} million tokens (--tokens).
Muon's share would be 1% with {enough_millions:.3g} million tokens, {of_rank:,.0f} for each rank."""


def _memory(report: dict[str, Any], rank: int) -> str:
    schedule = report["schedule"]
    elements = 0
    owned_of_shape: Counter[Shape] = Counter()
    for layout, owner in zip(schedule.layouts, schedule.owners, strict=True):
        if rank in layout.holders:
            elements += layout.shards.numel_of(rank)
        if owner == rank:
            owned_of_shape[layout.shape] += 1
    most_bytes = 0
    for shape, count in owned_of_shape.items():
        batch = min(count, batch_size(shape))
        most_bytes = max(most_bytes, newton_schulz_bytes(shape) * batch)
    momentum = 4 * elements / 1e9
    buffers = report["buffers"] / 1e9
    newton_schulz = most_bytes / 1e9
    in_step = f"{buffers:.2f} GB of buffers, {newton_schulz:.2f} GB for Newton-Schulz"
    return f"Memory of this rank: {momentum:.2f} GB of momentum; in a step {in_step}."


def _owners(report: dict[str, Any], rank: int) -> str:
    schedule, world = report["schedule"], report["case"].world
    matrices_of_owner = Counter(schedule.owners)
    most_matrices = max(matrices_of_owner.values())
    names = []
    for layout, owner in zip(schedule.layouts, schedule.owners, strict=True):
        if owner == rank:
            names.append(layout.key.short)
    count = len(matrices_of_owner)
    owners = f"{count} of {world} ranks, with at most {most_matrices} matrices"
    return f"Owners: {owners}. This one is rank {rank} and owns\n{listed(names, 2)}."


def _assumptions(hardware: Hardware, model: Model) -> str:
    peak = hardware.peak_flops / 1e12
    in_newton_schulz = hardware.utilization
    in_training = hardware.training_utilization
    intra, inter = hardware.intra_bandwidth / 1e9, hardware.inter_bandwidth / 1e9
    parameters = model.active_numel / 1e9
    return f"""\
Assumed: {peak:.0f} TFLOP/s, of which Newton-Schulz gets {in_newton_schulz:.0%}, forward and backward {in_training:.0%}; {intra:.0f} GB/s
in a node of {hardware.gpus_per_node}, {inter:.0f} between nodes. Forward and backward: 6 x {parameters:.3g} billion active parameters of Muon
x tokens; embeddings, heads, attention's products and recomputation would lower Muon's share. Left out: passes
over local memory, which AdamW makes too, launches and congestion. None of this is measured on GPUs."""


def _changes(report: dict[str, Any], hardware: Hardware, prefetch: int) -> str:
    """Simulated alternatives that are worth it, the fastest first."""
    tried = {}
    for owners, seconds in report["divided"].items():
        change = f"owners_per_matrix={owners}, whose bits are not those of one process"
        tried[change] = seconds
    change = f"prefetch_count={prefetch + 1}, with one more bucket of memory"
    tried[change] = simulate(report["plan"], hardware, prefetch + 1).seconds
    nodes = hardware.gpus_per_node
    for change, case in _other_cases(report["case"]).items():
        plan = make_plan(schedule_of(case, hardware), case.world, nodes)
        tried[change] = simulate(plan, hardware, prefetch).seconds
    worth = (1 - WORTH) * report["step"]
    fastest = sorted(tried.items(), key=lambda change: change[1])
    lines = []
    for change, seconds in fastest[:3]:
        if seconds < worth:
            share = seconds / (seconds + report["rest"])
            lines.append(f"  {milliseconds(seconds):>6} ms, {share:.2%}: {change}")
    if not lines:
        return f"  nothing: no option saves {WORTH:.0%} of the step"
    return "\n".join(lines)


def _other_cases(case: Case) -> dict[str, Case]:
    """Alternatives for the training, by their description."""
    others = {}
    if case.model.fused:
        change = "split_of(model) for fused weights, as training should"
        others[change] = case._replace(own=case.model._replace(is_split=True))
    if case.model.stacked:
        change = "stacks of experts as Shard(1): shard_placement_fn of fully_shard"
        others[change] = case._replace(own=case.model._replace(stacked=False))
    if case.kind in ("hsdp", "ddp"):
        change = "FSDP over all ranks, which changes forward and backward too"
        others[change] = case._replace(kind="fsdp", outer=case.world, inner=1)
    return others
