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
        self.steps = 0
        self.names_of = names_of(model)
        self.cut_rows = set()
        for name, param in model.named_parameters():
            if "_fsdp_wrapped_module" in name or getattr(param, "is_rows", False):
                self.cut_rows.add(param)
        self.whole = {}
        if one is not None:
            self.whole.update(one.named_parameters())
        else:
            joined = self.join({param: param for param in self.names_of})
            for name, value in joined.items():
                self.whole[name] = torch.nn.Parameter(value.clone())
        self.starts = {}
        for name, param in self.whole.items():
            self.starts[name] = param.detach().clone()
        # The Muon of each parameter that has one.
        self.muons = {}
        groups = []
        for muon in muons:
            for group in muon.param_groups:
                groups.append(self.whole_group(group))
                self.muons |= dict.fromkeys(group["params"], muon)
        self.twin = Muon(groups, allow_batched_matrices=True)
        self.names = set()
        for param in self.muons:
            self.names.update(self.names_of[param])

    def whole_group(self, group):
        """The options of a group, with the whole parameters of which its parameters are pieces."""
        whole = []
        for param in group["params"]:
            whole += [self.whole[name] for name in self.names_of[param]]
        options = dict(group)
        options.pop("param_names", None)
        return {**options, "params": whole}

    def step(self):
        """The step of one process, before that of the distributed model."""
        grads = {}
        for param in self.muons:
            grads[param] = param.grad
            if param.grad is None:
                # FSDP1 leaves a rank without elements of a matrix without a gradient.
                grads[param] = torch.zeros_like(param)
        for name, grad in self.join(grads).items():
            self.whole[name].grad = grad.clone()
        self.twin.step()
        self.steps += 1

    def problems(self):
        found = []
        joined = self.join({param: param for param in self.muons})
        for name, value in joined.items():
            expected, start = self.whole[name].detach(), self.starts[name]
            if not common_muon.moved_alike(value, expected, self.steps, start):
                found.append(f"parameter {name}")
            if torch.equal(expected, start):
                found.append(f"parameter {name} does not move")
        momenta = {}
        for param, muon in self.muons.items():
            momenta[param] = muon.state[param]["momentum_buffer"]
        for name, value in self.join(momenta).items():
            state = self.twin.state[self.whole[name]]
            if not equal(value, state["momentum_buffer"]):
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
            for name in self.names_of[param]:
                shape = self.piece_shape(name)
                # FSDP's padding is left over.
                elements, flat = flat[: shape.numel()], flat[shape.numel() :]
                pieces[name] = elements.view(shape)
        names = [name for name in pieces if self.tp_dim(name) is not None]
        cut = {name: pieces[name] for name in names}
        joined = dict(gathered_values(cut, self.tp))
        for name in names:
            pieces[name] = torch.cat(joined[name], self.tp_dim(name))
        return whole | pieces

    def tp_dim(self, name):
        """The dimension that TP cuts of a whole parameter; None for one that it leaves whole."""
        if self.tp is None:
            return None
        _, _, last = name.removesuffix(".weight").rpartition(".")
        return self.tp_dims.get(last)

    def piece_shape(self, name):
        """The shape of what TP leaves of a whole parameter."""
        shape = list(self.whole[name].shape)
        dim = self.tp_dim(name)
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
    """Each key with the values that the ranks of ``group`` have for it."""
    if not tensors:
        return
    values = [tensor.detach().cpu() for tensor in tensors.values()]
    of_ranks = common_muon.everyone(values, group)
    for number, key in enumerate(tensors):
        yield key, [of_rank[number].to(device()) for of_rank in of_ranks]


def check_module(
    case,
    model,
    config,
    steps=2,
    data_rank=0,
    inputs=None,
    count=None,
    **pieces,
):
    """Trains ``model``, and next to it a Muon of one process with the same gradients.

    Args:
        case: the test on this rank.
        data_rank: ranks of one ``data_rank`` see the same data.
        inputs: gives the data of a step instead.
        count: Newton-Schulz calls of all ranks in a step; as many as matrices by default.
        pieces: see :class:`OneProcess`.
    """
    matrices, _ = partition_parameters(model)
    muon = Muon(matrices, lr=0.05, distributed_config=config)
    alone = OneProcess(model, [muon], **pieces)
    if count is None:
        count = len(matrices)
    for step in range(steps):
        if inputs is None:
            data = common_muon.full(100 * step + data_rank, (6, 12))
        else:
            data = inputs(step)
        model(data).pow(2).mean().backward()
        alone.step()
        with NewtonSchulzCalls() as calls:
            muon.step()
        model.zero_grad()
        counts = common_muon.everyone(len(calls.shapes))
        case.assertEqual(sum(counts), count)
        case.assertEverywhere(alone.problems(), f"step {step}")
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
    for number, info in enumerate(flat._shard_param_infos):
        if not info.in_shard:
            continue
        whole = wholes[flat._fqns[number]]
        first, end = info.intra_param_start_idx, info.intra_param_end_idx + 1
        piece = whole.flatten()[first:end]
        offset = info.offset_in_shard
        grad[offset : offset + info.numel_in_shard] = piece
        if flat._params is not None:
            flat._params[number].grad = piece.clone()
    if flat._params is None:
        flat.grad = grad


class Run:
    """An FSDP1 model with a Muon, and one process next to it.

    Args:
        orig: FSDP1's ``use_orig_params``.
        by_module: whether the config gets the module, or the process group. By default, where FSDP1 keeps the
            original parameters.
        model: by default a :class:`Model`, with biases next to original parameters.
        groups: the parameter groups of a model's Muon, if it has all parameters.
        x: the shape of inputs.
    """

    def __init__(
        self, orig, by_module=None, model=None, groups=None, x=(5, 8), **wrapping
    ):
        torch.manual_seed(5)
        self.groups, self.x, self.steps = groups, x, 0
        one = Model(orig) if model is None else model()
        self.one = one.to(device())
        self.model = wrap(copy.deepcopy(self.one), orig, **wrapping)
        if by_module is None:
            by_module = orig
        if by_module:
            self.config = create_auto_config(module=self.model)
        else:
            group = self.model.process_group
            self.config = create_auto_config(fsdp_process_group=group)
        self.build()

    def build(self):
        if self.groups is None:
            params, _ = partition_parameters(self.model)
        else:
            params = self.groups(self.model)
        self.optimizer = Muon(
            params,
            lr=0.1,
            allow_batched_matrices=self.groups is not None,
            distributed_config=self.config,
        )
        group = self.model.process_group
        self.alone = OneProcess(self.model, [self.optimizer], self.one, fsdp=group)

    def step(self):
        """The shapes of the matrices that this rank orthogonalized."""
        self.steps += 1
        inputs = common_muon.full(100 * self.steps, self.x)
        self.model(inputs).pow(2).sum().backward()
        self.alone.step()
        with NewtonSchulzCalls() as calls:
            self.optimizer.step()
        self.model.zero_grad()
        return calls.shapes
