# Owner(s): ["module: optimizer"]
"""Newton-Schulz: the algorithms that Muon offers, coefficients for each step, rounding, and what accelerators run."""

import itertools

import torch
from torch.optim import _muon as ours
from torch.optim import muon as public_module
from torch.optim._newton_schulz import (
    newton_schulz,
    Products,
)
from torch.optim._newton_schulz_variants import (
    newton_schulz_numel,
    products_for,
    SymmetricProducts,
    uses_gram,
)
from torch.testing._internal import common_utils
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._muon import common_config
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
)
from torch.utils._python_dispatch import TorchDispatchMode


class TestRounding(TestCase):
    def test_order_of_additions(self):
        """A batch, and rows and columns in another order, give other sums: GPUs choose theirs by shape."""
        torch.manual_seed(0)
        distances = []
        shapes = (8, 8), (16, 12), (9, 13), (32, 32), (64, 64), (128, 128)
        for (rows, columns), rank in itertools.product(shapes, (1, 2, 8, 128)):
            stack = torch.randn(20, rows, rank) @ torch.randn(20, rank, columns)
            stack = stack.bfloat16()
            one_by_one = self.one_by_one(stack)
            turned = self.one_by_one(stack.flip(1, 2))
            batch = newton_schulz(stack, COEFFICIENTS, 5, 1e-7)
            for same in (batch, turned.flip(1, 2)):
                distance = (same - one_by_one).norm(dim=(1, 2))
                relative = distance / one_by_one.norm(dim=(1, 2))
                distances += relative.tolist()
        distances.sort()
        self.assertGreater(distances[-1], 0)
        self.assertLess(distances[-1], common_config.ROUNDING)
        # One of a hundred is farther.
        rare = distances[-len(distances) // 100]
        self.assertLess(rare, common_config.ROUNDING / 2)

    def one_by_one(self, matrices):
        """Newton-Schulz of each matrix alone."""
        results = [newton_schulz(each, COEFFICIENTS, 5, 1e-7) for each in matrices]
        return torch.stack(results)


def spectrum(kind, rows, columns):
    """A matrix of seeded noise with singular values of a ``kind``."""
    matrix = torch.randn(rows, columns)
    if kind == "flat":
        return matrix
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    ranks = torch.arange(1, len(s) + 1)
    if kind == "decaying":
        return u @ torch.diag(ranks**-1.5) @ v
    # A few directions far above the noise, as momentum has them.
    return u @ torch.diag(torch.where(ranks > 8, 1e-3, 1.0)) @ v


def safe(a, b, c):
    """Coefficients for singular values that rounding has made larger than one."""
    return a / 1.01, b / 1.01**3, c / 1.01**5


class TestGramNewtonSchulz(TestCase):
    """``ns_algorithm="gram"``, and coefficients for each step."""

    # The first five of https://arxiv.org/abs/2505.16932, with the safety factor for bfloat16.
    POLAR_EXPRESS = [
        safe(8.28721201814563, -23.595886519098837, 17.300387312530933),
        safe(4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        safe(3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        safe(3.3184196573706015, -2.488488024314874, 0.51004894012372),
        safe(2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ]

    def test_distance_from_the_exact_polynomial(self):
        torch.manual_seed(0)
        for shape, (coefficients, triples), kind in itertools.product(
            ((64, 96), (96, 384), (512, 64)),
            ((COEFFICIENTS, [COEFFICIENTS] * 5), (self.POLAR_EXPRESS,) * 2),
            ("flat", "decaying", "low rank"),
        ):
            with self.subTest(
                shape=shape, kind=kind, coefficients=coefficients, triples=triples
            ):
                x = spectrum(kind, *shape).bfloat16()
                expected = common_config.exact_result(x, triples)
                quintic, gram = (
                    (
                        newton_schulz(x, coefficients, 5, ours.EPS, name) - expected
                    ).norm()
                    for name in ("quintic", "gram")
                )
                # Both round to bfloat16 on the way, the Gram matrix what is small the most.
                bound = max(0.05 * expected.norm(), 2 * quintic)
                self.assertLessEqual(gram, bound, f"{shape} {kind} {quintic}")
        # Three iterates and two Gram matrices, or two and five.
        numels = [newton_schulz_numel((4, long), "gram") for long in (64, 8)]
        self.assertEqual(numels, [800, 144])


class TestCoefficients(TestCase):
    """The published coefficients in torch.optim.muon, and those of a cubic."""

    PRESETS = {
        # How far from 1 singular values of at least 0.01 end, in exact arithmetic.
        "CUBIC": (public_module.CUBIC, 0.4),
        "DEEPSEEK_V4": (public_module.DEEPSEEK_V4, 0.01),
        "POLAR_EXPRESS": (public_module.POLAR_EXPRESS, 1e-4),
    }

    def test_published_coefficients(self):
        torch.manual_seed(0)
        u, v = (
            torch.linalg.qr(torch.randn(n, 20, dtype=torch.float64))[0]
            for n in (24, 32)
        )
        values = torch.logspace(-2, 0, 20, dtype=torch.float64)
        matrix = u @ torch.diag(values) @ v.T / values.norm()
        for name, (preset, most) in self.PRESETS.items():
            with self.subTest(name):
                self.assertEqual(len(preset["ns_coefficients"]), preset["ns_steps"])
                found = newton_schulz(matrix, **preset, eps=1e-7)
                distance = (torch.linalg.svdvals(found)[:20] - 1).abs().max()
                self.assertLess(distance, most)

    def test_cubic(self):
        """A product with ``alpha=0`` takes many times as long on a CPU. Without it, the bits are the same."""
        coefficients = [(3.3656576, -3.3420992, 0.0), (2.5744352, -1.4957376, 0.0)]
        for shape, algorithm in itertools.product(
            ((8, 12), (12, 8), (3, 8, 12), (600, 700)), ("quintic", "gram", "symmetric")
        ):
            if algorithm == "gram" and shape == (600, 700):
                continue
            with self.subTest(shape=shape, algorithm=algorithm):
                x = torch.randn(
                    shape, generator=torch.Generator().manual_seed(0)
                ).bfloat16()
                with ProductCalls() as calls:
                    found = newton_schulz(x, coefficients, 2, 1e-7, algorithm)
                self.assertEqual([alpha for alpha in calls.alphas if alpha == 0], [])
                if algorithm == "quintic" and len(shape) == 2 and shape[0] < 512:
                    self.assertEqual(calls.count, 2 * len(coefficients))
                if algorithm == "quintic":
                    self.assertTrue(
                        torch.equal(found, self.with_all_products(x, coefficients))
                    )

    def with_all_products(self, x, coefficients):
        """As stock computes it."""
        is_tall = x.size(-2) > x.size(-1)
        x = x.mT if is_tall else x
        addmm = torch.addmm if x.ndim == 2 else torch.baddbmm
        if x.ndim == 2:
            norm = x.norm()
        else:
            norm = torch.stack([matrix.norm() for matrix in x])[:, None, None]
        x = x / norm.clamp(min=1e-7)
        for a, b, c in coefficients:
            gram = x @ x.mT
            polynomial = addmm(gram, gram, gram, beta=b, alpha=c)
            x = addmm(x, polynomial, x, beta=a)
        return x.mT if is_tall else x


class ProductCalls(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count, self.alphas = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
            self.count += 1
            self.alphas.append((kwargs or {}).get("alpha", 1))
        return func(*args, **(kwargs or {}))


class TestAlgorithmsOnAccelerators(TestCase):
    """An algorithm that a user asks for is never slower than the default."""

    def test_shapes_that_take_the_gram_form(self):
        for shape, on_cpu, on_accelerator in (
            ((64, 64), False, False),
            ((64, 128), True, False),
            ((1024, 4096), True, False),
            ((2048, 4096), True, False),
            ((2048, 8192), True, True),
            ((14336, 4096), True, True),
        ):
            with self.subTest(shape=shape):
                for is_cpu, expected in ((True, on_cpu), (False, on_accelerator)):
                    with self.subTest(is_cpu=is_cpu):
                        self.assertEqual(uses_gram(shape, "gram", is_cpu), expected)
                        self.assertFalse(uses_gram(shape, "quintic", is_cpu))

    def test_products(self):
        """Blocks of a symmetric product are many launches, which an H100 outruns."""
        for algorithm in ("quintic", "gram", "symmetric"):
            with self.subTest(algorithm=algorithm):
                there = products_for(torch.empty(2048, 8192, device="meta"), algorithm)
                self.assertIs(there, Products)
        here = products_for(torch.empty(2048, 8192), "symmetric")
        self.assertIs(here, SymmetricProducts)

    def test_same_operations_as_the_default(self):
        def operations(shape, algorithm):
            x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            with ProductCalls() as calls:
                newton_schulz(x, COEFFICIENTS, 5, 1e-7, algorithm)
            return calls.count

        for shape in ((64, 64), (512, 2048), (8, 512, 2048), (4096, 4096)):
            with self.subTest(shape=shape):
                for algorithm in ("gram", "symmetric"):
                    with self.subTest(algorithm=algorithm):
                        found = operations(shape, algorithm)
                        self.assertEqual(
                            found, operations(shape, "quintic"), f"{shape} {algorithm}"
                        )
        self.assertNotEqual(
            operations((2048, 8192), "gram"), operations((2048, 8192), "quintic")
        )


if __name__ == "__main__":
    common_utils.run_tests()
