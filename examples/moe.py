"""A small GPT whose MLPs are mixtures of experts, which may be on several ranks."""

import torch
import torch.distributed as dist
from gpt import Attention, GPT
from torch import nn, Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Each token goes to the one expert that the router likes best.

    Args:
        count: the number of experts, in all.
        group: the ranks that hold equally many of them each; None if this process holds all.
    """

    def __init__(self, width: int, count: int, group: ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.count = count
        self.ranks = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        self.router = nn.Linear(width, count, bias=False)
        # All are drawn, so that each starts alike whoever holds it, and goes by one name.
        drawn = [(str(expert), Expert(width)) for expert in range(count)]
        here = count // self.ranks
        self.experts = nn.ModuleDict(drawn[rank * here : (rank + 1) * here])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        # By expert, which is also by rank: a rank's experts follow each other.
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.count).view(self.ranks, -1)
        arriving = torch.empty_like(counts)
        if self.group is None:
            arriving.copy_(counts)
        else:
            dist.all_to_all_single(arriving, counts, group=self.group)
        there, back = counts.sum(1).tolist(), arriving.sum(1).tolist()
        arrived = self.send(tokens[order], there, back)
        done = self.send(self.apply_experts(arrived, arriving), back, there)
        mixed = torch.zeros_like(tokens).index_copy(0, order, done)
        return (weight[:, None] * mixed).view_as(x)

    def send(self, rows: Tensor, there: list[int], back: list[int]) -> Tensor:
        """``there[i]`` of the rows to rank i of the group, for ``back[i]`` of its; gradients go back."""
        if self.group is None:
            return rows
        return all_to_all_single_autograd(rows, back, there, self.group)

    def apply_experts(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Tokens come, and leave, by the rank they are from and then by expert: ``counts``."""
        pieces = list(tokens.split(counts.flatten().tolist()))
        here = len(self.experts)
        for index, expert in enumerate(self.experts.values()):
            own = pieces[index::here]
            # Called for no tokens too: the gradient is then zero. Were it None on some
            # replicas only, Muon could not tell whether to step.
            pieces[index::here] = expert(torch.cat(own)).split([len(p) for p in own])
        return torch.cat(pieces)


class Block(nn.Module):
    def __init__(
        self, width: int, heads: int, experts: int, group: ProcessGroup | None
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mixture_norm = nn.LayerNorm(width)
        self.mixture = Mixture(width, experts, group)
        nn.init.zeros_(self.attention.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mixture(self.mixture_norm(x))


class MixtureGPT(GPT):
    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        context: int,
        experts: int,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(width, 0, heads, context)
        self.blocks = nn.ModuleList(
            Block(width, heads, experts, group) for _ in range(layers)
        )
