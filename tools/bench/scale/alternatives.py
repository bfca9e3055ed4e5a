"""The same step by other ways to distribute it, seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import newton_schulz_flops

from .plan import make_plan
from .timeline import simulate


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim._muon_engine.layouts import Layout
    from torch.optim._muon_engine.schedule.packs import Schedule

    from .hardware import Hardware

BF16_BYTES = 2


def all_gather(layouts: Sequence[Layout], hardware: Hardware) -> float:
    """Every rank gathers each of its matrices by a ring and orthogonalizes it, two in flight.

    What rank 0 does; all ranks have as much.
    """
    wire = work = longest = 0.0
    for layout, count in _of_rank_0(layouts).items():
        shards = layout.shards
        ring = [ranks[0] for ranks in shards.replica_sets]
        nodes = len({rank // hardware.gpus_per_node for rank in ring})
        slowest = hardware.inter_bandwidth if nodes > 1 else hardware.intra_bandwidth
        one = (layout.numel - min(shards.numels)) * BF16_BYTES / slowest
        one += (nodes - 1) * hardware.inter_latency
        one += (len(ring) - nodes) * hardware.intra_latency
        wire += count * one
        longest = max(longest, one)
        work += count * newton_schulz_flops(layout.shape) / hardware.flops
    return longest + max(wire, work)


def one_at_a_time(schedule: Schedule, hardware: Hardware) -> float:
    """Each matrix makes its whole trip before the next one of its ranks begins."""
    owners = dict(zip(map(id, schedule.layouts), schedule.owners, strict=True))
    return sum(
        count * trip(layout, owners[id(layout)], hardware)
        for layout, count in _of_rank_0(schedule.layouts).items()
    )


def trip(layout: Layout, owner: int, hardware: Hardware) -> float:
    """Gather, Newton-Schulz and scatter of one matrix alone."""
    schedule = make_schedule(
        [layout], [owner], torch.bfloat16, ranks_per_node=hardware.gpus_per_node
    )
    plan = make_plan(schedule, layout.group[-1] + 1, hardware.gpus_per_node)
    return simulate(plan, hardware).seconds


def in_one_level(schedule: Schedule) -> Schedule:
    """The schedule as it is, however many peers a rank then has."""
    buckets = tuple(replace(bucket, node_size=1) for bucket in schedule.buckets)
    return replace(schedule, buckets=buckets)


def _of_rank_0(layouts: Sequence[Layout]) -> dict[Layout, int]:
    """One matrix for each shape and placement that rank 0 has a part in, and how many there are."""
    alike: dict[tuple, Layout] = {}
    counts: Counter[tuple] = Counter()
    for layout in layouts:
        if 0 in layout.shards:
            key = id(layout.shards), layout.shape
            alike.setdefault(key, layout)
            counts[key] += 1
    return {layout: counts[key] for key, layout in alike.items()}
