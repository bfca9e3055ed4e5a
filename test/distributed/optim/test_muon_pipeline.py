# Owner(s): ["oncall: distributed"]
"""torch.optim.Muon under pipeline parallelism: each stage has its own optimizer."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
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


def model_of(stage):
    """A stage of a small model, the same on all of its replicas."""
    torch.manual_seed(10 + stage)
    width = [(8, 16, 12), (12, 20, 4)][stage]
    return torch.nn.Sequential(
        torch.nn.Linear(width[0], width[1], bias=False),
        torch.nn.ReLU(),
        torch.nn.Linear(width[1], width[2], bias=False),
    )


@requires_gloo()
class TestMuonPP(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def config(self):
        grid = grid_of(2, 2)
        return Strategy(grid, "pp", "ddp").config(
            pp_stage_id=grid.get_local_rank("a"), pp_num_stages=2
        )

    def test_pipeline_of_two_stages(self):
        grid = grid_of(2, 2)
        stage, replica = grid.get_coordinate()
        pp, dp = grid.get_all_groups()
        module = model_of(stage)
        # The whole model in one process, which sees the micro-batches of both replicas.
        whole = torch.nn.Sequential(model_of(0), model_of(1))
        config = self.config()
        self.assertEqual(config.state["pp_stage_id"], stage)
        self.assertEqual(config.state["pp_num_stages"], 2)
        self.assertIs(config.state["pp_process_group"], pp)
        optimizer = Muon(module.parameters(), lr=0.1, distributed_config=config)
        single = Muon(whole.parameters(), lr=0.1)
        schedule = ScheduleGPipe(
            PipelineStage(module, stage, 2, torch.device("cpu"), group=pp),
            n_microbatches=2,
            loss_fn=lambda out, target: (out - target).pow(2).sum(),
            scale_grads=False,
        )
        for step in range(2):
            inputs, targets = full(step, (2, 4, 8)), full(50 + step, (2, 4, 4))
            if stage == 0:
                schedule.step(inputs[replica])
            else:
                schedule.step(target=targets[replica])
            for param in module.parameters():
                dist.all_reduce(param.grad, group=dp)
            loss = (whole(inputs) - targets).pow(2).sum()
            loss.backward()
            theirs = list(whole[stage].parameters())
            for param, other in zip(module.parameters(), theirs):
                # The sum over micro-batches has another order. Both optimizers get the same gradient.
                torch.testing.assert_close(param.grad, other.grad, rtol=1e-4, atol=1e-4)
                other.grad.copy_(param.grad)
            with Collectives() as during:
                optimizer.step()
            single.step()
            same = [torch.equal(p, q) for p, q in zip(module.parameters(), theirs)]
            self.assertEverywhere([] if all(same) else [f"step {step}: {same}"])
            groups = {ranks for _, ranks in during.names() if ranks}
            mine = tuple(dist.get_process_group_ranks(dp))
            self.assertEverywhere([] if groups == {mine} else [f"sent over {groups}"])
            optimizer.zero_grad()
            single.zero_grad()
            # The other stage of the single process takes the values of that stage's ranks.
            stages = everyone([p.detach() for p in module.parameters()])[::2]
            for stepped, reference in zip(stages, whole):
                for new, param in zip(stepped, reference.parameters()):
                    param.data.copy_(new)

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

    def test_stage_without_matrices(self):
        stage, _ = grid_of(2, 2).get_coordinate()
        cuts = [[], [Cut((6, 8)), Cut((7, 3))]][stage]
        twins = Twins(cuts, self.config(), seed=500)
        self.assertTrainsAlike(twins, 2)
        with self.everywhere():
            twins.optimizer.load_state_dict(twins.optimizer.state_dict())

    def test_error_in_one_stage_stays_there(self):
        stage, replica = grid_of(2, 2).get_coordinate()
        shape = (4, 8) if stage == 0 and replica else (8, 8)
        params = [torch.nn.Parameter(full(0, shape))]
        with self.everywhere():
            if stage == 0:
                with self.assertRaisesRegex(ValueError, "different shapes"):
                    Muon(params, distributed_config=self.config())
            else:
                Muon(params, distributed_config=self.config())


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
