"""``step``: the times of one optimizer step, and the limit that no implementation can undercut.

The limit has three parts, timed in the same repetition:

- ``newton_schulz``: all matrices, one by one and with plain products, on one rank while the others wait,
  divided by min(processes, cores);
- ``exchange``: one blocking ``all_to_all_single`` after another, with the splits of the engine's buckets;
- ``elementwise``: momentum, look-ahead, weight decay and the update over this rank's storage.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.optim import _newton_schulz as ns, Muon

from . import contestants, engine_view, fleet
from .contestants import LR, MOMENTUM, WEIGHT_DECAY
from .layouts import Laid, lay, LAYOUTS, local_of
from .table import cores, render


PARTS = ("newton_schulz", "exchange", "elementwise")


class Job(NamedTuple):
    """The work of one set of processes; the first of ``names`` is one of ours."""

    layout: str
    workload: str
    names: tuple[str, ...]
    reps: int = 1
    device: str = "cpu"


def work(rank: int, world: int, job: Job) -> dict[str, list[float]]:
    """The seconds of one rank by name and repetition."""
    laid = lay(job.layout, job.workload, world, job.device)
    ours = contestants.make(job.names[0], laid)
    steps: dict[str, Callable[[], object]] = {job.names[0]: ours.step}
    for name in job.names[1:]:
        steps[name] = contestants.make(name, laid, ours).step
    for step in steps.values():
        step()  # makes all state
    runs = {name: lambda rep, step=step: step() for name, step in steps.items()}
    runs |= _limit(laid, ours, rank, world)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for rep in range(job.reps):
        # Each repetition starts with another name, so that none always follows the same one.
        first = rep % len(runs)
        names = [*runs]
        for name in names[first:] + names[:first]:
            dist.barrier()
            fleet.synchronize(job.device)
            began = time.perf_counter()
            runs[name](rep)
            fleet.synchronize(job.device)
            seconds[name].append(time.perf_counter() - began)
    return seconds


def _limit(
    laid: Laid, ours: Muon, rank: int, world: int
) -> dict[str, Callable[[int], None]]:
    triple = ns.DEFAULT_A, ns.DEFAULT_B, ns.DEFAULT_C
    device = laid.params[0].device
    matrices = [torch.randn(s, device=device).bfloat16() for s in laid.shapes]
    calls = engine_view.all_to_alls(ours)
    shards = []
    for index, param in enumerate(laid.params):
        momentum = local_of(ours.state[param]["momentum_buffer"])
        update = torch.randn_like(momentum).bfloat16()
        ahead = torch.empty_like(update) if engine_view.is_source(ours, index) else None
        shards.append((local_of(param), local_of(param.grad), momentum, ahead, update))

    def newton_schulz(rep: int) -> None:
        if rep % world == rank:
            for matrix in matrices:
                how = triple, ns.DEFAULT_NS_STEPS, ns.EPS, "quintic", ns.Products
                ns.newton_schulz(matrix, *how)

    def exchange(rep: int) -> None:
        for call in calls:
            dist.all_to_all_single(*call)

    @torch.no_grad()
    def elementwise(rep: int) -> None:
        for param, grad, momentum, ahead, update in shards:
            momentum.lerp_(grad, 1 - MOMENTUM)
            if ahead is not None:
                torch.lerp(grad, momentum, MOMENTUM, out=ahead)
            param.mul_(1 - LR * WEIGHT_DECAY)
            param.add_(update, alpha=-LR)

    exchange(0)  # gloo connects
    return dict(zip(PARTS, (newton_schulz, exchange, elementwise), strict=True))


def ratios(
    results: Sequence[dict[str, list[float]]], share: int
) -> dict[str, tuple[float, list[float]]]:
    """By name: the median seconds of the slowest rank, and its quartiles in multiples of the limit.

    Args:
        share: how many processes run at the same time.
    """
    slowest = {
        name: [max(times) for times in zip(*(r[name] for r in results))]
        for name in results[0]
    }
    limits = [
        alone / share + exchange + passes
        for alone, exchange, passes in zip(*(slowest[part] for part in PARTS))
    ]
    found = {}
    for name, times in (*slowest.items(), ("limit", limits)):
        each = [a / b for a, b in zip(times, limits, strict=True)]
        quartiles = statistics.quantiles(each * 2, n=4, method="inclusive")
        found[name] = statistics.median(times), quartiles
    return found


def text(job: Job, results: Sequence[dict[str, list[float]]]) -> str:
    """One set of processes as a table: each implementation in multiples of the limit."""
    world = len(results)
    found = ratios(results, world if job.device != "cpu" else min(world, cores()))
    rows = [
        [name, f"{1e3 * seconds:.1f}", f"{middle:.2f} ({low:.2f}-{high:.2f})"]
        for name, (seconds, (low, middle, high)) in found.items()
    ]
    table = render(["", "ms", "x limit (quartiles)"], rows)
    load = f"load average {os.getloadavg()[1]:.1f}"
    return f"{title(job, world)}: {job.reps} repetitions, {load}\n{table}"


def title(job: Job, world: int) -> str:
    return f"{job.workload}, {LAYOUTS[job.layout]}, {world} processes"
