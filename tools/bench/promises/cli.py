"""``python -m tools.bench promises``: its arguments, and the processes that it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TYPE_CHECKING

from .. import fleet, machine, section
from . import table


if TYPE_CHECKING:
    import argparse


TIMEOUT = 600
WORLD = 4
COMPUTE = ("asleep", "real")
# Whether all owners work at once, and prefetch_count.
SETTINGS = tuple((all, prefetch) for all in (False, True) for prefetch in (0, 1, 2))


def add_parser(commands: Any) -> None:
    """Nothing here imports torch: it is for those that run a command."""
    command = commands.add_parser(
        "promises",
        help="time all owners at once and prefetch over a slow wire, on 4 processes",
        description=__doc__,
    )
    command.add_argument(
        "--newton-schulz",
        nargs="+",
        choices=COMPUTE,
        default=COMPUTE,
        help="asleep, as if each rank had a device of its own, or real, on the cores that are there",
    )
    command.add_argument("--reps", type=int, default=7)
    command.add_argument(
        "--write", type=Path, metavar="DOCS", help="put the tables into DOCS/bench.md"
    )
    command.add_argument("--out", type=Path, metavar="FILE.json")
    command.set_defaults(run=run, no_stock=True)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    from .work import Promises, Wire

    wires = (
        Wire("latency", 0.0),
        *(Wire(kind, share) for kind in ("latency", "bandwidth") for share in (0.5, 1)),
    )
    cores = len(os.sched_getaffinity(0))
    cases = []
    for compute in args.newton_schulz:
        job = Promises(compute == "asleep", wires, SETTINGS, args.reps, cores)
        ranks = fleet.run("promises.work", job, WORLD, TIMEOUT)
        times = slowest([one["times"] for one in ranks])
        case = {**ranks[0], "newton_schulz": compute, "times": times}
        case |= {"wires": wires, "settings": SETTINGS}
        cases.append(case)
        text = table.page(case, machine.words())
        print(text, flush=True)
        if args.write is not None:
            name = f"tools.bench promises {compute}"
            section.put(args.write / "bench.md", name, text)
    return cases


def slowest(ranks: list[list[list[list[float]]]]) -> list[list[list[float]]]:
    """Of each repetition, by wire and setting."""
    return [
        [list(map(max, *of_setting)) for of_setting in zip(*of_wire, strict=True)]
        for of_wire in zip(*ranks, strict=True)
    ]
