"""Train the GPT of train_gpt.py with FSDP2 and distributed Muon, and compare with one process.

    python examples/compare_gpt.py
    torchrun --nproc-per-node 4 examples/compare_gpt.py

The processes train on the same batches as the first of them does afterwards, alone. A table
compares: the losses, who orthogonalized how many matrices, the bytes that were sent with the
least that have to be, the time. Then all take a few steps with gradients that are identical
to those of one process. After these the parameters and the momentum have to be equal to the
last bit. The exit code is 1 if what has to be equal is not.

The trained parameters are far from equal, and that is not the optimizer's doing. The
processes' gradients are added up in another order, and Newton-Schulz lifts the rounding of
a gradient's small directions to the size of its large ones. One process that adds up its
own gradients in four slices ends as far from itself: 37 % of the way trained, where four
processes end 43 % away (80 steps, torch 2.13, on a CPU).

All of this is on the CPU: on a GPU the rounding of a product depends on strides.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train_gpt
from measure import by_kind, conclude, exact_steps, last_tenth, Meter, print_loss
from processes import connect, Failed, leave_on_signals, Place, Processes
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Muon


CPU = torch.device("cpu")
SECONDS = 3600  # for everything together
Parameters = dict[str, Tensor]


def run_training(
    args: argparse.Namespace, mesh: DeviceMesh | None
) -> tuple[dict[str, Any], Parameters, Parameters]:
    """The figures, and on the first process the parameters before and after."""
    model = train_gpt.build_model(args, mesh, CPU)
    optimizers = train_gpt.build_optimizers(model, args, mesh)
    meter = Meter(optimizers[0])
    before = {n: p.clone() for n, p in train_gpt.full_parameters(model).items()}
    losses: list[float] = []
    who = "one process" if mesh is None else f"{mesh.size()} processes"

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        print_loss(who, args.steps, step, loss)

    began = time.monotonic()
    held_out = train_gpt.train(model, optimizers, args, mesh, report)
    figures = {
        "losses": losses,
        "held_out": held_out,
        "seconds": time.monotonic() - began,
        **meter.figures(),
    }
    if mesh is not None:
        kinds = {"all ranks": dist.group.WORLD}
        figures["sent"] = by_kind(meter.wire, kinds, meter.steps)
        figures |= needed(optimizers[0], mesh)
    return figures, before, train_gpt.full_parameters(model)


def needed(muon: Muon, mesh: DeviceMesh) -> dict[str, int]:
    """The bytes that this rank cannot avoid sending in a step.

    Its shards of others' matrices go to their owners, and everybody else's shards of its
    own results go back; in bfloat16.
    """
    owned = muon.assignments.get(mesh.get_rank(), ())
    elements = 0
    parameters = [p for group in muon.param_groups for p in group["params"]]
    for index, p in enumerate(parameters):
        here = p.to_local().numel()
        elements += p.numel() - here if index in owned else here
    return {"needed": elements * torch.bfloat16.itemsize}


def run_exact(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """The same gradients for this rank's shards and for the whole model on one process."""
    many, one = (train_gpt.build_model(args, on, CPU) for on in (mesh, None))
    muons = (
        train_gpt.build_optimizers(model, args, on)[0]
        for model, on in ((many, mesh), (one, None))
    )
    return exact_steps(*zip((many, one), muons), args.exact_steps)


def compare(args: argparse.Namespace) -> int:
    """What each process does. Returns the exit code."""
    began = time.monotonic()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    figures, _, trained_by_many = run_training(args, mesh)
    figures |= run_exact(args, mesh)
    trained_by_one: list[Parameters] = []

    def alone() -> dict[str, Any]:
        figures, *parameters = run_training(args, None)
        trained_by_one.extend(parameters)
        return figures

    def more(one: dict[str, Any], many: list[dict[str, Any]], found: list[str]) -> None:
        found += problems(one, many)
        apart = distances(*trained_by_one, trained_by_many)
        print(WORDS.format_map(apart))
        write(args.out, {"one": one, "many": many, **apart, "problems": found})
        print(f"\n{time.monotonic() - began:.0f} s in all", flush=True)

    size = sum(p.numel() for p in train_gpt.build_model(args, None, CPU).parameters())
    count = len(figures["checked"])
    title = f"GPT of {size:,} parameters, {count} matrices by Muon"
    return conclude(title, figures, alone, more=more)


