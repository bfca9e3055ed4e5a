# Owner(s): ["module: optimizer"]
"""Fused and flattened weights, stacks, kernels in channels_last, and batches, in one process."""

import copy
import functools
import json

import torch
from torch import nn
from torch.optim import Muon
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
    local_config,
    make_params,
    MuonTestCase,
    NewtonSchulzCalls,
    parts_of,
    randn,
)


FLAT = {"flatten": True}
# Fused QKV, a convolution, a convolution whose groups are matrices, a stack of fused weights, a matrix, which is flat
# already, and stacks.
FORMS = [
    ((48, 16), {"split": (16, 20, 12)}),
    ((8, 6, 3, 3), FLAT),
    ((16, 2, 3, 3), {"flatten": True, "split": [4] * 4}),
    ((4, 6, 8), {"split": [2, 4]}),
    ((8, 12), FLAT),
    # Query, key and value of each group of heads; columns; alternating columns of a stack; alternating rows.
    ((24, 10), {"split": {"sizes": (4, 1, 3), "repeats": 3}}),
    ((9, 14), {"split": {"sizes": [3, 4], "repeats": 2, "dim": 1}}),
    ((3, 6, 10), {"split": {"sizes": (1, 1), "repeats": 5, "dim": 1}}),
    ((4, 3, 2), {"flatten": True, "split": {"sizes": (1, 1), "repeats": 2}}),
    ((3, 4, 6), {}),
    ((2, 3, 6, 4), {}),
]
# Kernels in channels_last, which have the bits of contiguous ones.
LAST = [
    ((96, 64, 3, 3), FLAT),
    ((8, 6, 3, 3), {"flatten": True, "split": (3, 5)}),
    ((8, 6, 1, 3), FLAT),
    ((8, 6, 1, 1), FLAT),
    ((8, 4, 2, 1, 3), {"flatten": True, "split": {"sizes": (1, 3), "repeats": 2}}),
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


def in_channels_last(tensor):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[tensor.ndim])


class Whole:
    """A weight, and its matrices as parameters of their own."""

    def __init__(self, shape, form, is_last):
        self.form = form
        value = randn(1, *shape)
        self.param = nn.Parameter(in_channels_last(value) if is_last else value)
        self.parts = [nn.Parameter(p.clone()) for p in self.parts_of(self.param)]

    def parts_of(self, tensor):
        return parts_of(tensor.detach().contiguous(), **self.form)


