"""Train the GPT of train_fsdp2.py with several processes and with one, and compare.

    python examples/compare_gpt.py
    python examples/compare_gpt.py --processes 2 --steps 40 --width 96

Both runs see the same batches. A table compares their losses and seconds, and a picture shows the
curves. After that, the processes take a few steps with gradients that are identical to those of one
process: each rank's parameters and momentum must be equal to the last bit, and the ranks may send
only the bytes that they have to. The exit code is 1 if something does not hold.

The losses of the two runs are close, not equal. The processes add up gradients in another order,
and Newton-Schulz lifts the rounding of a gradient's small directions to the size of its large ones.

Everything runs on the CPU. On a GPU, the rounding of a product depends on strides. Other options
go to train_fsdp2.py.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train_fsdp2
from gpt import GPT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.optim import Muon
from torch.optim.muon import partition_named_parameters
from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends to other ranks in all-to-alls."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "alltoall_base_" in str(func):
            packed, splits = args[1], args[4]
            elements = sum(splits) - splits[dist.get_rank()]
            self.count += elements * packed.itemsize
        return func(*args, **(kwargs or {}))


def exact(args: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Takes steps with the same gradients for this rank's shards and for the whole model."""
    names = ("replicate", "shard", "tp")
    shape = (1, dist.get_world_size(), 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    many = train_fsdp2.build_model(args, mesh)
    muon, _ = train_fsdp2.build_optimizers(many, args)
    shards = dict(partition_named_parameters(many)[0])
    one = GPT(args.width, args.layers, args.heads, args.context)
    one.load_state_dict({n: t.full_tensor() for n, t in many.state_dict().items()})
    wholes = dict(partition_named_parameters(one)[0])
    options = {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    alone = Muon(wholes.items(), lr=args.lr, **options)
    sent = SentBytes()
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(steps):
        for name, whole in wholes.items():
            whole.grad = torch.randn(whole.shape, generator=generator)
            like = shards[name].device_mesh, shards[name].placements
            shard = distribute_tensor(whole.grad, *like, src_data_rank=None)
            shards[name].grad = shard
        with sent:
            muon.step()
        alone.step()
    differing, key = [], "momentum_buffer"
    for name, whole in wholes.items():
        shard = shards[name].detach()
        momenta = muon.state[shards[name]][key], alone.state[whole][key]
        for mine, its in ((shard, whole), momenta):
            if not torch.equal(mine.full_tensor(), its):
                differing.append(name)
    # A rank must send its shards to their owners and, as an owner, the rest of each result.
    owned = muon.assignments.get(dist.get_rank(), [])
    least = 0
    for index, shard in enumerate(shards.values()):
        here = shard.to_local().numel()
        least += shard.numel() - here if index in owned else here
    return {
        "matrices": len(owned),
        "differing": differing,
        "sent": sent.count // steps,
        "least": least * torch.bfloat16.itemsize,
    }


def report(
    one: dict[str, Any], many: dict[str, Any], ranks: list[dict[str, Any]], steps: int
) -> list[str]:
    """Prints the comparison. Returns what does not hold, in words."""
    losses = [[step["loss"] for step in run["steps"]] for run in (one, many)]
    tenth = max(1, len(losses[0]) // 10)
    ends = [sum(each[-tenth:]) / tenth for each in losses]
    apart = max(abs(a - b) for a, b in zip(*losses))
    seconds = [run["steps"][-1]["seconds"] for run in (one, many)]
    print(f"\n{'':34}{'one process':>14}{f'{len(ranks)} processes':>14}")
    for what, figures, form in (
        ("loss, first step", [each[0] for each in losses], ".4f"),
        ("loss, mean of the last tenth", ends, ".4f"),
        ("loss on held-out text", [run["held_out"] for run in (one, many)], ".4f"),
        ("seconds", seconds, ".1f"),
    ):
        print(f"  {what:32}{figures[0]:14{form}}{figures[1]:14{form}}")
    print(f"  {'largest difference of loss':46}{apart:14.2g}")
    head = f"{'a Muon step of rank':22}{'matrices':>10}{'KiB sent':>12}{'least':>12}"
    print(f"\n  {head}")
    for number, rank in enumerate(ranks):
        row = f"{rank['matrices']:10}{rank['sent'] / 1024:12.1f}"
        print(f"  {number:<22}{row}{rank['least'] / 1024:12.1f}")
    count = sum(rank["matrices"] for rank in ranks)
    unequal = sorted({name for rank in ranks for name in rank["differing"]})
    words = f"NO, {', '.join(unequal)}" if unequal else "yes"
    print("\nIdentical gradients: parameters and momentum against one process")
    print(f"  bitwise equal: {words} ({count} matrices, {steps} steps)")

    problems = [f"not bitwise equal: {name}" for name in unequal]
    for who, each, end in zip(("one process", "the processes"), losses, ends):
        if not end < each[0]:  # also if it is NaN
            problems.append(f"{who}: loss did not fall: {each[0]:.4f} to {end:.4f}")
    if not abs(losses[0][0] - losses[1][0]) < 1e-3:
        problems.append("the first losses differ")
    for number, rank in enumerate(ranks):
        if rank["sent"] != rank["least"]:
            problems.append(f"rank {number} sends {rank['sent']} bytes in a step")
    return problems


def draw(one: dict[str, Any], many: dict[str, Any], count: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for run, label, style in (
        (one, "one process", {"color": "#9ecae1", "linewidth": 5}),
        (many, f"{count} processes, FSDP2", {"color": "#08306b", "linewidth": 1.2}),
    ):
        losses = [step["loss"] for step in run["steps"]]
        axes.plot(range(1, len(losses) + 1), losses, label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Muon, same batches")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def torchrun(count: int, script: str, *arguments: object) -> None:
    """Runs an example on ``count`` processes. Exits if it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [sys.executable, *launcher, count, Path(__file__).with_name(script)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    print(f"\n{script} on {count} process{'es' * (count > 1)}", flush=True)
    done = subprocess.run(list(map(str, (*command, *arguments))), env=environ)
    if done.returncode:
        sys.exit(f"compare_gpt: {script} failed on {count} processes")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compare several processes with one. Other options: train_fsdp2.py's",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=4, help=" ")
    parser.add_argument("--exact-steps", type=int, default=5, help="same gradients")
    parser.add_argument("--out", type=Path, default="out", help="folder for figures")
    args, given = parser.parse_known_args()
    given = ["--steps", "80", *given]
    training = train_fsdp2.options().parse_args(given)
    too_few = min(args.processes - 1, args.exact_steps) < 1
    if training.replicate * training.tp > 1 or too_few:
        parser.error("this compares FSDP2 on two or more processes with one")
    figures = {name: args.out / f"{name}.json" for name in ("one", "many", "ranks")}
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, exact(training, args.exact_steps))
        if dist.get_rank() == 0:
            figures["ranks"].write_text(json.dumps(ranks))
        dist.destroy_process_group()
        time.sleep(0.2)  # as in train_fsdp2.py
        return 0

    args.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("many", args.processes), ("one", 1)):
        torchrun(count, "train_fsdp2.py", *given, "--losses", figures[name])
    torchrun(args.processes, "compare_gpt.py", *sys.argv[1:])
    one, many, ranks = (json.loads(path.read_text()) for path in figures.values())
    problems = report(one, many, ranks, args.exact_steps)
    draw(one, many, args.processes, args.out / "losses.png")
    print(f"\n{args.out / 'losses.png'}", flush=True)
    for problem in problems:
        print(f"compare_gpt: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
