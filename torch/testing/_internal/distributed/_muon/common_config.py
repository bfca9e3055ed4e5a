"""Helpers for tests of Muon with a distributed_config on one process."""

import torch
from torch import nn
from torch.optim import Muon
from torch.optim.muon import DistributedConfig
from torch.testing._internal.common_utils import TestCase


# The arguments that torch.optim._muon.muon needs.
FUNCTIONAL = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "ns_steps": 5,
    "eps": 1e-7,
    "adjust_lr_fn": None,
    "has_complex": False,
}


def all_to(rank):
    return lambda params, state: {rank: list(range(len(params)))}


def local_config(assign_fn=None, *, state=None, **options):
    """Functions that communicate nothing."""
    return DistributedConfig(
        assign_fn=assign_fn or all_to(0),
        gather_fn=lambda piece, owner, state: piece,
        redistribute_fn=lambda full, owner, state: full,
        state={} if state is None else state,
        **options,
    )


def make_params(*shapes, dtype=torch.float32, seed=0):
    """Parameters with gradients."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in shapes:
        param = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        param.grad = torch.randn(shape, generator=generator).to(dtype)
        params.append(param)
    return params


class ConfigTestCase(TestCase):
    def assert_same_bits(self, actual, expected):
        self.assertEqual(len(actual), len(expected))
        for mine, other in zip(actual, expected):
            self.assertTrue(torch.equal(mine, other), f"{mine} != {other}")

    def trained(self, config, *shapes, steps=3, dtype=torch.float32, **options):
        """Parameters and momentum after ``steps`` steps with made-up gradients."""
        params = make_params(*shapes, dtype=dtype)
        optimizer = Muon(params, lr=0.05, distributed_config=config, **options)
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            optimizer.step()
        buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
        return [p.detach() for p in params] + buffers
