"""``scale``: the figures of one case and of its alternatives."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim._muon_engine.layouts.layout import Layout
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.division import divided
from torch.optim._muon_engine.schedule.owners import assign_owners, newton_schulz_flops
from torch.optim._muon_engine.schedule.schedule import Schedule

from ..engine_view import described
from ..table import render
from .cases import Case
from .hardware import Hardware
from .plan import IN, make_plan, OUT, Plan
from .timeline import simulate


# The numbers of owners per matrix that the table compares.
OWNERS = (2, 4, 8, "auto")


def schedule_of(case: Case, hardware: Hardware, owners: int | str = 1) -> Schedule:
    """The engine's schedule on nodes of this hardware."""
    layouts = divided(case.layouts(), owners, hardware.gpus_per_node)
    return make_schedule(
        layouts,
        assign_owners(layouts, ranks_per_node=hardware.gpus_per_node),
        ranks_per_node=hardware.gpus_per_node,
    )


def report(
    case: Case, schedule: Schedule, hardware: Hardware, prefetch: int
) -> dict[str, Any]:
    """Times in seconds, sizes in bytes."""
    plan = make_plan(schedule, case.world, hardware.gpus_per_node)
    step = simulate(plan, hardware, prefetch)
    seconds = step.seconds
    sent, received = link_bytes(plan).sum(1)
    busiest = int(step.busy.argmax())
    _, buffers = described(schedule, busiest, prefetch)
    direct, one_level_seconds = plan, None
    one_level = _in_one_level(schedule)
    if one_level is not None:
        direct = make_plan(one_level, case.world, hardware.gpus_per_node)
        one_level_seconds = simulate(direct, hardware, prefetch).seconds
    limits = _limits(case, schedule, direct, hardware)
    rest = _rest_of_training(case, hardware)
    return {
        "case": case,
        "title": case.title,
        "schedule": schedule,
        "plan": plan,
        "simulated": step,
        "matrices": len(schedule.layouts),
        "owners": len(set(schedule.owners)),
        "buckets": max(bucket.bucket.index for bucket in plan.buckets) + 1,
        "relays": sum(len(bucket.relays) for bucket in plan.buckets),
        "step": seconds,
        "rest": rest,
        "of_training": seconds / (seconds + rest),
        "idle": 1 - float(step.busy.mean()) / seconds,
        "sent": (sent.mean(), sent.max()),
        "received": (received.mean(), received.max()),
        "buffers": buffers,
        "all_gather": all_gather(schedule.layouts, hardware),
        "each_replica": _each_replica(case, hardware, prefetch),
        "one_level": one_level_seconds,
        "divided": {1: seconds, **_divided(case, schedule, hardware, prefetch)},
        **limits,
        "ideal": max(limits.values()),
    }


def _divided(
    case: Case, schedule: Schedule, hardware: Hardware, prefetch: int
) -> dict[int | str, float]:
    """Seconds with several owners per matrix, by their number, where this divides a matrix."""
    seconds = {}
    for owners in OWNERS:
        divided_schedule = schedule_of(case, hardware, owners)
        if len(divided_schedule.layouts) > len(schedule.layouts):
            plan = make_plan(divided_schedule, case.world, hardware.gpus_per_node)
            seconds[owners] = simulate(plan, hardware, prefetch).seconds
    return seconds


def _in_one_level(schedule: Schedule) -> Schedule | None:
    """The schedule with direct exchanges, if some of its own have two levels."""
    if all(bucket.node_size <= 1 for bucket in schedule.buckets):
        return None
    buckets = [replace(bucket, node_size=1) for bucket in schedule.buckets]
    return replace(schedule, buckets=tuple(buckets))


def _each_replica(case: Case, hardware: Hardware, prefetch: int) -> float | None:
    """Seconds if each replica of HSDP orthogonalizes everything by itself."""
    if case.kind != "hsdp":
        return None
    schedule = schedule_of(case._replace(outer=1), hardware)
    plan = make_plan(schedule, case.inner, hardware.gpus_per_node)
    return simulate(plan, hardware, prefetch).seconds


def _limits(
    case: Case, schedule: Schedule, direct: Plan, hardware: Hardware
) -> dict[str, float]:
    """Seconds that no distribution of whole matrices undercuts; ``direct`` sends nothing twice."""
    flops = [newton_schulz_flops(layout.shape) for layout in schedule.layouts]
    bandwidths = np.array([hardware.intra_bandwidth, hardware.inter_bandwidth])
    mean_bytes = link_bytes(direct).mean(2)
    busiest_link = (mean_bytes / bandwidths).max()
    return {
        "wire": float(busiest_link),
        "share": sum(flops) / case.world / hardware.flops,
        "largest": max(flops) / hardware.flops,
    }


def _rest_of_training(case: Case, hardware: Hardware) -> float:
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
            link_kind = int(wave.nodes(plan.gpus_per_node) > 1)
            nbytes = np.broadcast_to(wave.nbytes[:, None], wave.ranks.shape)
            # A broadcast cuts the ring to a chain, whose last rank does not send.
            _, replicas = wave.ranks.shape
            share = 1 - 1 / replicas
            total_bytes[OUT, link_kind, wave.ranks] += share * nbytes
            total_bytes[IN, link_kind, wave.ranks] += ~wave.is_source * nbytes
    return total_bytes


def all_gather(layouts: Sequence[Layout], hardware: Hardware) -> float:
    """Seconds if every rank gathers and orthogonalizes each of its matrices, perfectly overlapped."""
    mine = [layout for layout in layouts if 0 in layout.holders]
    flops = sum(newton_schulz_flops(layout.shape) for layout in mine)
    wire = 0.0
    for layout in mine:
        near = layout.holders[-1] < hardware.gpus_per_node
        bandwidth = hardware.intra_bandwidth if near else hardware.inter_bandwidth
        lacking = layout.numel - min(layout.shards.numels)
        nbytes = lacking * torch.bfloat16.itemsize
        wire += nbytes / bandwidth
    return max(flops / hardware.flops, wire)


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
