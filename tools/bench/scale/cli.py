"""``python -m tools.bench scale``: its arguments, and what it prints."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, TYPE_CHECKING

from torch.testing._internal.distributed._muon.model_shapes import MODELS
from . import table
from .hardware import Hardware


if TYPE_CHECKING:
    import argparse


# Of Hardware, in the units of the command line.
UNITS = {
    "peak_flops": ("tflops", 1e12),
    "utilization": ("", 1),
    "intra_bandwidth": ("gb-s", 1e9),
    "inter_bandwidth": ("gb-s", 1e9),
    "intra_latency": ("us", 1e-6),
    "inter_latency": ("us", 1e-6),
    "gpus_per_node": ("", 1),
}


def add_parser(commands: Any) -> None:
    """Nothing here imports torch: it is for those that run a command."""
    scaled = commands.add_parser(
        "scale",
        help="simulate a step at real sizes, on hundreds of ranks, beside its alternatives",
        description=Hardware.__doc__,
    )
    scaled.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    for field in fields(Hardware):
        if field.name in UNITS:
            unit, factor = UNITS[field.name]
            name = "-".join([*field.name.split("_"), *([unit] if unit else [])])
            scaled.add_argument(
                f"--{name}",
                dest=field.name,
                type=type(field.default),
                default=field.default / factor if unit else field.default,
                help="default: %(default)g",
            )
    scaled.add_argument("--prefetch", type=int, default=1, help="prefetch_count")
    scaled.add_argument(
        "--max-replicas",
        type=int,
        help="relay beyond so many replicas; default: the engine's own",
    )
    scaled.add_argument(
        "--figure",
        type=Path,
        metavar="FILE.png",
        help="draw the picture of docs/bench.md",
    )
    scaled.add_argument("--out", type=Path, metavar="FILE.json")
    scaled.set_defaults(run=run, no_stock=True)


def hardware_of(args: argparse.Namespace) -> Hardware:
    values = vars(args)
    return Hardware(
        **{
            name: values[name] * factor if unit else values[name]
            for name, (unit, factor) in UNITS.items()
        }
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    from .cases import CASES
    from .report import report

    hardware = hardware_of(args)
    found = []
    for case in CASES:
        if case.model in args.models:
            found.append(report(case, hardware, args.prefetch, args.max_replicas))
            print(table.progress(found[-1]), flush=True)
    print("", table.times(found), table.volumes(found), sep="\n\n")
    if args.figure is not None:
        from . import figure

        figure.draw(args.figure, hardware, args.prefetch)
    return found
