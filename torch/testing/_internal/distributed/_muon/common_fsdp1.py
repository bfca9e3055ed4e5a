"""Helpers for multi-process tests of torch.optim.Muon under FullyShardedDataParallel."""

from __future__ import annotations

import copy
import warnings

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Muon
from torch.optim.muon import create_auto_config, partition_parameters
from torch.testing._internal.distributed._muon.common_config import NewtonSchulzCalls
from torch.testing._internal.distributed._muon.common_modules import OneProcess
from torch.testing._internal.distributed._muon.common_muon import device, full, grid_of


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
        source = (
            {"module": self.model}
            if by_module
            else {"fsdp_process_group": self.model.process_group}
        )
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
        self.model(full(100 * self.steps, self.x)).pow(2).sum().backward()
        self.alone.step()
        with NewtonSchulzCalls() as calls:
            self.optimizer.step()
        self.model.zero_grad()
        return calls.shapes
