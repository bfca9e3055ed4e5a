# Owner(s): ["oncall: distributed"]
"""Several optimizers, layers that take turns in one optimizer, and models that are built on meta."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    equal,
    full,
    GlooOnCPU,
    local,
    mesh_of,
    ParityAssertions,
    piece_of,
    place,
    R,
    S0,
    Spec,
)


@requires_gloo()
class TestMuonSeveral(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def spec(self, placement=S0):
        return Spec((8, 8), mesh_of(4), (placement,))

    def params(self, spec, count, seed=0):
        return [nn.Parameter(place(full(seed + i, (8, 8)), spec)) for i in range(count)]

    def give_gradients(self, params, spec, step):
        for i, param in enumerate(params):
            param.grad = place(full(1000 + 100 * step + i, (8, 8)), spec)

    def configs(self):
        """A config for sharded, one for replicated and none for whole matrices."""
        ddp = create_auto_config(ddp_process_group=dist.group.WORLD)
        return [
            (create_dtensor_config(), self.spec()),
            (ddp, Spec((8, 8), None, None)),
            (None, Spec((8, 8), None, None)),
        ]

    def assertAsStock(self, results):
        """Each of ``results`` has a spec and tensors. The last one is stock's."""
        *configured, (_, expected) = results
        problems = [
            f"{spec}: tensor {i}"
            for spec, tensors in configured
            for i, (mine, its) in enumerate(zip(tensors, expected))
            if not equal(local(mine.detach()), piece_of(its.detach(), spec))
        ]
        self.assertEverywhere(problems)

    def test_two_layers_take_turns(self):
        """Block-coordinate training without names. A layer was once given the other one's momentum."""
        results = []
        for config, spec in self.configs():
            layers = self.params(spec, 2)
            optimizer = Muon(layers[:1], lr=0.1, distributed_config=config)
            for step in range(6):
                optimizer.param_groups[0]["params"] = [layers[step % 2]]
                self.give_gradients(layers, spec, step)
                optimizer.step()
            buffers = [optimizer.state[layer]["momentum_buffer"] for layer in layers]
            results.append((spec, [*layers, *buffers]))
        self.assertAsStock(results)

    def test_a_group_takes_the_place_of_another(self):
        results = []
        for config, spec in self.configs():
            layers = self.params(spec, 3)
            optimizer = Muon(layers[:1], lr=0.1, distributed_config=config)
            for step in range(6):
                if step:
                    del optimizer.param_groups[-1]
                    optimizer.add_param_group({"params": [layers[step % 3]]})
                self.give_gradients(layers, spec, step)
                optimizer.step()
            buffers = [optimizer.state[layer]["momentum_buffer"] for layer in layers]
            results.append((spec, [*layers, *buffers]))
        self.assertAsStock(results)

    def test_twenty_optimizers_of_one_matrix_share_the_work(self):
        """All of them once chose the first rank."""
        for placement in (S0, R):
            spec = self.spec(placement)
            owners = Counter()
            for param in self.params(spec, 20):
                optimizer = Muon([param], distributed_config="auto")
                owners.update(optimizer.matrix_owners.values())
            with self.everywhere():
                self.assertEqual(owners, dict.fromkeys(range(4), 5))

    def test_optimizers_with_one_config(self):
        """An optimizer leaves nothing in a config that another one would find."""
        results = []
        for config, spec in self.configs():
            params = self.params(spec, 5)
            first = Muon(params[:2], lr=0.1, distributed_config=config)
            second = Muon(
                params[2:4], lr=0.2, nesterov=False, distributed_config=config
            )
            for step in range(4):
                self.give_gradients(params, spec, step)
                if step == 2:
                    # Both build a new engine.
                    second.add_param_group({"params": params[4:]})
                    params[1].requires_grad_(False)
                if step >= 2:
                    params[1].grad = None
                for optimizer in (first, second)[:: 1 if step % 2 else -1]:
                    optimizer.step()
            results.append((spec, params))
            if config is not None:
                with self.everywhere():
                    self.assertNotIn("current_owner", config.state)
                    for optimizer, count in ((first, 2), (second, 3)):
                        self.assertEqual(len(optimizer.matrix_owners), count)
        self.assertAsStock(results)

    def test_a_model_on_meta_works_once_it_has_values(self):
        results = []
        for config, spec in self.configs()[1:]:
            with torch.device("meta"):
                model = nn.Linear(8, 8, bias=False)
            optimizer = Muon(model.parameters(), lr=0.1, distributed_config=config)
            model.to_empty(device="cpu")
            with torch.no_grad():
                model.weight.copy_(full(0, (8, 8)))
            optimizer.param_groups[0]["params"] = [*model.parameters()]
            for step in range(3):
                self.give_gradients([model.weight], spec, step)
                optimizer.step()
            buffer = optimizer.state[model.weight]["momentum_buffer"]
            results.append((spec, [model.weight, buffer]))
        self.assertAsStock(results)


if __name__ == "__main__":
    run_tests()
