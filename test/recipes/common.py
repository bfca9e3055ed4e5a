"""The models of the recipes, and the proof: the same training on one process, bit for bit."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, parallel, Partial, Replicate, Shard
from torch.nn import functional as F
from torch.optim import AdamW, Muon
from torch.testing._internal.distributed._muon.common_config import NewtonSchulzCalls
from torch.testing._internal.distributed._muon.common_modules import OneProcess
from torch.testing._internal.distributed._muon.common_muon import everyone, OnCPU


CPU = torch.device("cpu")
WIDTH = 32
STEPS = 2
# The dimension that tensor parallelism cuts. A weight is (out, in): ColwiseParallel cuts dimension 0.
TP_DIMS = {"qkv_proj": 0, "out_proj": 1, "w1": 0, "w2": 1}


def mlp(bias=False):
    torch.manual_seed(0)
    sizes = (WIDTH, 48), (48, 40), (40, WIDTH)
    up, middle, down = (nn.Linear(*each, bias=bias) for each in sizes)
    return nn.Sequential(up, nn.GELU(), middle, nn.GELU(), down)


class Attention(nn.Module):
    """Rows of ``qkv_proj`` go by head. With ``context``, each of its ranks has a part of a sequence."""

    context = None

    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        heads = self.qkv_proj(x).unflatten(-1, (-1, 3, 8)).transpose(1, 2)
        query, key, value = heads.unbind(-2)
        if self.context is not None:
            key, value = (joined(t, self.context, Shard(2)) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.ffn = FeedForward()

    def forward(self, x):
        x = x + self.attention(F.layer_norm(x, x.shape[-1:]))
        return x + self.ffn(F.layer_norm(x, x.shape[-1:]))


class Transformer(nn.Module):
    """All of its parameters are matrices: vectors in, vectors out."""

    def __init__(self, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class MoE(nn.Module):
    """Four experts. Each rank of ``group`` holds some of them, whole."""

    def __init__(self, group=None):
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.router = nn.Linear(WIDTH, 4, bias=False)
        experts = [(str(number), FeedForward()) for number in range(4)]
        here = 4 // group.size() if group else 4
        first = here * group.rank() if group else 0
        self.experts = nn.ModuleDict(experts[first : first + here])

    def forward(self, x):
        tokens = x if self.group is None else joined(x, self.group, Shard(0))
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        mixed = sum(
            weight[..., None] * (chosen == int(number))[..., None] * expert(tokens)
            for number, expert in self.experts.items()
        )
        if self.group is not None:
            mixed = joined(mixed, self.group, Partial())
            mixed = mixed.chunk(self.group.size())[self.group.rank()]
        return x + mixed


def parallelize(model, mesh, names=None):
    """Cuts each layer by columns or rows. Or cuts ``names`` along dimension 0, and the others need whole inputs."""
    if names is None:
        columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
        plan = dict.fromkeys(("attention.qkv_proj", "ffn.w1"), columns)
        plan |= dict.fromkeys(("attention.out_proj", "ffn.w2"), rows)
    else:
        whole = parallel.ColwiseParallel(output_layouts=Replicate())
        plan = dict.fromkeys(names, whole)
    layers = model.layers
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        parallel.parallelize_module(layer, mesh, plan)
    return model


class CutLinear(nn.Module):
    """This rank's piece of a linear layer, as Megatron has it; FSDP cuts the rows of TP's piece."""

    def __init__(self, linear, tp, dim, fsdp=None):
        super().__init__()
        self.tp, self.dim, self.fsdp = tp, dim, fsdp
        piece = linear.weight.detach().chunk(tp.size(), dim)[tp.rank()]
        if fsdp is not None:
            piece = piece.chunk(fsdp.size())[fsdp.rank()]
        self.weight = nn.Parameter(piece.contiguous().clone())
        self.weight.tp_dim = dim  # as such frameworks mark their parameters
        self.weight.is_rows = fsdp is not None

    def forward(self, x):
        weight, tp = self.weight, self.tp
        if self.fsdp is not None:
            weight = joined(weight, self.fsdp, Shard(0), Partial("avg"))
        if self.dim == 0 or x.shape[-1] != weight.shape[1]:
            x = joined(x, tp, Replicate())
        if self.dim == 0:
            return F.linear(x, weight)
        if x.shape[-1] != weight.shape[1]:  # no layer cut along 0 comes before
            x = x.chunk(tp.size(), -1)[tp.rank()]
        y = F.linear(x, weight)
        return joined(y, tp, Partial(), Replicate())


def cut_linears(model, tp, dim=None, fsdp=None):
    """Cuts each linear layer along ``dim``, by default along that of TP_DIMS."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                along = TP_DIMS[name] if dim is None else dim
                setattr(module, name, CutLinear(child, tp, along, fsdp))
    return model


