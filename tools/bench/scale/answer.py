"""What Muon costs a model of the user's own, in words."""

import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.optim._muon_engine.process_groups import listed
from torch.optim._newton_schulz_variants import newton_schulz_bytes
from tools.bench.models import Model, Shape

from ..engine_view import batch_size
from ..table import render
from .costs import ADAMW, ADAMW_STATE, MUON_STATE, TRAINING_BYTES
from .hardware import Hardware
from .report import milliseconds
from .search import Change, Combination, Found, WORTH
from .timeline import PASSES_BESIDE, Step


def answer(report: dict[str, Any], notes: str, hardware: Hardware, found: Found) -> str:
    """Some 30 lines about the ``report`` of one case, with ``notes`` about its model and the result of a search."""
    case = report["case"]
    busiest = int(report["simulated"].busy.argmax())
    title = f"{case.title}\nMuon has {notes}."
    figures = [
        _phases(report, busiest),
        _limits(report),
        _memory(report, busiest),
        _against_adamw(report),
        _owners(report, busiest),
    ]
    changes = _changes(found, report["rest"])
    assumptions = _assumptions(hardware, case.model)
    return "\n\n".join([title, "\n".join(figures), changes, assumptions])


def _phases(report: dict[str, Any], rank: int) -> str:
    """What ``rank`` does in the step."""
    step, simulated = report["step"], report["simulated"]
    begins, ends = _orthogonalizing(simulated, rank)
    busy = float(simulated.busy[rank])
    # Those during Newton-Schulz take no time of their own.
    passes = float(simulated.exposed_passes()[rank])
    # Passes while the first matrices travel count as passes.
    before, after = _passes_outside(simulated, rank, begins[0], ends[-1])
    waits = abs(ends[-1] - begins[0] - busy - (passes - before - after))
    seconds_of = {
        "until its first matrices have arrived": begins[0] - before,
        "Newton-Schulz": busy,
        "passes over memory before and after it": passes,
        "waits for other matrices": waits,
        "until all ranks have the last updates": abs(step - ends[-1] - after),
    }
    share = f"{report['of_training']:.2%} of a training step"
    lines = [
        f"A step of Muon takes {milliseconds(step)} ms, {share}. On its busiest rank:"
    ]
    for phase, seconds in seconds_of.items():
        lines.append(f"  {milliseconds(seconds):>6} ms  {phase}")
    return "\n".join(lines)


def _orthogonalizing(step: Step, rank: int) -> tuple[list[float], list[float]]:
    """When Newton-Schulz begins and ends on ``rank``, by bucket."""
    begins, ends = [], []
    for event in step.events:
        if event.kind == "orthogonalize":
            for place in np.flatnonzero(event.ranks == rank):
                begins.append(float(event.begin[place]))
                ends.append(float(event.end[place]))
    return begins, ends


def _passes_outside(
    step: Step, rank: int, begin: float, end: float
) -> tuple[float, float]:
    """Seconds of the passes of ``rank`` before and after these times."""
    before, after = 0.0, 0.0
    for event in step.events:
        if event.kind in ("passes", PASSES_BESIDE):
            for place in np.flatnonzero(event.ranks == rank):
                began, ended = float(event.begin[place]), float(event.end[place])
                if ended <= begin:
                    before += ended - began
                elif ended > end:
                    # A pass of the stream of relays may begin during Newton-Schulz.
                    after += ended - max(began, end)
    return before, after


def _limits(report: dict[str, Any]) -> str:
    """Times that no step undercuts, and the tokens with which Muon is cheap."""
    work = milliseconds(report["share"])
    largest = milliseconds(report["largest"])
    wire = milliseconds(report["wire"])
    rest, case = report["rest"], report["case"]
    tokens = case.model.tokens
    of_gpu = tokens / case.world
    # With these tokens, forward and backward take 99 times as long as Muon.
    enough_tokens = 99 * report["step"] / rest * tokens
    millions, enough_millions = tokens / 1e6, enough_tokens / 1e6
    of_rank = enough_tokens / case.world
    return f"""\
Limits: {work} ms (all work, divided by the ranks), {largest} ms (the largest matrix), {wire} ms (bytes).
The rest of a training step takes {rest:.3g} s, with {millions:.3g} million tokens, {of_gpu:,.0f} for each rank.
Muon's share would be 1% with {enough_millions:.3g} million tokens, {of_rank:,.0f} for each rank."""


def _memory(report: dict[str, Any], rank: int) -> str:
    schedule, algorithm = report["schedule"], report["options"].algorithm
    elements = 0
    owned_of_shape: Counter[Shape] = Counter()
    for layout, owner in zip(schedule.layouts, schedule.owners, strict=True):
        if rank in layout.holders:
            elements += layout.shards.numel_of(rank)
        if owner == rank:
            owned_of_shape[layout.shape] += 1
    most_bytes = 0
    for shape, count in owned_of_shape.items():
        of_matrix = newton_schulz_bytes(shape, algorithm, is_cpu=False)
        batch = min(count, batch_size(shape, algorithm))
        most_bytes = max(most_bytes, of_matrix * batch)
    momentum = MUON_STATE * elements / 1e9
    buffers = report["buffers"] / 1e9
    newton_schulz = most_bytes / 1e9
    in_step = f"{buffers:.2f} GB of buffers, {newton_schulz:.2f} GB for Newton-Schulz"
    return f"Memory of this rank: {momentum:.2f} GB of momentum; in a step {in_step}."


