"""The commands of the bench and their arguments."""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim._newton_schulz import NS_ALGORITHMS

from . import check, contestants, fleet, page, splits, step, table, traffic
from .layouts import fits, LAYOUTS, WORKLOADS
from .scale import measured, own, report
from .scale.answer import answer, layouts_answer
from .scale.cases import Case, CASES
from .scale.costs import Options
from .scale.hardware import GPUS, Hardware
from .scale.search import Search


class Command(NamedTuple):
    """A command of the bench: what runs it, and what it does."""

    run: Callable[[argparse.Namespace], Iterator[str]]
    summary: str


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser("python -m tools.bench", description=__doc__)
    commands = result.add_subparsers(dest="command", required=True)
    for name, (run, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        command.set_defaults(run=run)
        command.add_argument(
            "--write",
            type=Path,
            metavar="FOLDER",
            help=f"also write {name}.md",
        )
        if name == "scale":
            _add_simulation(command.add_argument)
            continue
        if name == "measured":
            command.add_argument("file", type=Path, help="gpu.json of a GPU")
            continue
        command.add_argument(
            "--timeout",
            type=float,
            default=900.0,
            help="seconds of one table",
        )
        if name != "bytes":
            command.add_argument("--reps", type=int, default=11)
        if name in ("step", "bytes"):
            _add_comparison(command.add_argument)
    return result


def _add_simulation(add: Callable[..., object]) -> None:
    """The arguments of ``scale``."""
    add("--only", default="", metavar="WORDS", help="rows whose title has them")
    add("--prefetch", type=int, default=1, help="prefetch_count")
    add(
        "--algorithm",
        choices=NS_ALGORITHMS,
        default="quintic",
        help="ns_algorithm",
    )
    add("--fused", action="store_true", help="fused=True")
    add("--owners", default="1", metavar="K", help='owners_per_matrix, or "auto"')
    add("--html", type=Path, metavar="FILE", help="a page about one row")
    gpus = ", ".join(GPUS)
    fields = ", ".join(vars(Hardware()))
    add(
        "--hardware",
        help=f"{gpus}, gpu.json, or fields: {fields}",
        nargs="+",
        default=[],
        metavar="NAME[=VALUE] or FILE",
    )
    add("--model", metavar="FILE", help=f"your model: {own.SOURCES}")
    add("--ranks", type=int, default=64, help="GPUs for --model")
    add(
        "--layout",
        nargs="+",
        default=["fsdp"],
        help=f"of --model: {own.FORMS}; several are compared, any means all that are sensible",
    )
    add(
        "--shard-dim",
        type=int,
        choices=(0, 1),
        default=0,
        help="how you shard stacks of experts: Shard(0), FSDP2's default, or Shard(1)",
    )
    add("--split", action="store_true", help="you split fused weights as split_of does")
    tokens = "tokens of a training step"
    add("--tokens", type=int, help=f"{tokens} on all ranks together")
    add("--tokens-per-rank", type=int, metavar="N", help=f"{tokens} on each rank")
    add(
        "--seconds",
        type=float,
        default=50.0,
        help="CPU seconds after which no other combination of options is simulated",
    )
    add("--active-experts", type=int, metavar="K", help="experts of a token")


def _add_comparison(add: Callable[..., object]) -> None:
    """The arguments of commands that compare implementations."""
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    add("--workloads", nargs="+", choices=WORKLOADS, default=["pairs", "gpt2"])
    add("--world", nargs="+", type=int, default=[2, 4], help="processes")
    add("--prefetch", nargs="+", type=int, default=[1], help="prefetch_count")
    add("--algorithms", nargs="+", default=["quintic"], help="ns_algorithm")
    _, *others = contestants.IMPLEMENTATIONS
    add("--against", nargs="*", choices=others, default=others, metavar="OTHER")


def main(arguments: Sequence[str]) -> int:
    args = parser().parse_args(arguments)
    texts: list[str] = []
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
    names = []
    for prefetch in args.prefetch:
        for algorithm in args.algorithms:
            names.append(f"ours-{prefetch}-{algorithm}")
    return [*names, *args.against]


def jobs(
    args: argparse.Namespace, repetitions: int = 1
) -> Iterator[tuple[step.Job, int]]:
    """Every layout, workload and number of processes that fit together."""
    names = names_of(args)
    combinations = itertools.product(args.workloads, args.world, args.layouts)
    for workload, world, layout in combinations:
        if fits(layout, world):
            able = contestants.able(names, layout)
            yield step.Job(layout, workload, able, repetitions), world


def legend(args: argparse.Namespace) -> str:
    lines = []
    for name in ("ours", *args.against):
        lines.append(f"{name}: {contestants.IMPLEMENTATIONS[name]}")
    return "\n".join(lines)


def run_step(args: argparse.Namespace) -> Iterator[str]:
    yield legend(args)
    names = names_of(args)
    rows = []
    for job, world in jobs(args, args.reps):
        results = fleet.run(step.work, job, world, args.timeout)
        yield step.text(job, results)
        at_once = min(world, table.cores())
        medians = {}
        for name, (_, quartiles) in step.ratios(results, at_once).items():
            _, median, _ = quartiles
            medians[name] = f"{median:.2f}"
        cells = [medians.get(name, "refuses") for name in names]
        rows.append([step.title(job, world), *cells])
    yield table.render(["x limit", *names], rows)


def run_bytes(args: argparse.Namespace) -> Iterator[str]:
    yield legend(args)
    for job, world in jobs(args):
        results = fleet.run(traffic.work, job, world, args.timeout)
        yield traffic.text(job, results)


def run_check(args: argparse.Namespace) -> Iterator[str]:
    for what, settings, work in (
        ("exchange", check.SETTINGS, check.work),
        ("relays", check.RELAYED, check.work_relayed),
    ):
        results = fleet.run(work, args.reps, check.WORLD, args.timeout)
        yield check.text(what, settings, results)


def run_splits(args: argparse.Namespace) -> Iterator[str]:
    results = fleet.run(splits.work, args.reps, 2, args.timeout)
    # By split: the seconds of planning and of packing on the slowest rank.
    unsplit, *split_ones = splits.slowest(results)
    rows = []
    for split, seconds in zip(splits.SPLITS, split_ones):
        planning = seconds[0] / unsplit[0]
        packing = seconds[1] / unsplit[1]
        rows.append([str(split), f"{planning:.2f}", f"{packing:.2f}"])
    yield table.render(["x unsplit", "planning", "packing"], rows)


def run_scale(args: argparse.Namespace) -> Iterator[str]:
    hardware = Hardware().with_values(args.hardware)
    owners = args.owners if args.owners == "auto" else int(args.owners)
    options = Options(args.algorithm, args.fused, args.prefetch, owners)
    if args.model is not None:
        yield _of_model(args, hardware, options)
        return
    cases = [case for case in CASES if args.only in case.title]
    if not cases:
        raise ValueError(f"no row has {args.only!r} in its title")
    if args.html is not None and len(cases) > 1:
        titles = "\n".join(case.title for case in cases)
        raise ValueError(f"--html needs --only with the title of one row:\n{titles}")
    reports = []
    for case in cases:
        row = report.comparisons(_report(case, hardware, options, args.html), hardware)
        # The memory of the first schedule is free before others are made.
        reports.append(report.with_owners(row, hardware, options))
    yield report.text(reports)
    yield report.divided_text(reports)
    yield report.options_text(reports)


def _of_model(args: argparse.Namespace, hardware: Hardware, options: Options) -> str:
    """The answer about a model of the user's own: of one layout, or a table of several."""
    if args.tokens and args.tokens_per_rank:
        raise ValueError("--tokens and --tokens-per-rank: give one of them")
    model, notes = own.read(args.model, args.active_experts)
    model, notes = own.as_users_have_it(model, notes, args.shard_dim, args.split)
    name, ranks = Path(args.model).stem, args.ranks
    tokens = args.tokens
    if args.tokens_per_rank:
        tokens = args.tokens_per_rank * ranks
    layouts = []
    for layout in args.layout:
        if layout == "any":
            layouts += own.sensible_layouts(model, ranks, hardware)
        else:
            layouts.append(layout)
    # Without repetitions.
    layouts = list(dict.fromkeys(layouts))
    cases = [own.case_of(model, name, layout, ranks, tokens) for layout in layouts]
    if args.html is not None and len(cases) > 1:
        raise ValueError("--html needs one layout")
    began = time.process_time()
    reports, searches = [], []
    for number, case in enumerate(cases, 1):
        reports.append(_report(case, hardware, options, args.html))
        searches.append(Search(case, options, hardware, len(cases) == 1))
        # The fastest layouts get the second half of the time.
        share = number / len(cases) / 2
        searches[-1].run(began + share * args.seconds)
    found = {}
    for one in sorted(searches, key=lambda search: search.found.fastest.seconds):
        found[one] = one.run(began + args.seconds)
    of_cases = [found[one] for one in searches]
    if len(cases) == 1:
        return answer(reports[0], notes, hardware, of_cases[0])
    return layouts_answer(reports, of_cases, notes, hardware)


def _report(
    case: Case, hardware: Hardware, options: Options, html: Path | None
) -> dict[str, Any]:
    schedule = report.schedule_of(case, hardware, options)
    if html is not None:
        page.write(html, case.title, schedule, case.world, hardware, options)
    return report.report(case, schedule, hardware, options)


def run_measured(args: argparse.Namespace) -> Iterator[str]:
    return measured.tables(args.file, Hardware())


COMMANDS = {
    "step": Command(run_step, "time a step of each implementation"),
    "bytes": Command(run_bytes, "count what a step sends"),
    "scale": Command(run_scale, "simulate a step of public models on many ranks"),
    "measured": Command(
        run_measured, "compare the simulator's costs with the times of a GPU"
    ),
    "check": Command(
        run_check, "compare simulated steps with real ones on a slow wire"
    ),
    "splits": Command(run_splits, "compare fused weights with and without split"),
}
