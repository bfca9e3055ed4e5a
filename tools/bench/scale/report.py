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
    sent, received = link_bytes(plan).sum(1)
    result = {
        "title": case.title,
        "matrices": len(schedule.layouts),
        "owners": len(set(schedule.owners)),
        "buckets": max(b.bucket.index for b in plan.buckets) + 1,
        "relays": sum(len(b.relays) for b in plan.buckets),
        "step": step.seconds,
        "idle": 1 - float(step.busy.mean()) / step.seconds,
        "sent": (sent.mean(), sent.max()),
        "received": (received.mean(), received.max()),
        "buffers": described(schedule, int(step.busy.argmax()), prefetch)[1],
        "all_gather": all_gather(schedule.layouts, hardware),
        "each_replica": None,
        "one_level": None,
        "divided": {1: step.seconds},
    }
    for owners in OWNERS:
        shared = schedule_of(case, hardware, owners)
        if len(shared.layouts) > len(schedule.layouts):
            many = make_plan(shared, case.world, hardware.gpus_per_node)
            result["divided"][owners] = simulate(many, hardware, prefetch).seconds
    direct = plan
    if any(bucket.node_size > 1 for bucket in schedule.buckets):
        buckets = tuple(replace(bucket, node_size=1) for bucket in schedule.buckets)
        one_level = replace(schedule, buckets=buckets)
        direct = make_plan(one_level, case.world, hardware.gpus_per_node)
        result["one_level"] = simulate(direct, hardware, prefetch).seconds
    if case.kind == "hsdp":
        replica = schedule_of(case._replace(outer=1), hardware)
        alone = make_plan(replica, case.inner, hardware.gpus_per_node)
        result["each_replica"] = simulate(alone, hardware, prefetch).seconds
    # No distribution of whole matrices undercuts any of these three.
    flops = [newton_schulz_flops(layout.shape) for layout in schedule.layouts]
    bandwidths = np.array([hardware.intra_bandwidth, hardware.inter_bandwidth])
    wire = float((link_bytes(direct).mean(2) / bandwidths).max())
    share = sum(flops) / case.world / hardware.flops
    ideal = max(wire, share, max(flops) / hardware.flops)
    of_model = 6 * case.model.active_numel * case.model.tokens / case.world
    rest = of_model / (hardware.peak_flops * hardware.training_utilization)
    result |= {"case": case, "schedule": schedule, "plan": plan, "simulated": step}
    result |= {"rest": rest, "of_training": step.seconds / (step.seconds + rest)}
    result |= {"largest": max(flops) / hardware.flops, "ideal": ideal}
    return result | {"wire": wire, "share": share}


def link_bytes(plan: Plan) -> NDArray:
    """The bytes on each rank's links, with relays, shape (out or in, intra or inter, ranks)."""
    total = np.zeros((2, 2, plan.world))
    for bucket in plan.buckets:
        for hop in (*bucket.gather, *bucket.scatter):
            total[:, :, bucket.ranks] += hop.nbytes
        for wave in bucket.relays:
            kind = int(wave.nodes(plan.gpus_per_node) > 1)
            nbytes = np.broadcast_to(wave.nbytes[:, None], wave.ranks.shape)
            # A broadcast cuts the ring to a chain, whose last rank does not send.
            share = 1 - 1 / wave.ranks.shape[1]
            total[OUT, kind, wave.ranks] += share * nbytes
            total[IN, kind, wave.ranks] += ~wave.is_source * nbytes
    return total


def all_gather(layouts: Sequence[Layout], hardware: Hardware) -> float:
    """Seconds if every rank gathers and orthogonalizes each of its matrices, perfectly overlapped."""
    mine = [layout for layout in layouts if 0 in layout.holders]
    work = sum(newton_schulz_flops(layout.shape) for layout in mine) / hardware.flops
    wire = 0.0
    for layout in mine:
        near = layout.holders[-1] < hardware.gpus_per_node
        bandwidth = hardware.intra_bandwidth if near else hardware.inter_bandwidth
        lacking = layout.numel - min(layout.shards.numels)
        wire += lacking * torch.bfloat16.itemsize / bandwidth
    return max(work, wire)


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.2f}" if seconds < 0.01 else f"{1e3 * seconds:.0f}"


COLUMNS = ("ms and GB", "matrices per owner", "step", "million tokens")
COLUMNS += ("share of a training step", "ideal", "step / ideal", "idle")
COLUMNS += ("all-gather", "owners per replica", "one level", "sent: mean", "busiest")
COLUMNS += ("received: mean", "busiest", "buffers", "buckets", "broadcasts")
DIVIDED = ("ms by owners per matrix", "true limit", "1", *map(str, OWNERS))
DIVIDED += ("1 / limit", "auto / limit", "auto / best number", "share with auto")


def text(cases: Sequence[dict[str, Any]]) -> str:
    """One row per case."""
    rows = []
    for case in cases:
        row = [case["title"], f"{case['matrices'] / case['owners']:.1f}"]
        row += [milliseconds(case["step"]), f"{case['case'].model.tokens / 1e6:.1f}"]
        row += [f"{case['of_training']:.2%}", milliseconds(case["ideal"])]
        row += [f"{case['step'] / case['ideal']:.2f}", f"{case['idle']:.0%}"]
        alternatives = ("all_gather", "each_replica", "one_level")
        row += [milliseconds(case[name]) for name in alternatives]
        row += [f"{size / 1e9:.2f}" for size in (*case["sent"], *case["received"])]
        row += [f"{case['buffers'] / 1e9:.2f}"]
        rows.append(row + [str(case["buckets"]), str(case["relays"])])
    return render(COLUMNS, rows)


def divided_text(cases: Sequence[dict[str, Any]]) -> str:
    """One row per case: the step with several owners per matrix, over all work and bytes divided by all ranks."""
    rows = []
    for case in cases:
        limit, by_owners = max(case["share"], case["wire"]), case["divided"]
        steps = [by_owners.get(owners) for owners in (1, *OWNERS)]
        row = [case["title"], *map(milliseconds, (limit, *steps))]
        auto = by_owners.get("auto", by_owners[1])
        best = min(step for step in steps[:-1] if step is not None)
        ratios = by_owners[1] / limit, auto / limit, auto / best
        row += [f"{ratio:.2f}" for ratio in ratios]
        rows.append([*row, f"{auto / (auto + case['rest']):.2%}"])
    return render(DIVIDED, rows)
