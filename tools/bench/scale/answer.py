"""What Muon costs a model of the user's own, in words."""

from collections import Counter
from typing import Any

import numpy as np
from torch.optim._muon_engine.process_groups import listed
from torch.optim._newton_schulz_variants import newton_schulz_bytes
from tools.bench.models import Model, Shape

from ..engine_view import batch_size
from .cases import Case
from .hardware import Hardware
from .plan import make_plan
from .report import milliseconds, schedule_of
from .timeline import simulate


# A change that saves a smaller part of the step is not proposed.
WORTH = 0.05


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
