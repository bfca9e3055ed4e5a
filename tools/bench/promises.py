"""``python -m tools.bench promises``: what all owners at once and prefetch are worth over a slow wire.

Newton-Schulz is a sleep, as if each rank had a device of its own.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple, TYPE_CHECKING
from unittest import mock

from . import fleet
from .table import render


if TYPE_CHECKING:
    import argparse


WORLD, SHAPES, SLEEP = 4, [(64, 64)] * 16, 20e-3
# Whether all owners work at once, and prefetch_count.
SETTINGS = tuple((all, prefetch) for all in (False, True) for prefetch in (0, 1, 2))
# How much later a collective ends, over Newton-Schulz of a bucket.
SHARES = (0.0, 0.5, 1.0)
TIMEOUT = 600


class Promises(NamedTuple):
    reps: int


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    ranks = fleet.run("promises", Promises(args.reps), WORLD, TIMEOUT)
    # By share and setting, the slowest rank of each repetition.
    times = [
        [statistics.median(map(max, *of_setting)) for of_setting in zip(*of_share)]
        for of_share in zip(*ranks)
    ]
    head = [f"{'at once' if all else 'in turn'}, {count}" for all, count in SETTINGS]
    rows = [
        [f"{share:g}", *(f"{1e3 * seconds:.0f}" for seconds in of_share)]
        for share, of_share in zip(SHARES, times, strict=True)
    ]
    print(render(["ms a step, by the wire's delay over Newton-Schulz", *head], rows))
    return [{"shares": SHARES, "settings": SETTINGS, "seconds": times}]


def work(rank: int, world: int, job: Promises) -> list[list[list[float]]]:
    """Seconds of each step, by share, setting and repetition."""
    import torch.distributed as dist
    from torch.optim import _muon

    from . import engine_view, wire
    from .contestants import make_ours
    from .layouts import make_parameters

    def sleep(x: Any, *args: Any) -> Any:
        time.sleep(SLEEP)
        return x.clone()

    def timed(optimizer: Any) -> float:
        dist.barrier()
        began = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - began

    held = make_parameters("shard", SHAPES, world)
    found: list[list[list[float]]] = [[[] for _ in SETTINGS] for _ in SHARES]
    with mock.patch.object(_muon, "orthogonalize", sleep):
        optimizers = [make_ours(held, prefetch, all) for all, prefetch in SETTINGS]
        for optimizer in optimizers:
            optimizer.step()
        buckets = len(engine_view.all_to_alls(optimizers[-1])) // 2
        seconds = SLEEP * len(SHAPES) / world / buckets
        for _ in range(job.reps):
            for of_share, share in zip(found, SHARES, strict=True):
                with wire.delayed(share * seconds):
                    for times, optimizer in zip(of_share, optimizers, strict=True):
                        times.append(timed(optimizer))
    return found
