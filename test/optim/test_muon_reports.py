# Owner(s): ["module: optimizer"]
"""What describe() and the log say on one process, and the public names."""

import copy

import torch
from torch import nn
from torch.optim import Muon
from torch.optim import muon as public_module
from torch.optim.muon import create_dtensor_config
from torch.testing._internal import common_utils
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._muon.common_config import randn


class TestReports(TestCase):
    def test_describe_without_a_config(self):
        muon = Muon([nn.Parameter(torch.randn(4, 6))])
        other = torch.optim.SGD([nn.Parameter(torch.ones(2))])
        page = muon.describe(nn.Linear(6, 4), other)
        for words in (
            "Muon has 1 parameter\nNo optimizer given here has weight",
            "has no distributed_config",
        ):
            with self.subTest(words=words):
                self.assertIn(words, page)
        copied = copy.deepcopy(Muon(muon.param_groups, distributed_config="auto"))
        self.assertIn("lost its distributed_config", copied.describe())

    def test_a_frozen_layer_does_not_leave_its_momentum_to_another(self):
        first = nn.Parameter(randn(0, 4, 4))
        ours = Muon([first], distributed_config=create_dtensor_config())
        first.grad = randn(1, 4, 4)
        ours.step()
        first.requires_grad_(False)
        first.grad = None
        ours.step()
        ours.param_groups[0]["params"] = [nn.Parameter(randn(7, 4, 4))]
        with self.assertWarnsRegex(UserWarning, "starts at zero"):
            ours.step()


class TestPublicNames(TestCase):
    def test_public_names(self):
        # As upstream's test of public bindings: __all__ must list each public name of this module.
        own = {
            name
            for name, value in vars(public_module).items()
            if getattr(value, "__module__", None) == "torch.optim.muon"
        }
        public = {name for name in own if not name.startswith("_")}
        presets = {"CUBIC", "DEEPSEEK_V4", "POLAR_EXPRESS"}
        self.assertEqual(public | presets, set(public_module.__all__))
        documented = {
            "DistributedConfig",
            "create_auto_config",
            "create_dtensor_config",
            "detect_tp_dims_from_model",
            "partition_named_parameters",
            "partition_parameters",
            "split_of",
        }
        self.assertEqual(public, documented)
        self.assertTrue(all(getattr(public_module, name).__doc__ for name in public))
        self.assertIs(public_module.Muon, torch.optim.Muon)
        self.assertEqual(Muon.__module__, "torch.optim")
        self.assertIn("distributed_config", Muon.__doc__)


if __name__ == "__main__":
    common_utils.run_tests()
