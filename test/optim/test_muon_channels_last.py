# Owner(s): ["module: optimizer"]
"""Kernels in channels_last, in one process: ``flatten`` takes them as they are, without a copy in each step."""

import torch
from torch import nn
from torch.optim import Muon
from torch.optim._muon import muon
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_config import FUNCTIONAL, randn


def in_memory(tensor):
    """The matrix of a kernel in channels_last, with the columns in the order of memory."""
    return tensor.detach().movedim(1, -1).flatten(1)


class TestMuonChannelsLast(TestCase):
    def kernel(self, *shape):
        kernel = randn(1, *shape)
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return nn.Parameter(kernel.contiguous(memory_format=formats[kernel.ndim]))

    def train(self, muon, param, steps):
        for step in steps:
            param.grad = randn(10 + step, *param.shape)
            muon.step()

    def test_matrix_in_the_order_of_memory(self):
        """The columns are others than those of a contiguous kernel, and so is the rounding. Bits are those
        of a matrix with these columns."""
        for shape, split in (
            ((96, 64, 3, 3), None),
            ((8, 6, 3, 3), (3, 5)),
            ((8, 6, 1, 3), None),
            ((8, 1, 3, 3), None),
            ((8, 6, 1, 1), None),
            ((8, 4, 2, 1, 3), {"sizes": (1, 3), "repeats": 2}),
        ):
            with self.subTest(shape=shape, split=split):
                kernel = self.kernel(*shape)
                contiguous = nn.Parameter(randn(1, *shape))
                matrix = nn.Parameter(in_memory(kernel).clone())
                strides, address = kernel.stride(), kernel.data_ptr()
                options = {"flatten": True, "split": split}
                muon = Muon([{"params": [kernel, contiguous], **options}], lr=0.1)
                twin = Muon([{"params": [matrix], "split": split}], lr=0.1)
                for step in range(3):
                    grad = randn(10 + step, *shape)
                    matrix.grad = in_memory(grad)
                    contiguous.grad = grad
                    # A layer may give gradients of another format.
                    same_format = torch.empty_like(kernel).copy_(grad)
                    kernel.grad = grad if step == 1 else same_format
                    muon.step()
                    twin.step()
                buffer = muon.state[kernel]["momentum_buffer"]
                momentum = twin.state[matrix]["momentum_buffer"]
                self.assertEqual(
                    (kernel.stride(), kernel.data_ptr()), (strides, address)
                )
                self.assertEqual(buffer.stride(), strides)
                self.assertTrue(torch.equal(in_memory(kernel), matrix), shape)
                self.assertTrue(torch.equal(in_memory(buffer), momentum), shape)
                self.assertTrue(
                    torch.equal(buffer, muon.state[contiguous]["momentum_buffer"])
                )
                moved = (contiguous - randn(1, *shape)).norm()
                self.assertLess((kernel - contiguous).norm(), 0.02 * moved)

    def test_parameters_that_become_no_view(self):
        """Nothing moves: neither the parameter nor momentum."""
        columns = {"sizes": (36, 36), "dim": 1}
        kernel = randn(1, 8, 8, 3, 3)
        for split, changed in (
            (None, kernel.transpose(0, 1)),
            (columns, kernel.to(memory_format=torch.channels_last)),
        ):
            with self.subTest(split=split, changed=changed):
                param = nn.Parameter(kernel.clone())
                muon = Muon([{"params": [param], "flatten": True, "split": split}])
                self.train(muon, param, range(1))
                momentum = muon.state[param]["momentum_buffer"].clone()
                param.data = changed.clone()
                with self.assertRaisesRegex(
                    ValueError, r"\(8, 8, 3, 3\).*make it contig"
                ):
                    self.train(muon, param, range(1, 2))
                self.assertTrue(torch.equal(param, changed))
                self.assertTrue(
                    torch.equal(muon.state[param]["momentum_buffer"], momentum)
                )

    def test_momentum_of_another_format_in_the_functional_form(self):
        """A copy of momentum would start it anew."""
        kernel, grad = self.kernel(8, 6, 3, 3), randn(2, 8, 6, 3, 3)
        options = {**FUNCTIONAL, "flatten": True}
        with self.assertRaisesRegex(ValueError, "strides.*momentum"):
            muon([kernel], [grad], [torch.zeros(8, 6, 3, 3)], **options)


if __name__ == "__main__":
    run_tests()
