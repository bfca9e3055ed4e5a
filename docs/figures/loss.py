"""Draws the losses of Muon and AdamW on the GPT of `setup_overlay.py verify`.

    torchrun --nproc-per-node 4 docs/figures/loss.py [FILE.png] [--steps N] [--clip adamw]

The first process trains alone, with AdamW and with Muon, at each of --rates, and with more seeds (--seeds) at the best
one. A seed decides about the first weights and the batches. After that, all processes train with FSDP2 and distributed
Muon at its best rate, with the first seed. All runs have the betas, scale, weight decay, clipping and warmup of
docs/guide.md, and both optimizers of a Muon run have one rate. With `--clip adamw`, a Muon run clips AdamW's gradients
only.
"""

import argparse
import statistics
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.muon import partition_named_parameters


HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

from compare_gpt import at_the_end
from gpt import GPT
from common import load, loss_of, sample


BATCH, CONTEXT = 16, 128
RATES = [2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3]


def optimizers_of(model, has_muon, lr, config):
    """Muon for the hidden matrices and AdamW for the rest, or AdamW for all."""
    options = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if not has_muon:
        return [AdamW(model.parameters(), **options)]
    matrices, others = partition_named_parameters(model)
    scale = "match_rms_adamw"
    muon = Muon(matrices, lr, adjust_lr_fn=scale, distributed_config=config)
    return [muon, AdamW(others, **options)]


def train(steps, has_muon, lr, clips, seed=0, sharded=False):
    """The loss of each step, as the mean over all processes."""
    torch.manual_seed(seed)
    model = GPT(192, 4, 6, CONTEXT)
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizers = optimizers_of(model, has_muon, lr, "auto" if sharded else None)
    clipped = list(model.parameters())
    if clips == "adamw":
        clipped = []
        for group in optimizers[-1].param_groups:
            clipped.extend(group["params"])

    def pace(step):  # up over the first tenth, then down to a tenth
        warm_up = (step + 1) / max(1, steps // 10)
        decay = 1 - 0.9 * step / steps
        return min(warm_up, decay)

    schedules = [LambdaLR(optimizer, pace) for optimizer in optimizers]
    text, _ = load()
    rank, size = 0, 1
    if sharded:
        rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(steps):
        batch = sample(text, BATCH, CONTEXT, seed * steps + step + 1)
        inputs, targets = (part.chunk(size)[rank] for part in batch)
        loss = loss_of(model, (inputs, targets))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(clipped, 1.0)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        mean = loss.detach() / size
        if sharded:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def runs_of(args, title, has_muon):
    """The best rate of the first seed, and the losses of each seed at this rate."""
    losses_of = {}
    for lr in args.rates:
        losses_of[lr] = train(args.steps, has_muon, lr, args.clip)
        end = at_the_end(losses_of[lr])
        print(f"{title}, learning rate {lr:g}: {end:.3f} at the end", flush=True)
    best = min(losses_of, key=lambda lr: at_the_end(losses_of[lr]))
    losses = [losses_of[best]]
    for seed in range(1, args.seeds):
        losses.append(train(args.steps, has_muon, best, args.clip, seed))
    ends = ", ".join(f"{at_the_end(of_seed):.3f}" for of_seed in losses)
    print(f"{title}, {len(losses)} seeds at {best:g}: {ends}", flush=True)
    return best, losses


def draw(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    styles = [("#9ecae1", 5, "-"), ("#08306b", 1.2, "-"), ("#d94801", 1.6, "--")]
    for (label, seeds), (color, width, dashes) in zip(curves.items(), styles):
        steps = range(1, len(seeds[0]) + 1)
        by_step = list(zip(*seeds, strict=True))
        middle = [statistics.median(losses) for losses in by_step]
        axes.plot(steps, middle, dashes, color=color, linewidth=width, label=label)
        lowest, highest = map(min, by_step), map(max, by_step)
        axes.fill_between(steps, [*lowest], [*highest], color=color, alpha=0.25, lw=0)
    axes.set(xlabel="step", ylabel="training loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=HERE / "loss.png")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--clip", choices=("all", "adamw"), default="all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # The others wait while the first process trains alone.
    dist.init_process_group("gloo", timeout=timedelta(hours=2))
    found = [None]
    if dist.get_rank() == 0:
        adamw = runs_of(args, "AdamW", has_muon=False)
        muon = runs_of(args, "Muon", has_muon=True)
        found = [(muon, adamw)]
    dist.broadcast_object_list(found)
    (lr, of_muon), (adamw_lr, of_adamw) = found[0]
    many = train(args.steps, True, lr, args.clip, sharded=True)
    if dist.get_rank() == 0:
        gap = max(abs(one - other) for one, other in zip(of_muon[0], many))
        print(f"Muon on one process and on many: losses at most {gap:.3f} apart")
        curves = {
            f"Muon, 1 process (lr {lr:g}, {args.seeds} seeds)": of_muon,
            f"Muon, {dist.get_world_size()} processes, FSDP2, first seed": [many],
            f"AdamW (lr {adamw_lr:g}, {args.seeds} seeds)": of_adamw,
        }
        draw(curves, args.out)
        print(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
