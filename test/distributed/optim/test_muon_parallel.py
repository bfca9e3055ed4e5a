# Owner(s): ["oncall: distributed"]
"""The distributed Muon under FSDP2, tensor parallelism and their mixes, and on random layouts."""

import os
import random
import sys
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.optim import Muon
from torch.optim._muon_engine import process_groups
from torch.optim._muon_engine.process_groups import spanning_group
from torch.optim._muon_engine.schedule import buckets
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    Collectives,
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    mesh_of,
    NewtonSchulzCalls,
    ParityAssertions,
    place,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
    without_local_names,
)
from torch.utils.weak import WeakIdKeyDictionary


class Block(torch.nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    """With biases, uneven sizes, and a matrix that has fewer rows than there are ranks."""

    def __init__(self, width=10, hidden=14, blocks=2):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = torch.nn.Linear(width, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ModelParity:
    """Trains a real model with real gradients, beside plain matrices that get the same ones."""

    def make_model(self, dtype=torch.float32, **sizes):
        torch.manual_seed(3)
        return Model(**sizes).to(dtype)

    def train(self, model, steps=4, data_rank=None, config=None, **options):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        self.assertGreater(len(matrices), 2)
        for param in matrices:
            self.assertIsInstance(param, DTensor)
        singles = [
            torch.nn.Parameter(p.detach().full_tensor().clone()) for p in matrices
        ]
        optimizer = Muon(
            matrices, distributed_config=config or create_dtensor_config(), **options
        )
        biases = torch.optim.AdamW(others)
        single = Muon(singles, **options)
        width = matrices[0].shape[1]
        for step in range(steps):
            rank = self.rank if data_rank is None else data_rank
            x = full(100 * step + rank, (6, width))
            model(x).pow(2).mean().backward()
            for param, other in zip(matrices, singles):
                other.grad = param.grad.full_tensor().to(other.dtype)
                self.assertGreater(other.grad.count_nonzero().item(), 0)
            with NewtonSchulzCalls() as calls:
                optimizer.step()
            single.step()
            biases.step()
            total = sum(everyone(len(calls.shapes)))
            self.assertEqual(total, len(matrices))
            problems = []
            for i, (param, other) in enumerate(zip(matrices, singles)):
                buffer = optimizer.state[param]["momentum_buffer"]
                for what, mine, its in [
                    ("parameter", param.detach(), other.detach()),
                    ("momentum", buffer, single.state[other]["momentum_buffer"]),
                ]:
                    if mine.placements != param.placements:
                        problems.append(f"{what} {i} {mine.placements}")
                    if not torch.equal(mine.full_tensor(), its):
                        problems.append(f"{what} {i} {tuple(param.shape)}")
            self.assertEverywhere(problems, f"step {step}")
            for each in (optimizer, single, biases):
                each.zero_grad()
        return matrices


@requires_gloo()
class TestMuonParallel(
    GlooOnCPU, ParityAssertions, ModelParity, MultiProcContinuousTest
):
    world_size = 4

    # FSDP2

    def test_fully_shard(self):
        for nesterov in (True, False):
            model = self.make_model()
            for block in model.blocks:
                fully_shard(block, mesh=mesh_of(4))
            fully_shard(model, mesh=mesh_of(4))
            matrices = self.train(model, nesterov=nesterov)
            self.assertEqual(matrices[0].placements, (Shard(0),))
            # The head has three rows.
            head = matrices[-1].to_local()
            self.assertEqual(everyone(len(head)), [1, 1, 1, 0])

    def test_fully_shard_of_dim_1(self):
        model = self.make_model(width=8, hidden=12)
        fully_shard(
            model,
            mesh=mesh_of(4),
            shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else Shard(0),
        )
        matrices = self.train(model)
        self.assertEqual(matrices[0].placements, (Shard(1),))

    def test_fully_shard_on_two(self):
        model = self.make_model()
        fully_shard(model, mesh=mesh_of(2))
        self.train_in_pairs(model)

    def train_in_pairs(self, model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        optimizer = Muon(matrices, distributed_config=create_dtensor_config())
        singles = [torch.nn.Parameter(p.detach().full_tensor()) for p in matrices]
        single = Muon(singles)
        for step in range(3):
            model(full(step * 10 + self.rank, (6, 10))).pow(2).mean().backward()
            for param, other in zip(matrices, singles):
                other.grad = param.grad.full_tensor()
            optimizer.step()
            single.step()
            problems = [
                f"{tuple(p.shape)}"
                for p, other in zip(matrices, singles)
                if not torch.equal(p.detach().full_tensor(), other.detach())
            ]
            self.assertEverywhere(problems, f"step {step}")

    def test_fully_shard_with_mixed_precision(self):
        model = self.make_model()
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
        fully_shard(model, mesh=mesh_of(4), mp_policy=policy)
        matrices = self.train(model)
        self.assertEqual(matrices[0].dtype, torch.float32)

    def test_fully_shard_unsharded_between_forward_and_backward(self):
        model = self.make_model()
        for block in model.blocks:
            fully_shard(block, mesh=mesh_of(4), reshard_after_forward=False)
        fully_shard(model, mesh=mesh_of(4), reshard_after_forward=False)
        self.train(model)

    # HSDP

    def test_hsdp(self):
        for prefetch in (0, 2):
            model = self.make_model()
            for block in model.blocks:
                fully_shard(block, mesh=grid_of(2, 2))
            fully_shard(model, mesh=grid_of(2, 2))
            matrices = self.train(
                model, config=create_dtensor_config(prefetch_count=prefetch)
            )
            self.assertEqual(matrices[0].placements, (Replicate(), Shard(0)))

    # Tensor parallelism

    def plan_of_blocks(self, model):
        # A chain: torch.nn.ModuleList has no forward of its own.
        model.blocks = torch.nn.Sequential(*model.blocks)
        plan = {}
        for i in range(len(model.blocks)):
            plan[f"blocks.{i}.up"] = ColwiseParallel()
            plan[f"blocks.{i}.down"] = RowwiseParallel()
        return plan

    def test_tensor_parallel(self):
        model = self.make_model(width=10, hidden=16)
        parallelize_module(model, mesh_of(4), self.plan_of_blocks(model))
        matrices = self.train(model.blocks, data_rank=0)
        found = [p.placements for p in matrices[:2]]
        self.assertEqual(found, [(Shard(0),), (Shard(1),)])

    def test_fully_shard_over_tensor_parallel(self):
        grid = grid_of(2, 2)
        for prefetch, parallel in [(1, True), (0, False)]:
            model = self.make_model(width=12, hidden=16)
            parallelize_module(model, grid["b"], self.plan_of_blocks(model))
            for block in model.blocks:
                fully_shard(block, mesh=grid["a"])
            matrices = [p for n, p in model.blocks.named_parameters() if p.ndim == 2]
            # Data differ along "a", and are the same along "b".
            self.train(
                model.blocks,
                data_rank=self.rank // 2,
                config=create_dtensor_config(parallel, prefetch),
            )
            up, down = (p.placements for p in matrices[:2])
            self.assertEqual(type(up[0]).__name__, "_StridedShard")
            self.assertEqual(up[1], Shard(0))
            self.assertEqual(down, (Shard(0), Shard(1)))

    # Random layouts

    def random_twins(self, rng):
        meshes = [
            mesh_of(4),
            mesh_of(2),
            mesh_of(1),
            grid_of(2, 2),
            grid_of(1, 4),
            grid_of(4, 1),
            grid_of(2, 1, 2),
            grid_of(2, 2)["a"],
        ]
        dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float16]
        placed = []
        for _ in range(rng.randint(1, 14)):
            mesh = rng.choice(meshes)
            shape = (rng.randint(1, 40), rng.randint(1, 40))
            placements = tuple(rng.choice((S0, S1, R)) for _ in range(mesh.ndim))
            placed.append(Spec(shape, mesh, placements, rng.choice(dtypes)))
        order = list(range(len(placed)))
        rng.shuffle(order)
        groups = []
        while order:
            n = rng.randint(1, len(order))
            lr = rng.choice((0.01, 0.1))
            group = {
                "lr": torch.tensor(lr) if rng.random() < 0.3 else lr,
                "momentum": rng.choice((0.0, 0.5, 0.95)),
                "weight_decay": rng.choice((0.0, 0.1)),
                "nesterov": rng.random() < 0.5,
                "ns_steps": rng.choice((1, 3, 5)),
                "adjust_lr_fn": rng.choice((None, "original", "match_rms_adamw")),
            }
            groups.append((order[:n], group))
            order = order[n:]
        config = create_dtensor_config(
            rng.random() < 0.75, prefetch_count=rng.choice((0, 1, 2, 5))
        )
        return Twins(placed, config, groups, seed=rng.randint(0, 10**6))

    def test_random_layouts(self):
        """To see one again: MUON_TEST_SEED=... and the seed that was printed."""
        given = os.environ.get("MUON_TEST_SEED")
        seed = int(given) if given else everyone(random.randrange(10**6))[0]
        if self.rank == 0:
            print(f"MUON_TEST_SEED={seed}", file=sys.stderr)
        rng = random.Random(seed)
        for trial in range(12):
            twins = self.random_twins(rng)
            n = len(twins.specs)
            for step in range(3):
                missing = [i for i in range(n) if rng.random() < 0.2]
                if rng.random() < 0.3:
                    twins.config.prefetch_count = rng.randint(0, 4)
                twins.set_gradients(missing)
                with NewtonSchulzCalls() as calls, Collectives() as seen:
                    twins.optimizer.step()
                twins.single.step()
                message = f"MUON_TEST_SEED={seed} trial {trial} step {step}"
                self.assertParity(twins, message)
                self.assertLessEqual(
                    {call.name for call in seen.calls}, {"alltoall_base_"}, message
                )
                # A matrix on a smaller mesh is there on several of them.
                here = [
                    s.shape
                    for i, s in enumerate(twins.specs)
                    if i not in missing and s.mesh.size() == self.world_size
                ]
                everywhere = sum(everyone(len(calls.shapes)))
                copies = sum(
                    self.world_size // s.mesh.size()
                    for i, s in enumerate(twins.specs)
                    if i not in missing and s.mesh.size() < self.world_size
                )
                self.assertEqual(everywhere, len(here) + copies, message)


@requires_gloo()
class TestMuonEightRanks(
    GlooOnCPU, ParityAssertions, ModelParity, MultiProcContinuousTest
):
    world_size = 8

    def test_3d_mesh(self):
        mesh = grid_of(2, 2, 2)
        self.assertTrainsAlike(
            Twins(specs(mesh, all_placements(mesh), [(16, 8), (7, 13), (3, 5)])), 2
        )

    def test_more_ranks_than_rows(self):
        mesh = mesh_of(8)
        twins = Twins(specs(mesh, all_placements(mesh), [(5, 3), (9, 17), (1, 1)]))
        self.assertTrainsAlike(twins)

    def test_4d_mesh(self):
        mesh = grid_of(1, 2, 2, 2)
        placements = [(R, S0, S1, R), (S1, S0, S0, S1), (S0, R, R, S0), (R, R, R, R)]
        self.assertTrainsAlike(Twins(specs(mesh, placements, [(8, 8), (7, 13)])), 2)

    def test_parts_of_a_mesh(self):
        # No process group of the framework spans a 2-D part of a mesh: the engine makes one.
        mesh = grid_of(2, 2, 2)
        part = mesh["b", "c"]
        placed = specs(part, [(S0, S1), (R, S0)], [(8, 8), (7, 5)])
        twins = Twins(placed, seed=30 * (self.rank // 4))
        self.assertTrainsAlike(twins)
        ranks = sorted(part.mesh.flatten().tolist())
        self.assertEqual(sorted(twins.optimizer.assignments), ranks)
        with Collectives() as seen:
            twins.step()
        self.assertEqual({call.ranks for call in seen.calls}, {tuple(ranks)})
        self.assertNotEqual(len(ranks), self.world_size)

    def test_ranks_that_have_different_numbers_of_groups(self):
        """new_group() names a group by how many this rank has, and members wait under its name."""
        part = grid_of(2, 2, 2)["a", "c"]
        for _ in range(self.rank % 3):
            dist.new_group([self.rank], use_local_synchronization=True)
        ranks = part.mesh.flatten().tolist()
        self.assertEqual(len({rank % 3 for rank in ranks}), 3)
        twins = Twins(specs(part, [(S0, S1)], [(8, 8), (7, 5)]), seed=ranks[0])
        self.assertTrainsAlike(twins)

    def test_different_numbers_of_groups_in_a_torch_without_the_patch(self):
        """Members would wait for each other under different names. They are told what to do instead."""
        names = ("p", "q", "r")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)["p", "r"]
        ranks = mesh.mesh.flatten().tolist()
        for _ in range(self.rank % 3):
            dist.new_group([self.rank], use_local_synchronization=True)
        placed = [Spec((8, 8), mesh, (S0, S1)), Spec((7, 5), mesh, (R, S0))]
        # As if no other test had made the group.
        made = mock.patch.object(process_groups, "_made", WeakIdKeyDictionary())
        with made, without_local_names():
            with self.everywhere():
                with self.assertRaisesRegex(ValueError, r"_flatten\(\), on all ranks"):
                    Twins(placed)
            group = mesh._flatten().get_group()
            twins = Twins(placed, seed=ranks[0])
            with Collectives() as seen:
                twins.step()
        with self.everywhere():
            self.assertEqual({call.ranks for call in seen.calls}, {tuple(ranks)})
            self.assertEqual(dist.get_process_group_ranks(group), ranks)
        self.assertTrainsAlike(twins)

    def test_group_that_the_engine_makes_has_the_timeout_of_its_mesh(self):
        part = grid_of(2, 2, 2)["a", "b"]
        # Another test may have needed a group of these ranks.
        made = mock.patch.object(process_groups, "_made", WeakIdKeyDictionary())
        made.start()
        self.addCleanup(made.stop)
        for group, seconds in zip(part.get_all_groups(), (37, 41)):
            _set_pg_timeout(timedelta(seconds=seconds), group)
        twins = Twins([Spec((8, 8), part, (S0, S1))])
        seen = []
        original = dist.all_to_all_single

        def all_to_all_single(*args, group=None, **kwargs):
            seen.append(group)
            return original(*args, group=group, **kwargs)

        with mock.patch.object(dist, "all_to_all_single", all_to_all_single):
            twins.step()
        self.assertParity(twins)
        self.assertEqual(len(seen), 2)
        self.assertNotIn(seen[0], part.get_all_groups())
        self.assertEqual(len(dist.get_process_group_ranks(seen[0])), 4)
        options = seen[0]._get_backend(torch.device("cpu")).options
        self.assertEqual(options._timeout, timedelta(seconds=41))

    def test_group_that_was_destroyed_is_made_again(self):
        ranks = tuple(range(self.rank % 2, 8, 2))
        made = spanning_group(ranks, [])
        self.assertIs(spanning_group(ranks, []), made)
        dist.barrier()
        dist.destroy_process_group(made)
        again = spanning_group(ranks, [])
        self.assertIsNot(again, made)
        total = torch.tensor([float(self.rank)])
        dist.all_reduce(total, group=again)
        self.assertEqual(total.item(), sum(ranks))

    def test_parameter_is_added_after_flags_changed(self):
        """Ranks 0 and 1 made the replicas' groups at once, and waited for those that first ask about the flags."""
        pair = DeviceMesh("cpu", [0, 1])
        config = create_dtensor_config(async_gpu_parallelism=False)
        # A bucket of all owners is relayed then, and one of a single owner is not.
        with mock.patch.dict(buckets.make_schedule.__kwdefaults__, bucket_bytes=192):
            twins = Twins(specs(grid_of(2, 2, 2), [(R, R, S0)], [(8, 6)] * 8), config)
            twins.step()
            config.async_gpu_parallelism = True
            added = torch.nn.Parameter(
                place(full(9, (8, 6)), Spec((8, 6), pair, (S0,)))
            )
            if self.rank in pair.mesh:
                twins.optimizer.add_param_group({"params": [added]})
            twins.step()
        self.assertParity(twins)

    def test_hsdp_over_tensor_parallel(self):
        mesh = grid_of(2, 2, 2)
        model = torch.nn.Sequential(*self.make_model(width=12, hidden=16).blocks)
        plan = {}
        for i in range(len(model)):
            plan[f"{i}.up"] = ColwiseParallel()
            plan[f"{i}.down"] = RowwiseParallel()
        parallelize_module(model, mesh["c"], plan)
        for block in model:
            fully_shard(block, mesh=mesh["a", "b"])
        matrices = self.train(model, data_rank=self.rank // 2)
        self.assertEqual(
            [type(p).__name__ for p in matrices[0].placements],
            ["Replicate", "_StridedShard", "Shard"],
        )


if __name__ == "__main__":
    run_tests()
