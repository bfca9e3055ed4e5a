"""All figures of one case."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, TYPE_CHECKING

import numpy as np
import torch
from torch.optim._muon_engine.schedule.specs import RELAYS_IN_FLIGHT, slots_for
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners, newton_schulz_flops

from . import alternatives
from .messages import IN, OUT
from .plan import make_plan
from .timeline import simulate, Step


if TYPE_CHECKING:
    from torch.optim._muon_engine.schedule.specs import Schedule

    from numpy.typing import NDArray

    from .cases import Case
    from .hardware import Hardware
    from .plan import BucketPlan, Plan


def schedule_of(
    case: Case, hardware: Hardware, prefetch: int, max_replicas: int | None = None
) -> Schedule:
    """As the engine makes it on nodes of this hardware."""
    layouts = case.layouts()
    return make_schedule(
        layouts,
        assign_owners(layouts),
        torch.bfloat16,
        max_replicas=max_replicas,
        ranks_per_node=hardware.gpus_per_node,
        slots=slots_for(prefetch),
    )


def report(
    case: Case, hardware: Hardware, prefetch: int, max_replicas: int | None = None
) -> dict[str, Any]:
    """Times in seconds, sizes in bytes."""
    schedule = schedule_of(case, hardware, prefetch, max_replicas)
    plan = make_plan(schedule, case.world, hardware.gpus_per_node)
    step = simulate(plan, hardware, prefetch)
    direct = plan
    if any(bucket.node_size > 1 for bucket in schedule.buckets):
        one_level = alternatives.in_one_level(schedule)
        direct = make_plan(one_level, case.world, hardware.gpus_per_node)
    result = {
        "model": case.model,
        "mesh": case.mesh,
        "ranks": case.world,
        "matrices": len(schedule.layouts),
        "owners": len(set(schedule.owners)),
        "buckets": max(b.bucket.index for turn in plan.turns for b in turn) + 1,
        "relays": sum(len(b.relays) for turn in plan.turns for b in turn),
        "step": step.seconds,
        "without_broadcasts": _without_relays(plan, hardware, prefetch),
        **_limits(schedule, case.world, link_bytes(direct), hardware),
        **_use(step),
        "stretch": stretch(schedule),
        **_volume(plan),
        **_memory(schedule, plan, prefetch),
        **_others(case, schedule, hardware, prefetch),
        "one_level": None,
        "one_level_peers": None,
    }
    if direct is not plan:
        result["one_level"] = simulate(direct, hardware, prefetch).seconds
        result["one_level_peers"] = _volume(direct)["peers_max"]
    result["ratio"] = result["step"] / result["ideal"]
    return result


def _limits(
    schedule: Schedule, world: int, nbytes: NDArray, hardware: Hardware
) -> dict[str, float]:
    """What no distribution of whole matrices undercuts, and the largest matrix's trip alone."""
    flops = [newton_schulz_flops(layout.shape) for layout in schedule.layouts]
    largest = max(range(len(flops)), key=flops.__getitem__)
    bandwidths = np.array([hardware.intra_bandwidth, hardware.inter_bandwidth])
    limits = {
        "share": sum(flops) / world / hardware.flops,
        "largest": flops[largest] / hardware.flops,
        "wire": float((nbytes.mean(2) / bandwidths).max()),
    }
    trip = alternatives.trip(
        schedule.layouts[largest], schedule.owners[largest], hardware
    )
    return {
        **limits,
        "ideal": max(limits.values()),
        "trip": trip,
        "largest_shape": schedule.layouts[largest].shape,
    }


def _without_relays(plan: Plan, hardware: Hardware, prefetch: int) -> float:
    """The step as if nothing had to be relayed."""
    turns = [[replace(bucket, relays=[]) for bucket in turn] for turn in plan.turns]
    return simulate(replace(plan, turns=turns), hardware, prefetch).seconds


def _use(step: Step) -> dict[str, float]:
    return {
        "busiest": float(step.busy.max()),
        "idle": 1 - float(step.busy.mean()) / step.seconds,
    }


