# Owner(s): ["module: optimizer"]
"""Parameters that are replaced, or get other storage, after the optimizer was built; one process."""

import itertools

import torch
from torch import nn
from torch.optim import Muon
from torch.optim._muon_engine.layouts import Region
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_config import MuonTestCase


FACTORIES = (create_dtensor_config, create_auto_config)


def matrix(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestReplaced(MuonTestCase):
    def train(self, make, change, before=2):
        """Trains before and after a change, as a Muon without a config does from the start."""

        def between(optimizer, step):
            if step == before:
                change(optimizer, optimizer.param_groups[0]["params"])

        options = {"named": True, "steps": before + 2, "between": between, "lr": 0.1}
        self.assert_same_training([(8, 8)] * 2, Muon, make(), **options)

    def test_larger_matrix(self):
        """An 8x8 matrix became a 16x8 one. Half of its rows were trained, without an error."""

        def replace(optimizer, params):
            optimizer.state.pop(params[0], None)
            params[0] = nn.Parameter(matrix(7, 16, 8))

        def fill(optimizer, params):
            if optimizer.assignments:
                params[0].grad = None
                params[0].data = matrix(7, 16, 8)
            else:
                # Stock Muon cannot continue with a buffer of another shape.
                replace(optimizer, params)

        for factory in FACTORIES:
            for change, before in itertools.product((replace, fill), (0, 1)):
                self.train(factory, change, before)

    def test_named_parameter_is_added(self):
        """The list of names stays as it was, and so the new parameter was not trained."""
        for place in (0, 2):
            self.train(
                create_dtensor_config,
                lambda optimizer, params: params.insert(
                    place, nn.Parameter(matrix(9, 3, 7))
                ),
            )

    def test_moved_to_another_group(self):
        """The order of all parameters stays the same, but one of them gets other options."""

        def move(optimizer, params):
            added = nn.Parameter(matrix(9, 3, 7))
            optimizer.add_param_group({"params": [("added", added)], "lr": 0.5})
            first, second = optimizer.param_groups
            for key in ("params", "param_names"):
                second[key].insert(0, first[key].pop())

        for factory in FACTORIES:
            self.train(factory, move)

    def test_replaced_before_a_group_is_added(self):
        named = [(f"w{i}", nn.Parameter(matrix(i, 6, 4))) for i in range(2)]
        ours = Muon(named, distributed_config=create_dtensor_config())
        params = ours.param_groups[0]["params"]
        for param in params:
            param.grad = matrix(9, 6, 4)
        ours.step()
        old, new = params[1], nn.Parameter(matrix(7, 6, 4))
        momentum = ours.state[old]["momentum_buffer"]
        params[1] = new
        ours.add_param_group({"params": [("w2", nn.Parameter(matrix(8, 3, 3)))]})
        # A parameter of the same name inherits the momentum.
        self.assertIs(ours.state[new]["momentum_buffer"], momentum)
        # As in stock Muon, the momentum of the old one stays with it, but not in a checkpoint.
        self.assertIs(ours.state[old]["momentum_buffer"], momentum)
        self.assertEqual(set(ours.state_dict()["state"]), {0, 1})

    def test_a_frozen_layer_does_not_leave_its_momentum_to_another(self):
        first = nn.Parameter(matrix(0, 4, 4))
        ours = Muon([first], distributed_config=create_dtensor_config())
        first.grad = matrix(1, 4, 4)
        ours.step()
        first.requires_grad_(False)
        first.grad = None
        ours.step()
        ours.param_groups[0]["params"] = [nn.Parameter(matrix(7, 4, 4))]
        # A rebuild is logged once.
        with self.assertLogs("torch.optim.muon", "INFO") as logs:
            with self.assertWarnsRegex(UserWarning, "starts at zero"):
                ours.step()
            ours.step()
        self.assertEqual(len(logs.output), 1)

    def test_region_that_a_local_tensor_does_not_hold(self):
        region = Region(0, 0, 4, 8, 0, 8)
        self.assertEqual(region.of_local(torch.ones(4, 8)).shape, (4, 8))
        for local in (torch.ones(3, 8), torch.ones(31)):
            with self.assertRaisesRegex(ValueError, "does not hold"):
                region.of_local(local)


if __name__ == "__main__":
    run_tests()