def joined(x, group, placement, grads=Partial()):
    """The whole of what the ranks of ``group`` have: pieces, replicas, or contributions to a sum. By default, each rank has a
    loss of its own, and the gradient is that of their sum."""
    mesh = DeviceMesh.from_group(group, "cpu")
    dtensor = DTensor.from_local(x, mesh, [placement])
    return dtensor.full_tensor(grad_placements=[grads])


def average(parameters, group, count=None):
    """Each gradient becomes the sum over ``group`` divided by ``count``, as under DDP."""
    for p in parameters:
        dist.all_reduce(p.grad, group=group)
        p.grad /= count or group.size()


def batch(step):
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(16, 8, WIDTH, generator=generator)
    return inputs, inputs.roll(1, 1).sin()


def batches(*groups):
    """This rank's slices. The ranks of each of ``groups`` have different slices."""
    for step in range(STEPS):
        mine = batch(step)
        for group in groups:
            mine = tuple(t.chunk(group.size())[group.rank()] for t in mine)
        yield mine


class WholeModel(OneProcess):
    """The whole model on one process. The gradients that it takes over must be those of the whole batch."""

    def __init__(self, one, model, muons, tp_dims=TP_DIMS, **pieces):
        super().__init__(model, muons, one, tp_dims=tp_dims, **pieces)
        self.one, self.wrong = one, []

    def step(self):
        self.train_one()
        own = {name: self.whole[name].grad for name in self.names}
        super().step()
        for name, grad in own.items():
            # A forgotten average or division would show. The rounding differs.
            apart = (self.whole[name].grad - grad).abs().max()
            if not apart <= 1e-4 * grad.abs().max():
                self.wrong.append(f"{name} does not have the gradient of the batch")

    def problems(self):
        return self.wrong + super().problems()

    def train_one(self):
        """The backward pass of the whole batch, from the parameters that the ranks have now."""
        values = self.join({param: param for param in self.names_of})
        for theirs in everyone(values):  # other ranks have other stages and experts
            for name, value in theirs.items():
                if name not in self.names:
                    self.whole[name].data.copy_(value)
        self.one.zero_grad()
        inputs, targets = batch(self.steps)
        F.mse_loss(self.one(inputs), targets).backward()


class Recipe(OnCPU):
    """Each test is a block of the documents. Its docstring names the block."""

    def grid(self, *names):
        """A mesh of two ranks along each dimension, and the groups of the dimensions."""
        sizes = (2,) * len(names)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        return mesh, *mesh.get_all_groups()

    def check(self, one, model, config, params=None, **how):
        """Compares the training of ``model`` by one Muon, by default of all parameters."""
        params = model.parameters() if params is None else params
        muon = Muon(params, lr=0.01, distributed_config=config)
        self.compare(one, model, muon, **how)

    def compare(
        self,
        one,
        model,
        *muons,
        others=(),
        data=(),
        backward=None,
        after=None,
        once=True,
        **pieces,
    ):
        """Trains ``model`` next to ``one`` on a single process, and requires equal bits.

        Args:
            muons: each Muon of ``model``.
            others: further parameters, for AdamW.
            data: groups whose ranks have different slices of each batch.
            backward: takes the inputs and targets of a step.
            after: called after it.
            once: whether only one rank may orthogonalize each matrix.
            pieces: see ``OneProcess``.
        """
        alone, calls = WholeModel(one, model, muons, **pieces), NewtonSchulzCalls()
        adamw = AdamW(others, lr=1e-3) if others else None
        for inputs, targets in batches(*data):
            if backward is not None:
                backward(inputs, targets)
            else:
                F.mse_loss(model(inputs), targets).backward()
            if after is not None:
                after()
            alone.step()
            with calls:
                for muon in muons:
                    muon.step()
            self.assertEverywhere(alone.problems())
            if adamw is not None:
                adamw.step()
            model.zero_grad()
        if once:
            matrices = len(set().union(*everyone(alone.names)))
            self.assertEqual(sum(everyone(len(calls.shapes))), matrices * STEPS)
