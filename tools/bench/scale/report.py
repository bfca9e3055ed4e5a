"""The tables of ``scale``."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim._muon_engine.layouts.layout import Layout
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners
from torch.optim._muon_engine.schedule.packs import slots_for
from torch.optim._muon_engine.schedule.schedule import Schedule

from ..engine_view import buffer_bytes
from ..table import render
from .cases import Case
from .costs import (
    ADAMW,
    ADAMW_STATE,
    DEFAULT,
    MUON_STATE,
    newton_schulz_seconds,
    Options,
)
from .hardware import Hardware
from .plan import BucketPlan, IN, make_plan
from .timeline import simulate


# The algorithms and passes that the second table compares.
OPTIONS = {
    "default": ("quintic", False),
    "fused": ("quintic", True),
    "symmetric": ("symmetric", False),
    "gram": ("gram", False),
    "gram, fused": ("gram", True),
}
COLUMNS = (
    "ms and GB",
    "matrices per owner",
    "step",
    "million tokens",
    "share of a training step",
    "largest matrix",
    "its share",
    "ideal",
    "all-gather",
    "received: mean",
    "busiest",
    "buffers",
)
OPTION_COLUMNS = (
    "ms by options",
    *OPTIONS,
    "AdamW",
    "its share of a training step",
    "GB saved",
)


class Row(NamedTuple):
    """One simulated case. Times in seconds, sizes in bytes.

    Args:
        rest: forward and backward of a training step.
        largest: Newton-Schulz of the largest matrix.
        ideal: the largest of ``largest``, all work and bytes divided by the ranks.
        all_gather: if every rank gathers and orthogonalizes each of its matrices.
        received: by rank.
        stored: the elements of each rank.
        buffers: of the busiest rank.
        by_options: seconds of the same schedule with other options.
    """

    case: Case
    matrices: int
    owners: int
    step: float
    rest: float
    largest: float
    ideal: float
    all_gather: float
    received: NDArray
    stored: NDArray
    buffers: int
    adamw: float
    by_options: dict[str, float]

    def share_of_training(self, seconds: float) -> str:
        return f"{seconds / (seconds + self.rest):.2%}"


def schedule_of(case: Case, options: Options = DEFAULT) -> Schedule:
    layouts = case.layouts()
    owners = assign_owners(layouts)
    return make_schedule(layouts, owners, slots=slots_for(options.prefetch))


def row_of(case: Case, hardware: Hardware, options: Options = DEFAULT) -> Row:
    schedule = schedule_of(case, options)
    plan = make_plan(schedule, hardware.gpus_per_node)
    step = simulate(plan, case.world, hardware, options)
    link_bytes = _link_bytes(plan, case.world)
    bandwidths = np.array([hardware.intra_bandwidth, hardware.inter_bandwidth])
    wire = float((link_bytes.mean(2) / bandwidths).max())
    work = _seconds_of_all(schedule.layouts, hardware, options.algorithm)
    share = (work + float(step.passes.sum())) / case.world
    largest = _largest(schedule.layouts, hardware, options.algorithm)
    stored = np.zeros(case.world)
    for bucket in plan:
        stored[bucket.ranks] += bucket.elements.held
    by_options = {}
    for name, (algorithm, fused) in OPTIONS.items():
        others = options._replace(algorithm=algorithm, fused=fused)
        by_options[name] = simulate(plan, case.world, hardware, others).seconds
    return Row(
        case=case,
        matrices=len(schedule.layouts),
        owners=len(set(schedule.owners)),
        step=step.seconds,
        rest=_rest_of_training(case, hardware),
        largest=largest,
        ideal=max(wire, share, largest),
        all_gather=_all_gather(schedule.layouts, hardware, options.algorithm),
        received=link_bytes[IN].sum(0),
        stored=stored,
        buffers=buffer_bytes(schedule, int(step.busy.argmax()), options.prefetch),
        adamw=float(stored.max()) * ADAMW / hardware.memory_bandwidth,
        by_options=by_options,
    )


def _link_bytes(plan: Sequence[BucketPlan], world: int) -> NDArray:
    """The bytes of a step on each rank's links, shape (out or in, intra or inter, ranks)."""
    nbytes = np.zeros((2, 2, world))
    for bucket in plan:
        for loads in (bucket.gather, bucket.scatter, bucket.relays):
            nbytes[:, :, bucket.ranks] += loads.nbytes
    return nbytes


def _seconds_of_all(
    layouts: Iterable[Layout], hardware: Hardware, algorithm: str
) -> float:
    """Newton-Schulz of all ``layouts`` on one rank."""
    seconds = 0.0
    for shape, count in Counter(layout.shape for layout in layouts).items():
        seconds += newton_schulz_seconds(shape, count, algorithm, hardware)
    return seconds


def _largest(layouts: Iterable[Layout], hardware: Hardware, algorithm: str) -> float:
    """Newton-Schulz of the largest of ``layouts``."""
    seconds = []
    for shape in {layout.shape for layout in layouts}:
        seconds.append(newton_schulz_seconds(shape, 1, algorithm, hardware))
    return max(seconds)


def _rest_of_training(case: Case, hardware: Hardware) -> float:
    model = case.model
    flops = 6 * model.active_numel * model.tokens / case.world
    return flops / (hardware.peak_flops * hardware.training_utilization)


def _all_gather(layouts: Iterable[Layout], hardware: Hardware, algorithm: str) -> float:
    """The seconds of rank 0, perfectly overlapped."""
    mine = [layout for layout in layouts if 0 in layout.holders]
    busy = _seconds_of_all(mine, hardware, algorithm)
    wire = 0.0
    for layout in mine:
        is_near = layout.holders[-1] < hardware.gpus_per_node
        bandwidth = hardware.intra_bandwidth if is_near else hardware.inter_bandwidth
        lacking = layout.numel - min(layout.shards.numels)
        wire += lacking * torch.bfloat16.itemsize / bandwidth
    return max(busy, wire)


def milliseconds(seconds: float) -> str:
    thousandths = 1e3 * seconds
    return f"{thousandths:.2f}" if seconds < 0.01 else f"{thousandths:.0f}"


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


def text(rows: Iterable[Row]) -> str:
    """One line per case."""
    lines = []
    for row in rows:
        lines.append(
            [
                row.case.title,
                f"{row.matrices / row.owners:.1f}",
                milliseconds(row.step),
                f"{row.case.model.tokens / 1e6:.1f}",
                row.share_of_training(row.step),
                milliseconds(row.largest),
                row.share_of_training(row.largest),
                milliseconds(row.ideal),
                milliseconds(row.all_gather),
                gigabytes(row.received.mean()),
                gigabytes(row.received.max()),
                gigabytes(row.buffers),
            ]
        )
    return render(COLUMNS, lines)


def options_text(rows: Iterable[Row]) -> str:
    """One line per case: the step by options, against fused AdamW for the same parameters."""
    lines = []
    for row in rows:
        saved = (ADAMW_STATE - MUON_STATE) * row.stored.max()
        lines.append(
            [
                row.case.title,
                *map(milliseconds, row.by_options.values()),
                milliseconds(row.adamw),
                row.share_of_training(row.adamw),
                gigabytes(saved),
            ]
        )
    return render(OPTION_COLUMNS, lines)
