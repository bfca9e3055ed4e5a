# Owner(s): ["module: optimizer"]
"""What Muon refuses, with and without a distributed_config, and the dtypes of its momentum."""

import itertools
import sys
from unittest import mock

import torch
from torch import nn
from torch.optim import _muon as ours
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal import common_utils
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
    FUNCTIONAL,
)


CONFIGS = [None, create_dtensor_config(), create_auto_config()]


class TestMuonRefusals(TestCase):
    def test_construction(self):
        for options, words in (
            ({"lr": -1e-3}, "Learning rate should be >= 0 but is: -0.001"),
            ({"lr": torch.tensor(-1.0)}, "Learning rate should be >= 0"),
            ({"lr": torch.tensor([1.0, 2.0])}, "Tensor lr must be 1-element"),
            ({"momentum": -0.5}, "momentum should be >= 0 but is: -0.5"),
            ({"weight_decay": -0.1}, "weight decay should be >= 0 but is: -0.1"),
            ({"adjust_lr_fn": "x"}, "Adjust learning rate function x is not supported"),
            ({"ns_algorithm": "g"}, "ns_algorithm .*'quintic', 'gram'.*'g'"),
            ({"ns_steps": 100}, "Number of steps must be less than 100"),
            ({"params": []}, "empty parameter list"),
        ):
            with self.subTest(options=options):
                with self.assertRaisesRegex(ValueError, words):
                    Muon(**{"params": [torch.randn(2, 3)], **options})

    def test_options_of_a_wrong_type(self):
        """YAML reads "1e-7" as text, for example. It failed in the middle of a step, and some ranges only at construction."""
        wrong_types = {
            "eps": "1e-7",
            "weight_decay": None,
            "momentum": None,
            "lr": "1e-3",
            "ns_steps": 5.0,
        }
        for (name, value), config in itertools.product(wrong_types.items(), CONFIGS):
            with self.subTest(name=name, config=config):
                with self.assertRaisesRegex(TypeError, f"^{name} must be"):
                    options = {"distributed_config": config, name: value}
                    Muon([torch.randn(2, 3)], **options)
        wrong_values = {
            "lr": (torch.tensor([0.1, 0.2]), "Tensor lr must be 1-element"),
            "adjust_lr_fn": ("match_rms_adam", "match_rms_adam is not supported"),
            "momentum": (-0.1, "momentum should be >= 0"),
            "weight_decay": (-1, "weight decay should be >= 0"),
            "eps": (-1e-7, "eps should be >= 0"),
            "fused": (True, "fused=True and foreach=True exclude each other"),
        }
        for config in CONFIGS[1:]:
            param = nn.Parameter(torch.randn(2, 3))
            muon = Muon([param], foreach=True, distributed_config=config)
            param.grad = torch.randn(2, 3)
            muon.step()
            (group,) = muon.param_groups
            momentum = muon.state[param]["momentum_buffer"]
            cases = [(name, value, name) for name, value in wrong_types.items()]
            cases += [(name, *case) for name, case in wrong_values.items()]
            for name, value, words in cases:
                with self.subTest(name=name, config=config):
                    before = param.detach().clone(), momentum.clone()
                    right, group[name] = group[name], value
                    with self.assertRaisesRegex((TypeError, ValueError), words):
                        muon.step()
                    self.assertEqual((param, momentum), before, rtol=0, atol=0)
                    group[name] = right
                    muon.step()
                    self.assertNotEqual(param, before[0])

    def test_parameters_that_are_no_matrices(self):
        for shape, config in itertools.product(((), (3,), (2, 3, 4)), CONFIGS):
            with self.subTest(shape=shape):
                with self.assertRaisesRegex(ValueError, "only supports 2D parameters"):
                    params = [torch.randn(2, 2), torch.randn(shape)]
                    Muon(params, distributed_config=config)

    def test_only_deepspeed_is_blamed_for_flat_partitions(self):
        for modules, end in (
            ({}, r"belong to AdamW$"),
            (
                {"deepspeed": mock.Mock()},
                r"belong to AdamW\. DeepSpeed's ZeRO .*FSDP2$",
            ),
        ):
            with self.subTest(modules=modules):
                with mock.patch.dict(sys.modules, modules):
                    with self.assertRaisesRegex(ValueError, end):
                        Muon([torch.randn(8)])

    def test_gradients_that_a_step_cannot_take(self):
        for config in CONFIGS:
            with self.subTest(config=config):
                for dtype, sparse, words in (
                    (torch.complex64, False, "complex parameters"),
                    (torch.float32, True, "sparse"),
                ):
                    with self.subTest(dtype=dtype, sparse=sparse):
                        param = torch.rand(2, 3, dtype=dtype)
                        grad = torch.rand_like(param)
                        param.grad = grad.to_sparse() if sparse else grad
                        muon = Muon([param], distributed_config=config)
                        with self.assertRaisesRegex(RuntimeError, words):
                            muon.step()
                        param.grad = None
                        if sparse:
                            muon.step()
        lists = [[torch.randn(2, 3, 4)] for _ in range(3)]
        for options in ({}, {"foreach": True}, {"distributed_config": CONFIGS[1]}):
            with self.subTest(options=options):
                with self.assertRaisesRegex(ValueError, "must be a 2D matrix"):
                    ours.muon(*lists, **FUNCTIONAL, **options)
                with self.assertRaisesRegex(ValueError, "Complex .* not supported"):
                    ours.muon(
                        [], [], [], **{**FUNCTIONAL, **options, "has_complex": True}
                    )
        # It would be added to each row of the momentum.
        matrix, row = torch.zeros(2, 3), torch.ones(3)
        with self.assertRaisesRegex(ValueError, "gradient must be a 2D matrix"):
            ours.muon([matrix], [row], [matrix.clone()], **FUNCTIONAL)

    def test_newton_schulz_options_are_checked_by_the_step(self):
        param = nn.Parameter(torch.rand(2, 3))
        param.grad = torch.rand(2, 3)
        muon = Muon([param], ns_steps=99)
        muon.step()
        muon.param_groups[0]["ns_steps"] = 100
        with self.assertRaisesRegex(ValueError, "Number of steps must be less than"):
            muon.step()
        for options, words in (
            ({"ns_coefficients": (1.0, 2.0)}, "tuple of exactly 3 values"),
            ({"ns_coefficients": [(1, 2)] * 5}, "exactly 3 values"),
            ({"ns_coefficients": [(1, 2, 3)] * 4}, "4 tuples but ns_steps is 5"),
        ):
            with self.subTest(options=options):
                param = nn.Parameter(torch.rand(2, 3))
                param.grad = torch.rand(2, 3)
                with self.assertRaisesRegex(ValueError, words):
                    Muon([param], **options).step()
        call = ours._zeropower_via_newtonschulz
        with self.assertRaisesRegex(ValueError, "gradient must be a 2D matrix"):
            call(torch.randn(3, 4, 5), COEFFICIENTS, 5, 1e-7)
        with self.assertRaisesRegex(ValueError, "steps must be less than 100"):
            call(torch.randn(4, 5), COEFFICIENTS, 100, 1e-7)

    def test_state_dict_of_another_model(self):
        """torch.optim takes any state_dict with the same number of parameters."""
        params = [("up", nn.Parameter(torch.randn(4, 6)))]
        muon = Muon(params, lr=0.1)
        param = nn.Parameter(torch.randn(6, 4))
        param.grad = torch.ones(6, 4)
        other = Muon([param], lr=0.5)
        other.step()
        with self.assertRaisesRegex(ValueError, r"'?up'? of shape \(4, 6\).*\(6, 4\)"):
            muon.load_state_dict(other.state_dict())
        self.assertEqual(muon.param_groups[0]["lr"], 0.1)
        self.assertFalse(muon.state)

    def test_state_dict_of_another_optimizer(self):
        """It loaded, and the next step failed with a KeyError."""
        for cls in (torch.optim.AdamW, torch.optim.SGD):
            with self.subTest(cls=cls):
                for config in (None, "auto"):
                    with self.subTest(config=config):
                        param = nn.Parameter(torch.randn(4, 6))
                        muon = Muon([param], lr=0.1, distributed_config=config)
                        loaded = cls(
                            [nn.Parameter(torch.randn(4, 6))], lr=0.5
                        ).state_dict()
                        with self.assertRaisesRegex(
                            ValueError, "not of Muon.*lacks.*'ns_steps'"
                        ):
                            muon.load_state_dict(loaded)
                        self.assertEqual(muon.param_groups[0]["lr"], 0.1)
                        param.grad = torch.randn(4, 6)
                        muon.step()


if __name__ == "__main__":
    common_utils.run_tests()
