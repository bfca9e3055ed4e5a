# Owner(s): ["oncall: distributed"]
"""create_dtensor_config in several processes: every placement, dtype, group and hyperparameter."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    everyone,
    GlooOnCPU,
    grid_of,
    mesh_of,
    ParityAssertions,
    R,
    S0,
    S1,
    SHAPES,
    Spec,
    specs,
    Strategy,
    Twins,
)


@requires_gloo()
class TestMuonDTensorLayouts(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def test_parity_on_meshes(self):
        for size in (4, 2, 1):
            mesh = mesh_of(size)
            twins = Twins(specs(mesh, all_placements(mesh)))
            self.assertTrainsAlike(twins)
            owners = set(twins.optimizer.assignments)
            self.assertEqual(owners, set(mesh.mesh.tolist()))

    def test_parity_on_every_placement_of_a_2d_mesh(self):
        mesh = grid_of(2, 2)
        shapes = [(8, 8), (7, 5), (3, 9), (1, 8), (5, 1)]
        self.assertTrainsAlike(Twins(specs(mesh, all_placements(mesh), shapes)))

    def test_fewer_matrices_than_ranks(self):
        mesh = mesh_of(4)
        for placement in (S0, S1, R):
            twins = Twins([Spec((9, 6), mesh, (placement,))])
            self.assertTrainsAlike(twins)
            owned = [len(i) for i in twins.optimizer.assignments.values()]
            self.assertEqual(sorted(owned), [0, 0, 0, 1])

    def test_dtypes(self):
        mesh, grid = mesh_of(4), grid_of(2, 2)
        for dtype, nesterov in (
            (torch.bfloat16, True),
            (torch.float16, False),
            (torch.float64, True),
            (torch.bfloat16, False),
        ):
            placed = specs(mesh, all_placements(mesh), SHAPES[1:6], dtype)
            placed += specs(grid, [(S1, S0), (R, S1)], SHAPES[1:6], dtype)
            twins = Twins(placed, nesterov=nesterov, lr=0.02)
            self.assertTrainsAlike(twins, 2, f"{dtype} {nesterov=}")

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
        for flags in ((True, 0), (False, 1), (True, 2), (False, 0), (True, 5)):
            twins = Twins(layout, create_dtensor_config(*flags), nesterov=False)
            self.assertTrainsAlike(twins, 2, f"{flags}")

    def test_each_option_of_a_group_is_used_for_its_matrices(self):
        options = [
            {"lr": 0.3},
            {"lr": torch.tensor(0.03)},
            {"weight_decay": 0.7},
            {"momentum": 0.5},
            {"nesterov": False},
            {"ns_coefficients": (2.0, -1.5, 0.5)},
            # Larger than the norms, so that the iteration divides by it.
            {"eps": 100.0},
            {"ns_steps": 2},
            {"adjust_lr_fn": "match_rms_adamw"},
            {"adjust_lr_fn": "spectral_unclamped"},
        ]
        # Equal shapes and values, which could share a batch.
        placed = specs(grid_of(2, 2), [(S0, S1)], [(32, 48)] * len(options))
        groups = [([i], own) for i, own in enumerate(options)]
        seeds = [0] * len(options)
        self.assertTrainsAlike(Twins(placed, groups=groups, seeds=seeds, lr=0.1), 2)

    def test_version_counters_show_what_a_step_writes(self):
        # They tell autograd that a tensor that it saved has changed.
        shapes = [(8, 8), (4, 9), (16, 4)]
        placed = specs(mesh_of(4), [(S0,), (S1,), (R,)], shapes)
        placed += specs(grid_of(2, 2), [(S0, R), (S1, S0)], shapes)
        placed += [Spec(shape, None, None) for shape in shapes]
        for twins in (Twins(placed), Strategy(mesh_of(4), "fsdp").twins(shapes)):
            twins.step()
            state = twins.optimizer.state
            pairs = [(p, state[p]["momentum_buffer"]) for p in twins.params]
            for missing in ((), (1,)):
                before = [[one._version for one in pair] for pair in pairs]
                saved = [param.square().sum() for param in twins.params]
                twins.step(missing)
                with self.everywhere(f"{missing=}"):
                    for i, pair in enumerate(pairs):
                        kind = f"{i}: {twins.specs[i].placements}"
                        for one, old in zip(pair, before[i], strict=True):
                            self.assertEqual(one._version == old, i in missing, kind)
                        if i not in missing:
                            with self.assertRaisesRegex(RuntimeError, "inplace oper"):
                                saved[i].backward()

    def test_plain_tensors_beside_dtensors(self):
        placed = specs(mesh_of(4), [(S0,)], [(8, 8), (3, 4)])
        placed.insert(1, Spec((6, 5), None, None))
        placed.append(Spec((2, 9), None, None, torch.bfloat16))
        twins = Twins(placed)
        self.assertTrainsAlike(twins)
        assignments = twins.optimizer.assignments
        self.assertLessEqual({1, 3}, set(assignments[self.rank]))
        owned = sorted(i for own in assignments.values() for i in own)
        self.assertEqual(owned, [0, 1, 2, 3])

    def test_several_meshes_in_one_optimizer(self):
        grid = grid_of(2, 2)
        shapes = [(8, 8), (7, 5), (3, 9), (16, 12)]
        placed = [
            spec
            for mesh, *placements in (
                (mesh_of(2), (S0,), (R,)),
                (mesh_of(4), (S1,), (R,)),
                (grid, (S1, S0)),
                (grid["a"], (S0,)),
                (grid["b"], (S1,)),
                (mesh_of(1), (S0,)),
            )
            for spec in specs(mesh, placements, shapes)
        ]
        for prefetch in (0, 2):
            twins = Twins(placed, create_dtensor_config(prefetch_count=prefetch))
            self.assertTrainsAlike(twins, 2, f"prefetch {prefetch}")

    def test_second_group_on_half_of_the_ranks(self):
        # On ranks 0 and 1, its buckets come between those that all ranks share. All ranks make the mesh.
        half = mesh_of(2)
        placed = specs(mesh_of(4), [(S0,)], [(8, 8)] * 16)
        if self.rank < 2:
            placed += specs(half, [(S0,)], [(8, 8)] * 8)
        for prefetch in (0, 1, 2):
            twins = Twins(placed, create_dtensor_config(prefetch_count=prefetch))
            for _ in range(2):
                with self.everywhere(f"{prefetch}"):
                    twins.step()
                self.assertParity(twins, f"{prefetch}")

    def test_assignments_are_one_owner_each_and_equal_on_all_ranks(self):
        grid = grid_of(2, 2)
        twins = Twins(specs(grid, [(R, S0), (R, R)], [(8, 8)] * 4))
        views = everyone(twins.optimizer.assignments)
        self.assertEqual(views, [views[0]] * 4)
        owned = sorted(i for own in views[0].values() for i in own)
        self.assertEqual(owned, list(range(8)))
        # Equal matrices, so equal shares, replicas included.
        self.assertEqual([len(views[0][rank]) for rank in range(4)], [2] * 4)
        self.assertEqual(twins.optimizer.current_rank, self.rank)


class TestMuonOnOneRank(TestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        self.addCleanup(dist.destroy_process_group)

    def test_one_rank_trains_like_a_single_process(self):
        line, grid = (init_device_mesh("cpu", shape) for shape in ((1,), (1, 1)))
        placed = specs(line, all_placements(line))
        placed += specs(grid, all_placements(grid), [(7, 5), (4, 8)])
        twins = Twins(placed)
        for _ in range(3):
            twins.step()
            self.assertEqual(twins.problems(), [])
        self.assertEqual(twins.optimizer.assignments, {0: [*range(len(placed))]})


if __name__ == "__main__":
    run_tests()
