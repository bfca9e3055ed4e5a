"""Train the GPT of train_fsdp2.py with several processes and with one, and compare.

    python examples/compare_gpt.py
    python examples/compare_gpt.py --processes 2 --steps 40 --width 96

Both runs see the same batches. A table compares their losses, and a picture shows the curves. After
that, the processes take a few steps with gradients that are identical to those of one process: each
rank's parameters and momentum must be equal to the last bit, and the ranks may send only the bytes
that they have to. The exit code is 1 if something does not hold.

The losses of the two runs are close, not equal. The processes add up gradients in another order,
and Newton-Schulz lifts the rounding of a gradient's small directions to the size of its large ones.

Everything runs on the CPU. On a GPU, the rounding of a product depends on strides.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train_fsdp2
from common import SentBytes, start, stop
from gpt import GPT
from torch.distributed.tensor import distribute_tensor
from torch.optim import Muon
from torch.optim.muon import partition_named_parameters


EXACT_STEPS = 5


def exact(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Takes steps with the same gradients for this rank's shards and for the whole model."""
    model, (muon, _) = train_fsdp2.build(args, device)
    shards = dict(partition_named_parameters(model)[0])
    torch.manual_seed(0)
    whole_model = GPT(args.width, args.layers, args.heads, args.context)
    wholes = dict(partition_named_parameters(whole_model)[0])
    alone = Muon(wholes.items(), lr=args.lr, adjust_lr_fn="match_rms_adamw")
    sent = SentBytes()
    for _ in range(EXACT_STEPS):
        for name, whole in wholes.items():
            mesh, placements = shards[name].device_mesh, shards[name].placements
            whole.grad = torch.randn(whole.shape)
            shards[name].grad = distribute_tensor(
                whole.grad, mesh, placements, src_data_rank=None
            )
        with sent:
            muon.step()
        alone.step()
    differing = []
    # A rank must send its shards to their owners and, as an owner, the rest of each result.
    owned = muon.assignments.get(dist.get_rank(), [])
    least = 0
    for index, (name, whole) in enumerate(wholes.items()):
        shard = shards[name]
        momentum = muon.state[shard]["momentum_buffer"].full_tensor()
        has_value = torch.equal(shard.detach().full_tensor(), whole)
        has_momentum = torch.equal(momentum, alone.state[whole]["momentum_buffer"])
        if not (has_value and has_momentum):
            differing.append(name)
        here = shard.to_local().numel()
        least += shard.numel() - here if index in owned else here
    return {
        "matrices": len(owned),
        "differing": differing,
        "sent": sent.count // EXACT_STEPS,
        "least": least * torch.bfloat16.itemsize,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a run, in each of its processes."""
    device = start()
    losses, held_out = train_fsdp2.train(args, device)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, exact(args, device))
    return {"losses": losses, "held_out": held_out, "ranks": ranks}


def at_the_end(losses: list[float]) -> float:
    """The mean of the last tenth."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def report(one: dict[str, Any], many: dict[str, Any]) -> list[str]:
    """Prints the comparison. Returns what does not hold, in words."""
    problems = []
    print()
    for name, run in (("one process", one), (f"{len(many['ranks'])} processes", many)):
        first, last = run["losses"][0], at_the_end(run["losses"])
        print(
            f"  {name}: loss {first:.4f}, {last:.4f} in the last tenth of the steps, "
            f"{run['held_out']:.4f} on held-out text"
        )
        if not last < first:  # also if it is NaN
            problems.append(f"{name}: loss did not fall: {first:.4f} to {last:.4f}")
    apart = [abs(a - b) for a, b in zip(one["losses"], many["losses"])]
    print(f"  largest difference of loss: {max(apart):.2g}")
    if not apart[0] < 1e-3:
        problems.append("the first losses differ")

    unequal: set[str] = set()
    for number, rank in enumerate(many["ranks"]):
        sent, least, owned = rank["sent"], rank["least"], rank["matrices"]
        print(
            f"  rank {number}: {owned} matrices, {sent} bytes in a step, least {least}"
        )
        unequal.update(rank["differing"])
        if sent != least:
            problems.append(f"rank {number} sends {sent} bytes in a step")
    count = sum(rank["matrices"] for rank in many["ranks"])
    print("\nIdentical gradients: parameters and momentum against one process")
    answer = f"NO, {', '.join(sorted(unequal))}" if unequal else "yes"
    print(f"  bitwise equal: {answer} ({count} matrices, {EXACT_STEPS} steps)")
    return problems + [f"not bitwise equal: {name}" for name in sorted(unequal)]


def draw(one: dict[str, Any], many: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(one["losses"]) + 1)
    label = f"{len(many['ranks'])} processes, FSDP2"
    axes.plot(steps, one["losses"], label="one process", color="#9ecae1", linewidth=5)
    axes.plot(steps, many["losses"], label=label, color="#08306b", linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Muon, same batches")
    axes.legend()
    figure.savefig(path, dpi=120)


def torchrun(count: int) -> None:
    """Runs this script on ``count`` processes. Exits if it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [sys.executable, *launcher, str(count), __file__, *sys.argv[1:]]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    print(f"\nFSDP2 on {count} process{'es' * (count > 1)}", flush=True)
    if subprocess.run(command, env=environ).returncode:
        sys.exit(f"compare_gpt: failed on {count} processes")


def main() -> int:
    parser = train_fsdp2.options()
    parser.add_argument("--processes", type=int, default=4, help="number")
    parser.add_argument("--out", type=Path, default="out", help="folder for figures")
    parser.set_defaults(steps=80)
    args = parser.parse_args()
    if args.replicate * args.tp > 1 or args.folder or args.processes < 2:
        parser.error("this compares FSDP2 on two or more processes with one")
    if "RANK" in os.environ:
        figures = measure(args)
        if dist.get_rank() == 0:
            path = args.out / f"{dist.get_world_size()}.json"
            path.write_text(json.dumps(figures))
        stop()
        return 0

    args.out.mkdir(parents=True, exist_ok=True)
    runs = []
    for count in (1, args.processes):
        torchrun(count)
        runs.append(json.loads((args.out / f"{count}.json").read_text()))
    problems = report(*runs)
    draw(*runs, args.out / "losses.png")
    print(f"\n{args.out / 'losses.png'}", flush=True)
    for problem in problems:
        print(f"compare_gpt: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
