"""``check``: whether a real step takes as long as ``scale`` simulates, on four processes over a slow wire.

On one machine, loopback hides transfers and the processes share cores. Therefore Newton-Schulz is a sleep
here, and each exchange occupies its rank for a latency per message. The real engine runs everything else.
"""

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.optim import _muon_formulas, Muon
from torch.optim._muon_engine.schedule.owners import newton_schulz_flops

from .layouts import lay
from .scale.costs import Options
from .scale.hardware import Hardware
from .scale.plan import make_plan
from .scale.timeline import simulate
from .table import render


WORLD, PEERS = 4, 3


class Setting(NamedTuple):
    """A step to measure and to simulate.

    Args:
        share: the time of an exchange with three peers over that of a bucket's Newton-Schulz.
        is_parallel: whether all owners work at the same time.
        prefetch: prefetch_count.
    """

    share: float
    is_parallel: bool
    prefetch: int

    def __str__(self) -> str:
        owners = "all owners at once" if self.is_parallel else "one owner at a time"
        return f"{self.share:g} x, {owners}, prefetch_count {self.prefetch}"


SETTINGS = [
    Setting(share, is_parallel, prefetch)
    for share in (0.5, 1.0)
    for is_parallel in (False, True)
    for prefetch in (0, 1, 2)
]
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
        received = np.count_nonzero(kwargs["output_split_sizes"])
        sent = np.count_nonzero(kwargs["input_split_sizes"])
        messages = max(received, sent)
        time.sleep(self.latency * messages)
        self.original(*args, **kwargs)


class Measured(NamedTuple):
    """The seconds of each repetition on one rank, and the simulated seconds."""

    times: list[float]
    simulated: float


def work(rank: int, world: int, repetitions: int) -> list[Measured]:
    """The measurements of this rank, by setting."""
    laid = lay("shard", "square", world)
    flops = newton_schulz_flops(laid.shapes[0])
    measurements = []
    for setting in SETTINGS:
        config = laid.make_config(setting.prefetch)
        config.async_gpu_parallelism = setting.is_parallel
        optimizer = Muon(laid.params, distributed_config=config)
        latency = setting.share * SLEEP / PEERS
        hardware = Hardware(
            peak_flops=flops / SLEEP,
            utilization=1.0,
            memory_bandwidth=math.inf,
            intra_bandwidth=math.inf,
            inter_bandwidth=math.inf,
            intra_latency=latency,
            inter_latency=latency,
            gpus_per_node=1,
        )
        plan = make_plan(optimizer._engine.schedule, world, hardware.gpus_per_node)
        simulated = simulate(plan, hardware, Options(prefetch=setting.prefetch))
        times = _times(optimizer, SlowWire(latency), repetitions)
        measurements.append(Measured(times, simulated.seconds))
    return measurements


def _times(optimizer: Muon, wire: SlowWire, repetitions: int) -> list[float]:
    """The seconds of each step after the first one, which makes all state."""
    times = []
    with (
        mock.patch.object(_muon_formulas, "newton_schulz", _sleep),
        mock.patch.object(dist, "all_to_all_single", wire),
    ):
        for _ in range(repetitions + 1):
            dist.barrier()
            began = time.perf_counter()
            optimizer.step()
            ended = time.perf_counter()
            times.append(ended - began)
    return times[1:]


def _sleep(matrix: Tensor, *how: Any, **options: Any) -> Tensor:
    time.sleep(SLEEP)
    return matrix.clone()


def rows(results: Sequence[list[Measured]]) -> list[tuple[str, float, float]]:
    """Setting, measured seconds of the slowest rank, simulated seconds.

    The fastest repetition counts: other programs delay all of them, and nothing makes a sleep shorter.
    """
    found = []
    for setting, ranks in zip(SETTINGS, zip(*results, strict=True), strict=True):
        repetitions = zip(*(rank.times for rank in ranks), strict=True)
        measured = min(map(max, repetitions))
        found.append((str(setting), measured, ranks[0].simulated))
    return found


def text(results: Sequence[list[Measured]]) -> str:
    head = ["exchange x Newton-Schulz", "ms", "simulated", "ms / simulated"]
    cells = []
    for setting, measured, simulated in rows(results):
        ratio = measured / simulated
        times = f"{1e3 * measured:.0f}", f"{1e3 * simulated:.0f}"
        cells.append([setting, *times, f"{ratio:.2f}"])
    table = render(head, cells)
    _, load, _ = os.getloadavg()
    return f"{table}\n\nload average {load:.1f}"
