"""Draw one step of Muon: a row for each rank, time across, a colour for each phase.

    torchrun --nproc-per-node 4 examples/timeline.py
    torchrun --nproc-per-node 4 examples/timeline.py --parallel ddp --prefetch 0

A small GPT takes some steps, and a profiler watches the last one. A step that overlaps well has much
dark blue and little grey. An owner applies its own part of an update within "orthogonalize". The
program first prints what each rank has to do (``muon.describe()``).
"""

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from gpt import GPT
from text import load, sample
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    partition_named_parameters,
)
from torch.profiler import profile, record_function


# By the actions of a step. Relays exist with many replicas only.
COLOURS = {
    "gather": "#9ecae1",
    "wait for gather": "#d9d9d9",
    "orthogonalize": "#08519c",
    "scatter": "#fdae6b",
    "wait for scatter": "#bdbdbd",
    "apply": "#a63603",
    "relay": "#a1d99b",
    "wait for relay": "#969696",
    "apply relayed": "#006d2c",
}
TOGETHER = "all ranks are here"
RANGE = re.compile(r"Muon (.+), bucket (\d+) of \d+ ranks")


class Range(NamedTuple):
    """One phase of a step on a rank, in milliseconds since the step began."""

    phase: str
    bucket: int
    start: float
    end: float


def watched_step(muon: Muon) -> list[Range]:
    """The ranges of one step, which all ranks begin together."""
    with profile() as profiled:
        with record_function(TOGETHER):
            dist.barrier()
        muon.step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
    events = list(profiled.events())
    # An accelerator has its own ranges, next to those of the host that launches its kernels.
    kinds = {event.device_type for event in events if RANGE.match(event.name)}
    kind = max(kinds, key=lambda kind: kind.value)
    # The clocks of ranks differ, and their profilers start at different moments.
    begin = min(event.time_range.end for event in events if event.name == TOGETHER)
    found = []
    for event in events:
        match = RANGE.match(event.name)
        if match and event.device_type == kind:
            span = event.time_range
            start, end = ((at - begin) / 1000 for at in (span.start, span.end))
            found.append(Range(match[1], int(match[2]), start, end))
    return found


def train(args: argparse.Namespace, device: str) -> tuple[Muon, list[Range]]:
    torch.manual_seed(0)
    model = GPT(args.width, layers=4, heads=4, context=64).to(device)
    if args.parallel == "ddp":
        model = DistributedDataParallel(model)
        config = create_auto_config(ddp_process_group=model.process_group)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        config = create_dtensor_config()
    config.prefetch_count = args.prefetch
    matrices, _ = partition_named_parameters(model)
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config=config
    )
    text, _ = load()
    for step in range(args.steps):
        inputs, targets = (t.to(device) for t in sample(text, 4, 64, seed=step))
        cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        if step + 1 < args.steps:
            muon.step()
            model.zero_grad()
    return muon, watched_step(muon)


def print_table(everyone: list[list[Range]]) -> None:
    print("".join(f"{name:>18}" for name in ("ms on rank", *COLOURS)))
    for rank, ranges in enumerate(everyone):
        spent: Counter[str] = Counter()
        for each in ranges:
            spent[each.phase] += each.end - each.start
        print(f"{rank:18}" + "".join(f"{spent[name]:18.1f}" for name in COLOURS))


def draw(everyone: list[list[Range]], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.5 + 0.5 * len(everyone)), layout="constrained")
    axes = figure.subplots()
    for rank, ranges in enumerate(everyone):
        longest: dict[int, float] = {}
        for phase, bucket, start, end in ranges:
            if phase == "orthogonalize":
                longest[bucket] = max(longest.get(bucket, 0), end - start)
        for phase, bucket, start, end in ranges:
            bar = axes.barh(rank, end - start, left=start, color=COLOURS[phase])
            # A bucket has a bar for each batch, and its number on the longest one.
            if phase == "orthogonalize" and end - start == longest.get(bucket):
                axes.bar_label(bar, [str(bucket)], label_type="center", color="white")
                del longest[bucket]
    axes.set(xlabel="ms", ylabel="rank", yticks=range(len(everyone)))
    axes.set_xlim(left=0)
    axes.set_title("One step of Muon; numbers are buckets")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    seen = {each.phase for ranges in everyone for each in ranges}
    patches = [
        Patch(color=c, label=name) for name, c in COLOURS.items() if name in seen
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=7, frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", choices=("fsdp2", "ddp"), default="fsdp2")
    parser.add_argument("--prefetch", type=int, default=1, help="prefetch_count")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--picture", type=Path, default="timeline.png", metavar="FILE")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_node_local_rank())
    muon, ranges = train(args, "cuda" if cuda else "cpu")
    everyone: list[list[Range]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, ranges)
    if dist.get_rank() == 0:
        print(muon.describe(), end="\n\n")
        print_table(everyone)
        draw(everyone, args.picture)
        print(args.picture)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
