"""The models that the recipes train, and the batches that they see.

Each model is made alike on every process, and whole: a recipe then wraps or cuts it.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from moe import Mixture
from place import device
from torch import nn, Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F


SEED = 0
WIDTH = 32
BATCH = 16
TIME = 8
STEPS = 3


class MLP(nn.Module):
    """Two hidden layers of unequal shapes."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.up = nn.Linear(WIDTH, 48, bias=bias)
        self.middle = nn.Linear(48, 40, bias=bias)
        self.down = nn.Linear(40, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.middle(F.gelu(self.up(x)))))


class Attention(nn.Module):
    """Causal self-attention.

    Rows of ``qkv_proj`` go by head, so that a piece of them is some whole heads. With
    ``context``, each of its ranks sees other positions of a sequence, in rank order.
    """

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.size = WIDTH // heads
        self.context: ProcessGroup | None = None
        self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, 3, self.size)).transpose(1, 2)
        query, key, value = heads.unbind(-2)
        first = 0
        if self.context is not None:
            first = x.shape[1] * dist.get_rank(self.context)
            key, value = (_Joined.apply(t, 2, self.context, 1) for t in (key, value))
        places = torch.arange(key.shape[2], device=x.device)
        seen = places <= places[first : first + x.shape[1], None]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.ffn = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(F.layer_norm(x, x.shape[-1:]))
        return x + self.ffn(F.layer_norm(x, x.shape[-1:]))


class Transformer(nn.Module):
    """Only its blocks, all of whose parameters are matrices: vectors in, vectors out."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MoE(nn.Module):
    """Four experts, of which ``group`` is shared out: each of its ranks holds some, whole."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.mixture = Mixture(WIDTH, count=4, group=group)
        for expert in self.mixture.experts.values():
            # Theirs are zeros, which leave nothing to send back to ``up``.
            nn.init.eye_(expert.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(x)


# Which dimension of each weight tensor parallelism cuts. A weight is (out, in): what
# ColwiseParallel calls columns are its rows, dimension 0.
TP_DIMS = {"qkv_proj": 0, "out_proj": 1, "w1": 0, "w2": 1, "up": 0, "down": 1}


def tp_dim_of(name: str) -> int:
    return TP_DIMS[name.removesuffix(".weight").rpartition(".")[2]]


class CutLinear(nn.Module):
    """This rank's piece of a linear layer's weight, as Megatron has it.

    Along dimension 0 a piece makes some of the outputs. Along dimension 1 it makes a part
    of each output's sum, from some of the inputs. With ``fsdp``, its ranks share the rows
    of TP's piece out among each other, join them for each use, and average gradients.
    """

    def __init__(
        self,
        linear: nn.Linear,
        tp: ProcessGroup,
        dim: int,
        fsdp: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.tp, self.dim, self.fsdp = tp, dim, fsdp
        piece = linear.weight.detach().chunk(tp.size(), dim)[tp.rank()]
        if fsdp is not None:
            piece = piece.chunk(fsdp.size())[fsdp.rank()]
        self.weight = nn.Parameter(piece.contiguous().clone())
        # As such frameworks mark their parameters.
        self.weight.tp_dim = dim
        if fsdp is not None:
            self.weight.is_rows = True

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.fsdp is not None:
            weight = _Joined.apply(weight, 0, self.fsdp, self.fsdp.size())
        if self.dim == 0:
            return F.linear(_ForEach.apply(x, self.tp), weight)
        if x.shape[-1] != weight.shape[1]:  # not what a layer cut along 0 has made
            x = _ForEach.apply(x, self.tp).chunk(self.tp.size(), -1)[self.tp.rank()]
        return _OfAll.apply(F.linear(x, weight), self.tp)


class _ForEach(torch.autograd.Function):
    """The same for each rank, whose gradients add up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _OfAll(torch.autograd.Function):
    """The sum of what each rank has."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Joined(torch.autograd.Function):
    """What the ranks have, one after the other along ``dim``; its gradient over ``count``."""

    @staticmethod
    def forward(ctx, x, dim, group, count):
        ctx.dim, ctx.group, ctx.count = dim, group, count
        pieces = [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for _ in range(group.size())
        ]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        own = grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()]
        return own / ctx.count, None, None, None


def cut_linears(
    model: nn.Module,
    tp: ProcessGroup,
    dim: int | None = None,
    fsdp: ProcessGroup | None = None,
) -> nn.Module:
    """Leaves this rank its piece of each linear layer: along ``dim``, else as `TP_DIMS` says."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                along = TP_DIMS[name] if dim is None else dim
                setattr(module, name, CutLinear(child, tp, along, fsdp))
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of all processes."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(BATCH, TIME, WIDTH, generator=generator)
    return inputs, inputs.roll(1, 1).sin()


def batches(*groups: ProcessGroup) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's slice of each batch; ranks of each of ``groups`` have slices of their own."""
    for step in range(STEPS):
        mine = batch(step)
        for group in groups:
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            mine = tuple(tensor.chunk(size)[rank] for tensor in mine)
        yield tuple(tensor.to(device()) for tensor in mine)
