# Owner(s): ["oncall: distributed"]
"""create_dtensor_config in several processes: every placement, and the functions of a config, called and replaced."""

import torch
from torch.optim.muon import (
    create_dtensor_config,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    grid_of,
    mesh_of,
    OnCPU,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


class TestMuonDTensorLayouts(OnCPU):
    def test_autocast_does_not_reach_the_iteration(self):
        twins = Twins(specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)]))
        twins.set_gradients()
        twins.single.step()
        with torch.autocast("cpu", dtype=torch.float16):
            twins.optimizer.step()
        self.assertParity(twins)

    def test_prefetch_and_async_change_nothing(self):
        layout = specs(mesh_of(4), [(S0,), (R,)])
        layout += specs(grid_of(2, 2), [(S0, S1), (R, S0)])
        for flags in ((True, 0), (False, 1), (False, 0), (True, 5)):
            with self.subTest(flags=flags):
                twins = Twins(layout, create_dtensor_config(*flags), nesterov=False)
                self.assertTrainsAlike(twins, 2, f"{flags}")

    def test_plain_tensors_beside_dtensors(self):
        placed = specs(mesh_of(4), [(S0,)], [(8, 8), (3, 4)])
        placed.insert(1, Spec((6, 5), None, None))
        placed.append(Spec((2, 9), None, None, torch.bfloat16))
        twins = Twins(placed)
        self.assertTrainsAlike(twins)
        self.assertLessEqual({1, 3}, set(twins.optimizer.assignments[self.rank]))

    def test_several_meshes_in_one_optimizer(self):
        grid = grid_of(2, 2)
        shapes = [(8, 8), (7, 5), (3, 9), (16, 12)]
        lines = [(mesh_of(2), S0), (mesh_of(2), R), (mesh_of(4), S1), (mesh_of(4), R)]
        lines += [(mesh_of(1), S0), (grid["a"], S0), (grid["b"], S1)]
        placed = specs(grid, [(S1, S0)], shapes)
        for mesh, placement in lines:
            placed += specs(mesh, [(placement,)], shapes)
        twins = Twins(placed, create_dtensor_config(prefetch_count=2))
        self.assertTrainsAlike(twins)


if __name__ == "__main__":
    run_tests()
