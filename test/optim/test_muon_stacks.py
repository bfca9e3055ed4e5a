# Owner(s): ["module: optimizer"]
"""Batches of matrices, and parameters that are stacks of matrices, on one process."""

import torch
from torch import nn
from torch.optim import Muon
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_config import (
    make_params,
    MuonTestCase,
    NewtonSchulzCalls,
    randn,
)


class TestMuonStacks(MuonTestCase):
    def test_batches_have_the_bits_of_a_loop(self):
        """But for the rounding of batched products, which the calls avoid here."""
        shapes = [(4, 6), (6, 4), (4, 6), (3, 3), (4, 6)]
        alone, alone_buffers, _ = self.run_steps(Muon, shapes)
        with NewtonSchulzCalls() as calls:
            batched, buffers, _ = self.run_steps(Muon, shapes, foreach=True)
        self.assert_same_bits(batched, alone)
        self.assert_same_bits(buffers, alone_buffers)
        self.assertEqual({*calls.batches}, {(3, 4, 6)})

    def test_a_stack_has_the_bits_of_its_matrices(self):
        start, *gradients = (randn(seed, 3, 5, 4) for seed in range(4))
        stack = nn.Parameter(start.clone())
        matrices = [nn.Parameter(matrix.clone()) for matrix in start]
        # The learning rate has the shape of a matrix, not that of the stack.
        options = {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw"}
        of_stack = Muon([stack], allow_batched_matrices=True, **options)
        of_matrices = Muon(matrices, **options)
        for gradient in gradients:
            stack.grad = gradient.clone()
            for matrix, own in zip(matrices, gradient):
                matrix.grad = own.clone()
            of_stack.step()
            of_matrices.step()
        self.assert_same_bits(list(stack.detach()), [m.detach() for m in matrices])
        (momentum,) = self.buffers_of(of_stack, [stack])
        self.assert_same_bits(list(momentum), self.buffers_of(of_matrices, matrices))

    def test_batches_are_of_one_device(self):
        """Without ``foreach``, accelerators batch the matrices of a stack, and CPUs do not."""
        matrices = [
            nn.Parameter(torch.ones(3, 4, device="cpu")),
            nn.Parameter(torch.ones(3, 4, device="meta")),
        ]
        stacks = [
            nn.Parameter(torch.ones(2, 3, 4, device="cpu")),
            nn.Parameter(torch.ones(2, 3, 5, device="meta")),
        ]
        for param in matrices + stacks:
            param.grad = torch.empty_like(param)
        with NewtonSchulzCalls() as calls:
            Muon(matrices, foreach=True).step()
            for stack in stacks:
                Muon([stack], allow_batched_matrices=True).step()
        self.assertEqual(calls.batches, [(2, 3, 5)])

    def test_foreach_with_a_config(self):
        # A single rank has one bucket.
        shapes = [(4, 6)] * 16
        for foreach in (None, False, True):
            with self.subTest(foreach=foreach):
                options = {"distributed_config": "auto", "foreach": foreach}
                optimizer = Muon(make_params(*shapes), **options)
                with NewtonSchulzCalls() as calls:
                    optimizer.step()
                self.assertEqual(calls.shapes, shapes)
                self.assertEqual(calls.batches, [(16, 4, 6)] if foreach else [])


if __name__ == "__main__":
    run_tests()
