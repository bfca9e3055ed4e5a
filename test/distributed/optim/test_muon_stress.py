# Owner(s): ["oncall: distributed"]
"""Many sizes, settings that change, and the same bits each time."""

import random

import torch
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    GlooOnCPU,
    grid_of,
    local,
    mesh_of,
    ParityAssertions,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


@requires_gloo()
class TestMuonStress(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def test_twelve_steps_twice(self):
        mesh, grid = mesh_of(4), grid_of(2, 2)
        placed = specs(mesh, all_placements(mesh)) + specs(grid, [(R, S0), (S0, S1)])
        values = []
        for _ in range(2):
            twins = Twins(placed)
            for _ in range(12):
                twins.step()
            self.assertParity(twins)
            values.append([local(p.detach()).clone() for p in twins.params])
        with self.everywhere():
            for first, second in zip(*values):
                self.assertTrue(torch.equal(first, second))

    def test_many_sizes(self):
        draw = random.Random(0)
        mesh, grid = mesh_of(4), grid_of(2, 2)
        for trial in range(6):
            placed = [
                Spec(
                    (draw.choice((1, 2, 5, 31, 64, 130)), draw.randint(1, 140)),
                    *draw.choice(
                        [
                            (mesh, (S0,)),
                            (mesh, (S1,)),
                            (grid, (R, S0)),
                            (grid, (S1, S0)),
                        ]
                    ),
                )
                for _ in range(12)
            ]
            config = create_dtensor_config(prefetch_count=trial % 3)
            twins = Twins(placed, config, seed=100 * trial)
            self.assertTrainsAlike(twins, 3, f"trial {trial}")

    def test_settings_changed_all_the_time(self):
        placed = specs(mesh_of(4), [(S0,), (R,)]) + specs(grid_of(2, 2), [(R, S1)])
        twins = Twins(placed)
        draw = random.Random(1)
        for step in range(40):
            twins.config.prefetch_count = draw.randint(0, 4)
            twins.config.async_gpu_parallelism = draw.random() < 0.5
            twins.step()
            if step % 10 == 9:
                self.assertParity(twins, f"step {step}")


if __name__ == "__main__":
    run_tests()
