# Owner(s): ["oncall: distributed"]
"""torch.optim.Muon under pipeline parallelism: each stage has its own optimizer."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim import Muon
from torch.optim.muon import create_auto_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    Collectives,
    everyone,
    full,
    GlooOnCPU,
    NewtonSchulzCalls,
    ParityAssertions,
)


class Stage:
    """This rank's pieces of the matrices of one stage, and the same matrices in a single process.

    Args:
        cut: this rank's piece of matrix number i.
    """

    def __init__(self, seed, shapes, cut, config, **options):
        self.seed, self.shapes, self.cut = seed, shapes, cut
        whole = [full(seed + i, shape) for i, shape in enumerate(shapes)]
        self.singles = [torch.nn.Parameter(w.clone()) for w in whole]
        self.params = [
            torch.nn.Parameter(cut(i, w).clone()) for i, w in enumerate(whole)
        ]
        # Optimizers take an empty group, but no empty list of parameters.
        self.single = Muon([{"params": self.singles}], **options)
        self.optimizer = Muon(
            [{"params": self.params}], distributed_config=config, **options
        )
        self.steps = 0

    def step(self):
        self.steps += 1
        for i, shape in enumerate(self.shapes):
            gradient = full(self.seed + 100 * self.steps + i, shape)
            self.singles[i].grad = gradient
            self.params[i].grad = self.cut(i, gradient).clone()
        self.single.step()
        self.optimizer.step()

    def problems(self):
        found = []
        for i, (param, single) in enumerate(zip(self.params, self.singles)):
            mine = self.optimizer.state[param]["momentum_buffer"]
            its = self.single.state[single]["momentum_buffer"]
            if not torch.equal(param.detach(), self.cut(i, single.detach())):
                found.append(f"parameter {i}")
            if not torch.equal(mine, self.cut(i, its)):
                found.append(f"momentum {i}")
        return found


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

    def mesh(self):
        if not hasattr(type(self), "made"):
            type(self).made = init_device_mesh(
                "cpu", (2, 2), mesh_dim_names=("pp", "dp")
            )
        return self.made

    def config(self, **options):
        mesh = self.mesh()
        return create_auto_config(
            ddp_process_group=mesh["dp"].get_group(),
            pp_process_group=mesh["pp"].get_group(),
            pp_stage_id=mesh.get_coordinate()[0],
            pp_num_stages=2,
            **options,
        )

    def test_pipeline_of_two_stages(self):
        mesh = self.mesh()
        stage, replica = mesh.get_coordinate()
        dp = mesh["dp"].get_group()
        module = model_of(stage)
        # The whole model in one process, which sees the micro-batches of both replicas.
        whole = torch.nn.Sequential(model_of(0), model_of(1))
        config = self.config()
        self.assertEqual(config.state["pp_stage_id"], stage)
        self.assertEqual(config.state["pp_num_stages"], 2)
        self.assertIs(config.state["pp_process_group"], mesh["pp"].get_group())
        optimizer = Muon(module.parameters(), lr=0.1, distributed_config=config)
        single = Muon(whole.parameters(), lr=0.1)
        schedule = ScheduleGPipe(
            PipelineStage(
                module, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group()
            ),
            n_microbatches=2,
            loss_fn=lambda out, target: (out - target).pow(2).sum(),
            scale_grads=False,
        )
        for step in range(3):
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
        stage, _ = self.mesh().get_coordinate()
        shapes = [[(8, 6), (5, 7), (4, 4)], [(16, 4)]][stage]
        # One stage makes two steps before the other one builds its optimizer. A key in the store says
        # so, because a collective would bring the stages together.
        store = dist.distributed_c10d._get_default_store()
        done = [f"rank {rank} has made two steps" for rank in (0, 1)]
        if stage:
            store.wait(done, self.timeout)
        made = Stage(1000 * stage, shapes, lambda i, whole: whole, self.config())
        for _ in range(2):
            made.step()
        if not stage:
            store.set(done[self.rank], "yes")
        self.assertEverywhere(made.problems())
        ranks = dist.get_process_group_ranks(self.mesh()["dp"].get_group())
        self.assertEqual(sorted(made.optimizer.assignments), sorted(ranks))

    def test_stage_without_matrices(self):
        stage, _ = self.mesh().get_coordinate()
        shapes = [[], [(6, 8), (7, 3)]][stage]
        made = Stage(500, shapes, lambda i, whole: whole, self.config())
        for _ in range(2):
            made.step()
        self.assertEverywhere(made.problems())
        with self.everywhere():
            made.optimizer.load_state_dict(made.optimizer.state_dict())

    def test_error_in_one_stage_stays_there(self):
        stage, replica = self.mesh().get_coordinate()
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
        names = ("pp", "replicate", "shard", "tp")
        mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=names)
        stage, _, shard, tp = mesh.get_coordinate()
        shapes = [[(8, 8), (16, 6), (9, 7)], [(4, 12), (10, 10)]][stage]

        def cut(i, whole):
            piece = whole.tensor_split(2, i % 2)[tp]
            return piece.tensor_split(2, 0)[shard]

        config = create_auto_config(
            tp_process_group=mesh["tp"].get_group(),
            shard_process_group=mesh["shard"].get_group(),
            replicate_process_group=mesh["replicate"].get_group(),
            tp_dim_per_param={i: i % 2 for i in range(len(shapes))},
            pp_process_group=mesh["pp"].get_group(),
            pp_stage_id=stage,
            pp_num_stages=2,
        )
        made = Stage(1000 * stage, shapes, cut, config)
        stage_ranks = tuple(range(8 * stage, 8 * stage + 8))
        for _ in range(3):
            with NewtonSchulzCalls() as calls, Collectives() as during:
                made.optimizer.zero_grad()
                made.step()
            self.assertEverywhere(made.problems())
        # The single process of this rank makes as many calls as the stage has matrices.
        extra = everyone(len(calls.shapes) - len(shapes))
        self.assertEqual(sum(extra[:8]), 3)
        self.assertEqual(sum(extra[8:]), 2)
        groups = {ranks for _, ranks in during.names() if ranks}
        self.assertEverywhere([] if groups == {stage_ranks} else [f"{groups}"])


if __name__ == "__main__":
    run_tests()
