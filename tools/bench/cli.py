"""The commands and their arguments."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TYPE_CHECKING

from . import bound, figures, fleet, gram, promises, table
from .catalog import fits, Job, LAYOUTS, names_for, PEERS, WORKLOADS
from .scale import cli as scale
from .stock import stock_path


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser("python -m tools.bench", description=__doc__)
    commands = result.add_subparsers(dest="command", required=True)

    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    shared.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=["pairs", "gpt2"]
    )
    shared.add_argument("--world", nargs="+", type=int, default=[2, 4])
    shared.add_argument(
        "--no-stock", action="store_true", help="leave out stock Muon, which is slow"
    )
    shared.add_argument(
        "--prefetch",
        nargs="+",
        type=int,
        help="ours once with each prefetch_count; the first is what others are compared with",
    )
    shared.add_argument("--only-ours", action="store_true", help="no alternatives")
    shared.add_argument(
        "--timeout",
        type=float,
        default=900,
        metavar="SECONDS",
        help="for one layout and workload",
    )
    shared.add_argument("--out", type=Path, metavar="FILE.json")

    timed = commands.add_parser(
        "step", parents=[shared], help="time a step of each implementation"
    )
    timed.add_argument("--reps", type=int, default=15)
    timed.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="spend so long, for each layout and workload, on waiting for other programs to leave the machine alone",
    )
    timed.add_argument(
        "--profile", action="store_true", help="then show where a step of ours goes"
    )
    timed.set_defaults(run=run_step)

    counted = commands.add_parser(
        "bytes", parents=[shared], help="count what a step sends"
    )
    counted.set_defaults(run=run_bytes)
    scale.add_parser(commands)
    for module, name, words in (
        (gram, "gram", "compare ns_algorithm='gram' with the quintic"),
        (promises, "promises", "time all owners at once and prefetch over a slow wire"),
    ):
        command = commands.add_parser(name, help=words, description=module.__doc__)
        command.add_argument("--reps", type=int, default=7)
        command.add_argument("--out", type=Path, metavar="FILE.json")
        command.set_defaults(run=module.run, no_stock=True, shapes=None)
    return result


def main(arguments: Sequence[str]) -> int:
    args = parser().parse_args(arguments)
    try:
        if not (args.no_stock or args.only_ours):
            stock_path()
        cases = args.run(args)
    except (fleet.Failed, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.out is not None:
        report = {
            "command": [args.command, *arguments[1:]],
            "torch": importlib.metadata.version("torch"),
            "cores": cores(),
            "cases": cases,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def cases_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every layout, workload and world size that go together."""
    for workload in args.workloads:
        for world in args.world:
            for layout in args.layouts:
                if fits(layout, world):
                    yield {"workload": workload, "world": world, "layout": layout}


def names_of(args: argparse.Namespace) -> tuple[str, ...]:
    names = [f"ours-{p}" for p in dict.fromkeys(args.prefetch or [1])]
    if not args.only_ours:
        others = ("stock", "allgather", *PEERS, "adamw")
        names += [n for n in others if n not in left_out(args)]
    return tuple(names)


def left_out(args: argparse.Namespace) -> dict[str, str]:
    """Alternatives that are not there, and why."""
    missing = {
        name: "is not installed"
        for name in PEERS
        if importlib.util.find_spec(name) is None
    }
    return missing | ({"stock": "was not asked for"} if args.no_stock else {})


def legend(args: argparse.Namespace, names: Sequence[str]) -> str:
    lines = [table.legend(names)]
    if len({name.partition("-")[0] for name in names}) > 1:
        lines += [f"  {name}: {why}" for name, why in left_out(args).items()]
    return "\n".join(lines)


def run_step(args: argparse.Namespace) -> list[dict[str, Any]]:
    names = names_of(args)
    print(legend(args, names), end="\n\n")
    cases = []
    for case in cases_of(args):
        able = names_for(case["layout"], names)
        job = Job(
            case["layout"],
            case["workload"],
            able,
            cores(),
            args.reps,
            args.patience,
            args.profile,
        )
        results = fleet.run("step", job, case["world"], args.timeout + args.patience)
        case.update(
            asdict(job),
            placed=results[0]["placed"],
            buckets=results[0]["buckets"],
            owned=[result["owned"] for result in results],
            figures=figures.summarize(results, able, cores(), args.reps),
            profile=[r["profile"] for r in results] if args.profile else None,
            others=results[0]["others"],
            seconds=[result["seconds"] for result in results],
        )
        cases.append(case)
        print(table.step_case(case), end="\n\n", flush=True)
        if args.profile:
            print(table.profile(case), end="\n\n", flush=True)
    if cases:
        print(table.step_overview(cases))
    return cases


def run_bytes(args: argparse.Namespace) -> list[dict[str, Any]]:
    names = names_of(args)
    print(legend(args, names), end="\n\n")
    cases = []
    for case in cases_of(args):
        able = names_for(case["layout"], names)
        job = Job(case["layout"], case["workload"], able, cores())
        results = fleet.run("traffic", job, case["world"], args.timeout)
        case.update(
            names=list(able),
            figures=bound.summarize(results, able),
            by_rank=[result["sent"] for result in results],
        )
        cases.append(case)
        print(table.bytes_case(case), end="\n\n", flush=True)
    return cases


def cores() -> int:
    return len(os.sched_getaffinity(0))
