"""Train a small GPT with FSDP1 (FullyShardedDataParallel).

    torchrun --nproc-per-node 4 examples/train_fsdp1.py

FSDP1 keeps parameters as slices of flat storage. With ``use_orig_params=True`` each slice is a
parameter of its own, so that Muon and AdamW can share a unit. Only the wrapped model knows the
shapes of the matrices, so the config takes ``module=``.
"""

import argparse
import os

import torch
import torch.distributed as dist
from gpt import Block, GPT
from text import load, sample
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Muon
from torch.optim.muon import create_auto_config, partition_named_parameters


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="windows on each rank")
    parser.add_argument(
        "--strategy", choices=["FULL_SHARD", "SHARD_GRAD_OP"], default="FULL_SHARD"
    )
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        GPT(width=192, layers=4, heads=6, context=128),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[args.strategy],
        device_id=device,  # also on a CPU, where FSDP1 asks for it
        use_orig_params=True,
    )

    # By shape of the whole matrices, which the slices hide.
    matrices, others = partition_named_parameters(model)
    config = create_auto_config(fsdp_process_group=model.process_group, module=model)
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config=config
    )
    adamw = AdamW(others, lr=3e-3)

    text, _ = load()
    for step in range(args.steps):
        seed = step * ranks + rank
        inputs, targets = sample(text, args.batch, context=128, seed=seed)
        logits = model(inputs.to(device)).flatten(0, 1)
        loss = cross_entropy(logits, targets.to(device).flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}/{args.steps}, loss {loss:.4f}", flush=True)
    muon.synchronize()  # raises if ranks differed in the last step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
