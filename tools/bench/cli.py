"""The commands of the bench and their arguments."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import check, contestants, fleet, page, splits, step, table, traffic
from .layouts import fits, LAYOUTS, WORKLOADS
from .scale import own, report
from .scale.cases import CASES
from .scale.hardware import GPUS, Hardware


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser("python -m tools.bench", description=__doc__)
    commands = result.add_subparsers(dest="command", required=True)
    for name, run, words in (
        ("step", run_step, "time a step of each implementation"),
        ("bytes", run_bytes, "count what a step sends"),
        ("scale", run_scale, "simulate a step of public models on many ranks"),
        ("check", run_check, "compare simulated steps with real ones on a slow wire"),
        ("splits", run_splits, "compare fused weights with and without split"),
    ):
        command = commands.add_parser(name, help=words)
        command.set_defaults(run=run)
        add = command.add_argument
        add("--write", type=Path, metavar="FOLDER", help=f"also write {name}.md")
        if name == "scale":
            add("--only", default="", metavar="WORDS", help="rows whose title has them")
            add("--prefetch", type=int, default=1, help="prefetch_count")
            add("--html", type=Path, metavar="FILE", help="a page about one row")
            what = (
                f"{', '.join(GPUS)}, gpu.json, or fields: {', '.join(vars(Hardware()))}"
            )
            more = {"nargs": "+", "default": [], "metavar": "NAME[=VALUE] or FILE"}
            add("--hardware", help=what, **more)
            add("--model", metavar="FILE", help=f"your model: {own.SOURCES}")
            add("--ranks", type=int, default=64, help="GPUs for --model")
            add("--layout", default="fsdp", help=f"of --model: {own.FORMS}")
            add("--tokens", type=int, help="tokens of a training step")
            add("--active-experts", type=int, metavar="K", help="experts of a token")
            continue
        add("--timeout", type=float, default=900.0, help="seconds of one table")
        if name != "bytes":
            add("--reps", type=int, default=11)
        if name in ("check", "splits"):
            continue
        add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
        add("--workloads", nargs="+", choices=WORKLOADS, default=["pairs", "gpt2"])
        add("--world", nargs="+", type=int, default=[2, 4], help="processes")
        add("--prefetch", nargs="+", type=int, default=[1], help="prefetch_count")
        add("--algorithms", nargs="+", default=["quintic"], help="ns_algorithm")
        others = list(contestants.IMPLEMENTATIONS)[1:]
        add("--against", nargs="*", choices=others, default=others, metavar="OTHER")
    return result


def main(arguments: Sequence[str]) -> int:
    args = parser().parse_args(arguments)
    texts = []
    try:
        for text in args.run(args):
            print(text, end="\n\n", flush=True)
            texts.append(text)
    except (fleet.Failed, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.write is not None:
        table.write(args.write / f"{args.command}.md", arguments, texts)
    return 0


def names_of(args: argparse.Namespace) -> list[str]:
    ours = [f"ours-{p}-{a}" for p in args.prefetch for a in args.algorithms]
    return [*ours, *args.against]


def jobs(args: argparse.Namespace, reps: int = 1) -> Iterator[tuple[step.Job, int]]:
    """Every layout, workload and number of processes that fit together."""
    for workload in args.workloads:
        for world in args.world:
            for layout in args.layouts:
                if fits(layout, world):
                    able = contestants.able(names_of(args), layout)
                    yield step.Job(layout, workload, able, reps), world


def legend(args: argparse.Namespace) -> str:
    words = contestants.IMPLEMENTATIONS
    return "\n".join(f"{name}: {words[name]}" for name in ("ours", *args.against))


def run_step(args: argparse.Namespace) -> Iterator[str]:
    yield legend(args)
    rows = []
    for job, world in jobs(args, args.reps):
        results = fleet.run(step.work, job, world, args.timeout)
        yield step.text(job, results)
        found = step.ratios(results, min(world, table.cores()))
        middle = {name: f"{quartiles[1]:.2f}" for name, (_, quartiles) in found.items()}
        cells = [middle.get(name, "refuses") for name in names_of(args)]
        rows.append([step.title(job, world), *cells])
    yield table.render(["x limit", *names_of(args)], rows)


def run_bytes(args: argparse.Namespace) -> Iterator[str]:
    yield legend(args)
    for job, world in jobs(args):
        yield traffic.text(job, fleet.run(traffic.work, job, world, args.timeout))


def run_check(args: argparse.Namespace) -> Iterator[str]:
    yield check.text(fleet.run(check.work, args.reps, check.WORLD, args.timeout))


def run_splits(args: argparse.Namespace) -> Iterator[str]:
    results = fleet.run(splits.work, args.reps, 2, args.timeout)
    unsplit, *slowest = [list(map(max, zip(*times))) for times in zip(*results)]
    ratios = [[f"{a / b:.2f}" for a, b in zip(of, unsplit)] for of in slowest]
    rows = [[str(split), *cells] for split, cells in zip(splits.SPLITS, ratios)]
    yield table.render(["x unsplit", "planning", "packing"], rows)


def run_scale(args: argparse.Namespace) -> Iterator[str]:
    how = Hardware().with_values(args.hardware), args.prefetch
    cases = [case for case in CASES if args.only in case.title]
    if args.model is not None:
        model, notes = own.read(args.model, args.active_experts)
        name = Path(args.model).stem
        cases = [own.case_of(model, name, args.layout, args.ranks, args.tokens)]
    if not cases:
        raise ValueError(f"no row has {args.only!r} in its title")
    if args.html is not None and len(cases) > 1:
        titles = "\n".join(case.title for case in cases)
        raise ValueError(f"--html needs --only with the title of one row:\n{titles}")
    found = []
    for case in cases:
        schedule = report.schedule_of(case, how[0])
        found.append(report.report(case, schedule, *how))
        if args.html is not None:
            page.write(args.html, case.title, schedule, case.world, *how)
    if args.model is not None:
        yield own.answer(found[0], notes, *how)
        return
    yield report.text(found)
    yield report.divided_text(found)
