"""Helpers for multi-process tests of torch.optim.Muon under FullyShardedDataParallel."""

from __future__ import annotations

import copy
import warnings

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim.muon import create_auto_config, partition_parameters
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_config import NewtonSchulzCalls
from torch.testing._internal.distributed._muon.common_muon import (
    device,
    equal,
    full,
    grid_of,
    moved_alike,
)


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


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "")


def flat_pieces(flat, wholes):
    """Each of ``wholes`` that this rank holds some of: its number, its place in ``flat``, its elements."""
    for i, (name, info) in enumerate(zip(flat._fqns, flat._shard_param_infos)):
        if info.in_shard:
            first, last = info.intra_param_start_idx, info.intra_param_end_idx
            at = info.offset_in_shard
            elements = wholes[name].flatten()[first : last + 1]
            yield i, slice(at, at + info.numel_in_shard), elements


def give_flat_gradients(flat, wholes):
    """Cuts whole gradients, by name, as a unit's backward does."""
    grad = torch.zeros_like(flat)
    for i, place, elements in flat_pieces(flat, wholes):
        grad[place] = elements
        if flat._params is not None:
            flat._params[i].grad = elements.clone()
    if flat._params is None:
        flat.grad = grad


def give_gradients(model, single):
    """Gives an FSDP1 model the gradients of its plain twin, if autograd may round them differently."""
    if common_muon.is_exact():
        return
    grads = {name: param.grad for name, param in single.named_parameters()}
    for prefix, flat in flat_parameters(model):
        wholes = {name: grads[clean(prefix + name)] for name in flat._fqns}
        give_flat_gradients(flat, wholes)


def flat_parameters(model):
    """Each flat parameter of ``model``, and what stands before the names of its parameters."""
    for name, module in model.named_modules():
        if isinstance(module, FSDP) and module._handle is not None:
            yield f"{name}." if name else "", module._handle.flat_param


class Run:
    """An FSDP1 model and its plain twin, with an optimizer for their matrices and one for the rest.

    Args:
        model: by default a :class:`Model`, with biases next to original parameters.
        groups: the parameter groups of a model's Muon, if it has all parameters.
        x: the shape of inputs.
    """

    def __init__(
        self, orig, by_module=None, model=None, groups=None, x=(5, 8), **wrapping
    ):
        torch.manual_seed(5)
        self.orig, self.groups, self.x = orig, groups, x
        self.single = (Model(orig) if model is None else model()).to(device())
        self.starts = copy.deepcopy(self.single.state_dict())
        self.model = wrap(copy.deepcopy(self.single), orig, **wrapping)
        by_module = orig if by_module is None else by_module
        source = (
            {"module": self.model}
            if by_module
            else {"fsdp_process_group": self.model.process_group}
        )
        self.config = create_auto_config(**source)
        self.build()
        _, self.single_optimizers = self.optimizers(self.single)
        self.steps = 0

    def build(self):
        self.matrices, self.all = self.optimizers(self.model, self.config)
        self.optimizer = self.all[0]

    def optimizers(self, model, config=None):
        options = {"lr": 0.1, "weight_decay": 0.1, "distributed_config": config}
        if self.groups is not None:
            options["allow_batched_matrices"] = True
            return [*model.parameters()], [Muon(self.groups(model), **options)]
        matrices, others = partition_parameters(model)
        made = [Muon(matrices, **options)]
        return matrices, made + ([torch.optim.SGD(others, lr=0.1)] if others else [])

    def backward(self):
        self.steps += 1
        for model in (self.model, self.single):
            model(full(100 * self.steps, self.x)).pow(2).sum().backward()
        give_gradients(self.model, self.single)

    def update(self):
        with NewtonSchulzCalls() as calls:
            self.optimizer.step()
        for optimizer in [*self.all[1:], *self.single_optimizers]:
            optimizer.step()
        for optimizer in [*self.all, *self.single_optimizers]:
            optimizer.zero_grad()
        return calls.shapes

    def step(self):
        self.backward()
        return self.update()

    def problems(self):
        """The differences from the twin: whole parameters, and this rank's momentum."""
        expected = dict(self.single.named_parameters())
        with FSDP.summon_full_params(self.model, writeback=False):
            values = {
                clean(name): whole(param).detach().clone()
                for name, param in self.model.named_parameters()
            }
        # The names of flat parameters are there, too.
        values = {n: v for n, v in values.items() if n in expected}
        found = [f"no parameter {name}" for name in set(expected) - set(values)]
        for name, value in values.items():
            its = expected[name].detach()
            if not moved_alike(value, its, self.steps, self.starts[name]):
                found.append(f"parameter {name}")
        state = self.single_optimizers[0].state
        for name, mine, span in self.momenta():
            its = state.get(expected[name], {}).get("momentum_buffer")
            if its is None:
                # All buffers are made in the first step, so that checkpoints are the same on all ranks.
                alike = mine is None or not mine.any()
            else:
                alike = mine is not None and equal(mine, its.flatten()[span])
            if not alike:
                found.append(f"momentum {name} {span}")
        return found

    def momenta(self):
        """Name, momentum here, and the elements that it belongs to, for each matrix of which some are here."""
        chosen = set(self.matrices)
        for prefix, flat in flat_parameters(self.model):
            for i, (fqn, info) in enumerate(zip(flat._fqns, flat._shard_param_infos)):
                param = flat._params[i] if self.orig else flat
                if param not in chosen or not info.in_shard:
                    continue
                buffer = self.optimizer.state.get(param, {}).get("momentum_buffer")
                if buffer is not None:
                    at = 0 if self.orig else info.offset_in_shard
                    buffer = buffer.flatten()[at : at + info.numel_in_shard]
                span = slice(info.intra_param_start_idx, info.intra_param_end_idx + 1)
                yield clean(prefix + fqn), buffer, span
