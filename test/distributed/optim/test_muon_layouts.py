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

    def test_kinds_of_newton_schulz(self):
        mesh, grid = mesh_of(4), grid_of(2, 2)
        layout = specs(mesh, [(S0,), (R,)], [(8, 24), (30, 7), (9, 9)])
        layout += specs(grid, [(S1, S0)], [(8, 24), (30, 7)])
        by_step = [(4.0, -6.0, 3.0), (3.4, -4.7, 2.0), (1.9, -1.3, 0.4)]
        options = {"ns_algorithm": "gram", "ns_steps": 3, "ns_coefficients": by_step}
        self.assertTrainsAlike(Twins(layout, **options))

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

    def test_flags_are_read_when_muon_is_built(self):
        mesh = mesh_of(4)
        twins = Twins(specs(mesh, all_placements(mesh), [(8, 8), (7, 5)]))
        config = twins.config
        twins.step()
        for flag, value in (("prefetch_count", 3), ("async_gpu_parallelism", False)):
            original = getattr(config, flag)
            setattr(config, flag, value)
            twins.set_gradients()
            with self.everywhere():
                with self.assertRaisesRegex(ValueError, f"{flag}.*before you build"):
                    twins.optimizer.step()
            setattr(config, flag, original)
            # Nothing has moved.
            twins.single.step()
            twins.optimizer.step()
            self.assertParity(twins, flag)

    def test_each_option_of_a_group_is_used_for_its_matrices(self):
        # Some sides are whole tiles, so that matrices of several groups could share a batch.
        placed = specs(mesh_of(4), [(S0,), (S1,)], [(32, 32), (8, 6)])
        placed += specs(grid_of(2, 2), [(S0, S1), (R, S0)], [(32, 32), (5, 9)])
        options = [
            {},
            {"lr": 0.3},
            {"weight_decay": 0.7},
            {"momentum": 0.5},
            {"nesterov": False},
            {"ns_coefficients": (2.0, -1.5, 0.5)},
            # Larger than the norms, so that the iteration divides by it.
            {"eps": 100.0},
            {"ns_steps": 2},
            {"adjust_lr_fn": "match_rms_adamw"},
            {"adjust_lr_fn": "spectral_unclamped"},
            {"adjust_lr_fn": "original", "lr": torch.tensor(0.03)},
        ]
        count = len(placed)
        twins = Twins(
            placed * len(options),
            groups=[
                (range(i * count, (i + 1) * count), own)
                for i, own in enumerate(options)
            ],
            # The same values and gradients in each group.
            seeds=[*range(count)] * len(options),
            lr=0.1,
        )
        self.assertTrainsAlike(twins, 2)
        for i, own in enumerate(options[1:], 1):
            others = twins.singles[i * count : (i + 1) * count]
            # Each option must make a difference.
            self.assertFalse(all(map(torch.equal, twins.singles, others)), f"{own}")

    def test_matrices_of_one_shape_together(self):
        shapes = [(16, 16)] * 6 + [(24, 8)] * 5 + [(5, 9)] * 3
        # The single process does not batch.
        for foreach, dtype in ((None, torch.bfloat16), (False, torch.float32)):
            twins = self.of_few_shapes(shapes, dtype, foreach)
            self.assertTrainsAlike(twins, 2, f"{foreach} {dtype}")
        for dtype in (torch.float32, torch.bfloat16):
            twins = self.of_few_shapes(shapes, dtype, True)
            before = [single.detach().float() for single in twins.singles]
            twins.step()
            problems = []
            for param, single, old in zip(twins.params, twins.singles, before):
                moved = (single.detach().float() - old).norm()
                difference = (param.full_tensor().float() - single.float()).norm()
                # Batched products round differently. The largest difference seen was 1.3 % of the norm
                # of an update. A bfloat16 parameter rounds after that.
                rounding = torch.finfo(dtype).eps * single.detach().float().norm()
                if difference > 0.05 * moved + rounding:
                    problems.append(f"{tuple(single.shape)}: {difference / moved}")
            self.assertEverywhere(problems, f"{dtype}")

    def of_few_shapes(self, shapes, dtype, foreach):
        placed = specs(mesh_of(4), [(S0,), (R,)], shapes, dtype)
        placed += specs(grid_of(2, 2), [(R, S1)], shapes, dtype)
        # Every other matrix has an ``eps`` above its norm, so its iteration divides by ``eps``.
        groups = [
            (range(n, len(placed), 2), {"eps": eps})
            for n, eps in enumerate((1e-7, 100.0))
        ]
        twins = Twins(placed, groups=groups, foreach=foreach)
        for group in twins.single.param_groups:
            group["foreach"] = False
        return twins

    def test_version_counters_show_what_a_step_writes(self):
        # They tell autograd that a tensor that it saved has changed.
        strategy = Strategy(mesh_of(4), "fsdp")
        shapes = [(8, 8), (4, 9), (16, 4)]
        placed = specs(mesh_of(4), [(S0,), (S1,), (R,)], shapes)
        placed += specs(grid_of(2, 2), [(S0, R), (S1, S0)], shapes)
        placed += [Spec(shape, None, None) for shape in shapes]
        for twins in (Twins(placed), strategy.twins(shapes)):
            twins.step()
            for missing in ((), (1,), ()):
                momenta = [
                    twins.optimizer.state[param]["momentum_buffer"]
                    for param in twins.params
                ]
                before = [
                    (param._version, momentum._version)
                    for param, momentum in zip(twins.params, momenta, strict=True)
                ]
                saved = [param.square().sum() for param in twins.params]
                twins.step(missing)
                with self.everywhere(f"{missing=}"):
                    for i, (param, momentum) in enumerate(
                        zip(twins.params, momenta, strict=True)
                    ):
                        kind = f"{i}: {twins.specs[i].placements}"
                        after = param._version, momentum._version
                        if i in missing:
                            self.assertEqual(after, before[i], kind)
                            continue
                        self.assertGreater(after[0], before[i][0], kind)
                        self.assertGreater(after[1], before[i][1], kind)
                        with self.assertRaisesRegex(RuntimeError, "inplace operation"):
                            saved[i].backward()

    def test_closure(self):
        mesh = mesh_of(4)
        twins = Twins([Spec((8, 6), mesh, (S0,))])
        twins.set_gradients()
        gradient, twins.params[0].grad = twins.params[0].grad, None

        def closure():
            self.assertTrue(torch.is_grad_enabled())
            twins.params[0].grad = gradient
            return 7.5

        twins.single.step()
        self.assertEqual(twins.optimizer.step(closure), 7.5)
        self.assertParity(twins)

    def test_gradients_with_other_placements_than_their_parameters(self):
        mesh = mesh_of(4)
        mesh2 = grid_of(2, 2)
        placed = specs(mesh, [(S0,), (S1,), (R,)], [(8, 8), (7, 5), (3, 9)])
        placed += specs(mesh2, [(S0, S1), (R, S0)], [(8, 8), (7, 5)])
        twins = Twins(placed)
        for other in (S0, S1, R):
            twins.set_gradients()
            for param in twins.params:
                param.grad = param.grad.redistribute(
                    placements=[other] * param.device_mesh.ndim
                )
            twins.single.step()
            twins.optimizer.step()
            self.assertParity(twins, f"gradients {other}")

    def test_plain_tensors_beside_dtensors(self):
        mesh = mesh_of(4)
        placed = specs(mesh, [(S0,)], [(8, 8), (3, 4)])
        placed.insert(1, Spec((6, 5), None, None))
        placed.append(Spec((2, 9), None, None, torch.bfloat16))
        twins = Twins(placed)
        self.assertTrainsAlike(twins)
        assignments = twins.optimizer.assignments
        self.assertLessEqual({1, 3}, set(assignments[self.rank]))
        for i, spec in enumerate(placed):
            lists = [rank for rank, owned in assignments.items() if i in owned]
            self.assertEqual(len(lists), 1, f"{i} {spec}")

    def test_several_meshes_in_one_optimizer(self):
        whole, pairs, single = mesh_of(4), mesh_of(2), mesh_of(1)
        grid = grid_of(2, 2)
        shapes = [(8, 8), (7, 5), (3, 9), (16, 12)]
        placed = [
            spec
            for mesh, placements in [
                (pairs, [(S0,), (R,)]),
                (whole, [(S1,), (R,)]),
                (grid, [(S1, S0)]),
                (grid["a"], [(S0,)]),
                (grid["b"], [(S1,)]),
                (single, [(S0,)]),
            ]
            for spec in specs(mesh, placements, shapes)
        ]
        for prefetch in (0, 2):
            twins = Twins(placed, create_dtensor_config(prefetch_count=prefetch))
            self.assertTrainsAlike(twins, 2, f"prefetch {prefetch}")

    def test_second_group_on_half_of_the_ranks(self):
        # On ranks 0 and 1, its buckets come between those that all ranks share.
        placed = specs(mesh_of(4), [(S0,)], [(8, 8)] * 16)
        pair = specs(mesh_of(2), [(S0,)], [(8, 8)] * 8)
        for prefetch in (0, 1, 2):
            config = create_dtensor_config(prefetch_count=prefetch)
            twins = Twins(placed + (pair if self.rank < 2 else []), config)
            for _ in range(2):
                problems = []
                try:
                    twins.step()
                except RuntimeError as error:
                    problems.append(str(error))
                self.assertEverywhere(problems or twins.problems(), f"{prefetch}")

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
        mesh = init_device_mesh("cpu", (1,))
        mesh2 = init_device_mesh("cpu", (1, 1))
        twins = Twins(
            specs(mesh, all_placements(mesh))
            + specs(mesh2, all_placements(mesh2), [(7, 5), (4, 8)])
        )
        for _ in range(3):
            twins.step()
            self.assertEqual(twins.problems(), [])
        self.assertEqual(
            twins.optimizer.assignments, {0: list(range(len(twins.params)))}
        )


if __name__ == "__main__":
    run_tests()
