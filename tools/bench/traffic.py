"""Counts what each implementation sends in a step, on one rank."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from measure import Wire

from . import contestants
from .catalog import WORKLOADS
from .layouts import make_parameters


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .catalog import Job
    from .layouts import Held


def work(rank: int, world: int, job: Job) -> dict[str, Any]:
    """What this rank sends in one step, after a first that made all state."""
    held = make_parameters(job.layout, WORKLOADS[job.workload], world)
    sent = {}
    for name in job.names:
        step, optimizer = contestants.make_step(name, held)
        if name == job.names[0]:
            assignments = optimizer.assignments
        step()
        with Wire() as wire:
            step()
        if wire.unknown:  # a silent zero would flatter it
            raise NotImplementedError(f"what do these send: {wire.unknown}")
        sent[name] = {
            "bytes": wire.bytes.total(),
            "statuses": wire.statuses,
            "calls": dict(wire.calls),
        }
    return {
        "sent": sent,
        "held": [[r.start, r.stop, c.start, c.stop] for r, c in _parts(held)],
        "shapes": [list(h.shape) for h in held],
        "assignments": assignments,
    }


def _parts(held: Sequence[Held]) -> list[tuple[slice, slice]]:
    return [(h.rows, h.columns) for h in held]
