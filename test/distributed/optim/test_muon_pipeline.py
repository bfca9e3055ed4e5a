# Owner(s): ["oncall: distributed"]
"""torch.optim.Muon under pipeline parallelism: each stage has its own optimizer."""

import torch
import torch.distributed as dist
from torch.optim import Muon
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    Collectives,
    Cut,
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    NewtonSchulzCalls,
    ParityAssertions,
    Strategy,
    Twins,
)


@requires_gloo()
class TestMuonPP(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def config(self):
        grid = grid_of(2, 2)
        return Strategy(grid, "pp", "ddp").config(
            pp_stage_id=grid.get_local_rank("a"), pp_num_stages=2
        )

    def test_stages_of_different_sizes_at_different_times(self):
        stage, _ = grid_of(2, 2).get_coordinate()
        shapes = [[(8, 6), (5, 7), (4, 4)], [(16, 4)]][stage]
        # One stage makes two steps before the other one builds its optimizer. A key in the store says
        # so, because a collective would bring the stages together.
        store = dist.distributed_c10d._get_default_store()
        done = [f"rank {rank} has made two steps" for rank in (0, 1)]
        if stage:
            store.wait(done, self.timeout)
        twins = Twins(map(Cut, shapes), self.config(), seed=1000 * stage)
        for _ in range(2):
            twins.step()
        if not stage:
            store.set(done[self.rank], "yes")
        self.assertParity(twins)
        ranks = grid_of(2, 2)["b"].mesh.tolist()
        self.assertEqual(sorted(twins.optimizer.assignments), ranks)

    def test_error_in_one_stage_stays_there(self):
        stage, replica = grid_of(2, 2).get_coordinate()
        # The first stage has no matrix, or one that its replicas disagree about.
        for shapes in ([], [(4 + 4 * replica, 8)]):
            shapes = [(8, 8)] if stage else shapes
            params = [torch.nn.Parameter(full(0, shape)) for shape in shapes]

            def build():
                muon = Muon([{"params": params}], distributed_config=self.config())
                muon.load_state_dict(muon.state_dict())
                for param in params:
                    param.grad = torch.ones_like(param)
                muon.step()

            ranks = () if stage or not shapes else (0, 1)
            self.assertRaisesEverywhere(build, ValueError, "different shapes", ranks)


@requires_gloo()
class TestMuon4D(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 16

    def test_pp_tp_hsdp(self):
        strategy = Strategy(grid_of(2, 2, 2, 2), "pp", "ddp", "fsdp", "tp")
        stage = strategy.mesh.get_local_rank("a")
        shapes = [[(8, 8), (16, 6), (9, 7)], [(4, 12), (10, 10)]][stage]
        flags = {"pp_stage_id": stage, "pp_num_stages": 2}
        twins = strategy.twins(shapes, "balanced", flags=flags, seed=1000 * stage)
        twins.step()
        twins.set_gradients()
        twins.single.step()
        with NewtonSchulzCalls() as calls, Collectives() as during:
            twins.optimizer.step()
        self.assertParity(twins)
        counts = everyone(len(calls.shapes))
        self.assertEqual([sum(counts[:8]), sum(counts[8:])], [3, 2])
        groups = {ranks for _, ranks in during.names() if ranks}
        stage_ranks = tuple(range(8 * stage, 8 * stage + 8))
        self.assertEverywhere([] if groups == {stage_ranks} else [f"{groups}"])


if __name__ == "__main__":
    run_tests()
