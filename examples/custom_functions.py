"""Muon with functions of your own, for a framework whose sharding nothing here knows.

    torchrun --nproc-per-node 4 examples/custom_functions.py

Each rank holds some rows of each weight as a plain tensor. Three functions tell Muon who owns a
matrix, how to gather it, and how to return the result. They need not use torch.distributed: Muon
then issues no collective, and reads rank and world size from ``state``.
"""

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.nn.functional import linear, mse_loss
from torch.optim import Muon
from torch.optim.muon import DistributedConfig


def assign_by_size(params: list[Tensor], state: dict) -> dict[int, list[int]]:
    """Gives each matrix, the largest first, to the rank with the fewest elements so far.

    All ranks must come to the same result. Here the shards of a weight have one size.
    """
    owned: dict[int, list[int]] = {rank: [] for rank in range(state["world_size"])}
    for index in sorted(range(len(params)), key=lambda i: -params[i].numel()):
        rank = min(owned, key=lambda r: sum(params[i].numel() for i in owned[r]))
        owned[rank].append(index)
    return owned


def gather(shard: Tensor, owner: int, state: dict) -> Tensor | None:
    """Every rank calls this for each parameter. Only the owner needs the whole matrix."""
    is_owner = state["rank"] == owner
    shards = [torch.empty_like(shard) for _ in range(state["world_size"])]
    dist.gather(shard.contiguous(), shards if is_owner else None, dst=owner)
    return torch.cat(shards) if is_owner else None


def redistribute(update: Tensor | None, owner: int, state: dict) -> Tensor:
    """The owner passes the orthogonalized matrix. Each rank returns its shard of it."""
    ranks = state["world_size"]
    rows, columns = state["global_shapes"][state["current_param_idx"]]
    shard = torch.empty(rows // ranks, columns)
    shards = None
    if update is not None:
        shards = list(update.float().chunk(ranks))
    dist.scatter(shard, shards, src=owner)
    return shard


class Sharded(nn.Module):
    """A linear layer. Each rank stores some rows; the forward pass gathers the others."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs, bias=False).weight.detach()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.chunk(ranks)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, GatherRows.apply(self.weight))


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        rows = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, shard.contiguous())
        return torch.cat(rows)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        own = grad.chunk(dist.get_world_size())[dist.get_rank()]
        return own / dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all ranks draw the same weights and keep their rows
    model = nn.Sequential(Sharded(32, 64), nn.ReLU(), Sharded(64, 32))
    config = DistributedConfig(
        assign_fn=assign_by_size,
        gather_fn=gather,
        redistribute_fn=redistribute,
        state={
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            # By these, Muon scales the learning rate. The shards hide them.
            "global_shapes": {0: (64, 32), 1: (32, 64)},
        },
    )
    muon = Muon(
        model.parameters(),
        lr=3e-3,
        adjust_lr_fn="match_rms_adamw",
        distributed_config=config,
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        inputs = torch.randn(16, 32, generator=generator)
        loss = mse_loss(model(inputs), inputs.roll(1, 1))
        loss.backward()
        muon.step()
        muon.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}, loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
