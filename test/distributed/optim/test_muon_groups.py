# Owner(s): ["oncall: distributed"]
"""create_auto_config with matrices that were cut by hand, DTensors, experts and stages; its warnings and errors."""

from datetime import timedelta
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_groups import Strategy
from torch.testing._internal.distributed._muon.common_muon import (
    Cut,
    full,
    grid_of,
    mesh_of,
    Twins,
)


class TestMuonGroups(common_muon.OnCPU):
    def test_parameter_keeps_its_entry_of_the_config(self):
        """After a reversal, each parameter was cut along another one's dimension, without an error."""
        twins = Strategy(grid_of(4), "tp").twins([(8, 8), (8, 8), (6, 10), (8, 8)])
        twins.step()
        lists = [o.param_groups[0]["params"] for o in (twins.optimizer, twins.single)]
        lists += [twins.specs, twins.seeds, twins.params, twins.singles]
        for each in lists:
            each.reverse()
        self.assertTrainsAlike(twins, 2)
        # So does one that takes its place.
        replacing = nn.Parameter(twins.params[0].detach())
        twins.params[0] = replacing
        twins.optimizer.param_groups[0]["params"][0] = replacing
        del twins.single.state[twins.singles[0]]
        self.assertTrainsAlike(twins, 1)

    def test_materialized_after_the_optimizer_was_built(self):
        """to_empty() makes other parameters. The step said "Cannot copy out of meta tensor"."""
        model = nn.Linear(4, 4, bias=False, device="meta")
        config = Strategy(grid_of(4), "ddp").config()
        optimizer = Muon(model.named_parameters(), distributed_config=config)
        model.to_empty(device="cpu")
        model.weight.grad = torch.ones(4, 4)
        pattern = "'weight'.*Build Muon after"
        self.assertRaisesEverywhere(optimizer.step, RuntimeError, pattern)

    def test_marks_say_the_tp_dim_if_the_user_does_not(self):
        strategy, dims = Strategy(mesh_of(4), "tp"), (0, 1, None)
        given = {"tp_dim_per_param": {0: 0, 1: 1}}
        for mark, options in product(("tp_dim", "partition_dim"), ({}, given)):
            with self.subTest(mark=mark):
                placed = [strategy.cut((8, 12), d) for d in dims]
                twins = Twins(placed, strategy.config(**given))
                # No mark counts for what the user leaves out.
                marks = 0, 1, 0 if options else -1
                for param, dim in zip(twins.params, marks):
                    setattr(param, mark, dim)
                with self.assertWarnsOnce():
                    config = strategy.config(**options)
                    twins.optimizer = Muon(twins.params, distributed_config=config)
                self.assertTrainsAlike(twins, 1, mark)

    def test_group_on_one_rank_too_few(self):
        # The other rank of the pair can only notice that rank 0 does not come.
        short = timedelta(seconds=2)
        pairs = [dist.new_group(pair, timeout=short) for pair in ([0, 1], [2, 3])]
        own = pairs[self.rank // 2] if self.rank else None
        config = create_auto_config(ddp_process_group=own)
        pattern = r"could not reach ranks \[0\]"
        params = [nn.Parameter(torch.ones(8, 8))]
        build = partial(Muon, params, distributed_config=config)
        self.assertRaisesEverywhere(build, RuntimeError, pattern, ranks=[1])

    def stage_config(self):
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
        twins = Twins(map(Cut, shapes), self.stage_config(), seed=1000 * stage)
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
            with self.subTest(shapes=shapes):
                shapes = [(8, 8)] if stage else shapes
                params = [torch.nn.Parameter(full(0, shape)) for shape in shapes]

                def build():
                    group = {"params": params}
                    muon = Muon([group], distributed_config=self.stage_config())
                    muon.load_state_dict(muon.state_dict())
                    for param in params:
                        param.grad = torch.ones_like(param)
                    muon.step()

                ranks = () if stage or not shapes else (0, 1)
                self.assertRaisesEverywhere(
                    build, ValueError, "different shapes", ranks
                )


class TestMuonExperts(common_muon.OnCPU):
    def test_different_numbers_of_experts(self):
        """After a matrix that all ranks share."""
        experts = [[0], [1, 2], [], [3, 4, 5]][self.rank]
        world = dist.group.WORLD
        config = create_auto_config(
            ddp_process_group=world,
            ep_process_group=world,
            expert_assignments=dict(enumerate(experts, 1)),
        )
        matrices, seeds = [Cut((8, 8))], [0]
        for expert in experts:
            matrices.append(Cut((6, 4)))
            seeds.append(100 * (expert + 1))
        self.assertTrainsAlike(Twins(matrices, config, seeds=seeds))

    def test_stack_without_a_matrix_on_some_ranks(self):
        """The expert's next matrix was joined with one of the stack, and the groups "contradict each other"."""
        grid = grid_of(2, 2)
        groups = {
            "fsdp_process_group": grid.get_group("a"),
            "ep_process_group": grid.get_group("b"),
        }
        shard, expert = grid.get_coordinate()
        for ids in ({0: expert, 1: expert}, {0: expert}):
            with self.subTest(ids=ids):
                config = create_auto_config(expert_assignments=ids, **groups)
                if shard == 0:
                    stack, expected = torch.ones(1, 3, 4), [(0, 0), (1, 0)]
                else:
                    stack, expected = torch.ones(0, 3, 4), [(1, 0)]
                params = [stack, torch.ones(2, 4)]
                options = {"distributed_config": config, "allow_batched_matrices": True}
                owners = sorted(Muon(params, **options).matrix_owners)
                self.assertEqual(owners, expected)


if __name__ == "__main__":
    run_tests()
