"""``scale``: the figures of one case and of its alternatives."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim._muon_engine.layouts.layout import Layout
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.division import divided
from torch.optim._muon_engine.schedule.owners import assign_owners
from torch.optim._muon_engine.schedule.packs import slots_for
from torch.optim._muon_engine.schedule.schedule import Schedule

from ..engine_view import described
from ..table import render
from .cases import Case
from .costs import (
    ADAMW,
    ADAMW_STATE,
    DEFAULT,
    MatrixKind,
    MUON_STATE,
    newton_schulz_seconds,
    Options,
)
from .hardware import Hardware
from .plan import IN, make_plan, OUT, Plan
from .timeline import simulate, Step


# The numbers of owners per matrix that the table compares, and the algorithms and passes.
OWNERS = (2, 4, 8, "auto")
OPTION_NAMES = {
    "default": ("quintic", False),
    "fused": ("quintic", True),
    "symmetric": ("symmetric", False),
    "gram": ("gram", False),
    "gram, fused": ("gram", True),
}


def schedule_of(case: Case, hardware: Hardware, options: Options = DEFAULT) -> Schedule:
    """The engine's schedule on nodes of this hardware."""
    blocks = blocks_of(case.layouts(), hardware, options)
    owners = assign_owners(blocks, ranks_per_node=hardware.gpus_per_node)
    return scheduled(blocks, owners, hardware, options.prefetch)


def blocks_of(
    layouts: Sequence[Layout], hardware: Hardware, options: Options
) -> list[Layout]:
    """The layouts, with a block for each owner of a divided matrix."""
    algorithms = itertools.repeat(options.algorithm)
    return divided(layouts, options.owners, hardware.gpus_per_node, algorithms)


def scheduled(
    blocks: Sequence[Layout], owners: Sequence[int], hardware: Hardware, prefetch: int
) -> Schedule:
    return make_schedule(
        blocks,
        owners,
        ranks_per_node=hardware.gpus_per_node,
        slots=slots_for(prefetch),
    )


def simulated(case: Case, hardware: Hardware, options: Options = DEFAULT) -> Step:
    """A step of the engine's schedule."""
    schedule = schedule_of(case, hardware, options)
    plan = make_plan(schedule, case.world, hardware.gpus_per_node)
    return simulate(plan, hardware, options)


def report(
    case: Case, schedule: Schedule, hardware: Hardware, options: Options = DEFAULT
) -> dict[str, Any]:
    """Times in seconds, sizes in bytes."""
    plan = make_plan(schedule, case.world, hardware.gpus_per_node)
    step = simulate(plan, hardware, options)
    seconds = step.seconds
    busiest = int(step.busy.argmax())
    _, buffers = described(schedule, busiest, options.prefetch)
    whole = case.layouts()
    passes = float(step.exposed_passes().sum())
    work = _seconds_of_all(whole, hardware, options) + passes
    direct = plan
    one_level = _in_one_level(schedule)
    if one_level is not None:
        direct = make_plan(one_level, case.world, hardware.gpus_per_node)
    limits = {
        "wire": _wire(direct, hardware),
        "share": work / case.world,
        "largest": _largest(whole, hardware, options),
    }
    rest = rest_of_training(case, hardware)
    elements = held_elements(plan)
    adamw = float(elements.max()) * ADAMW / hardware.memory_bandwidth
    return {
        "case": case,
        "title": case.title,
        "options": options,
        "schedule": schedule,
        "plan": plan,
        # Without exchanges in two levels.
        "direct": direct,
        "simulated": step,
        "elements": elements,
        "step": seconds,
        "rest": rest,
        "of_training": seconds / (seconds + rest),
        "adamw": adamw,
        "adamw_of_training": adamw / (adamw + rest),
        "buffers": buffers,
        **limits,
        "ideal": max(limits.values()),
    }


# What is in a report of one step, and takes much memory.
LARGE = ("schedule", "plan", "direct", "simulated")


def comparisons(report: dict[str, Any], hardware: Hardware) -> dict[str, Any]:
    """The small values of a ``report`` with what else the table has: bytes, and other ways to make the step."""
    case, options, plan = report["case"], report["options"], report["plan"]
    schedule, step = report["schedule"], report["simulated"]
    one_level_seconds = None
    if report["direct"] is not plan:
        one_level_seconds = simulate(report["direct"], hardware, options).seconds
    sent, received = link_bytes(plan).sum(1)
    working = step.busy + step.exposed_passes()
    found = {
        **report,
        "matrices": len(schedule.layouts),
        "owners": len(set(schedule.owners)),
        "buckets": max(bucket.bucket.index for bucket in plan.buckets) + 1,
        "relays": sum(len(bucket.relays) for bucket in plan.buckets),
        "idle": 1 - float(working.mean()) / step.seconds,
        "sent": (sent.mean(), sent.max()),
        "received": (received.mean(), received.max()),
        "all_gather": all_gather(case.layouts(), hardware, options),
        "each_replica": _each_replica(case, hardware, options),
        "one_level": one_level_seconds,
        "by_options": _by_options(plan, hardware, options),
    }
    for name in LARGE:
        del found[name]
    return found


