# Owner(s): ["module: optimizer"]
"""Parameters that are replaced, or get other storage, after the optimizer was built; one process."""

import torch
from torch import nn
from torch.optim import Muon
from torch.optim._muon_engine.layouts import Region
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


FACTORIES = (create_dtensor_config, create_auto_config)


def matrix(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@instantiate_parametrized_tests
class TestReplaced(TestCase):
    def pair(self, config, *shapes):
        """A Muon with ``config`` and one without, over equal parameters."""
        made = []
        for one in (config, None):
            params = [nn.Parameter(matrix(i, *shape)) for i, shape in enumerate(shapes)]
            made.append(Muon(params, lr=0.1, distributed_config=one))
        return made

    def train(self, optimizers, steps=2):
        for step in range(steps):
            for optimizer in optimizers:
                for i, param in enumerate(optimizer.param_groups[0]["params"]):
                    param.grad = matrix(100 * step + i, *param.shape).to(param.dtype)
                optimizer.step()
        if not steps:
            return
        ours, single = (o.param_groups[0]["params"] for o in optimizers)
        for mine, its in zip(ours, single):
            self.assertEqual(mine, its, atol=0, rtol=0)
            self.assertEqual(
                optimizers[0].state[mine]["momentum_buffer"],
                optimizers[1].state[its]["momentum_buffer"],
                atol=0,
                rtol=0,
            )

    @parametrize("factory", FACTORIES)
    @parametrize("before", [0, 1])
    @parametrize("in_place", [False, True])
    def test_larger_matrix(self, factory, before, in_place):
        """An 8x8 matrix became a 16x8 one. Half of its rows were trained, without an error."""
        optimizers = self.pair(factory(), (8, 8), (6, 4))
        self.train(optimizers, before)
        larger = [nn.Parameter(matrix(7, 16, 8)) for _ in optimizers]
        for optimizer, param in zip(optimizers, larger):
            params = optimizer.param_groups[0]["params"]
            if in_place and optimizer is optimizers[0]:
                params[0].grad = None
                params[0].data = param.data
                continue
            # Stock Muon cannot go on with a buffer of another shape, so this one starts at zero.
            optimizer.state.pop(params[0], None)
            params[0] = param
        self.train(optimizers)

    def test_named_parameter_is_appended(self):
        """The list of names stays as it was, and so the new parameter was not trained."""
        for place in (0, 1):
            optimizers = []
            for config in (create_dtensor_config(), None):
                named = [(f"w{i}", nn.Parameter(matrix(i, 4, 6))) for i in range(2)]
                optimizers.append(Muon(named, lr=0.1, distributed_config=config))
            self.train(optimizers, 1)
            for optimizer in optimizers:
                params = optimizer.param_groups[0]["params"]
                params.insert(2 * place, nn.Parameter(matrix(9, 3, 7)))
            self.train(optimizers)

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
        (ours, _) = optimizers = self.pair(create_dtensor_config(), (4, 4))
        self.train(optimizers, 1)
        params = ours.param_groups[0]["params"]
        params[0].requires_grad_(False)
        params[0].grad = None
        ours.step()
        params[:] = [nn.Parameter(matrix(7, 4, 4))]
        with self.assertWarnsRegex(UserWarning, "starts at zero"):
            ours.step()

    def test_region_that_a_local_tensor_does_not_hold(self):
        region = Region(0, 0, 4, 8, 0, 8)
        self.assertEqual(region.of_local(torch.ones(4, 8)).shape, (4, 8))
        for local in (torch.ones(3, 8), torch.ones(31)):
            with self.assertRaisesRegex(ValueError, "does not hold"):
                region.of_local(local)

    def test_a_rebuild_is_logged_once(self):
        optimizers = self.pair(create_dtensor_config(), (8, 8))
        optimizers[0].param_groups[0]["params"] = [nn.Parameter(matrix(7, 4, 8))]
        optimizers[1].param_groups[0]["params"] = [nn.Parameter(matrix(7, 4, 8))]
        with self.assertLogs("torch.optim.muon", "INFO") as logs:
            self.train(optimizers, 3)
        self.assertEqual(len(logs.output), 1)


if __name__ == "__main__":
    run_tests()
