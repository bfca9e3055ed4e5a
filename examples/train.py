"""FSDP2 with Muon, to copy. Started again, it goes on from its last checkpoint.

torchrun --nproc-per-node 2 examples/train.py FOLDER STEPS
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT
from text import load, sample
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.muon import partition_named_parameters


folder, steps = Path(sys.argv[1]), int(sys.argv[2])
MICRO_BATCHES, BATCH, CONTEXT, RATE, EVERY = 2, 4, 64, 3e-3, 10
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dist.init_process_group()
if device.type == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
torch.manual_seed(0)  # the same weights on every rank
model = GPT(width=192, layers=4, heads=6, context=CONTEXT).to(device)
for index, block in enumerate(model.blocks):  # with activation checkpointing
    model.blocks[index] = fully_shard(wrapper.checkpoint_wrapper(block))
fully_shard(model)
matrices, others = partition_named_parameters(model)
muon = Muon(matrices, RATE, adjust_lr_fn="match_rms_adamw", distributed_config="auto")
optims = [muon, AdamW(others, RATE, betas=(0.9, 0.95), weight_decay=0.1)]
schedules = [OneCycleLR(o, RATE, steps, cycle_momentum=False) for o in optims]
text, held_out = load()


def state() -> dict:
    weights, moments = get_state_dict(model, optims)
    return {"model": weights, "optims": moments, **dict(zip("ab", schedules))}


def loss_of(text: torch.Tensor, seed: int) -> torch.Tensor:
    seed = seed * dist.get_world_size() + dist.get_rank()
    inputs, targets = (x.to(device) for x in sample(text, BATCH, CONTEXT, seed))
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


if saved := [int(path.parent.name) for path in folder.glob("*/.metadata")]:
    dcp.load(found := state(), checkpoint_id=folder / str(max(saved)))
    weights, moments = found["model"], found["optims"]
    set_state_dict(model, optims, model_state_dict=weights, optim_state_dict=moments)
for step in range(schedules[0].last_epoch, steps):
    for part in range(MICRO_BATCHES):
        model.set_requires_gradient_sync(part == MICRO_BATCHES - 1)
        (loss_of(text, step * MICRO_BATCHES + part) / MICRO_BATCHES).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for each in (*optims, *schedules):
        each.step()
    model.zero_grad()
    if (step + 1) % EVERY == 0:
        with torch.no_grad():
            dist.all_reduce(loss := loss_of(held_out, seed=0))
        if dist.get_rank() == 0:
            print(f"step {step + 1}, loss {loss / dist.get_world_size():.4f}")
        dcp.save(state(), checkpoint_id=folder / str(step + 1))
dist.destroy_process_group()
