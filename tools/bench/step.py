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
from torch import Tensor
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
    first_name, *other_names = job.names
    ours = contestants.make(first_name, laid)
    steps: dict[str, Callable[[], object]] = {first_name: ours.step}
    for name in other_names:
        steps[name] = contestants.make(name, laid, ours).step
    for step in steps.values():
        step()  # makes all state
    runs: dict[str, Callable[[int], object]] = {}
    for name, step in steps.items():
        runs[name] = lambda repetition, step=step: step()
    runs |= _limit(laid, ours, rank, world)
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(job.reps):
        # Each repetition starts with another name, so that none always follows the same one.
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            fleet.synchronize(job.device)
            began = time.perf_counter()
            runs[name](repetition)
            fleet.synchronize(job.device)
            ended = time.perf_counter()
            seconds[name].append(ended - began)
    return seconds


class _Storage(NamedTuple):
    """The tensors of one parameter in the elementwise passes. Only a source has ``ahead``."""

    param: Tensor
    grad: Tensor
    momentum: Tensor
    update: Tensor
    ahead: Tensor | None


def _limit(
    laid: Laid, ours: Muon, rank: int, world: int
) -> dict[str, Callable[[int], None]]:
    device = laid.params[0].device
    matrices = []
    for shape in laid.shapes:
        matrix = torch.randn(shape, device=device)
        matrices.append(matrix.bfloat16())
    calls = engine_view.all_to_alls(ours)
    shards = []
    for index, param in enumerate(laid.params):
        momentum = local_of(ours.state[param]["momentum_buffer"])
        update = torch.randn_like(momentum).bfloat16()
        ahead = None
        if engine_view.is_source(ours, index):
            ahead = torch.empty_like(update)
        grad = local_of(param.grad)
        shards.append(_Storage(local_of(param), grad, momentum, update, ahead))

    def newton_schulz(repetition: int) -> None:
        if repetition % world != rank:
            return
        coefficients = ns.DEFAULT_A, ns.DEFAULT_B, ns.DEFAULT_C
        for matrix in matrices:
            # By torch's own products.
            ns.quintic(matrix, [coefficients] * ns.DEFAULT_NS_STEPS, ns.EPS)

    def exchange(repetition: int) -> None:
        for call in calls:
            dist.all_to_all_single(*call)

    @torch.no_grad()
    def elementwise(repetition: int) -> None:
        for param, grad, momentum, update, ahead in shards:
            momentum.lerp_(grad, 1 - MOMENTUM)
            if ahead is not None:
                torch.lerp(grad, momentum, MOMENTUM, out=ahead)
            param.mul_(1 - LR * WEIGHT_DECAY)
            param.add_(update, alpha=-LR)

    exchange(0)  # gloo connects
    parts = newton_schulz, exchange, elementwise
    return dict(zip(PARTS, parts, strict=True))


def ratios(
    results: Sequence[dict[str, list[float]]], share: int
) -> dict[str, tuple[float, list[float]]]:
    """By name: the median seconds of the slowest rank, and its quartiles in multiples of the limit.

    Args:
        share: how many processes run at the same time.
    """
    slowest = {}
    for name in results[0]:
        by_rank = [result[name] for result in results]
        slowest[name] = [max(times) for times in zip(*by_rank, strict=True)]
    limits = []
    of_parts = [slowest[part] for part in PARTS]
    for newton_schulz, exchange, elementwise in zip(*of_parts, strict=True):
        limits.append(newton_schulz / share + exchange + elementwise)
    found = {}
    for name, times in {**slowest, "limit": limits}.items():
        multiples = []
        for seconds, limit in zip(times, limits, strict=True):
            multiples.append(seconds / limit)
        # statistics.quantiles wants two values at least.
        quartiles = statistics.quantiles(multiples * 2, n=4, method="inclusive")
        found[name] = statistics.median(times), quartiles
    return found


def text(job: Job, results: Sequence[dict[str, list[float]]]) -> str:
    """One set of processes as a table: each implementation in multiples of the limit."""
    world = len(results)
    at_once = world if job.device != "cpu" else min(world, cores())
    rows = []
    for name, (seconds, quartiles) in ratios(results, at_once).items():
        low, median, high = quartiles
        multiples = f"{median:.2f} ({low:.2f}-{high:.2f})"
        rows.append([name, f"{1e3 * seconds:.1f}", multiples])
    table = render(["", "ms", "x limit (quartiles)"], rows)
    _, load, _ = os.getloadavg()
    repetitions = f"{job.reps} repetitions, load average {load:.1f}"
    return f"{title(job, world)}: {repetitions}\n{table}"


def title(job: Job, world: int) -> str:
    return f"{job.workload}, {LAYOUTS[job.layout]}, {world} processes"
