# Owner(s): ["oncall: distributed"]
"""State of the distributed Muon: state_dict and copies."""

import copy
import io

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    local,
    mesh_of,
    ParityAssertions,
    place,
    R,
    S0,
    S1,
    SHAPES,
    Spec,
    specs,
    Twins,
)


@requires_gloo()
class TestMuonState(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def replace_optimizer(self, twins, state_dict):
        """Gives ``twins`` new parameters of the same values, and an optimizer that loads the state."""
        twins.params = [torch.nn.Parameter(p.detach().clone()) for p in twins.params]
        twins.optimizer = Muon(twins.params, distributed_config="auto")
        twins.optimizer.load_state_dict(state_dict)

    def trained(self, placed=None, **options):
        if placed is None:
            grid = grid_of(2, 2)
            placed = specs(mesh_of(4), all_placements(mesh_of(4)), SHAPES[:5])
            placed += specs(grid, [(R, S0), (S0, S1)], SHAPES[:5])
        twins = Twins(placed, **options)
        self.assertTrainsAlike(twins)
        return twins

    def test_state_dict(self):
        """It has no entry of the config, and serves another Muon through a file or a copy."""
        twins = self.trained(momentum=0.9, weight_decay=0.3, nesterov=False)
        state_dict = twins.optimizer.state_dict()
        (mine,), (its,) = (
            saved["param_groups"] for saved in (state_dict, twins.single.state_dict())
        )
        self.assertEqual(set(mine), set(its))
        for state in state_dict["state"].values():
            self.assertEqual(list(state), ["momentum_buffer"])
            self.assertIsInstance(state["momentum_buffer"], DTensor)
        file = io.BytesIO()
        torch.save(state_dict, file)
        file.seek(0)
        self.replace_optimizer(twins, torch.load(file, weights_only=False))
        self.assertParity(twins)
        self.assertTrainsAlike(twins)
        self.replace_optimizer(twins, copy.deepcopy(twins.optimizer).state_dict())
        self.assertTrainsAlike(twins)

    def test_momentum_of_another_mesh_is_brought_to_its_parameter(self):
        mesh, other = mesh_of(4), mesh_of(2)
        twins = self.trained(specs(mesh, [(S0,), (S1,)], [(8, 8), (7, 5)]))
        state_dict = twins.optimizer.state_dict()
        for state in state_dict["state"].values():
            whole = state["momentum_buffer"].full_tensor()
            state["momentum_buffer"] = place(whole, Spec(whole.shape, other, (S1,)))
        self.replace_optimizer(twins, state_dict)
        self.assertTrainsAlike(twins)

    def test_momentum_that_does_not_fit(self):
        pattern = r"momentum buffer of parameter 0.*\(7, 8\)"
        small = Spec((7, 8), mesh_of(4), (S0,))
        for buffer in (torch.zeros(7, 8), place(torch.zeros(7, 8), small)):
            twins = self.trained(specs(mesh_of(4), [(S0,)], [(8, 8)]))
            state_dict = twins.optimizer.state_dict()
            state_dict["state"][0]["momentum_buffer"] = buffer
            with self.everywhere(f"{type(buffer)}"):
                with self.assertRaisesRegex(ValueError, pattern):
                    twins.optimizer.load_state_dict(state_dict)
            # The optimizer's own state may get it by other ways.
            twins.optimizer.state[twins.params[0]]["momentum_buffer"] = buffer
            twins.set_gradients()
            before = local(twins.params[0].detach()).clone()
            with self.everywhere(f"{type(buffer)}"):
                with self.assertRaisesRegex(ValueError, pattern):
                    twins.optimizer.step()
                after = local(twins.params[0].detach())
                self.assertTrue(torch.equal(after, before))

    # Copies

    def test_first_step_makes_all_momentum(self):
        # Checkpoints would otherwise differ from rank to rank.
        mesh = mesh_of(4)
        twins = Twins(specs(mesh, [(S0,)], [(3, 9), (2, 4), (8, 8)]))
        frozen = torch.nn.Parameter(full(9, (4, 4)), requires_grad=False)
        twins.optimizer.add_param_group({"params": [frozen]})
        twins.set_gradients([1])
        if self.rank == 3:
            # Its piece is empty, and autograd gave it nothing.
            twins.params[0].grad = None
        twins.optimizer.step()
        twins.single.step()
        has = [
            "momentum_buffer" in twins.optimizer.state.get(p, {})
            for p in [*twins.params, frozen]
        ]
        self.assertEqual(everyone(has), [[True, True, True, False]] * 4)
        # Without a gradient it is zero.
        self.assertParity(twins)


if __name__ == "__main__":
    run_tests()
