"""All figures of one case."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import numpy as np
import torch
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners, newton_schulz_flops
from torch.optim._muon_engine.schedule.packs import RELAYS_IN_FLIGHT, slots_for

from . import alternatives
from .plan import IN, make_plan, OUT
from .timeline import simulate


if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.optim._muon_engine.schedule.packs import Schedule

    from .cases import Case
    from .hardware import Hardware
    from .plan import BucketPlan, Plan


def schedule_of(
    case: Case, hardware: Hardware, max_replicas: int | None = None
) -> Schedule:
    """As the engine makes it on nodes of this hardware."""
    layouts = case.layouts()
    return make_schedule(
        layouts,
        assign_owners(layouts),
        torch.bfloat16,
        max_replicas=max_replicas,
        ranks_per_node=hardware.gpus_per_node,
    )


def report(
    case: Case, hardware: Hardware, prefetch: int, max_replicas: int | None = None
) -> dict[str, Any]:
    """Times in seconds, sizes in bytes."""
    schedule = schedule_of(case, hardware, max_replicas)
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
        **_limits(schedule, case.world, link_bytes(direct), hardware),
        "idle": 1 - float(step.busy.mean()) / step.seconds,
        **_volume(plan),
        **_memory(schedule, plan, prefetch),
        "all_gather": alternatives.all_gather(schedule.layouts, hardware),
        "each_replica": None,
        "one_at_a_time": alternatives.one_at_a_time(schedule, hardware),
        "one_level": None,
        "one_level_peers": None,
    }
    if replica := case.one_replica():
        alone = schedule_of(replica, hardware)
        alone = make_plan(alone, replica.world, hardware.gpus_per_node)
        result["each_replica"] = simulate(alone, hardware, prefetch).seconds
    if direct is not plan:
        result["one_level"] = simulate(direct, hardware, prefetch).seconds
        result["one_level_peers"] = _volume(direct)["peers_max"]
    result["ratio"] = result["step"] / result["ideal"]
    return result


def _limits(
    schedule: Schedule, world: int, nbytes: NDArray, hardware: Hardware
) -> dict[str, float]:
    """What no distribution of whole matrices undercuts."""
    flops = [newton_schulz_flops(layout.shape) for layout in schedule.layouts]
    bandwidths = np.array([hardware.intra_bandwidth, hardware.inter_bandwidth])
    limits = {
        "share": sum(flops) / world / hardware.flops,
        "largest": max(flops) / hardware.flops,
        "wire": float((nbytes.mean(2) / bandwidths).max()),
    }
    return {**limits, "ideal": max(limits.values())}


def link_bytes(plan: Plan) -> NDArray:
    """What each rank's links carry, relays included, shape (out or in, intra or inter, ranks)."""
    total = np.zeros((2, 2, plan.world))
    for turn in plan.turns:
        for bucket in turn:
            for hop in (*bucket.gather, *bucket.scatter):
                total[:, :, bucket.ranks] += hop.nbytes
            for wave in bucket.relays:
                kind = int(wave.nodes(plan.gpus_per_node) > 1)
                nbytes = np.broadcast_to(wave.nbytes[:, None], wave.ranks.shape)
                # Of the chain that a ring is cut to, all but its last rank send.
                share = 1 - 1 / wave.ranks.shape[1]
                total[OUT, kind, wave.ranks] += share * nbytes
                total[IN, kind, wave.ranks] += ~wave.is_source * nbytes
    return total


def _volume(plan: Plan) -> dict[str, float]:
    nbytes = link_bytes(plan)
    out, into = nbytes[OUT].sum(0), nbytes[IN].sum(0)
    peers, messages, sent = np.zeros(plan.world), 0.0, 0.0
    for turn in plan.turns:
        for bucket in turn:
            peers[bucket.ranks] = np.maximum(peers[bucket.ranks], bucket.peers)
            for hop in (*bucket.gather, *bucket.scatter):
                messages += hop.messages[OUT].sum()
                sent += hop.nbytes[OUT].sum()
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
    """Bytes of the buffers that each rank keeps. What two levels pass on is allocated for each exchange."""
    of_group: dict[tuple[int, ...], list[BucketPlan]] = {}
    sent, received = np.zeros(plan.world), np.zeros(plan.world)
    for turn in plan.turns:
        for bucket in turn:
            of_group.setdefault(bucket.bucket.group, []).append(bucket)
            own = np.zeros(plan.world)
            for wave in bucket.relays:
                nbytes = np.broadcast_to(wave.nbytes[:, None], wave.ranks.shape)
                own[wave.ranks] += wave.is_source * nbytes
                before = received[wave.ranks]
                received[wave.ranks] = np.maximum(before, ~wave.is_source * nbytes)
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
