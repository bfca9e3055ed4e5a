# Owner(s): ["module: optimizer"]
"""Stacks of matrices in one process: each matrix as if it were a parameter of its own."""

import copy

import torch
from torch import nn
from torch.optim import Muon
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_config import ConfigTestCase


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestMuonStack(ConfigTestCase):
    def trained(self, params, **options):
        muon = Muon(params, lr=0.1, **options)
        for step in range(3):
            for i, param in enumerate(params):
                param.grad = randn(100 * step + i, *param.shape)
            muon.step()
        return muon

    def test_a_stack_is_its_matrices(self):
        for shape, options in (
            ((3, 4, 6), {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}),
            ((2, 3, 6, 4), {"ns_algorithm": "gram"}),
            ((2, 3, 6, 4), {"distributed_config": "auto"}),
            ((1, 5, 5), {}),
        ):
            stack = nn.Parameter(randn(7, *shape))
            start = stack.detach().reshape(-1, *shape[-2:])
            matrices = [nn.Parameter(m.clone()) for m in start]
            muon = self.trained([stack], allow_batched_matrices=True, **options)
            alone = Muon(matrices, lr=0.1, **options)
            for step in range(3):
                whole = randn(100 * step, *shape).reshape(-1, *shape[-2:])
                for matrix, grad in zip(matrices, whole):
                    matrix.grad = grad.clone()
                alone.step()
            found = stack.detach().reshape(-1, *shape[-2:])
            self.assert_same_bits(found, matrices)
            self.assertEqual(muon.state[stack]["momentum_buffer"].shape, shape)

    def test_stacks_in_one_batch(self):
        # Rounding differs between a batch and a loop.
        batched, looped = (nn.Parameter(randn(7, 4, 16, 24)) for _ in range(2))
        self.trained([batched], allow_batched_matrices=True, foreach=True)
        self.trained([looped], allow_batched_matrices=True, foreach=False)
        difference = (batched - looped).norm() / (looped - randn(7, 4, 16, 24)).norm()
        self.assertLess(difference, 0.05)

    def test_strides_change_nothing(self):
        plain = nn.Parameter(randn(7, 3, 4, 6))
        turned = nn.Parameter(
            randn(7, 3, 4, 6).transpose(0, 2).contiguous().transpose(0, 2)
        )
        for options in ({}, {"distributed_config": "auto"}):
            a, b = copy.deepcopy(plain), copy.deepcopy(turned)
            self.trained([a], allow_batched_matrices=True, **options)
            self.trained([b], allow_batched_matrices=True, **options)
            self.assertTrue(torch.equal(a, b))

    def test_a_copy_keeps_the_option(self):
        muon = self.trained(
            [nn.Parameter(randn(7, 3, 4, 6))], allow_batched_matrices=True
        )
        copied = copy.deepcopy(muon)
        copied.load_state_dict(copy.deepcopy(muon.state_dict()))
        (mine,), (its,) = (o.param_groups[0]["params"] for o in (muon, copied))
        mine.grad = its.grad = randn(8, 3, 4, 6)
        muon.step()
        copied.step()
        self.assertTrue(torch.equal(mine, its))

    def test_without_the_option_it_is_an_error(self):
        for config in (None, "auto"):
            with self.assertRaisesRegex(ValueError, "2D.*allow_batched_matrices=True"):
                Muon([nn.Parameter(randn(7, 3, 4, 6))], distributed_config=config)
        with self.assertRaisesRegex(ValueError, "2D"):
            Muon([nn.Parameter(randn(7, 3))], allow_batched_matrices=True)


if __name__ == "__main__":
    run_tests()
