"""Times both algorithms in one process, in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon
from torch.utils.flop_counter import FlopCounterMode

from ..quiet import busy_seconds, stolen_seconds


ALGORITHMS = ("quintic", "gram")
ONE_TRIPLE = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)


@dataclass(frozen=True)
class Speed:
    shapes: tuple[tuple[int, int], ...]
    threads: tuple[int, ...]
    reps: int
    # A shape that takes longer has fewer repetitions, but at least three.
    seconds: float
    cores: int


def work(rank: int, world: int, job: Speed) -> list[dict[str, Any]]:
    return [
        time_shape(shape, threads, job.reps, job.seconds, job.cores)
        for threads in job.threads
        for shape in job.shapes
    ]


def time_shape(
    shape: tuple[int, int], threads: int, reps: int, limit: float, cores: int
) -> dict[str, Any]:
    """Seconds by algorithm and repetition, after one that warms up, and who else had the cores."""
    torch.set_num_threads(threads)
    x = torch.randn(shape).bfloat16()
    seconds: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    for name in ALGORITHMS:
        orthogonalize(x, name)
    stolen, busy = stolen_seconds(), busy_seconds()
    wall, cpu = time.perf_counter(), time.process_time()
    for rep in range(reps):
        if rep >= 3 and time.perf_counter() - wall > limit:
            break
        for name in ALGORITHMS if rep % 2 else reversed(ALGORITHMS):
            began = time.perf_counter()
            orthogonalize(x, name)
            seconds[name].append(time.perf_counter() - began)
    whole = cores * (time.perf_counter() - wall)
    mine = time.process_time() - cpu
    return {
        "shape": list(shape),
        "threads": threads,
        "seconds": seconds,
        "flops": {name: flops(shape, name) for name in ALGORITHMS},
        "core_seconds": whole,
        "stolen": stolen_seconds() - stolen,
        "others": busy_seconds() - busy - mine,
    }


def orthogonalize(x: Tensor, algorithm: str) -> Tensor:
    return _muon._zeropower_via_newtonschulz(
        x, ONE_TRIPLE, _muon.DEFAULT_NS_STEPS, _muon.EPS, algorithm
    )


def flops(shape: tuple[int, int], algorithm: str) -> int:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.empty(shape, device="meta"), algorithm)
    return counter.get_total_flops()
