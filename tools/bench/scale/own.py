"""A model of the user's own: its matrices, and what Muon costs it, in words."""

import json
import math
import re
from collections import Counter
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch.optim._muon_engine.process_groups import listed
from torch.optim._muon_split import Split
from torch.optim._newton_schulz_variants import newton_schulz_bytes
from torch.optim.muon import partition_named_parameters, split_of
from tools.bench.models import Model

from ..engine_view import batch_size
from .cases import Case
from .hardware import Hardware
from .plan import make_plan
from .report import milliseconds as ms, schedule_of
from .timeline import simulate


SOURCES = "a JSON of names and shapes, a transformers config.json, or module:function"
FORMS = "fsdp, ddp, hsdp:AxB (replicas x shards), fsdp-tp:AxB or fsdp-ep:AxB"
# Embeddings, heads, routers and biases of experts in a JSON: two dimensions, but AdamW's.
DOUBTFUL = re.compile(
    r"emb|tok|wte|wpe|head$|^output$|classifier|score|router|^gate$|bias"
)
# A change that saves a smaller part of the step is not proposed.
WORTH = 0.05


def read(source: str, active: int | None) -> tuple[Model, str]:
    """The model of one of ``SOURCES``, and remarks on it.

    Raises:
        ValueError: ``source`` is something else, lacks matrices, or does not say how many experts are active.
    """
    path, make, shapes = Path(source), None, {}
    try:
        if path.suffix != ".json":
            make = resolve_name(source)
            if not callable(make):
                raise TypeError("no function is named after a colon")
        elif "model_type" in (content := json.loads(path.read_bytes())):
            import transformers

            config = transformers.AutoConfig.from_pretrained(path)
            names = config.architectures or ["AutoModelForCausalLM"]
            make = getattr(transformers, names[0])
            make = partial(getattr(make, "from_config", make), config)
        else:
            shapes = {name: tuple(map(int, of)) for name, of in content.items()}
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"--model {source} is not {SOURCES}: {error!r}") from error
    everything, fused = shapes, {}
    if make is not None:
        with torch.device("meta"):
            model = make()
        matrices, _ = partition_named_parameters(model, allow_batched_matrices=True)
        shapes, fused = {name: param.shape for name, param in matrices}, split_of(model)
        everything = {name: param.shape for name, param in model.named_parameters()}
        config = getattr(model, "config", None)
        config = getattr(config, "get_text_config", lambda: config)()
        active = active or getattr(config, "num_experts_per_tok", None)
    # Each matrix with the number of its expert, -1 for none.
    found, stacked = [], False
    for name, shape in shapes.items():
        numbered = re.search(r"\bexperts\.(\d+)\.", name)
        if len(shape) == 3 and (make or "expert" in name):
            stacked = True
            found += [(f"{name}[{e}]", tuple(shape[1:]), e) for e in range(shape[0])]
        elif len(shape) == 2:
            found.append((name, tuple(shape), int(numbered[1]) if numbered else -1))
    found.sort(key=lambda one: one[2])
    dense, expert = ([s for _, s, e in found if e == which] for which in (-1, 0))
    experts = found[-1][2] + 1 if found else 0
    if not found or len(found) != len(dense) + len(expert) * experts:
        what = "layers with different numbers of experts" if found else "no matrices"
        raise ValueError(f"--model {source} has {what}")
    if experts and not active:
        raise ValueError("--active-experts K: how many experts does a token use?")
    names = [name for name, *_ in found]
    fits = {}
    for name, shape, _ in found:
        split = Split.of(fused.get(name.partition("[")[0]))
        if not split.problem_with(shape):
            fits[name] = split
    model = Model(
        dense, expert, experts, active or 0, stacked=stacked, names=names, fused=fits
    )
    both = model.shapes, everything.values()
    ours, total = (sum(map(math.prod, shapes)) / 1e9 for shapes in both)
    notes = f"{len(names):,} matrices with {ours:.3g} of {total:.3g} billion parameters"
    if experts:
        notes += f"; {active} of {experts} experts are active"
    layers = {re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight")) for name in names}
    kinds = sorted(l for l in layers if DOUBTFUL.search(l.rpartition(".")[2]))
    if kinds and make is None:
        notes += f".\nAmong them are some that look like AdamW's: {listed(kinds, 3)}"
    return model, notes


def case_of(
    model: Model, name: str, layout: str, ranks: int, tokens: int | None = None
) -> Case:
    """``model`` on one of ``FORMS``, with ``tokens`` in a training step."""
    form = re.fullmatch(r"(fsdp|ddp)|(hsdp|fsdp-tp|fsdp-ep):(\d+)x(\d+)", layout)
    one, two, *sizes = form.groups() if form else [None] * 4
    mesh = [ranks, 1] if one else [int(size or 0) for size in sizes]
    if ranks < 1 or math.prod(mesh) != ranks:
        raise ValueError(f"--layout {layout} is not {FORMS}, where A x B = {ranks}")
    model = model._replace(tokens=tokens or model.tokens)
    return Case(name, one or two.removeprefix("fsdp-"), *mesh, model)


def answer(found: dict[str, Any], notes: str, hardware: Hardware, prefetch: int) -> str:
    """At most 25 lines about ``found``, a report, with ``notes`` about its model."""
    case, schedule, hw = found["case"], found["schedule"], hardware
    model, step, rest = case.model, found["step"], found["rest"]
    rank = int(found["simulated"].busy.argmax())
    runs = [
        (float(event.begin[at]), float(event.end[at]))
        for event in found["simulated"].events
        for at in np.flatnonzero(event.ranks == rank)
        if event.kind == "orthogonalize"
    ]
    first, last = runs[0][0], runs[-1][1]
    busy = sum(end - begin for begin, end in runs)
    owned = Counter(schedule.owners)
    work = [m for m, owner in enumerate(schedule.owners) if owner == rank]
    batches = Counter(schedule.layouts[m].shape for m in work).items()
    space = max(newton_schulz_bytes(s) * min(n, batch_size(s)) for s, n in batches)
    mine = [layout for layout in schedule.layouts if rank in layout.holders]
    momentum = 4 * sum(layout.shards.numel_of(rank) for layout in mine)
    # With these tokens, forward and backward take 99 times as long as Muon.
    tokens = 99 * step / rest * model.tokens
    return f"""\
{case.title}
Muon has {notes}.

A step of Muon takes {ms(step)} ms, {found["of_training"]:.2%} of a training step. On its busiest rank:
  {ms(first):>6} ms  until its first matrices have arrived
  {ms(busy):>6} ms  Newton-Schulz
  {ms(abs(last - first - busy)):>6} ms  waits for other matrices
  {ms(step - last):>6} ms  until all ranks have the last updates
Limits: {ms(found["share"])} ms (all work, divided by the ranks), {ms(found["largest"])} ms (the largest matrix), {ms(found["wire"])} ms (bytes).
The rest of a training step takes {rest:.3g} s, with {model.tokens / 1e6:.3g} million tokens (--tokens).
Muon's share would be 1% with {tokens / 1e6:.3g} million tokens, {tokens / case.world:,.0f} for each rank.
Memory of this rank: {momentum / 1e9:.2f} GB of momentum; in a step {found["buffers"] / 1e9:.2f} GB of buffers, {space / 1e9:.2f} GB for Newton-Schulz.
Owners: {len(owned)} of {case.world} ranks, with at most {max(owned.values())} matrices. This one is rank {rank} and owns
{listed([schedule.layouts[m].key.short for m in work], 2)}.

What to change (simulated):
{_changes(found, hardware, prefetch)}

Assumed: {hw.peak_flops / 1e12:.0f} TFLOP/s, of which Newton-Schulz gets {hw.utilization:.0%}, forward and backward {hw.training_utilization:.0%}; {hw.intra_bandwidth / 1e9:.0f} GB/s
in a node of {hw.gpus_per_node}, {hw.inter_bandwidth / 1e9:.0f} between nodes. Forward and backward: 6 x {model.active_numel / 1e9:.3g} billion active parameters of Muon
x tokens; embeddings, heads, attention's products and recomputation would lower Muon's share. Left out: passes
over local memory, which AdamW makes too, launches and congestion. None of this is measured on GPUs."""


def _changes(found: dict[str, Any], hardware: Hardware, prefetch: int) -> str:
    """Simulated alternatives that are worth it, the fastest first."""
    case = found["case"]
    words = "owners_per_matrix={}, whose bits are not those of one process"
    tried = {words.format(n): seconds for n, seconds in found["divided"].items()}
    words = f"prefetch_count={prefetch + 1}, with one more bucket of memory"
    tried[words] = simulate(found["plan"], hardware, prefetch + 1).seconds
    others = {}
    if case.model.fused:
        words = "split_of(model) for fused weights, as training should"
        others[words] = case._replace(own=case.model._replace(is_split=True))
    if case.model.stacked:
        words = "stacks of experts as Shard(1): shard_placement_fn of fully_shard"
        others[words] = case._replace(own=case.model._replace(stacked=False))
    if case.kind in ("hsdp", "ddp"):
        words = "FSDP over all ranks, which changes forward and backward too"
        others[words] = case._replace(kind="fsdp", outer=case.world, inner=1)
    nodes = hardware.gpus_per_node
    for words, other in others.items():
        plan = make_plan(schedule_of(other, hardware), case.world, nodes)
        tried[words] = simulate(plan, hardware, prefetch).seconds
    lines = [
        f"  {ms(seconds):>6} ms, {seconds / (seconds + found['rest']):.2%}: {words}"
        for words, seconds in sorted(tried.items(), key=lambda item: item[1])[:3]
        if seconds < (1 - WORTH) * found["step"]
    ]
    return "\n".join(lines) or f"  nothing: no option saves {WORTH:.0%} of the step"