def _against_adamw(report: dict[str, Any]) -> str:
    """Fused AdamW for the same parameters: its state and its step."""
    elements = float(report["elements"].max())
    state = ADAMW_STATE * elements / 1e9
    saved = (ADAMW_STATE - MUON_STATE) * elements / 1e9
    share = report["adamw_of_training"]
    more = 100 * (report["of_training"] - share)
    return f"""\
AdamW would take {milliseconds(report["adamw"])} ms, {share:.2%}, and {state:.2f} GB of state for these parameters: Muon saves {saved:.2f} GB
on each rank, and takes {more:.2f} percentage points more of a training step."""


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
    rate = hardware.memory_bandwidth / 1e12
    return f"""\
Assumed: {peak:.0f} TFLOP/s, of which products of Newton-Schulz get {in_newton_schulz:.0%}, forward and backward {in_training:.0%};
{rate:.1f} TB/s of memory; {intra:.0f} GB/s in a node of {hardware.gpus_per_node}, {inter:.0f} between nodes. Forward and backward: 6 x
{parameters:.3g} billion active parameters of Muon x tokens; embeddings, heads, attention's products and recomputation
would lower Muon's share. Left out: launches and congestion. Links are not measured; the rest is from one H100."""


def _changes(found: Found, rest: float) -> str:
    """The fastest combinations, and what their letters mean."""
    steps = found.steps
    title = f"What to change (simulated: {_count([found])}):"
    if not steps:
        return f"{title}\n  nothing: no combination saves {WORTH:.0%} of the step"
    letters: dict[Change, str] = {}
    for step in steps:
        for change in step.changes:
            letters.setdefault(change, string.ascii_lowercase[len(letters)])
    lines = [title]
    for step in steps:
        share = step.seconds / (step.seconds + rest)
        names = " + ".join(sorted(letters[change] for change in step.changes))
        figures = f"{milliseconds(step.seconds):>6} ms, {share:.2%}, {_stored(step)} GB"
        lines.append(f"  {figures}: {names}")
    for change, letter in letters.items():
        lines.append(f"  {letter}: {change.full}")
    now = _stored(found.best[0])
    lines.append(f"GB: weights, gradients and momentum of the fullest rank; {now} now.")
    return "\n".join(lines)


def _stored(combination: Combination) -> str:
    """GB of weights, gradients and momentum of the fullest rank."""
    return f"{TRAINING_BYTES * combination.elements / 1e9:.1f}"


def _count(searches: Sequence[Found]) -> str:
    tried = sum(found.tried for found in searches)
    left_out = sum(found.left_out for found in searches)
    count = f"{tried:,} combinations"
    if left_out:
        count += f"; no time for {left_out:,} others, see --seconds"
    return count


def layouts_answer(
    reports: Sequence[dict[str, Any]],
    searches: Sequence[Found],
    notes: str,
    hardware: Hardware,
) -> str:
    """A row for each layout, the fastest first: as it is, and with the best changes; and what they mean."""
    rows: list[tuple[float, list[str]]] = []
    meanings: dict[Change, None] = {}
    for report, found in zip(reports, searches, strict=True):
        best = found.fastest
        meanings |= dict.fromkeys(best.changes)
        share = best.seconds / (best.seconds + report["rest"])
        adamw = best.elements * ADAMW / hardware.memory_bandwidth
        more = share - adamw / (adamw + report["rest"])
        cells = [
            report["case"].mesh,
            milliseconds(report["step"]),
            f"{report['of_training']:.2%}",
            milliseconds(best.seconds),
            f"{share:.2%}",
            milliseconds(adamw),
            f"{more:.2%}",
            _stored(best),
            " + ".join(change.short for change in best.changes) or "nothing",
        ]
        rows.append((best.seconds, cells))
    in_order = sorted(rows, key=lambda row: row[0])
    head = ["layout", "ms", "share", "best, ms", "share"]
    head += ["AdamW, ms", "Muon's - AdamW's", "GB", "with"]
    table = render(head, [cells for _, cells in in_order])
    case = reports[0]["case"]
    title = f"{case.name}, {case.world} ranks\nMuon has {notes}."
    rest = f"{reports[0]['rest']:.3g}"
    legend = [
        f'share: of a training step, whose rest takes {rest} s in each layout here. The columns from "best" on are with the',
        "changes. AdamW: fused, for the same parameters. Muon's - AdamW's: of the shares. GB: weights, gradients and",
        f"momentum of the fullest rank. Simulated: {_count(searches)}.",
    ]
    for change in meanings:
        legend.append(f"  {change.short}: {change.full}")
    assumptions = _assumptions(hardware, case.model)
    return "\n\n".join([title, table, "\n".join(legend), assumptions])