def with_owners(
    row: dict[str, Any], hardware: Hardware, options: Options
) -> dict[str, Any]:
    """A row with the seconds of several owners per matrix, by their number; and of "auto" with the fastest options."""
    case = row["case"]
    algorithm, fused = OPTION_NAMES["gram, fused"]
    fastest = options._replace(algorithm=algorithm, fused=fused, owners="auto")
    return {
        **row,
        "divided": _divided(case, hardware, options),
        "with_auto": simulated(case, hardware, fastest).seconds,
    }


def _divided(
    case: Case, hardware: Hardware, options: Options
) -> dict[int | str, float]:
    """Seconds with several owners per matrix, by their number, where this divides a matrix."""
    seconds: dict[int | str, float] = {}
    whole = case.layouts()
    for owners in (1, *OWNERS):
        with_owners = options._replace(owners=owners)
        schedule = schedule_of(case, hardware, with_owners)
        if owners == 1 or len(schedule.layouts) > len(whole):
            plan = make_plan(schedule, case.world, hardware.gpus_per_node)
            seconds[owners] = simulate(plan, hardware, with_owners).seconds
    return seconds


def _by_options(plan: Plan, hardware: Hardware, options: Options) -> dict[str, float]:
    """Seconds of the same schedule with other algorithms and passes, by their name."""
    seconds = {}
    for name, (algorithm, fused) in OPTION_NAMES.items():
        others = options._replace(algorithm=algorithm, fused=fused)
        seconds[name] = simulate(plan, hardware, others).seconds
    return seconds


def _in_one_level(schedule: Schedule) -> Schedule | None:
    """The schedule with direct exchanges, if some of its own have two levels."""
    if all(bucket.node_size <= 1 for bucket in schedule.buckets):
        return None
    buckets = [replace(bucket, node_size=1) for bucket in schedule.buckets]
    return replace(schedule, buckets=tuple(buckets))


def _each_replica(case: Case, hardware: Hardware, options: Options) -> float | None:
    """Seconds if each replica of HSDP orthogonalizes everything by itself."""
    if case.kind != "hsdp":
        return None
    return simulated(case._replace(outer=1), hardware, options).seconds


def _seconds_of_all(
    layouts: Sequence[Layout], hardware: Hardware, options: Options
) -> float:
    """Newton-Schulz of all ``layouts``, one after the other."""
    shapes = Counter(layout.full_shape for layout in layouts)
    seconds = 0.0
    for shape, count in shapes.items():
        kind = MatrixKind(shape)
        seconds += newton_schulz_seconds(kind, count, options.algorithm, hardware)
    return seconds


def _largest(layouts: Sequence[Layout], hardware: Hardware, options: Options) -> float:
    """Newton-Schulz of the largest of ``layouts``, alone."""
    seconds = []
    for shape in {layout.full_shape for layout in layouts}:
        kind = MatrixKind(shape)
        seconds.append(newton_schulz_seconds(kind, 1, options.algorithm, hardware))
    return max(seconds)


def _wire(plan: Plan, hardware: Hardware) -> float:
    """Seconds of the mean bytes of a link."""
    bandwidths = np.array([hardware.intra_bandwidth, hardware.inter_bandwidth])
    mean_bytes = link_bytes(plan).mean(2)
    return float((mean_bytes / bandwidths).max())


def rest_of_training(case: Case, hardware: Hardware) -> float:
    """Seconds of forward and backward of a training step."""
    model = case.model
    flops = 6 * model.active_numel * model.tokens / case.world
    rate = hardware.peak_flops * hardware.training_utilization
    return flops / rate


def link_bytes(plan: Plan) -> NDArray:
    """The bytes on each rank's links, with relays, shape (out or in, intra or inter, ranks)."""
    total_bytes = np.zeros((2, 2, plan.world))
    for bucket in plan.buckets:
        for hop in (*bucket.gather, *bucket.scatter):
            total_bytes[:, :, bucket.ranks] += hop.nbytes
        for wave in bucket.relays:
            link_kind = int(wave.nodes > 1)
            nbytes = np.broadcast_to(wave.nbytes[:, None], wave.ranks.shape)
            # A broadcast cuts the ring to a chain, whose last rank does not send.
            _, replicas = wave.ranks.shape
            share = 1 - 1 / replicas
            total_bytes[OUT, link_kind, wave.ranks] += share * nbytes
            total_bytes[IN, link_kind, wave.ranks] += ~wave.is_source * nbytes
    return total_bytes


