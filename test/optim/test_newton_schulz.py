# Owner(s): ["module: optimizer"]
"""The quintic Newton-Schulz iteration as a function: its bits, its inputs and its options."""

import itertools

import torch
from torch.optim._newton_schulz import (
    _zeropower_via_newtonschulz,
    as_tuples,
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    EPS,
    newton_schulz,
    NS_DTYPE,
)
from torch.testing._internal.common_utils import run_tests, TestCase


DEFAULTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
SHAPES = (8, 8), (7, 5), (4, 16), (16, 4), (1, 8), (5, 1), (1, 1), (40, 24)


def matrix_of(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def as_upstream(grad, coefficients, steps, eps):
    """The iteration as torch.optim.Muon had it, in its order of operations."""
    a, b, c = coefficients
    x = grad.bfloat16()
    if grad.size(0) > grad.size(1):
        x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if grad.size(0) > grad.size(1) else x


class TestQuintic(TestCase):
    def test_bits(self):
        """The result may be in ``out``, which may be the input. Another input stays: one in bfloat16 was divided by its
        norm in place, and that was the momentum.
        """
        dtypes = torch.float32, torch.bfloat16
        for shape, steps, dtype in itertools.product(SHAPES, (0, 1, 5), dtypes):
            with self.subTest(shape=shape, steps=steps, dtype=dtype):
                grad = matrix_of(*shape).to(dtype)
                before, x = grad.clone(), grad.to(NS_DTYPE, copy=True)
                expected = as_upstream(grad, DEFAULTS, steps, EPS)
                results = [_zeropower_via_newtonschulz(grad, DEFAULTS, steps, EPS)]
                for out in (torch.empty_like(x), x):
                    found = newton_schulz(x, DEFAULTS, steps, EPS, out=out)
                    results.append(found)
                for found in results:
                    self.assertEqual(found.dtype, NS_DTYPE)
                    self.assertTrue(torch.equal(found, expected))
                self.assertTrue(torch.equal(grad, before))

    def test_batch(self):
        """Each matrix of a batch is divided by its own norm."""
        batch = torch.stack([10**k * matrix_of(6, 9, seed=k) for k in range(3)])
        found = newton_schulz(batch, DEFAULTS, 5, EPS)
        for matrix, one in zip(batch, found, strict=True):
            expected = newton_schulz(matrix, DEFAULTS, 5, EPS)
            self.assertEqual(one, expected, rtol=1e-4, atol=1e-4)

    def test_coefficients_of_each_step(self):
        x = matrix_of(6, 9).double()
        own = [DEFAULTS, (2.0, -1.5, 0.5), (1.5, -0.5, 0.0)]
        one_by_one = newton_schulz(x, own, 3, EPS)
        u, values, v = torch.linalg.svd(x, full_matrices=False)
        values = values / values.norm()
        for a, b, c in own:
            values = a * values + b * values**3 + c * values**5
        self.assertEqual(one_by_one, u @ values.diag() @ v, rtol=1e-9, atol=1e-9)


class TestOptions(TestCase):
    def test_errors(self):
        for shape, coefficients, words in (
            ((2, 3), (1.0, 2.0), "tuple of exactly 3 values"),
            ((2, 3, 4), [DEFAULTS] * 5, "must be a 2D matrix"),
        ):
            with self.subTest(words), self.assertRaisesRegex(ValueError, words):
                _zeropower_via_newtonschulz(matrix_of(*shape), coefficients, 5, EPS)

    def test_forms_of_checkpoints(self):
        """JSON has lists for tuples."""
        self.assertEqual(as_tuples([[1, 2, 3], [4, 5, 6]]), ((1, 2, 3), (4, 5, 6)))


if __name__ == "__main__":
    run_tests()
