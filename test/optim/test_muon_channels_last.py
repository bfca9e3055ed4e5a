# Owner(s): ["module: optimizer"]
"""Kernels in channels_last, in one process: ``flatten`` gives them the bits of contiguous ones."""

import torch
from torch import nn
from torch.optim import Muon
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_config import randn


class TestMuonChannelsLast(TestCase):
    def kernel(self, *shape):
        kernel = randn(1, *shape)
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return nn.Parameter(kernel.contiguous(memory_format=formats[kernel.ndim]))

    def test_bits_of_a_contiguous_kernel(self):
        for shape, split in (
            ((96, 64, 3, 3), None),
            ((8, 6, 3, 3), (3, 5)),
            ((8, 6, 3, 3), {"sizes": (24, 30), "dim": 1}),
            ((8, 6, 1, 3), None),
            ((8, 1, 3, 3), None),
            ((8, 4, 2, 1, 3), {"sizes": (1, 3), "repeats": 2}),
        ):
            with self.subTest(shape=shape, split=split):
                kernel = self.kernel(*shape)
                contiguous = nn.Parameter(randn(1, *shape))
                strides, address = kernel.stride(), kernel.data_ptr()
                group = {"params": [kernel, contiguous], "flatten": True}
                muon = Muon([{**group, "split": split}], lr=0.1)
                for step in range(3):
                    grad = randn(10 + step, *shape)
                    contiguous.grad = grad
                    # A layer may give gradients of another format.
                    same_format = torch.empty_like(kernel).copy_(grad)
                    kernel.grad = grad if step == 1 else same_format
                    muon.step()
                self.assertEqual(kernel.stride(), strides)
                self.assertEqual(kernel.data_ptr(), address)
                self.assertTrue(torch.equal(kernel, contiguous))
                momentum = [muon.state[p]["momentum_buffer"] for p in group["params"]]
                self.assertTrue(torch.equal(*momentum))

    def test_formats_that_change(self):
        """In the parameter and its gradient, and not in the momentum."""
        kernel = self.kernel(8, 6, 3, 3)
        twin = nn.Parameter(randn(1, 8, 6, 3, 3))
        muon = Muon([{"params": [kernel, twin], "flatten": True}])
        for step in range(3):
            for param in (kernel, twin):
                param.grad = randn(step, 8, 6, 3, 3)
            muon.step()
            kernel.data = kernel.data.contiguous().clone()
        self.assertTrue(torch.equal(kernel, twin))


if __name__ == "__main__":
    run_tests()
