"""``step``: the times of one optimizer step, and the limit that no implementation can undercut.

The limit has two parts, timed in the same repetition:

- ``newton_schulz``: all matrices, one by one and with plain products, on one rank while the others wait,
  divided by min(processes, cores);
- ``exchange``: the collectives of the engine's buckets, each after the one before.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.optim import _newton_schulz as ns

from . import contestants, engine_view, fleet
from .layouts import lay, LAYOUTS, WORKLOADS
from .table import render


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
    runs: dict[str, Callable[[], object]] = {}
    for name in job.names:
        optimizer = contestants.make(name, laid)
        optimizer.step()  # makes all state
        runs[name] = optimizer.step
        if name == job.names[0]:
            runs["exchange"] = partial(engine_view.exchange, optimizer)
            runs["exchange"]()  # gloo connects
    runs["newton_schulz"] = partial(_newton_schulz, job, rank)
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(job.reps):
        # Each repetition starts with another name, so that none always follows the same one.
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            fleet.synchronize(job.device)
            began = time.perf_counter()
            runs[name]()
            fleet.synchronize(job.device)
            ended = time.perf_counter()
            seconds[name].append(ended - began)
    return seconds


def _newton_schulz(job: Job, rank: int) -> None:
    if rank:
        return
    coefficients = ns.DEFAULT_A, ns.DEFAULT_B, ns.DEFAULT_C
    for shape in WORKLOADS[job.workload]:
        matrix = torch.ones(shape, dtype=ns.NS_DTYPE, device=job.device)
        # By torch's own products.
        ns.quintic(matrix, [coefficients] * ns.DEFAULT_NS_STEPS, ns.EPS)


def ratios(
    job: Job, results: Sequence[dict[str, list[float]]]
) -> dict[str, tuple[float, list[float]]]:
    """By name: the median seconds of the slowest rank, and its quartiles in multiples of the limit."""
    at_once = len(results)
    if job.device == "cpu":
        at_once = min(at_once, len(os.sched_getaffinity(0)))
    slowest = {}
    for name in results[0]:
        by_rank = [result[name] for result in results]
        slowest[name] = [max(times) for times in zip(*by_rank, strict=True)]
    parts = zip(slowest["newton_schulz"], slowest["exchange"], strict=True)
    slowest["limit"] = [whole / at_once + exchange for whole, exchange in parts]
    found = {}
    for name, times in slowest.items():
        pairs = zip(times, slowest["limit"], strict=True)
        multiples = [seconds / limit for seconds, limit in pairs]
        # statistics.quantiles wants two values at least.
        quartiles = statistics.quantiles(multiples * 2, n=4, method="inclusive")
        found[name] = statistics.median(times), quartiles
    return found


def text(job: Job, results: Sequence[dict[str, list[float]]]) -> str:
    """One set of processes as a table: each implementation in multiples of the limit."""
    rows = []
    for name, (seconds, quartiles) in ratios(job, results).items():
        low, median, high = quartiles
        multiples = f"{median:.2f} ({low:.2f}-{high:.2f})"
        rows.append([name, f"{1e3 * seconds:.1f}", multiples])
    table = render(["", "ms", "x limit (quartiles)"], rows)
    _, load, _ = os.getloadavg()
    repetitions = f"{job.reps} repetitions, load average {load:.1f}"
    title = f"{job.workload}, {LAYOUTS[job.layout]}, {len(results)} processes"
    return f"{title}: {repetitions}\n{table}"
