"""``python -m tools.bench gram``: its arguments, and the processes that it starts."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TYPE_CHECKING

from .. import fleet, machine, section
from . import table


if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


PARTS = ("speed", "accuracy", "training")
# Read by oneDNN, which does bfloat16 products on x86.
ISA = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_BF16"
SHAPES = ((512, 1024), (512, 1792), (512, 2048), (512, 4096), (1024, 4096))
LARGE = (2048, 8192)
TIMEOUT = 900


def add_parser(commands: Any) -> None:
    """Nothing here imports torch: it is for those that run a command."""
    command = commands.add_parser(
        "gram", help="compare ns_algorithm='gram' with the quintic", description=__doc__
    )
    command.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    command.add_argument("--reps", type=int, default=15)
    command.add_argument(
        "--seconds", type=float, default=4.0, help="for one shape, at most"
    )
    command.add_argument("--steps", type=int, default=80, help="of the training")
    command.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0, 1, 2],
        help="of the training; the first on four processes, too",
    )
    command.add_argument(
        "--write",
        type=Path,
        metavar="DOCS",
        help="put the tables into DOCS/bench.md and the curves into DOCS/figures/gram.png",
    )
    command.add_argument("--out", type=Path, metavar="FILE.json")
    command.set_defaults(run=run, no_stock=True)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    cases = []
    for part in args.parts:
        found = _RUN[part](args)
        text = getattr(table, part)(found)
        print(text, end="\n\n", flush=True)
        cases.append({"part": part, "found": found})
        if args.write is not None:
            section.put(args.write / "bench.md", f"tools.bench gram {part}", text)
            if part == "training":
                from . import figure

                figure.draw(args.write / "figures" / "gram.png", found)
    return cases


def run_speed(args: argparse.Namespace) -> dict[str, Any]:
    from .speed import Speed

    both = tuple(s for shape in (*SHAPES, LARGE) for s in (shape, shape[::-1]))
    cores = len(os.sched_getaffinity(0))
    plain = Speed(both, (1, 2) if cores > 1 else (1,), args.reps, args.seconds, cores)
    found = {"cpu": machine.words()}
    (found["times"],) = fleet.run("gram.speed", plain, 1, TIMEOUT)
    if "AMX" in found["cpu"]:
        capped = Speed(SHAPES, (1,), args.reps, args.seconds, cores)
        with environment(ISA, WITHOUT_AMX):
            (found["without_amx"],) = fleet.run("gram.speed", capped, 1, TIMEOUT)
    return found


def run_accuracy(args: argparse.Namespace) -> list[dict[str, Any]]:
    from .accuracy import Accuracy

    job = Accuracy(
        ((512, 1024), (512, 2048), (512, 4096)), len(os.sched_getaffinity(0))
    )
    return fleet.run("gram.accuracy", job, 1, TIMEOUT)[0]


def run_training(args: argparse.Namespace) -> list[dict[str, Any]]:
    from .training import Training

    found = []
    seeds = tuple(args.seeds)
    for world, chosen in ((1, seeds), (4, seeds[:1])):
        job = Training(("quintic", "gram"), chosen, args.steps)
        found += fleet.run("gram.training", job, world, TIMEOUT)[0]
    return found


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """For the processes that are started within."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_RUN = {"speed": run_speed, "accuracy": run_accuracy, "training": run_training}
