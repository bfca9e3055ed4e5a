"""Muon with functions of your own, for a framework whose sharding nothing here knows.

    torchrun --nproc-per-node 4 examples/custom_functions.py

Each rank holds some rows of each weight as a plain tensor. Three functions tell Muon who owns a
matrix, how to gather it, and how to return the result. They need not use torch.distributed: Muon
then issues no collective, and reads rank and world size from ``state``.
"""

import torch
import torch.distributed as dist
from common import start, train
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.functional import linear, mse_loss
from torch.optim import Muon
from torch.optim.muon import DistributedConfig


def assign(params: list[Tensor], state: dict) -> dict[int, list[int]]:
    """Gives the matrices to the ranks in turn. All ranks must come to the same result."""
    ranks = state["world_size"]
    return {rank: list(range(rank, len(params), ranks)) for rank in range(ranks)}


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
    shard = torch.empty(rows // ranks, columns, device=state["device"])
    shards = None
    if update is not None:
        shards = list(update.float().chunk(ranks))
    dist.scatter(shard, shards, src=owner)
    return shard


class Sharded(nn.Module):
    """A linear layer. Each rank stores some rows; the forward pass gathers the others.

    Here DTensor gathers, and adds up the gradients. Muon sees plain tensors.
    """

    def __init__(self, inputs: int, outputs: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        whole = nn.Linear(inputs, outputs, bias=False).weight.detach()
        rows = whole.chunk(mesh.size())[mesh.get_local_rank()]
        self.weight = nn.Parameter(rows.clone())

    def forward(self, x: Tensor) -> Tensor:
        shards = DTensor.from_local(self.weight, self.mesh, [Shard(0)])
        return linear(x, shards.full_tensor(grad_placements=[Partial("avg")]))


def main() -> None:
    device = start()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = nn.Sequential(Sharded(32, 64, mesh), nn.ReLU(), Sharded(64, 32, mesh))
    model.to(device)
    config = DistributedConfig(
        assign_fn=assign,
        gather_fn=gather,
        redistribute_fn=redistribute,
        state={
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "device": device,
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

    def gradients(step: int) -> Tensor:
        inputs = torch.randn(16, 32, generator=generator).to(device)
        loss = mse_loss(model(inputs), inputs.roll(1, 1))
        loss.backward()
        return loss

    train(gradients, [muon])


if __name__ == "__main__":
    main()
