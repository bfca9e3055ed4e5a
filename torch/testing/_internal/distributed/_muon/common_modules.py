"""Helpers for multi-process tests of torch.optim.Muon with the frameworks' own modules."""

from __future__ import annotations

import copy
import re
import warnings

import torch
from torch.distributed.fsdp import (
    FlatParameter,
    FullyShardedDataParallel as FSDP,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import (
    distribute_module,
    distribute_tensor,
    DTensor,
    parallel,
    Replicate,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Muon
from torch.optim.muon import create_auto_config, partition_parameters
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_config import NewtonSchulzCalls
from torch.testing._internal.distributed._muon.common_muon import device, equal, grid_of


def make_model(width=12, hidden=16, layers=2, bias=True, seed=3):
    torch.manual_seed(seed)
    blocks = []
    for _ in range(layers):
        up = torch.nn.Linear(width, hidden, bias=bias)
        blocks += [up, torch.nn.ReLU(), torch.nn.Linear(hidden, width, bias=bias)]
    return torch.nn.Sequential(*blocks).to(device())


def tensor_parallel(model, mesh):
    """The first layer of each block by columns, the second by rows."""
    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    plan = {}
    for up in range(0, len(model), 3):
        plan |= {str(up): columns, str(up + 2): rows}
    return parallel.parallelize_module(model, mesh, plan)


def place_weights(model, mesh, placements):
    """Makes DTensors of all parameters: weights as told, biases replicated.

    An assignment to ``param.data`` would destroy the parameter, and a plain bias cannot be added to
    what a DTensor weight gives.
    """

    def place(name, module, mesh):
        for key, param in list(module.named_parameters(recurse=False)):
            chosen = placements if param.ndim == 2 else [Replicate()] * mesh.ndim
            dtensor = distribute_tensor(param.detach(), mesh, chosen)
            module.register_parameter(key, torch.nn.Parameter(dtensor))

    return distribute_module(model, mesh, place)


def data_parallel(model, **options):
    gpus = None if device().type == "cpu" else [device()]
    return DDP(model, device_ids=gpus, **options)


class OneProcess:
    """Trains whole parameters next to a distributed model, on this process alone.

    In each step it takes over the gradients of the distributed model, put together from the pieces of
    all ranks. After the step, parameters and momentum must be equal to the last bit. Pieces are put
    together by the framework or by concatenation, never by the optimizer's own readers.

    Args:
        model: the distributed model, before training.
        muons: each Muon of ``model``.
        one: the whole model with the same names. FSDP1 and ``tp_dims`` need it.
        fsdp: the ranks that cut rows, for FSDP1 and for parameters with ``is_rows``.
        tp: the ranks that cut plain tensors along ``tp_dims``, by the last part of a name.
    """

    def __init__(self, model, muons, one=None, fsdp=None, tp=None, tp_dims=None):
        self.fsdp, self.tp, self.tp_dims = fsdp, tp, tp_dims
        self.steps, groups = 0, []
        self.names_of = names_of(model)
        self.cut_rows = {
            p
            for name, p in model.named_parameters()
            if "_fsdp_wrapped_module" in name or getattr(p, "is_rows", False)
        }
        self.whole = dict(one.named_parameters()) if one is not None else {}
        if one is None:
            values = self.join({p: p for p in self.names_of})
            self.whole = {n: torch.nn.Parameter(v.clone()) for n, v in values.items()}
        self.starts = {n: p.detach().clone() for n, p in self.whole.items()}
        # The Muon of each parameter that has one.
        self.muons = {}
        for muon in muons:
            for group in muon.param_groups:
                names = [name for p in group["params"] for name in self.names_of[p]]
                own = {k: v for k, v in group.items() if k != "param_names"}
                groups.append({**own, "params": [self.whole[n] for n in names]})
                self.muons |= dict.fromkeys(group["params"], muon)
        self.twin = Muon(groups, allow_batched_matrices=True)
        self.names = {name for p in self.muons for name in self.names_of[p]}

    def step(self):
        """The step of one process, before that of the distributed model."""
        # FSDP1 leaves a rank without elements of a matrix without a gradient.
        grads = {
            p: torch.zeros_like(p) if p.grad is None else p.grad for p in self.muons
        }
        for name, grad in self.join(grads).items():
            self.whole[name].grad = grad.clone()
        self.twin.step()
        self.steps += 1

    def problems(self):
        found, key = [], "momentum_buffer"
        for name, value in self.join({p: p for p in self.muons}).items():
            expected, start = self.whole[name].detach(), self.starts[name]
            if not common_muon.moved_alike(value, expected, self.steps, start):
                found.append(f"parameter {name}")
            if torch.equal(expected, start):
                found.append(f"parameter {name} does not move")
        momenta = {p: muon.state[p][key] for p, muon in self.muons.items()}
        for name, value in self.join(momenta).items():
            if not equal(value, self.twin.state[self.whole[name]][key]):
                found.append(f"momentum {name}")
        return found

    @torch.no_grad()
    def join(self, tensors):
        """The whole tensors by name. Each tensor is laid out as its key, a parameter."""
        whole, pieces, rows = {}, {}, {}
        for param, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                placed = tensor.redistribute(placements=param.placements)
                whole[self.names_of[param][0]] = placed.full_tensor()
            elif param in self.cut_rows:
                rows[param] = tensor
            else:
                pieces[self.names_of[param][0]] = tensor.detach()
        for param, parts in gathered_values(rows, self.fsdp):
            flat = torch.cat([part.flatten() for part in parts])
            for name in self.names_of[param]:  # FSDP's padding is left over
                shape = self.piece_shape(name)
                pieces[name] = flat[: shape.numel()].view(shape)
                flat = flat[shape.numel() :]
        cut = {n: p for n, p in pieces.items() if self.tp_dim(n) is not None}
        for name, parts in gathered_values(cut, self.tp):
            pieces[name] = torch.cat(parts, self.tp_dim(name))
        return whole | pieces

    def tp_dim(self, name):
        last = name.removesuffix(".weight").rpartition(".")[2]
        return None if self.tp is None else self.tp_dims.get(last)

    def piece_shape(self, name):
        shape, dim = list(self.whole[name].shape), self.tp_dim(name)
        if dim is not None:
            lines = torch.arange(shape[dim]).chunk(self.tp.size())
            shape[dim] = len(lines[self.tp.rank()])
        return torch.Size(shape)


def names_of(model):
    """The whole parameters of which each parameter is a piece; a flat one of FSDP1, of several."""
    found = {}
    for name, param in model.named_parameters():
        names = [name]
        if isinstance(param, FlatParameter):
            names = [name.replace("_flat_param", inner) for inner in param._fqns]
        wrappers = r"\b(module|_fsdp_wrapped_module)\."
        found[param] = [re.sub(wrappers, "", name) for name in names]
    return found


def gathered_values(tensors, group):
    if not tensors:
        return
    values = [tensor.detach().cpu() for tensor in tensors.values()]
    for key, parts in zip(tensors, zip(*common_muon.everyone(values, group))):
        yield key, [part.to(device()) for part in parts]


class ModuleParity(common_muon.ParityAssertions):
    def check(
        self, model, config, steps=2, data_rank=0, inputs=None, count=None, **pieces
    ):
        """Trains ``model``, and next to it a Muon of one process with the same gradients.

        Args:
            data_rank: ranks of one ``data_rank`` see the same data.
            inputs: gives the data of a step instead.
            count: Newton-Schulz calls of all ranks in a step; as many as matrices by default.
            pieces: see :class:`OneProcess`.
        """
        matrices, _ = partition_parameters(model)
        muon = Muon(matrices, lr=0.05, distributed_config=config)
        alone = OneProcess(model, [muon], **pieces)
        for step in range(steps):
            seed = 100 * step + data_rank
            x = common_muon.full(seed, (6, 12)) if inputs is None else inputs(step)
            model(x).pow(2).mean().backward()
            alone.step()
            with NewtonSchulzCalls() as calls:
                muon.step()
            model.zero_grad()
            total = sum(common_muon.everyone(len(calls.shapes)))
            self.assertEqual(total, len(matrices) if count is None else count)
            self.assertEverywhere(alone.problems(), f"step {step}")
        return matrices, muon


class Block(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.a = torch.nn.Linear(8, 12, bias=bias)
        self.b = torch.nn.Linear(12, 7, bias=bias)
        self.c = torch.nn.Linear(7, 8, bias=bias)

    def forward(self, x):
        return x + self.c(self.b(self.a(x).relu()).relu())


class Tail(torch.nn.Linear):
    """Has fewer elements than there are ranks."""


class Model(torch.nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(bias) for _ in range(2))
        self.head = torch.nn.Linear(8, 3, bias=bias)
        self.tail = Tail(3, 1, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.tail(self.head(x))


def wrap(
    model,
    orig=False,
    strategy=ShardingStrategy.FULL_SHARD,
    units=(Block, Tail),
    **options,
):
    if strategy == ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = grid_of(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FSDP(
            model,
            device_id=device(),
            use_orig_params=orig,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy(units) if units else None,
            **options,
        )


def give_flat_gradients(flat, wholes):
    """Cuts whole gradients, by name, as a unit's backward does."""
    grad = torch.zeros_like(flat)
    for i, (name, info) in enumerate(zip(flat._fqns, flat._shard_param_infos)):
        if info.in_shard:
            first, last = info.intra_param_start_idx, info.intra_param_end_idx
            at, elements = info.offset_in_shard, wholes[name].flatten()
            grad[at : at + info.numel_in_shard] = elements[first : last + 1]
            if flat._params is not None:
                flat._params[i].grad = elements[first : last + 1].clone()
    if flat._params is None:
        flat.grad = grad


class Run:
    """An FSDP1 model with a Muon, and one process next to it.

    Args:
        model: by default a :class:`Model`, with biases next to original parameters.
        groups: the parameter groups of a model's Muon, if it has all parameters.
        x: the shape of inputs.
    """

    def __init__(
        self, orig, by_module=None, model=None, groups=None, x=(5, 8), **wrapping
    ):
        torch.manual_seed(5)
        self.groups, self.x, self.steps = groups, x, 0
        self.one = (Model(orig) if model is None else model()).to(device())
        self.model = wrap(copy.deepcopy(self.one), orig, **wrapping)
        by_module = orig if by_module is None else by_module
        group = self.model.process_group
        source = {"module": self.model} if by_module else {"fsdp_process_group": group}
        self.config = create_auto_config(**source)
        self.build()

    def build(self):
        if self.groups is None:
            params, _ = partition_parameters(self.model)
        else:
            params = self.groups(self.model)
        options = {"allow_batched_matrices": self.groups is not None, "lr": 0.1}
        self.optimizer = Muon(params, distributed_config=self.config, **options)
        group = self.model.process_group
        self.alone = OneProcess(self.model, [self.optimizer], self.one, fsdp=group)

    def step(self):
        """The shapes of the matrices that this rank orthogonalized."""
        self.steps += 1
        self.model(common_muon.full(100 * self.steps, self.x)).pow(2).sum().backward()
        self.alone.step()
        with NewtonSchulzCalls() as calls:
            self.optimizer.step()
        self.model.zero_grad()
        return calls.shapes
