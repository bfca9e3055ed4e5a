"""Train a small mixture of experts: expert parallelism, with replicas of each expert.

    torchrun --nproc-per-node 4 examples/train_moe.py

The ranks are a grid, dp x ep. Along ep, each rank holds other experts, and tokens travel to
their expert. Along dp, ranks hold replicas. Everything except the experts is on all ranks. Muon
never communicates over ep: it orthogonalizes an expert's matrices on one of its replicas, and
every other matrix on one of all ranks.
"""

import argparse

import torch
import torch.distributed as dist
from gpt import Block, GPT
from text import load, sample
from torch import nn, Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, gelu
from torch.optim import AdamW, Muon
from torch.optim.muon import create_auto_config, partition_named_parameters


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class Mixture(nn.Module):
    """Each token goes to the expert with the largest weight."""

    def __init__(self, width: int, count: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.count = group, count
        self.router = nn.Linear(width, count, bias=False)
        here = count // group.size()
        first = group.rank() * here
        # Every rank draws all experts, so that replicas start equal.
        drawn = [(str(number), Expert(width)) for number in range(count)]
        self.experts = nn.ModuleDict(drawn[first : first + here])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)  # by expert, and so by rank
        sent = chosen.bincount(minlength=self.count).view(self.group.size(), -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        there, back = sent.sum(1).tolist(), received.sum(1).tolist()
        arrived = all_to_all_single_autograd(tokens[order], back, there, self.group)
        # The tokens arrive sorted by sender, then by expert.
        pieces = list(arrived.split(received.flatten().tolist()))
        for index, expert in enumerate(self.experts.values()):
            own = pieces[index :: len(self.experts)]
            # An expert without tokens runs too. Its gradient is then zero and not None.
            done = expert(torch.cat(own)).split([len(piece) for piece in own])
            pieces[index :: len(self.experts)] = done
        done = all_to_all_single_autograd(torch.cat(pieces), there, back, self.group)
        mixed = torch.zeros_like(tokens).index_copy(0, order, done)
        return (weight[:, None] * mixed).view_as(x)


class MixtureBlock(Block):
    def __init__(self, width: int, heads: int, mixture: Mixture) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mixture(self.mlp_norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4, help="windows on each rank")
    parser.add_argument("--ep", type=int, default=2, help="ranks that share experts")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape = (ranks // args.ep, args.ep)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "ep"))
    dp, ep = mesh.get_group("dp"), mesh.get_group("ep")

    torch.manual_seed(0)
    model = GPT(width=128, layers=0, heads=4, context=64)
    model.blocks.extend(MixtureBlock(128, 4, Mixture(128, 4, ep)) for _ in range(2))
    model.to(device)
    experts = {
        p: int(number)
        for block in model.blocks
        for number, expert in block.mixture.experts.items()
        for p in expert.parameters()
    }

    matrices, others = partition_named_parameters(model, exclude=["*.router.weight"])
    config = create_auto_config(
        ep_process_group=ep,
        # All ranks hold the attention. Only ranks that name the same id share an expert.
        ddp_process_group=dist.group.WORLD,
        expert_assignments={
            index: experts[p] for index, (_, p) in enumerate(matrices) if p in experts
        },
    )
    muon = Muon(
        matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw", distributed_config=config
    )
    adamw = AdamW(others, lr=3e-3)

    text, _ = load()
    for step in range(args.steps):
        inputs, targets = sample(text, args.batch, 64, seed=step * ranks + rank)
        logits = model(inputs.to(device)).flatten(0, 1)
        loss = cross_entropy(logits, targets.to(device).flatten())
        loss.backward()
        for p in model.parameters():
            # Along ep, the backward pass has added up an expert's gradients already.
            dist.all_reduce(p.grad, group=dp if p in experts else dist.group.WORLD)
            p.grad /= ranks
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}/{args.steps}, loss {loss:.4f}", flush=True)
    muon.synchronize()  # raises if ranks differed in the last step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
