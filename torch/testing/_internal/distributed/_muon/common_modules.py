"""Helpers for multi-process tests of torch.optim.Muon with the frameworks' own modules."""

from __future__ import annotations

import copy
import functools
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
    params=None,
    steps=2,
    data_rank=0,
    inputs=None,
    count=None,
    **pieces,
):
    """Trains ``model``, and next to it a Muon of one process with the same gradients.

    Args:
        case: the test on this rank.
        params: those of Muon; the matrices of the model by default.
        data_rank: ranks of one ``data_rank`` see the same data.
        inputs: gives the data of a step instead.
        count: Newton-Schulz calls of all ranks in a step; as many as matrices by default.
        pieces: see :class:`OneProcess`.
    """
    if params is None:
        params, _ = partition_parameters(model)
    options = {"allow_batched_matrices": True, "distributed_config": config}
    muon = Muon(params, lr=0.05, **options)
    alone = OneProcess(model, [muon], **pieces)
    if count is None:
        count = len(alone.names)
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
    return muon


class Tail(torch.nn.Linear):
    """Has fewer elements than there are ranks."""


def make_units(bias=False):
    """A model for FSDP1, which wraps its blocks and its tail. The matrices have odd sides."""
    torch.manual_seed(5)
    blocks = [make_model(9, 7, 1, bias) for _ in range(2)]
    tail = Tail(3, 1, bias=False)
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(9, 3, bias=bias), tail)
    return model.to(device())


UNITS = torch.nn.Sequential, Tail


def wrap(
    model,
    orig=False,
    strategy=ShardingStrategy.FULL_SHARD,
    units=UNITS,
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


def check_fsdp1(case, orig, by_module=True, steps=2, **wrapping):
    """FSDP1 against one process.

    Args:
        orig: FSDP1's ``use_orig_params``, with biases next to the matrices.
        by_module: whether the config gets the module, or the process group.
        wrapping: the strategy and units of :func:`wrap`.
    """
    one = make_units(orig)
    model = wrap(copy.deepcopy(one), orig, **wrapping)
    group = model.process_group
    config = create_auto_config(fsdp_process_group=group)
    if by_module:
        config = create_auto_config(module=model)
    inputs = functools.partial(common_muon.full, shape=(5, 9))
    pieces = {"one": one, "fsdp": group}
    return check_module(case, model, config, steps=steps, inputs=inputs, **pieces)
