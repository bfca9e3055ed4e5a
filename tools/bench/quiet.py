"""Whether other programs had the cores meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


# Share of all cores' time that others may have had in a repetition that counts.
QUIET = 0.05
LOOK_SECONDS = 0.5
_STAT = Path("/proc/stat")


def busy_seconds() -> float:
    """What all cores have worked since the machine started; 0.0 where that is not told."""
    user, nice, system, _, _, irq, softirq, steal, *_ = _stat()
    # Guests are in user and nice already, and what was stolen is others'.
    return user + nice + system + irq + softirq + steal


def stolen_seconds() -> float:
    """What the host gave to other machines while a core here had work."""
    return _stat()[7]


def _stat() -> list[float]:
    try:
        with _STAT.open() as stat:
            ticks = stat.readline().split()[1:]
    except OSError:
        return [0.0] * 8
    return [int(tick) / os.sysconf("SC_CLK_TCK") for tick in ticks]


class Watch:
    """Measures, together with the other ranks, how much of the machine went to others."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.restart()

    def restart(self) -> None:
        self._busy = busy_seconds()
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    def others(self) -> tuple[float, float]:
        """Others' share of all cores' time since the start, and the seconds since; one value for all."""
        mine = [
            busy_seconds() - self._busy,
            time.perf_counter() - self._wall,
            time.process_time() - self._cpu,
        ]
        total = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(total)
        busy, wall, cpu = total.tolist()
        world = dist.get_world_size()
        busy, wall = busy / world, wall / world
        return max(0.0, (busy - cpu) / (wall * self.cores)), wall

    def wait_for_quiet(self, seconds: float) -> float:
        """Sleeps until others leave the cores alone, at most that long; returns how long it took."""
        waited = 0.0
        while waited < seconds:
            self.restart()
            time.sleep(LOOK_SECONDS)
            share, wall = self.others()
            waited += wall
            if share < QUIET:
                break
        return waited
