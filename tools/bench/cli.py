"""The commands of the bench and their arguments."""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence

from . import contestants, fleet, scale, step
from .layouts import fits, LAYOUTS, WORKLOADS


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser("python -m tools.bench", description=__doc__)
    commands = result.add_subparsers(dest="command", required=True)
    _add_step(commands.add_parser("step", help="time a step of each implementation"))
    _add_scale(commands.add_parser("scale", help="calculate a step on many ranks"))
    return result


def _add_scale(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=scale.run)
    add = command.add_argument
    models = ", ".join(scale.MODELS)
    add("--model", nargs="+", required=True, help=f"{models}, or module:function")
    add("--ranks", nargs="+", type=int, default=[64], help="GPUs")
    layouts = scale.LAYOUTS
    add("--layouts", nargs="+", choices=layouts, default=layouts)
    add("--inner", type=int, default=8, help="shards of HSDP, or ranks of TP or EP")
    add("--tokens", type=int, help="of a training step, on all GPUs")
    add("--active-experts", type=int, default=0, metavar="K", help="of a token")
    add("--shard-dim", type=int, choices=(0, 1), default=0, help="of FSDP for stacks")
    add("--prefetch", type=int, default=1, help="prefetch_count")
    names = ", ".join((*scale.GPUS, "gpu.json", *scale.GPU._fields))
    add("--gpu", nargs="+", default=["h100"], metavar="NAME[=VALUE]", help=names)


def _add_step(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=compare)
    add = command.add_argument
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    add("--workloads", nargs="+", choices=WORKLOADS, default=["pairs", "gpt2"])
    add("--world", nargs="+", type=int, default=[2, 4], help="processes")
    add("--algorithms", nargs="+", default=["quintic"], help="ns_algorithm")
    others = contestants.OTHERS
    add("--against", nargs="*", choices=others, default=others, metavar="OTHER")
    add("--reps", type=int, default=11, help="repetitions")


def main(arguments: Sequence[str]) -> int:
    args = parser().parse_args(arguments)
    try:
        for text in args.run(args):
            print(text, end="\n\n", flush=True)
    except (fleet.Failed, ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def compare(args: argparse.Namespace) -> Iterator[str]:
    """Times steps for every layout, workload and number of processes that fit together."""
    ours = [f"ours-{algorithm}" for algorithm in args.algorithms]
    names = [*ours, *args.against]
    combinations = itertools.product(args.workloads, args.world, args.layouts)
    for workload, world, layout in combinations:
        if fits(layout, world):
            able = contestants.able(names, layout)
            job = step.Job(layout, workload, able, args.reps)
            results = fleet.run(step.work, job, world, seconds=900)
            yield step.text(job, results)