def problems(one: dict[str, Any], many: list[dict[str, Any]]) -> list[str]:
    """What does not hold of the training, in words."""
    found = []
    for who, ranks in (("one process", [one]), (f"{len(many)} processes", many)):
        first, last = ranks[0]["losses"][0], last_tenth(ranks[0])
        if not last < first:  # also when it is NaN
            found.append(f"{who}: the loss did not fall: {first:.4f} to {last:.4f}")
    # Before the first update nothing but the sharded forward pass differs.
    starts = [figures["losses"][0] for figures in (one, many[0])]
    if not abs(starts[0] - starts[1]) < 1e-3:
        found.append(f"the runs do not start alike: loss {starts[0]} and {starts[1]}")
    for rank, figures in enumerate(many):
        sent, least = sum(figures["sent"].values()), figures["needed"]
        if sent != least:
            found.append(f"rank {rank} sends {sent:.0f} bytes a step, {least} needed")
    return found


WORDS = """
Training: the processes add gradients up in another order; Newton-Schulz amplifies rounding
  largest difference of a parameter      {largest:.2g} ({largest_in})
  training moved parameters by up to     {largest_move:.2g}
  distance of all parameters at the end  {percent:.1f} % of the distance trained"""


def distances(before: Parameters, one: Parameters, many: Parameters) -> dict[str, Any]:
    """How far the trained parameters are apart, and how far training had moved them."""
    apart = {name: many[name] - one[name] for name in one}
    moved = {name: one[name] - before[name] for name in one}
    largest = {
        name: difference.abs().max().item() for name, difference in apart.items()
    }
    name = max(largest, key=largest.__getitem__)
    norms = [
        torch.cat([t.flatten() for t in d.values()]).norm() for d in (apart, moved)
    ]
    return {
        "largest": largest[name],
        "largest_in": name,
        "largest_move": max(t.abs().max().item() for t in moved.values()),
        "percent": 100 * (norms[0] / norms[1]).item(),
    }


def write(out: Path, figures: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "verify.json").write_text(json.dumps(figures, indent=2) + "\n")
    many = figures["many"]
    losses = {
        "one process": figures["one"]["losses"],
        f"{len(many)} processes, FSDP2": many[0]["losses"],
    }
    try:
        draw(losses, out / "losses.png")
        print(f"\n{out / 'losses.png'}")
    except ImportError:  # the picture is not worth the figures
        print("\nno picture: there is no matplotlib")
    print(out / "verify.json")


def draw(losses: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (one_name, one), (many_name, many) = losses.items()
    figure, (curves, gap) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, len(one) + 1)
    # The curves lie on each other, so the lower one is wide and pale.
    curves.plot(steps, one, color="#9ecae1", linewidth=5, label=one_name)
    curves.plot(steps, many, color="#08306b", linewidth=1.2, label=many_name)
    curves.set(ylabel="loss (nats per byte)", title="Training loss, same batches")
    curves.legend(frameon=False)
    # Below float32's resolution the logarithm would only show noise, and zero not at all.
    apart = [max(abs(a - b), 1e-7) for a, b in zip(one, many)]
    gap.semilogy(steps, apart, color="#a63603", linewidth=1.2)
    gap.set(ylabel="difference", xlabel="step")
    for axes in (curves, gap):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    figure.savefig(path, dpi=120)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        parents=[train_gpt.options()],
        add_help=False,
        description="Compare distributed Muon with one process.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(steps=80)
    parser.add_argument("--exact-steps", type=int, default=5, help="same gradients")
    parser.add_argument("--processes", type=int, default=4, help="without torchrun")
    parser.add_argument(
        "--out", type=Path, default="out", help="folder for all figures and a picture"
    )
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, size: int) -> None:
    for name in (
        "steps",
        "exact_steps",
        "batch",
        "context",
        "width",
        "layers",
        "heads",
    ):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} has to be at least 1")
    if size < 2:
        parser.error("one process is what the others are compared with; at least 2")
    if args.batch % size:
        parser.error(f"--batch {args.batch} does not divide among {size} processes")
    if args.width % args.heads:
        parser.error(f"--width {args.width} does not divide among {args.heads} heads")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is no folder")


def work(place: Place, args: argparse.Namespace) -> int:
    connect(place, SECONDS)
    return compare(args)


def main() -> int:
    parser = options()
    args = parser.parse_args()
    under_torchrun = "RANK" in os.environ
    size = int(os.environ["WORLD_SIZE"]) if under_torchrun else args.processes
    check(parser, args, size)
    if under_torchrun:
        torch.set_num_threads(1)  # equal bits need equal sums
        dist.init_process_group("gloo")
        return compare(args)
    try:
        with Processes(size) as processes:
            return max(processes.run(work, args, seconds=SECONDS))
    except Failed as error:
        print(f"compare_gpt: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    leave_on_signals()
    sys.exit(main())
