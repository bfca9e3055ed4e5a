# Owner(s): ["module: optimizer"]
"""Parameters that are replaced, or stand on other storage, after the optimizer was built; one process."""

import torch
from torch import nn
from torch.optim import Muon
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
    def test_larger_matrix(self, factory, before):
        """Of an 8x8 matrix that became a 16x8 one, half of the rows were trained, without an error."""
        optimizers = self.pair(factory(), (8, 8), (6, 4))
        self.train(optimizers, before)
        for optimizer in optimizers:
            params = optimizer.param_groups[0]["params"]
            # Stock Muon cannot go on with a buffer of another shape, so this one begins anew.
            optimizer.state.pop(params[0], None)
            params[0] = nn.Parameter(matrix(7, 16, 8))
        self.train(optimizers)

    @parametrize("factory", FACTORIES)
    def test_larger_storage_behind_the_same_parameter(self, factory):
        optimizers = self.pair(factory(), (8, 8), (6, 4))
        self.train(optimizers, 1)
        for optimizer in optimizers:
            param = optimizer.param_groups[0]["params"][0]
            param.grad = None
            param.data = matrix(7, 16, 8)
        # The one without a config is helped; the other one finds out.
        optimizers[1].state.pop(param, None)
        self.train(optimizers)

    @parametrize("factory", FACTORIES)
    def test_longer_shorter_and_reordered_lists(self, factory):
        optimizers = self.pair(factory(), (8, 8), (6, 4), (5, 9))
        for change in (
            lambda params: params.append(nn.Parameter(matrix(9, 3, 7))),
            lambda params: params.reverse(),
            lambda params: params.pop(1),
        ):
            self.train(optimizers, 1)
            for optimizer in optimizers:
                change(optimizer.param_groups[0]["params"])
            self.train(optimizers, 1)

    @parametrize("factory", FACTORIES)
    def test_built_on_meta(self, factory):
        optimizers = []
        for config in (factory(), None):
            with torch.device("meta"):
                model = nn.Linear(6, 4, bias=False)
            optimizer = Muon(model.parameters(), lr=0.1, distributed_config=config)
            model.to_empty(device="cpu")
            (param,) = model.parameters()
            optimizer.param_groups[0]["params"] = [param]
            param.data.copy_(matrix(1, 4, 6))
            optimizers.append(optimizer)
        self.train(optimizers)

    @parametrize("factory", FACTORIES)
    def test_other_dtype(self, factory):
        model = nn.Linear(6, 4, bias=False)
        optimizer = Muon(model.parameters(), distributed_config=factory())
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            model.to(dtype)
            model.weight.grad = matrix(0, 4, 6).to(dtype)
            optimizer.step()
            self.assertEqual(
                optimizer.state[model.weight]["momentum_buffer"].dtype, dtype
            )

    def test_it_is_said_once(self):
        optimizers = self.pair(create_dtensor_config(), (8, 8))
        optimizers[0].param_groups[0]["params"] = [nn.Parameter(matrix(7, 4, 8))]
        optimizers[1].param_groups[0]["params"] = [nn.Parameter(matrix(7, 4, 8))]
        with self.assertLogs("torch.optim.muon", "INFO") as logs:
            self.train(optimizers, 3)
        self.assertEqual(len(logs.output), 1)


if __name__ == "__main__":
    run_tests()
