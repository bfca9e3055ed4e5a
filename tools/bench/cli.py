"""The commands of the bench and their arguments."""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch.optim._newton_schulz import NS_ALGORITHMS

from . import contestants, fleet, step, table, traffic
from .layouts import fits, LAYOUTS, WORKLOADS
from .scale import own, report
from .scale.cases import Case, CASES
from .scale.costs import Options
from .scale.hardware import GPUS, Hardware


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
        command.add_argument(
            "--timeout",
            type=float,
            default=900.0,
            help="seconds of one table",
        )
        if name == "step":
            command.add_argument("--reps", type=int, default=11)
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
        help=f"of --model: {own.FORMS}; several are compared",
    )
    add(
        "--shard-dim",
        type=int,
        choices=(0, 1),
        default=0,
        help="how you shard stacks of experts: Shard(0), FSDP2's default, or Shard(1)",
    )
    add("--split", action="store_true", help="you split fused weights as split_of does")
    add("--tokens", type=int, default=2**22, help="of a training step, on all ranks")
    add("--tokens-per-rank", type=int, default=0, metavar="N", help="on each rank")
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


def run_scale(args: argparse.Namespace) -> Iterator[str]:
    hardware = Hardware().with_values(args.hardware)
    options = Options(args.algorithm, args.fused, args.prefetch)
    if args.model is None:
        cases = [case for case in CASES if args.only in case.title]
        if not cases:
            raise ValueError(f"no row has {args.only!r} in its title")
    else:
        cases = _cases_of_model(args)
        yield f"Muon has {own.summary(cases[0].model)}."
    rows = [report.row_of(case, hardware, options) for case in cases]
    yield report.text(rows)
    yield report.options_text(rows)


def _cases_of_model(args: argparse.Namespace) -> list[Case]:
    """A model of the user's own, in one layout or several."""
    model = own.read(args.model, args.active_experts)
    model = own.as_users_have_it(model, args.shard_dim, args.split)
    tokens = args.tokens_per_rank * args.ranks
    model = model._replace(tokens=tokens or args.tokens)
    name = Path(args.model).stem
    return [own.case_of(model, name, layout, args.ranks) for layout in args.layout]


COMMANDS = {
    "step": Command(run_step, "time a step of each implementation"),
    "bytes": Command(run_bytes, "count what a step sends"),
    "scale": Command(run_scale, "simulate a step of public models on many ranks"),
}
