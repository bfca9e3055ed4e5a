"""``check``: whether a real step takes as long as ``scale`` simulates, on four processes over a slow wire.

On one machine, loopback hides transfers and the processes share cores. Therefore Newton-Schulz is a sleep
here, and each exchange occupies its rank for a latency per message. The real engine runs everything else.
"""

import itertools
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.optim import _muon_formulas, Muon
from torch.optim._muon_engine.schedule.owners import newton_schulz_flops

from .layouts import lay
from .scale.hardware import Hardware
from .scale.plan import make_plan
from .scale.timeline import simulate
from .table import render


WORLD, PEERS = 4, 3
# The time of an exchange with three peers over that of a bucket's Newton-Schulz; whether all owners work
# at the same time, and prefetch_count.
FLAGS = tuple(itertools.product((False, True), (0, 1, 2)))
SETTINGS = tuple(itertools.product((0.5, 1.0), FLAGS))
# Seconds of Newton-Schulz per matrix. Each bucket has one matrix per owner.
SLEEP = 0.02


class SlowWire:
    """The link of this rank: exchanges take turns on it, each for ``latency`` per message."""

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.link = ThreadPoolExecutor(1)
        self.original = dist.all_to_all_single

    def __call__(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = self.link.submit(self._exchange, *args, **kwargs)
        return mock.Mock(wait=work.result) if async_op else work.result()

    def _exchange(self, *args: Any, **kwargs: Any) -> None:
        splits = kwargs["output_split_sizes"], kwargs["input_split_sizes"]
        time.sleep(self.latency * max(sum(map(bool, sizes)) for sizes in splits))
        self.original(*args, **kwargs)


def work(rank: int, world: int, reps: int) -> list[tuple[list[float], float]]:
    """The measured seconds of each repetition and the simulated seconds, by setting."""
    laid = lay("shard", "square", world)
    flops = newton_schulz_flops(laid.shapes[0]) / SLEEP
    found = []
    for share, (parallel, prefetch) in SETTINGS:
        config = laid.make_config(prefetch)
        config.async_gpu_parallelism = parallel
        optimizer = Muon(laid.params, distributed_config=config)
        latency = share * SLEEP / PEERS
        hardware = Hardware(flops, 1.0, math.inf, math.inf, latency, latency, 1)
        plan = make_plan(optimizer._engine.schedule, world, hardware.gpus_per_node)
        simulated = simulate(plan, hardware, prefetch).seconds
        times = []
        with (
            mock.patch.object(_muon_formulas, "newton_schulz", _sleep),
            mock.patch.object(dist, "all_to_all_single", SlowWire(latency)),
        ):
            for _ in range(reps + 1):
                dist.barrier()
                began = time.perf_counter()
                optimizer.step()
                times.append(time.perf_counter() - began)
        found.append((times[1:], simulated))
    return found


def _sleep(matrix: Tensor, *how: Any, out: Tensor | None = None) -> Tensor:
    time.sleep(SLEEP)
    return matrix.clone()


def rows(
    results: Sequence[list[tuple[list[float], float]]],
) -> list[tuple[str, float, float]]:
    """Setting, measured seconds of the slowest rank, simulated seconds.

    The fastest repetition counts: other programs delay all of them, and nothing makes a sleep shorter.
    """
    found = []
    for (share, (parallel, prefetch)), ranks in zip(SETTINGS, zip(*results)):
        owners = "all owners at once" if parallel else "one owner at a time"
        measured = min(map(max, *(times for times, _ in ranks)))
        setting = f"{share:g} x, {owners}, prefetch_count {prefetch}"
        found.append((setting, measured, ranks[0][1]))
    return found


def text(results: Sequence[list[tuple[list[float], float]]]) -> str:
    head = ["exchange x Newton-Schulz", "ms", "simulated", "ms / simulated"]
    cells = [
        [setting, f"{1e3 * ms:.0f}", f"{1e3 * simulated:.0f}", f"{ms / simulated:.2f}"]
        for setting, ms, simulated in rows(results)
    ]
    return f"{render(head, cells)}\n\nload average {os.getloadavg()[1]:.1f}"
