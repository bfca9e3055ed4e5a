"""The engine's own step, with Newton-Schulz and the wire replaced by sleep, beside the simulated one."""

from __future__ import annotations

import functools
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch.distributed as dist
from torch.optim import _muon
from torch.optim._muon_engine.runtime.buffers import BucketBuffers
from torch.optim._muon_engine.schedule.owners import newton_schulz_flops

from .. import engine_view, wire
from ..contestants import make_ours
from ..layouts import make_parameters
from .hardware import Hardware
from .plan import make_plan
from .timeline import Timeline


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.optim import Muon


SHAPES = [(64, 64), (64, 256)] * 8
# So that the smaller ones sleep 20 ms, which is long beside what the engine itself takes.
FLOPS = newton_schulz_flops((64, 64)) / 20e-3
NO_TIME = 1e18


@dataclass(frozen=True)
class Check:
    layout: str
    prefetch: tuple[int, ...]
    reps: int
    delay_ms: float


def work(rank: int, world: int, job: Check) -> dict[int, dict[str, Any]]:
    """For each prefetch count: measured and simulated seconds, and both orders of collectives."""
    held = make_parameters(job.layout, SHAPES, world)
    found = {}
    with (
        mock.patch.object(_muon, "_zeropower_via_newtonschulz", _sleep),
        wire.delayed(job.delay_ms),
    ):
        for prefetch in job.prefetch:
            optimizer = make_ours(held, prefetch)
            optimizer.step()
            seconds = [_timed(optimizer) for _ in range(job.reps)]
            with recorded() as order:
                optimizer.step()
            found[prefetch] = {"seconds": seconds, "order": order}
            found[prefetch] |= _simulated(optimizer, world, prefetch, job.delay_ms)
    return found


def summarize(results: list[dict[int, dict[str, Any]]]) -> dict[int, dict[str, float]]:
    """Over all ranks the slowest of each repetition, the median of these, seconds."""
    summary = {}
    for prefetch, first in results[0].items():
        slowest = map(max, *(one[prefetch]["seconds"] for one in results))
        measured = statistics.median(slowest)
        summary[prefetch] = {"measured": measured, "simulated": first["simulated"]}
    return summary


def _sleep(grad: Tensor, *args: Any) -> Tensor:
    time.sleep(newton_schulz_flops(grad.shape) / FLOPS)
    return grad.clone()


def _timed(optimizer: Muon) -> float:
    dist.barrier()
    began = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - began


def _simulated(
    optimizer: Muon, world: int, prefetch: int, delay_ms: float
) -> dict[str, Any]:
    hardware = Hardware(
        peak_flops=FLOPS,
        utilization=1.0,
        intra_bandwidth=NO_TIME,
        inter_bandwidth=NO_TIME,
        intra_latency=0.0,
        inter_latency=0.0,
        flight=delay_ms / 1000,
    )
    schedule = engine_view.schedule(optimizer)
    timeline = Timeline(make_plan(schedule, world, world), hardware, prefetch)
    return {"simulated": timeline.run().seconds, "simulated_order": timeline.order}


@contextmanager
def recorded() -> Iterator[list[tuple[str, int]]]:
    """Takes down which collectives of which buckets this rank starts, in their order."""
    order: list[tuple[str, int]] = []

    def noting(phase: str) -> Any:
        original = getattr(BucketBuffers, f"start_{phase}")

        @functools.wraps(original)
        def start(bucket: BucketBuffers) -> None:
            order.append((phase, bucket.bucket.index))
            original(bucket)

        return mock.patch.object(BucketBuffers, f"start_{phase}", start)

    with noting("gather"), noting("scatter"):
        yield order
