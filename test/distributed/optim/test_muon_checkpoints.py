# Owner(s): ["oncall: distributed"]
"""Checkpoints of the distributed Muon by torch.distributed.checkpoint, resumed on other meshes."""

import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests


sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from muon_test_helpers import (
    everyone,
    GlooOnCPU,
    grid_of,
    local,
    mesh_of,
    ParityAssertions,
    R,
    S0,
    S1,
    Spec,
    Twins,
)


if not dist.is_available():
    print("torch.distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


SHAPES_OF_MODEL = [(8, 8), (7, 5), (3, 9), (16, 12)]


class Model(torch.nn.Module):
    """Holds parameters under names, which checkpoints need."""

    def __init__(self, params):
        super().__init__()
        for i, param in enumerate(params):
            self.register_parameter(f"w{i}", param)


@requires_gloo()
class TestMuonCheckpoints(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def directory(self):
        made = tempfile.mkdtemp() if self.rank == 0 else None
        path = everyone(made)[0]

        def remove():
            everyone(None)
            if self.rank == 0:
                shutil.rmtree(path)

        self.addCleanup(remove)
        return path

    def saved(self, twins, path):
        model = Model(twins.params)
        state = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, twins.optimizer),
        }
        dcp.save(state, checkpoint_id=path)

    def loaded(self, twins, path, placed, group=None):
        """Twins on ``placed`` that go on from what was saved: other values until it is loaded."""
        there = Twins(placed, seed=twins.seed)
        for param in there.params:
            local(param.detach()).zero_()
        model = Model(there.params)
        state = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, there.optimizer),
        }
        dcp.load(
            state,
            checkpoint_id=path,
            process_group=group,
            no_dist=group is not None and dist.get_world_size(group) == 1,
        )
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, there.optimizer, state["optimizer"])
        there.single, there.singles = twins.single, twins.singles
        there.steps = twins.steps
        return there

    def check_resumes(self, source, target, group=None):
        path = self.directory()
        twins = Twins(source, momentum=0.8, lr=0.02)
        self.assertTrainsAlike(twins, 3)
        self.saved(twins, path)
        there = self.loaded(twins, path, target, group)
        self.assertEqual(there.optimizer.param_groups[0]["momentum"], 0.8)
        self.assertParity(there, "as loaded")
        self.assertTrainsAlike(there, 3)
        return there

    def model_on(self, mesh, *placements):
        return [
            Spec(shape, mesh, placements[i % len(placements)])
            for i, shape in enumerate(SHAPES_OF_MODEL)
        ]

    def test_checkpoint_resumes_on_the_same_mesh(self):
        mesh = mesh_of(4)
        placed = self.model_on(mesh, (S0,), (R,), (S1,))
        self.check_resumes(placed, placed)

    def test_checkpoint_resumes_on_another_placement(self):
        grid = grid_of(2, 2)
        self.check_resumes(
            self.model_on(mesh_of(4), (S0,), (S1,)),
            self.model_on(grid, (R, S1), (S1, S0), (S0, R)),
        )

    def test_checkpoint_of_four_resumes_on_two(self):
        pair = mesh_of(2)
        there = self.check_resumes(
            self.model_on(mesh_of(4), (S0,), (R,)),
            self.model_on(pair, (S0,), (S1,)),
            pair.get_group(),
        )
        self.assertEqual(len(there.optimizer.assignments), 2)

    def test_checkpoint_of_four_resumes_on_one(self):
        one = mesh_of(1)
        there = self.check_resumes(
            self.model_on(mesh_of(4), (S0,), (S1,)),
            self.model_on(one, (S0,)),
            one.get_group(),
        )
        self.assertEqual(list(there.optimizer.assignments), [self.rank])

    def test_reading_the_state_of_a_fresh_optimizer_changes_no_parameter(self):
        mesh = mesh_of(4)
        twins = Twins(self.model_on(mesh, (S0,), (R,), (S1,)))
        before = [local(p).detach().clone() for p in twins.params]
        state = get_optimizer_state_dict(Model(twins.params), twins.optimizer)
        self.assertEqual(len(state["state"]), len(twins.params))
        for param, old in zip(twins.params, before):
            self.assertTrue(torch.equal(local(param), old))
        self.assertTrainsAlike(twins)


if __name__ == "__main__":
    run_tests()
