"""Times one optimizer step of each implementation, interleaved repetition by repetition."""

from __future__ import annotations

import time
from typing import Any, TYPE_CHECKING

import torch.distributed as dist
from torch.profiler import profile, ProfilerActivity

from . import contestants, engine_view, limit
from .catalog import WORKLOADS
from .layouts import make_parameters
from .quiet import QUIET, Watch


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim import Muon

    from .catalog import Job, Shape
    from .layouts import Held


WARM_UP = 1


def work(rank: int, world: int, job: Job) -> dict[str, Any]:
    """One rank's times in seconds, by name and repetition.

    ``others`` is the share of the machine that other programs had in each repetition.

    The limit's parts are timed among the implementations, under names of their own: ``ns_alone``
    on the rank whose turn it is (nothing elsewhere), ``exchange`` and ``elementwise``.
    """
    shapes = WORKLOADS[job.workload]
    held = make_parameters(job.layout, shapes, world)
    steps: dict[str, Callable[[], object]] = {}
    optimizers = {}
    for name in job.names:
        steps[name], optimizers[name] = contestants.make_step(name, held)
    ours = optimizers[job.names[0]]
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
    parts = _limit_parts(held, shapes, ours, rank)
    for name, run in parts.items():
        if name != "ns_alone":
            run(0)
    times = _interleave(steps, parts, job)
    operations = _profile(steps[job.names[0]], job.reps) if job.profile else None
    return {
        **times,
        "profile": operations,
        "owned": len(ours.assignments[rank]),
        "buckets": len(engine_view.all_to_alls(ours)) // 2,
        "placed": sorted({h.placed for h in held}),
    }


def _profile(step: Callable[[], object], reps: int) -> str:
    """The operations of ``reps`` steps on this rank, by the time of their own."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(reps):
            dist.barrier()
            step()
    return profiler.key_averages().table("self_cpu_time_total", row_limit=20)


def _limit_parts(
    held: Sequence[Held], shapes: Sequence[Shape], ours: Muon, rank: int
) -> dict[str, Callable[[int], None]]:
    world = dist.get_world_size()
    newton_schulz = limit.NewtonSchulz(shapes)
    exchange = limit.Exchange(engine_view.all_to_alls(ours))
    elementwise = limit.Elementwise(held, ours)

    def alone(rep: int) -> None:
        if rep % world == rank:
            newton_schulz.run()

    return {
        "ns_alone": alone,
        "exchange": lambda rep: exchange.run(),
        "elementwise": lambda rep: elementwise.run(),
    }


def _interleave(
    steps: Mapping[str, Callable[[], object]],
    parts: Mapping[str, Callable[[int], None]],
    job: Job,
) -> dict[str, Any]:
    """Each once a repetition, starting one further in each, so that none always follows another.

    With patience a repetition waits until the machine is quiet, and is repeated if it was not: for
    so many seconds in all.
    """
    names = [*steps, *parts]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    others: list[float] = []
    watch = Watch(job.cores)
    patience = job.patience
    rep = quiet = 0
    while quiet < job.reps:
        patience -= watch.wait_for_quiet(patience)
        watch.restart()
        first = rep % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            began = time.perf_counter()
            if name in steps:
                steps[name]()
            else:
                parts[name](rep)
            seconds[name].append(time.perf_counter() - began)
        share, wall = watch.others()
        others.append(share)
        rep += 1
        if share < QUIET or patience <= 0:
            quiet += 1
        else:
            patience -= wall
    return {"seconds": seconds, "others": others}
