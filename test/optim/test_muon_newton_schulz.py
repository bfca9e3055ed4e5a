# Owner(s): ["module: optimizer"]
"""Newton-Schulz: the algorithms that Muon offers, published coefficients, and how many products each form takes."""

import itertools
from unittest import mock

import torch
from torch.optim import _newton_schulz_variants as variants, muon as public_module
from torch.optim._newton_schulz import (
    BatchProducts,
    newton_schulz,
    Products,
    quintic,
)
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
    randn,
)
from torch.utils._python_dispatch import TorchDispatchMode


class ProductCalls(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = "mm", "bmm", "addmm", "baddbmm"
        self.count += func.overloadpacket.__name__ in names
        return func(*args, **(kwargs or {}))


def products_of(x, algorithm, coefficients=COEFFICIENTS):
    with ProductCalls() as calls:
        newton_schulz(x, coefficients, 5, 1e-7, algorithm)
    return calls.count


class TestAlgorithms(TestCase):
    def test_distance_of_the_gram_form(self):
        polar = public_module.POLAR_EXPRESS["ns_coefficients"]
        for shape, triples, is_low in itertools.product(
            ((64, 96), (96, 384), (512, 64)),
            ([COEFFICIENTS] * 5, polar[:5]),
            (False, True),
        ):
            with self.subTest(shape=shape, is_low=is_low, triples=triples):
                x = torch.randn(shape)
                if is_low:
                    # A few directions far above the noise, as momentum has them.
                    x = 1e-3 * x + torch.randn(shape[0], 8) @ torch.randn(8, shape[1])
                x = x.bfloat16()
                expected = quintic(x.double(), triples, 1e-7)
                default, gram = (
                    (newton_schulz(x, triples, 5, 1e-7, name) - expected).norm()
                    for name in ("quintic", "gram")
                )
                # Both round to bfloat16 on the way, the Gram matrix what is small the most.
                self.assertLessEqual(gram, max(0.05 * expected.norm(), 2 * default))
        # Three iterates and a Gram matrix, or two and five.
        numels = [variants.newton_schulz_numel((4, long), "gram") for long in (64, 8)]
        self.assertEqual(numels, [800, 144])

    def test_published_coefficients(self):
        values = torch.logspace(-2, 0, 20, dtype=torch.float64)
        matrix = (values / values.norm()).diag()
        # How far from 1 singular values of at least 0.01 end, in exact arithmetic.
        for name, most in (
            ("CUBIC", 0.4),
            ("DEEPSEEK_V4", 0.01),
            ("POLAR_EXPRESS", 1e-4),
        ):
            with self.subTest(name):
                preset = getattr(public_module, name)
                self.assertEqual(len(preset["ns_coefficients"]), preset["ns_steps"])
                found = newton_schulz(matrix, **preset, eps=1e-7)
                distance = (found.diagonal() - 1).abs().max()
                self.assertLess(distance, most)

    def test_cubic(self):
        """A product with ``alpha=0`` takes many times as long on a CPU. Without it, the bits are the same."""
        for shape, algorithm in itertools.product(
            ((8, 12), (12, 8), (3, 8, 12), (600, 700)), ("quintic", "gram", "symmetric")
        ):
            with self.subTest(shape=shape, algorithm=algorithm):
                x = randn(0, *shape).bfloat16()
                results, counts = [], []
                # The second one is lost by the rounding.
                for c in (0.0, 1e-30):
                    triples = [(3.3656576, -3.3420992, c), (2.5744352, -1.4957376, c)]
                    with ProductCalls() as calls:
                        found = newton_schulz(x, triples, 2, 1e-7, algorithm)
                    results.append(found)
                    counts.append(calls.count)
                self.assertTrue(torch.equal(*results))
                self.assertLess(*counts)

    @mock.patch.object(variants, "_has_same_bits", lambda: False)
    def test_products_of_each_form(self):
        """An algorithm that a user asks for is never slower than the default, with three products in each step."""
        plain, gram = 5 * 3, 18
        for device, shape, algorithm, expected in (
            # A CPU takes the Gram form of matrices that are half as long again.
            ("cpu", (64, 95), "gram", plain),
            ("cpu", (64, 96), "gram", gram),
            # Two of the products of a step are symmetric, and take three blocks each.
            ("cpu", (520, 530), "symmetric", 5 * (3 + 3 + 1)),
            # Blocks are many launches, which an H100 outruns.
            ("meta", (4096, 4096), "symmetric", plain),
            ("meta", (8, 512, 2048), "symmetric", plain),
            ("meta", (2048, 7167), "gram", plain),
            ("meta", (2048, 7168), "gram", gram),
            ("meta", (2047, 14336), "gram", plain),
        ):
            with self.subTest(device=device, shape=shape, algorithm=algorithm):
                x = torch.empty(shape, dtype=torch.bfloat16, device=device)
                self.assertEqual(products_of(x, "quintic"), plain)
                self.assertEqual(products_of(x, algorithm), expected)

    def test_bits_of_symmetric_products(self):
        # Blocks of even and odd sizes on two levels, a batch, and a matrix too small for blocks.
        for shape, algorithm in itertools.product(
            ((64, 96), (2, 512, 512), (700, 513), (601, 900), (1024, 1025)),
            ("quintic", "gram"),
        ):
            with self.subTest(shape=shape, algorithm=algorithm):
                x = randn(3, *shape).bfloat16()
                results = []
                for products in (
                    Products if x.ndim == 2 else BatchProducts,
                    variants.SymmetricProducts,
                ):
                    with mock.patch.object(
                        variants, "products_for", lambda *_: products
                    ):
                        found = newton_schulz(x, COEFFICIENTS, 2, 1e-7, algorithm)
                    results.append(found.float())
                plain, symmetric = results
                # Other CPUs round a product by the size of its blocks.
                is_alike = variants._has_same_bits() or shape == (64, 96)
                most = 0 if is_alike else 0.02
                self.assertLessEqual((plain - symmetric).norm(), most * plain.norm())


if __name__ == "__main__":
    run_tests()