def held_elements(plan: Plan) -> NDArray:
    """The elements that each rank stores."""
    elements = np.zeros(plan.world)
    for bucket in plan.buckets:
        elements[bucket.ranks] += bucket.elements.held
    return elements


def all_gather(
    layouts: Sequence[Layout], hardware: Hardware, options: Options
) -> float:
    """Seconds if every rank gathers and orthogonalizes each of its matrices, perfectly overlapped."""
    mine = [layout for layout in layouts if 0 in layout.holders]
    busy = _seconds_of_all(mine, hardware, options)
    wire = 0.0
    for layout in mine:
        near = layout.holders[-1] < hardware.gpus_per_node
        bandwidth = hardware.intra_bandwidth if near else hardware.inter_bandwidth
        lacking = layout.numel - min(layout.shards.numels)
        nbytes = lacking * torch.bfloat16.itemsize
        wire += nbytes / bandwidth
    return max(busy, wire)


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    thousandths = 1e3 * seconds
    return f"{thousandths:.2f}" if seconds < 0.01 else f"{thousandths:.0f}"


COLUMNS = (
    "ms and GB",
    "matrices per owner",
    "step",
    "million tokens",
    "share of a training step",
    "ideal",
    "step / ideal",
    "idle",
    "all-gather",
    "owners per replica",
    "one level",
    "sent: mean",
    "busiest",
    "received: mean",
    "busiest",
    "buffers",
    "buckets",
    "broadcasts",
)
OPTION_COLUMNS = (
    "ms by options",
    *OPTION_NAMES,
    "with auto",
    "AdamW",
    "share of a training step",
    "with the best",
    "AdamW's",
    "Muon's - AdamW's",
    "GB saved",
)
DIVIDED_COLUMNS = (
    "ms by owners per matrix",
    "true limit",
    "1",
    *map(str, OWNERS),
    "1 / limit",
    "auto / limit",
    "auto / best number",
    "share with auto",
)


def text(cases: Sequence[dict[str, Any]]) -> str:
    """One row per case."""
    rows = []
    for case in cases:
        step, ideal = case["step"], case["ideal"]
        per_owner = case["matrices"] / case["owners"]
        tokens = case["case"].model.tokens / 1e6
        rows.append(
            [
                case["title"],
                f"{per_owner:.1f}",
                milliseconds(step),
                f"{tokens:.1f}",
                f"{case['of_training']:.2%}",
                milliseconds(ideal),
                f"{step / ideal:.2f}",
                f"{case['idle']:.0%}",
                milliseconds(case["all_gather"]),
                milliseconds(case["each_replica"]),
                milliseconds(case["one_level"]),
                *map(gigabytes, case["sent"]),
                *map(gigabytes, case["received"]),
                gigabytes(case["buffers"]),
                str(case["buckets"]),
                str(case["relays"]),
            ]
        )
    return render(COLUMNS, rows)


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


def divided_text(cases: Sequence[dict[str, Any]]) -> str:
    """One row per case: the step with several owners per matrix, over all work and bytes divided by all ranks."""
    rows = []
    for case in cases:
        by_owners = case["divided"]
        one = by_owners[1]
        auto = by_owners.get("auto", one)
        numbers = [seconds for owners, seconds in by_owners.items() if owners != "auto"]
        limit = max(case["share"], case["wire"])
        times = [by_owners.get(owners) for owners in (1, *OWNERS)]
        share = auto / (auto + case["rest"])
        rows.append(
            [
                case["title"],
                milliseconds(limit),
                *map(milliseconds, times),
                f"{one / limit:.2f}",
                f"{auto / limit:.2f}",
                f"{auto / min(numbers):.2f}",
                f"{share:.2%}",
            ]
        )
    return render(DIVIDED_COLUMNS, rows)


def options_text(cases: Sequence[dict[str, Any]]) -> str:
    """One row per case: the step by options, against fused AdamW for the same parameters."""
    rows = []
    for case in cases:
        by_options, with_auto = case["by_options"], case["with_auto"]
        best = min(with_auto, *by_options.values())
        share = best / (best + case["rest"])
        saved = (ADAMW_STATE - MUON_STATE) * case["elements"].max()
        difference = case["of_training"] - case["adamw_of_training"]
        rows.append(
            [
                case["title"],
                *map(milliseconds, by_options.values()),
                milliseconds(with_auto),
                milliseconds(case["adamw"]),
                f"{case['of_training']:.2%}",
                f"{share:.2%}",
                f"{case['adamw_of_training']:.2%}",
                f"{difference:.2%}",
                gigabytes(saved),
            ]
        )
    return render(OPTION_COLUMNS, rows)
