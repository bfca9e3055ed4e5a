"""Train a small GPT with DDP. The replicas share the orthogonalization.

    torchrun --nproc-per-node 4 examples/train_ddp.py
    torchrun --nproc-per-node 4 examples/train_ddp.py --accumulate 4

Under DDP every rank holds every matrix. Stock Muon orthogonalizes all of them on each rank. With
a ``distributed_config``, each rank orthogonalizes its share and sends the results to the others.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from gpt import GPT
from text import load, sample
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon
from torch.optim.muon import create_auto_config, partition_named_parameters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="windows on each rank")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per step")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = GPT(width=192, layers=4, heads=6, context=128).to(device)
    model = DistributedDataParallel(model)

    matrices, others = partition_named_parameters(model)
    config = create_auto_config(ddp_process_group=model.process_group)
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config=config
    )
    adamw = AdamW(others, lr=3e-3)

    text, _ = load()
    for step in range(args.steps):
        for part in range(args.accumulate):
            seed = (step * args.accumulate + part) * ranks + rank
            inputs, targets = sample(text, args.batch, context=128, seed=seed)
            is_last = part == args.accumulate - 1
            # DDP averages the gradients in the last backward pass only.
            with contextlib.nullcontext() if is_last else model.no_sync():
                logits = model(inputs.to(device)).flatten(0, 1)
                loss = cross_entropy(logits, targets.to(device).flatten())
                (loss / args.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}/{args.steps}, loss {loss:.4f}", flush=True)
    muon.synchronize()  # raises if ranks differed in the last step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
