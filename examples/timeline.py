"""Draw one step of Muon: a row for each process, time across, a colour for each phase.

    torchrun --nproc-per-node 4 examples/timeline.py
    torchrun --nproc-per-node 4 examples/timeline.py --parallel ddp --prefetch 0 --picture ddp.png

The blocks of ``train_gpt.py``'s GPT take some steps, and a profiler watches the last one. In a step
that overlaps well there is much blue and little grey. An owner applies its own part of an update, and
relays others' results, within "orthogonalize". What each process has to do is printed first
(``muon.describe()``).
"""

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from text import load
from text_table import render
from torch.optim import Muon
from torch.optim.muon import partition_parameters
from torch.profiler import profile, record_function
from train_gpt import (
    batch,
    build_model,
    config_of,
    connect,
    loss_of,
    options,
    WRAPPERS,
)


COLOURS = {
    "gather": "#9ecae1",
    "wait for gather": "#d9d9d9",
    "orthogonalize": "#08519c",
    "scatter": "#fdae6b",
    "wait for scatter": "#bdbdbd",
    "apply": "#a63603",
    "wait for relay": "#969696",
}
TOGETHER = "all processes are here"
RANGE = re.compile(r"Muon (?P<phase>.+), bucket (?P<bucket>\d+) of \d+ ranks")


class Range(NamedTuple):
    """What a process did in a step, in milliseconds since the step began."""

    phase: str
    bucket: int
    start: float
    end: float


def watched_step(muon: Muon) -> list[Range]:
    """The ranges of one step, in which all processes begin together."""
    with profile() as profiled:
        with record_function(TOGETHER):
            dist.barrier()
        muon.step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    events = list(profiled.events())
    # An accelerator has ranges of its own beside those of the host that launches its kernels.
    kinds = {event.device_type for event in events if RANGE.match(event.name)}
    kind = max(kinds, key=lambda kind: kind.value)
    found = [
        (match, event.time_range)
        for event in events
        if event.device_type == kind and (match := RANGE.match(event.name))
    ]
    # Clocks of processes differ, and so do the moments at which their profilers are ready.
    begin = min(event.time_range.end for event in events if event.name == TOGETHER)
    return [
        Range(
            match["phase"],
            int(match["bucket"]),
            (span.start - begin) / 1000,
            (span.end - begin) / 1000,
        )
        for match, span in found
    ]


def train_and_watch(args: argparse.Namespace) -> tuple[Muon, list[Range]]:
    mesh, device = connect()
    if mesh is None:
        raise SystemExit("timeline: start it under torchrun, on several processes")
    model = build_model(args, mesh, device)
    matrices, _ = partition_parameters(getattr(model, "module", model).blocks)
    config = config_of(model)
    config.prefetch_count = args.prefetch
    muon = Muon(matrices, lr=args.lr, distributed_config=config)
    text, _ = load()
    ranges: list[Range] = []
    for step in range(args.steps):
        loss_of(model, *batch(text, args, mesh, seed=args.seed + step)).backward()
        if step < args.steps - 1:
            muon.step()
        else:
            ranges = watched_step(muon)
        model.zero_grad()
    return muon, ranges


def table(everyone: list[list[Range]]) -> str:
    rows = []
    for rank, ranges in enumerate(everyone):
        spent: Counter[str] = Counter()
        for each in ranges:
            spent[each.phase] += each.end - each.start
        last = max(each.end for each in ranges)
        rows.append(
            [str(rank), *(f"{spent[name]:.1f}" for name in COLOURS), f"{last:.1f}"]
        )
    return render(["ms on rank", *COLOURS, "all"], rows)


def draw(everyone: list[list[Range]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(
        figsize=(12, 1.5 + 0.5 * len(everyone)), layout="constrained"
    )
    for rank, ranges in enumerate(everyone):
        for each in ranges:
            width = each.end - each.start
            axes.barh(
                rank, width, left=each.start, height=0.8, color=COLOURS[each.phase]
            )
            if each.phase == "orthogonalize" and width > 0:
                axes.text(
                    each.start + width / 2,
                    rank,
                    str(each.bucket),
                    ha="center",
                    va="center",
                    color="white",
                    clip_on=True,
                )
    axes.set(xlabel="ms", ylabel="rank", yticks=range(len(everyone)))
    axes.set_title("One step of Muon; numbers are buckets")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    seen = {each.phase for ranges in everyone for each in ranges}
    patches = [
        Patch(color=COLOURS[name], label=name) for name in COLOURS if name in seen
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=7, frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = options()
    parser.set_defaults(steps=5)
    parser.description = __doc__
    parser.add_argument("--parallel", choices=WRAPPERS, default="fsdp2")
    parser.add_argument(
        "--prefetch", type=int, default=1, help="prefetch_count of the config"
    )
    parser.add_argument(
        "--picture", type=Path, default=Path("timeline.png"), metavar="FILE"
    )
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps has to be at least 1")
    muon, ranges = train_and_watch(args)
    everyone: list[list[Range]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, ranges)
    if dist.get_rank() == 0:
        print(muon.describe(), end="\n\n")
        print(table(everyone))
        draw(everyone, args.picture)
        print(args.picture)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