def stretch(schedule: Schedule) -> float:
    """Buckets one after the other over their busiest owner's own work, of the group with most of it."""
    one_by_one: Counter[tuple[int, ...]] = Counter()
    alone: dict[tuple[int, ...], Counter[int]] = {}
    for bucket in schedule.buckets:
        loads: Counter[int] = Counter()
        for matrix in bucket.matrices:
            shape = schedule.layouts[matrix].shape
            loads[schedule.owners[matrix]] += newton_schulz_flops(shape)
        one_by_one[bucket.group] += max(loads.values())
        alone.setdefault(bucket.group, Counter()).update(loads)
    return max(one_by_one[group] / max(alone[group].values()) for group in alone)


def link_bytes(plan: Plan) -> NDArray:
    """What each rank's links carry, relays included, shape (out or in, intra or inter, ranks)."""
    total = np.zeros((2, 2, plan.world))
    for turn in plan.turns:
        for bucket in turn:
            total[:, :, bucket.ranks] += bucket.gather.nbytes + bucket.scatter.nbytes
            for wave in bucket.relays:
                kind = int(wave.between_nodes(plan.gpus_per_node))
                nbytes = np.broadcast_to(wave.nbytes[:, None], wave.ranks.shape)
                # Of the chain that a ring is cut to, all but its last rank send.
                share = 1 - 1 / wave.ranks.shape[1]
                total[OUT, kind, wave.ranks] += share * nbytes
                others = np.arange(wave.ranks.shape[1]) != wave.source
                total[IN, kind, wave.ranks] += others * nbytes
    return total


def _volume(plan: Plan) -> dict[str, float]:
    nbytes = link_bytes(plan)
    out, into = nbytes[OUT].sum(0), nbytes[IN].sum(0)
    peers, messages, sent = np.zeros(plan.world), 0.0, 0.0
    for turn in plan.turns:
        for bucket in turn:
            peers[bucket.ranks] = np.maximum(peers[bucket.ranks], bucket.peers)
            for side in (bucket.gather, bucket.scatter):
                messages += side.messages[OUT].sum()
                sent += side.nbytes[OUT].sum()
    return {
        "out_mean": float(out.mean()),
        "out_max": float(out.max()),
        "in_mean": float(into.mean()),
        "in_max": float(into.max()),
        "peers_mean": float(peers.mean()),
        "peers_max": int(peers.max()),
        "message": sent / messages if messages else 0.0,
    }


def memory(plan: Plan, prefetch: int) -> NDArray:
    """Bytes of each rank's buffers."""
    of_group: dict[tuple[int, ...], list[BucketPlan]] = {}
    sent, received = np.zeros(plan.world), np.zeros(plan.world)
    for turn in plan.turns:
        for bucket in turn:
            of_group.setdefault(bucket.bucket.group, []).append(bucket)
            own = np.zeros(plan.world)
            for wave in bucket.relays:
                is_source = np.arange(wave.ranks.shape[1]) == wave.source
                nbytes = np.broadcast_to(wave.nbytes[:, None], wave.ranks.shape)
                own[wave.ranks] += is_source * nbytes
                before = received[wave.ranks]
                received[wave.ranks] = np.maximum(before, ~is_source * nbytes)
            sent = np.maximum(sent, own)
    buffers = sent + RELAYS_IN_FLIGHT * received
    for buckets in of_group.values():
        count = min(len(buckets), slots_for(prefetch))
        for at in range(count):
            # These buckets have the slot one after the other.
            slot = np.max([bucket.slot for bucket in buckets[at::count]], axis=0)
            buffers[buckets[0].ranks] += slot.sum(0)
    return buffers


def _memory(schedule: Schedule, plan: Plan, prefetch: int) -> dict[str, float]:
    """Buffers of the rank with most, and the float32 parameters of the rank with most of these."""
    params = np.zeros(plan.world)
    for layout in schedule.layouts:
        params[list(layout.shards.ranks)] += layout.shards.numels
    return {
        "buffers": float(memory(plan, prefetch).max()),
        "parameters": float(params.max()) * torch.float32.itemsize,
    }


def _others(
    case: Case, schedule: Schedule, hardware: Hardware, prefetch: int
) -> dict[str, float | None]:
    replica = case.one_replica()
    alone = None
    if replica is not None:
        schedule_of_one = schedule_of(replica, hardware, prefetch)
        plan = make_plan(schedule_of_one, replica.world, hardware.gpus_per_node)
        alone = simulate(plan, hardware, prefetch).seconds
    return {
        "all_gather": alternatives.all_gather(schedule.layouts, hardware),
        "each_replica": alone,
        "one_at_a_time": alternatives.one_at_a_time(schedule, hardware),
    }
