# Owner(s): ["module: optimizer"]
"""Fused and flattened weights, stacks, and symmetric products, in one process."""

import copy
import functools
import json
from unittest import mock

import torch
from torch import nn
from torch.optim import _newton_schulz, Muon
from torch.optim._newton_schulz import BatchProducts, newton_schulz, Products
from torch.optim._newton_schulz_variants import (
    _has_same_bits,
    products_for,
    SymmetricProducts,
)
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
    local_config,
    parts_of,
    randn,
)


# Fused QKV, heads, convolutions of one to three dimensions, a convolution whose groups are matrices, a
# stack of fused weights, a matrix, which is flat already, and stacks.
FORMS = [
    ((48, 16), {"split": (16, 20, 12)}),
    ((32, 16), {"split": [4] * 8}),
    ((8, 6, 3), {"flatten": True}),
    ((8, 6, 3, 3), {"flatten": True}),
    ((4, 2, 3, 1, 2), {"flatten": True}),
    ((16, 2, 3, 3), {"flatten": True, "split": [4] * 4}),
    ((4, 6, 8), {"split": [2, 4]}),
    ((8, 12), {"flatten": True}),
    # Query, key and value of each group of heads; columns; alternating columns of a stack; alternating rows.
    ((24, 10), {"split": {"sizes": (4, 1, 3), "repeats": 3}}),
    ((6, 4), {"split": {"sizes": (2,), "repeats": 3}}),
    ((9, 14), {"split": {"sizes": [3, 4], "repeats": 2, "dim": 1}}),
    ((10, 12), {"split": {"sizes": (5, 7), "dim": 1}}),
    ((3, 6, 10), {"split": {"sizes": (1, 1), "repeats": 5, "dim": 1}}),
    ((4, 3, 2), {"flatten": True, "split": {"sizes": (1, 1), "repeats": 2}}),
    ((3, 4, 6), {}),
    ((2, 3, 6, 4), {}),
]
# A function of the user's that only delegates.
DELEGATES = create_dtensor_config()
DELEGATES.gather_fn = functools.partial(DELEGATES.gather_fn)
OPTIONS = [
    {},
    {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
    {
        "adjust_lr_fn": "spectral_unclamped",
        "ns_coefficients": torch.tensor([COEFFICIENTS] * 5),
    },
    {"lr": torch.tensor(0.05)},
    {"foreach": True},
    {"ns_algorithm": "gram"},
    {"ns_algorithm": "symmetric"},
    {"distributed_config": "auto"},
    {"distributed_config": local_config()},
    {"distributed_config": DELEGATES},
]


class TestMuonSplit(TestCase):
    def build(self, **options):
        """An optimizer of whole weights, and one of their parts as parameters of their own."""
        self.whole = [nn.Parameter(randn(1, *shape)) for shape, _ in FORMS]
        self.parts = []
        for whole, (_, form) in zip(self.whole, FORMS, strict=True):
            parts = parts_of(whole.detach(), **form)
            self.parts.append([nn.Parameter(part.clone()) for part in parts])
        options = {"lr": 0.1, "allow_batched_matrices": True, **options}
        groups = [
            {"params": [param], **form} for param, (_, form) in zip(self.whole, FORMS)
        ]
        alone = [{"params": parts} for parts in self.parts]
        return Muon(groups, **options), Muon(alone, **options)

    def set_gradients(self, seed, turned=False):
        for whole, parts, (shape, form) in zip(self.whole, self.parts, FORMS):
            whole.grad = randn(seed, *shape)
            for part, grad in zip(parts, parts_of(whole.grad, **form), strict=True):
                part.grad = grad.clone()
            if turned:
                whole.grad = whole.grad.transpose(0, -1).contiguous().transpose(0, -1)

    def assertSame(self, fused, alone, message=""):
        for whole, parts, (shape, form) in zip(self.whole, self.parts, FORMS):
            buffer = fused.state[whole]["momentum_buffer"]
            self.assertEqual(buffer.shape, shape)
            momentum = [alone.state[part]["momentum_buffer"] for part in parts]
            for mine, its in ((whole.detach(), parts), (buffer, momentum)):
                with self.subTest(mine=mine):
                    found = parts_of(mine, **form)
                    same = map(torch.equal, found, its)
                    self.assertTrue(all(same), f"{shape} {form} {message}")

    def test_parts_are_parameters_of_their_own(self):
        for options in OPTIONS:
            with self.subTest(options=options):
                fused, alone = self.build(**options)
                for seed in range(3):
                    # Gradients of channels_last layers have other strides.
                    self.set_gradients(seed, turned=seed != 1)
                    fused.step()
                    alone.step()
                self.assertSame(fused, alone, options)

    def test_copies_and_checkpoints_keep_the_options(self):
        fused, alone = self.build()
        self.set_gradients(0)
        fused.step()
        alone.step()
        # Stock Muon does not know the options, and JSON has lists instead of tuples.
        for unknown in ((), ("split", "flatten")):
            with self.subTest(unknown=unknown):
                state = copy.deepcopy(fused.state_dict())
                groups = json.loads(json.dumps(state["param_groups"]))
                for group in groups:
                    for option in unknown:
                        del group[option]
                fused, self.whole = copy.deepcopy((fused, self.whole))
                fused.load_state_dict({**state, "param_groups": groups})
                self.set_gradients(1)
                fused.step()
                alone.step()
                self.assertSame(fused, alone)

    def test_errors(self):
        qkv, conv, stack = randn(0, 48, 16), randn(1, 8, 6, 3, 3), randn(2, 4, 6, 8)
        bad = r"split \(24, 8, 8\) adds up to 40, but dimension 0 has 48"
        for tensor, form, expected in (
            (qkv, {"split": (24, 8, 8)}, bad),
            (qkv, {"split": (48, 0)}, r"must be positive ints, .*but is \(48, 0\)"),
            (qkv, {"split": (64, -16)}, "positive ints"),
            (qkv, {"split": (32, "16")}, r"but is \(32, '16'\)"),
            (qkv, {"split": map(int, ("7", "8"))}, "positive ints"),
            (qkv, {"split": {"sizes": iter((16, 32))}}, "positive ints"),
            (qkv, {"split": {16, 32}}, "positive ints"),
            (qkv, {"split": {"sizes": None, "repeats": 3}}, "'sizes': None"),
            (stack, {"split": (6, 6)}, "adds up to 12, but dimension .* has 6"),
            (conv, {"flatten": True, "split": (6, 6)}, "12, but dimension 0 has 8"),
            (conv, {}, "flatten=True"),
            (qkv[0], {"split": (16,)}, "2D.*Biases and norms belong to AdamW$"),
            (qkv, {"split": 4}, r"split \(4,\) adds up to 4"),
            (qkv, {"split": {"sizes": (4, 2), "repeats": 3}}, r"\(4, 2\) x 3 .* to 18"),
            (qkv, {"split": {"sizes": (16,), "dim": 2}}, "positive ints.*'dim': 2"),
            (
                qkv,
                {"split": {"sizes": (16, 2), "dim": 1.0}},
                "positive ints.*'dim': 1.0",
            ),
            (qkv, {"split": []}, r"positive ints.*\[\]"),
            (qkv, {"split": ()}, r"positive ints.*\(\)"),
            (qkv, {"split": {"sizes": (), "repeats": 4}}, "positive ints"),
            (qkv, {"split": {"repeats": 4}}, "positive ints.*repeats"),
            (
                qkv,
                {"split": {"sizes": (24, 24), "dim": None}},
                "positive ints.*'dim': None",
            ),
        ):
            with self.subTest(form=form):
                group = {"params": [("w", nn.Parameter(tensor))], **form}
                options = {"allow_batched_matrices": tensor.ndim == 3}
                for config in (None, "auto"):
                    with self.subTest(config=config):
                        with self.assertRaisesRegex(ValueError, expected) as found:
                            Muon([group], distributed_config=config, **options)
                        self.assertIn("'w'", str(found.exception))

    def test_options_that_change(self):
        qkv = nn.Parameter(randn(0, 48, 16))
        muon = Muon([{"params": [qkv], "split": [16, 32]}], distributed_config="auto")
        qkv.grad = randn(1, 48, 16)
        # A list that changes in place went unnoticed.
        muon.param_groups[0]["split"] = [16, 32]
        muon.param_groups[0]["split"].reverse()
        with self.assertRaisesRegex(ValueError, r"split .*\(16, 32\).*\(32, 16\)"):
            muon.step()
        self.assertTrue(torch.equal(qkv, randn(0, 48, 16)))
        muon.param_groups[0]["split"] = (16, 32)
        muon.step()

    def test_memory_order_with_a_config(self):
        """Shards have the columns in the order of dimensions."""
        conv = nn.Conv2d(4, 8, 3, bias=False)
        group = {"params": [("w", conv.weight)], "flatten": True}
        muon = Muon([group], distributed_config="auto")
        conv.to(memory_format=torch.channels_last)
        conv.weight.grad = torch.randn_like(conv.weight)
        before = conv.weight.detach().clone()
        expected = "'w'.*not contiguous.*make it contiguous"
        with self.assertRaisesRegex(ValueError, expected):
            muon.step()
        self.assertTrue(torch.equal(conv.weight, before))
        with self.assertRaisesRegex(ValueError, expected):
            Muon([group], distributed_config="auto")

    @mock.patch("torch.optim._newton_schulz_variants._has_same_bits", lambda: True)
    def test_symmetric_products_where_they_have_the_same_bits(self):
        x = randn(0, 512, 512).bfloat16()
        for threads, is_alike in ((2, True), (3, False)):
            with self.subTest(threads=threads, is_alike=is_alike):
                with mock.patch("torch.get_num_threads", return_value=threads):
                    products = products_for(x, "quintic")
                self.assertIs(products is SymmetricProducts, is_alike)

    def test_bits_of_plain_products(self):
        # Blocks of even and odd sizes on two levels, a batch, and a matrix too small for blocks.
        for shape in ((64, 96), (2, 512, 512), (700, 513), (601, 900), (1024, 1025)):
            with self.subTest(shape=shape):
                matrix = randn(3, *shape).bfloat16()
                torchs = Products if matrix.ndim == 2 else BatchProducts
                for algorithm in ("quintic", "gram"):
                    with self.subTest(algorithm=algorithm):
                        results = []
                        for products in (torchs, SymmetricProducts):
                            with mock.patch.object(
                                _newton_schulz, "products_for", return_value=products
                            ):
                                args = matrix, COEFFICIENTS, 2, 1e-7, algorithm
                                results.append(newton_schulz(*args))
                        plain, symmetric = results
                        distance = (plain - symmetric).float().norm()
                        difference = distance / plain.float().norm()
                        # Other CPUs round a product by the size of its blocks.
                        most = 0 if _has_same_bits() or shape == (64, 96) else 0.02
                        self.assertLessEqual(difference, most, f"{shape} {algorithm}")


if __name__ == "__main__":
    run_tests()