class TestMuonSplit(MuonTestCase):
    def build(self, **options):
        """An optimizer of whole weights, and one of their parts."""
        self.wholes = [Whole(*form, False) for form in FORMS]
        if "distributed_config" not in options:
            self.wholes += [Whole(*form, True) for form in LAST]
        options = {"lr": 0.1, "allow_batched_matrices": True, **options}
        groups = [{"params": [whole.param], **whole.form} for whole in self.wholes]
        alone = [{"params": whole.parts} for whole in self.wholes]
        return Muon(groups, **options), Muon(alone, **options)

    def step(self, fused, alone, seed):
        for whole in self.wholes:
            grad = randn(seed, *whole.param.shape)
            for part, piece in zip(whole.parts, whole.parts_of(grad), strict=True):
                part.grad = piece.clone()
            if seed != 1:
                # A layer may give gradients of another format.
                grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
            whole.param.grad = grad
        fused.step()
        alone.step()

    def assertSame(self, fused, alone):
        for whole in self.wholes:
            with self.subTest(shape=whole.param.shape, form=whole.form):
                (buffer,) = self.buffers_of(fused, [whole.param])
                self.assertEqual(buffer.shape, whole.param.shape)
                momenta = self.buffers_of(alone, whole.parts)
                for mine, its in ((whole.param, whole.parts), (buffer, momenta)):
                    found = whole.parts_of(mine)
                    self.assertTrue(all(map(torch.equal, found, its)))

    def test_parts_are_parameters_of_their_own(self):
        for options in OPTIONS:
            with self.subTest(options=options):
                fused, alone = self.build(**options)
                for seed in range(3):
                    self.step(fused, alone, seed)
                self.assertSame(fused, alone)

    def test_copies_and_checkpoints_keep_the_options(self):
        fused, alone = self.build()
        self.step(fused, alone, 0)
        # Stock Muon does not know the options, and JSON has lists instead of tuples.
        for unknown in ((), ("split", "flatten")):
            with self.subTest(unknown=unknown):
                state = copy.deepcopy(fused.state_dict())
                groups = json.loads(json.dumps(state["param_groups"]))
                for group in groups:
                    for option in unknown:
                        del group[option]
                fused, alone, self.wholes = copy.deepcopy((fused, alone, self.wholes))
                fused.load_state_dict({**state, "param_groups": groups})
                self.step(fused, alone, 1)
                self.assertSame(fused, alone)

    def test_errors(self):
        qkv, stack = randn(0, 48, 16), randn(2, 4, 6, 8)
        malformed = "positive ints, .*but is "
        for tensor, form, words in (
            (qkv, {"split": (24, 8, 8)}, r"\(24, 8, 8\) adds .* 40, .* 0 has 48"),
            (qkv, {"split": map(int, ("7", "8"))}, malformed),
            (qkv, {"split": {"repeats": 4}}, f"{malformed}.*repeats"),
            (qkv, {"split": {"sizes": (48,), "repeats": 0}}, malformed),
            (qkv, {"split": {"sizes": (16,), "dim": 2}}, f"{malformed}.*'dim': 2"),
            (qkv, {"split": {"sizes": (4, 2), "repeats": 3}}, r"\(4, 2\) x 3 .* to 18"),
            (stack, {"split": (6, 6)}, "adds up to 12, but dimension .* has 6"),
        ):
            for config in (None, "auto"):
                with self.subTest(form=form, config=config):
                    group = {"params": [("w", nn.Parameter(tensor))], **form}
                    options = {"allow_batched_matrices": tensor.ndim == 3}
                    with self.assertRaisesRegex(ValueError, words) as found:
                        Muon([group], distributed_config=config, **options)
                    self.assertIn("'w'", str(found.exception))

    def test_options_that_change(self):
        """The next step cuts otherwise."""
        params = [nn.Parameter(randn(0, 48, 16)) for _ in range(2)]
        groups = [[{"params": [p], "split": [16, 32]}] for p in params]
        optimizers = Muon(groups[0], distributed_config="auto"), Muon(groups[1])
        for optimizer, param in zip(optimizers, params):
            for step in range(2):
                param.grad = randn(step + 1, 48, 16)
                # A list that changes in place went unnoticed.
                optimizer.param_groups[0]["split"] = [16, 32]
                if step:
                    optimizer.param_groups[0]["split"].reverse()
                optimizer.step()
        self.assertTrue(torch.equal(*params))

    def test_a_parameter_that_becomes_no_view(self):
        """Shards have the columns in the order of dimensions. Nothing moves: neither the parameter nor momentum."""
        kernel = randn(1, 8, 8, 3, 3)
        param = nn.Parameter(kernel.clone())
        group = {"params": [("w", param)], "flatten": True}
        muon = Muon([group], distributed_config="auto")
        param.grad = randn(2, *kernel.shape)
        muon.step()
        momentum = muon.state[param]["momentum_buffer"].clone()
        changed = in_channels_last(kernel)
        param.data = changed.clone()
        with self.assertRaisesRegex(ValueError, r"\(8, 8, 3, 3\).*make it contig"):
            muon.step()
        self.assertTrue(torch.equal(param, changed))
        self.assertTrue(torch.equal(muon.state[param]["momentum_buffer"], momentum))

    def test_sizes_of_the_whole_weight(self):
        """A shard that the user's functions gather failed in the first step."""
        # The update of other parts than the first one is rounded once more, to bfloat16.
        rounded = 0.1 * 1.5 * 2**-8
        for split, most in (((8, 8, 8), 0), ((16, 4, 4), rounded), ((2, 2), None)):
            with self.subTest(split=split):
                config = local_config()
                config.gather_fn = lambda piece, owner, state: piece.repeat(4, 1)
                config.redistribute_fn = lambda full, owner, state: full[18:]
                (shard,) = make_params((6, 8))
                whole = nn.Parameter(shard.detach().repeat(4, 1))
                whole.grad = shard.grad.repeat(4, 1)
                options = {"split": split, "lr": 0.1}
                groups = [{"params": [shard], **options}]
                muon = Muon(groups, distributed_config=config)
                if most is None:
                    words = "parameter 0.*adds up to 4, but dimension 0 has 24"
                    with self.assertRaisesRegex(ValueError, words):
                        muon.step()
                    continue
                muon.step()
                Muon([{"params": [whole], **options}]).step()
                expected = whole.detach()[18:]
                self.assertEqual(shard.detach(), expected, rtol=0, atol=most)


class TestBatches(MuonTestCase):
    def test_batches_have_the_bits_of_a_loop(self):
        """But for the rounding of batched products, which the calls avoid here."""
        shapes = [(4, 6), (6, 4), (4, 6), (3, 3), (4, 6)]
        alone, alone_buffers, _ = self.run_steps(Muon, shapes)
        with NewtonSchulzCalls() as calls:
            batched, buffers, _ = self.run_steps(Muon, shapes, foreach=True)
        self.assert_same_bits(batched + buffers, alone + alone_buffers)
        self.assertEqual({*calls.batches}, {(3, 4, 6)})

    def test_which_matrices_share_a_batch(self):
        auto, stacks = {"distributed_config": "auto"}, {"allow_batched_matrices": True}
        for tensors, options, expected in (
            # Accelerators batch the matrices of a stack, and CPUs do not.
            ([torch.ones(2, 3, 4)], stacks, []),
            ([torch.ones(2, 3, 5, device="meta")], stacks, [(2, 3, 5)]),
            # A single rank has one bucket.
            (torch.ones(16, 4, 6), auto, []),
            (torch.ones(16, 4, 6), {"foreach": True, **auto}, [(16, 4, 6)]),
        ):
            with self.subTest(options=options, expected=expected):
                groups = []
                for number, tensor in enumerate(tensors):
                    param = nn.Parameter(tensor.clone())
                    param.grad = torch.ones_like(param)
                    # Groups that differ in their rates only.
                    groups.append({"params": [param], "lr": 0.1 * number})
                with NewtonSchulzCalls() as calls:
                    Muon(groups, **options).step()
                self.assertEqual(calls.batches, expected)


if __name__ == "__main__":
    run_tests()
