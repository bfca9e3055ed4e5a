"""Train a small mixture of experts: expert parallelism, with replicas of each expert.

    torchrun --nproc-per-node 4 examples/train_moe.py

The ranks are a grid, dp x ep. Along ep, each rank holds other experts. Along dp, ranks hold
replicas. Everything except the experts is on all ranks. Muon never communicates over ep: it
orthogonalizes an expert's matrices on one of its replicas, and every other matrix on one of all
ranks.
"""

import torch
import torch.distributed as dist
from common import average_gradients, batch_of, loss_of, start, train
from gpt import Block, GPT
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.functional import gelu
from torch.optim import AdamW, Muon
from torch.optim.muon import create_auto_config, partition_named_parameters


EP, WIDTH, EXPERTS = 2, 64, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class Mixture(nn.Module):
    """Each token goes to the expert with the largest weight.

    To be short, the ranks along ep have the same tokens, and every expert computes all of them. A
    real mixture sends a token to its expert only.
    """

    def __init__(self, ep: DeviceMesh) -> None:
        super().__init__()
        self.ep = ep
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict()
        for number in range(EXPERTS):
            # Every rank draws all of them, so that replicas are equal.
            expert = Expert()
            if number % ep.size() == ep.get_local_rank():
                self.experts[str(number)] = expert

    def add_gradients(self, x: Tensor) -> Tensor:
        """Returns ``x``, whose gradient is the sum of those of all ranks along ep."""
        whole = DTensor.from_local(x, self.ep, [Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        x, weight = self.add_gradients(x), self.add_gradients(weight)
        mixed = torch.zeros_like(x)
        for number, expert in self.experts.items():
            share = weight * (chosen == int(number))
            mixed = mixed + share[..., None] * expert(x)
        return DTensor.from_local(mixed, self.ep, [Partial()]).full_tensor()


class MixtureBlock(Block):
    def __init__(self, ep: DeviceMesh) -> None:
        super().__init__(WIDTH, heads=4)
        del self.up, self.down
        self.mixture = Mixture(ep)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mixture(self.mlp_norm(x))


def main() -> None:
    device = start()
    shape = (dist.get_world_size() // EP, EP)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "ep"))
    dp = mesh.get_group("dp")
    model = GPT(WIDTH, layers=0, heads=4, context=64)
    model.blocks.extend(MixtureBlock(mesh["ep"]) for _ in range(2))
    model.to(device)
    experts = {}
    for block in model.blocks:
        for number, expert in block.mixture.experts.items():
            experts.update(dict.fromkeys(expert.parameters(), int(number)))

    matrices, others = partition_named_parameters(model, exclude=["*.router.weight"])
    config = create_auto_config(
        ep_process_group=mesh.get_group("ep"),
        # All ranks hold the attention. Only ranks that name the same id share an expert.
        ddp_process_group=dist.group.WORLD,
        expert_assignments={
            index: experts[p] for index, (_, p) in enumerate(matrices) if p in experts
        },
    )
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config=config
    )

    def gradients(step: int) -> Tensor:
        loss = loss_of(model, batch_of(step, dp))
        loss.backward()
        average_gradients(model, dp)
        return loss

    train(gradients, [muon, AdamW(others, lr=3e-3)])


if __name__ == "__main__":
    main()
