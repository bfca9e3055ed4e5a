"""Helpers for multi-process tests of torch.optim.Muon with the frameworks' own modules."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Muon
from torch.optim.muon import partition_parameters
from torch.testing._internal.distributed._muon.common_config import NewtonSchulzCalls
from torch.testing._internal.distributed._muon.common_muon import (
    device,
    equal,
    everyone,
    full,
    moved_alike,
    ParityAssertions,
)


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_model(width=12, hidden=16, layers=2, bias=True, seed=3):
    """The same on every rank."""
    torch.manual_seed(seed)
    blocks = []
    for _ in range(layers):
        up = torch.nn.Linear(width, hidden, bias=bias)
        blocks += [up, torch.nn.ReLU(), torch.nn.Linear(hidden, width, bias=bias)]
    return torch.nn.Sequential(*blocks).to(device())


def tensor_parallel(model, mesh):
    """The first layer of each block by columns, the second by rows."""
    plan = {}
    for up in range(0, len(model), 3):
        plan |= {str(up): ColwiseParallel(), str(up + 2): RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def data_parallel(model, **options):
    gpus = None if device().type == "cpu" else [device()]
    return DDP(model, device_ids=gpus, **options)


class ModuleParity(ParityAssertions):
    """To be put before a TestCase whose methods run on every rank."""

    def check(self, model, config, steps=2, data_rank=0, count=None):
        """Trains ``model``, and next to it a Muon of one process with the same gradients.

        Args:
            data_rank: ranks of one ``data_rank`` see the same data.
            count: Newton-Schulz calls of all ranks in a step; as many as matrices by default.
        """
        matrices, _ = partition_parameters(model)
        singles = [torch.nn.Parameter(whole(p).clone()) for p in matrices]
        before = [single.detach().clone() for single in singles]
        ours = Muon(matrices, lr=0.05, distributed_config=config)
        its = Muon(singles, lr=0.05)
        for step in range(steps):
            x = full(100 * step + data_rank, (6, 12))
            model(x).pow(2).mean().backward()
            for param, single in zip(matrices, singles):
                # Autograd may round sharded products otherwise; Muon may not.
                single.grad = whole(param.grad).clone()
            with NewtonSchulzCalls() as calls:
                ours.step()
            its.step()
            model.zero_grad()
            total = sum(everyone(len(calls.shapes)))
            self.assertEqual(total, len(matrices) if count is None else count)
            found = []
            for i, (param, single) in enumerate(zip(matrices, singles)):
                mine, other = ours.state[param], its.state[single]
                if not moved_alike(whole(param), single.detach(), step + 1, before[i]):
                    found.append(f"parameter {i}: {param} instead of {single}")
                if not equal(whole(mine["momentum_buffer"]), other["momentum_buffer"]):
                    found.append(f"momentum {i}: {mine} instead of {other}")
            self.assertEverywhere(found, f"step {step}")
        for old, single in zip(before, singles):
            self.assertFalse(torch.equal(old, single.detach()))
        return matrices, ours
