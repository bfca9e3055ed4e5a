# Owner(s): ["oncall: distributed"]
"""``fused=True``: ranks take gradients into momentum in the pass that blends them. The kernels have tests of their own."""

from unittest import mock

import torch
from torch.distributed.tensor import Partial
from torch.optim._muon_formulas import MuonFormulas
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_muon import (
    grid_of,
    mesh_of,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


# A step is bound as on a GPU, and torch's operations take the place of the kernels.
@mock.patch.object(MuonFormulas, "has_kernels", lambda formulas, _: formulas.fused)
@mock.patch.object(MuonFormulas, "takes_kernels", lambda formulas, *_: False)
class TestMuonFused(common_muon.OnCPU):
    def accumulating(self, twins):
        """The indices of the parameters whose gradients come into momentum with the blend, on this rank."""
        runner = twins.optimizer._engine._make_runner()
        return set(runner.binder._accumulating)

    def bind_as_on_a_gpu(self, twins):
        binder = twins.optimizer._engine._make_runner().binder
        binder.is_cpu, binder.device = False, torch.device("cuda")
        common_muon.bind_again(twins.optimizer)
        return twins

    def twins_on_an_accelerator(self, placed, **options):
        return self.bind_as_on_a_gpu(Twins(placed, fused=True, **options))

    def test_placements(self):
        shapes = [(8, 6), (7, 5), (4, 16), (5, 3)]
        placed = specs(mesh_of(4), [(S0,), (S1,), (R,)], shapes)
        placed += specs(grid_of(2, 2), [(S0, R), (R, S1), (S0, S0)], shapes)
        for options in ({}, {"nesterov": False}, {"momentum": 0.3}):
            with self.subTest(options=options):
                twins = self.twins_on_an_accelerator(placed, **options)
                self.assertTrainsAlike(twins, 3)
                with self.everywhere():
                    self.assertTrue(self.accumulating(twins))

    def test_steps_without_some_gradients(self):
        placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 6), (8, 6), (4, 16)])
        twins = self.twins_on_an_accelerator(placed)
        missing = [(), (0, 3), (1,), range(len(placed)), (2, 4, 5)]
        self.assertTrainsAlike(twins, len(missing), missing=missing.__getitem__)

    def test_only_what_a_rank_blends_as_a_whole(self):
        """A replica that sends nothing, and a sum, take their gradients before the blend."""
        whole, replicated = (Spec((8, 6), mesh_of(4), (p,)) for p in (S0, R))
        summed = Spec((8, 6), mesh_of(4), (Partial(),))
        twins = self.twins_on_an_accelerator([whole, replicated, summed])
        twins.step()
        (owner,) = (
            rank for rank, owned in twins.optimizer.assignments.items() if 1 in owned
        )
        with self.everywhere():
            expected = {0, 1} if self.rank == owner else {0}
            self.assertEqual(self.accumulating(twins), expected)

    def test_split_and_groups(self):
        placed = specs(mesh_of(4), [(S0,)], [(12, 6), (12, 6), (8, 4)])
        groups = [([0], {"split": (4, 8)}), ([1], {"fused": None}), ([2], {"lr": 0.5})]
        twins = Twins(placed, groups=groups, fused=True)
        self.bind_as_on_a_gpu(twins)
        self.assertTrainsAlike(twins, 3)
        with self.everywhere():
            self.assertEqual(self.accumulating(twins), {0, 2})

    def test_an_option_that_changes(self):
        twins = self.twins_on_an_accelerator(specs(mesh_of(4), [(S0,)], [(8, 6)]))
        self.assertTrainsAlike(twins, 2)
        for optimizer in (twins.optimizer, twins.single):
            optimizer.param_groups[0]["fused"] = None
        self.assertTrainsAlike(twins, 2)
        with self.everywhere():
            self.assertEqual(self.accumulating(twins), set())

    def test_bfloat16(self):
        placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 6), (7, 5)], torch.bfloat16)
        self.assertTrainsAlike(self.twins_on_an_accelerator(placed), 3)


if __name__ == "__main__":
    run_tests()
