"""Times steps with each setting over each wire, in turn."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim import _muon

from .. import engine_view, wire
from ..contestants import make_ours
from ..layouts import make_parameters
from ..quiet import stolen_seconds, Watch


if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Muon


# A device of its own for each rank is a sleep: four ranks share two cores.
SLEPT = [(64, 64)] * 16
SLEEP = 20e-3
REAL = [(256, 256), (256, 1024)] * 12


class Wire(NamedTuple):
    """How long a collective takes, over Newton-Schulz of a bucket, and of what kind that is."""

    kind: str
    share: float


@dataclass(frozen=True)
class Promises:
    """``settings`` are pairs: whether all owners work at once, and ``prefetch_count``."""

    slept: bool
    wires: tuple[Wire, ...]
    settings: tuple[tuple[bool, int], ...]
    reps: int
    cores: int


def work(rank: int, world: int, job: Promises) -> dict[str, Any]:
    shapes = SLEPT if job.slept else REAL
    held = make_parameters("shard", shapes, world)
    compute = (
        mock.patch.object(_muon, "_zeropower_via_newtonschulz", _sleep)
        if job.slept
        else nullcontext()
    )
    with compute:
        optimizers = [make_ours(held, prefetch, all) for all, prefetch in job.settings]
        for optimizer in optimizers:
            optimizer.step()
        together = optimizers[job.settings.index((True, 1))]
        buckets = len(engine_view.all_to_alls(together)) // 2
        seconds = _agreed(min(_timed(together) for _ in range(5))) / buckets
        if job.slept:
            seconds = SLEEP * len(shapes) / world / buckets
        nbytes = _agreed(_bytes(together))
        times: list[list[list[float]]] = [[[] for _ in job.settings] for _ in job.wires]
        watch, stolen = Watch(job.cores), stolen_seconds()
        for rep in range(job.reps):
            for of_wire, one in zip(times, job.wires, strict=True):
                with slowed(one, seconds, nbytes):
                    for i in range(len(optimizers)):
                        # Starting one further each time, so that none always follows another.
                        i = (i + rep) % len(optimizers)
                        of_wire[i].append(_timed(optimizers[i]))
        others, wall = watch.others()
    return {
        "times": times,
        "buckets": buckets,
        "seconds": seconds,
        "nbytes": nbytes,
        "others": others,
        "stolen": (stolen_seconds() - stolen) / (wall * job.cores),
    }


def slowed(one: Wire, seconds: float, nbytes: float) -> Any:
    wanted = one.share * seconds
    if one.kind == "bandwidth":
        return wire.delayed(0.0, nbytes / wanted)
    return wire.delayed(1000 * wanted)


def _bytes(optimizer: Muon) -> float:
    """What a collective of all owners at once has on this rank's link, on average."""
    calls = engine_view.all_to_alls(optimizer)
    rank = dist.get_rank()
    busier = [
        max(sum(side) - side[rank] for side in (call.send, call.receive))
        * call.dtype.itemsize
        for call in calls
    ]
    return sum(busier) / len(busier)


def _agreed(value: float) -> float:
    """The largest of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def _sleep(grad: Tensor, *args: Any) -> Tensor:
    time.sleep(SLEEP)
    return grad.clone()


def _timed(optimizer: Muon) -> float:
    dist.barrier()
    began = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - began
