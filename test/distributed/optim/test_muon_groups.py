# Owner(s): ["oncall: distributed"]
"""create_auto_config with plain matrices that were cut by hand, and with DTensors."""

import torch
import torch.distributed as dist
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
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
    local,
    NewtonSchulzCalls,
    ParityAssertions,
    place,
    R,
    S0,
    S1,
    SHAPES,
    specs,
    Strategy,
    Twins,
)


HOWS = ("chunk", "balanced", "last")


class GroupParity(GlooOnCPU, ParityAssertions):
    def check_once(self, twins):
        """``twins`` train, and each matrix is orthogonalized once."""
        self.assertTrainsAlike(twins, 1)
        twins.set_gradients()
        twins.single.step()
        with NewtonSchulzCalls() as calls:
            twins.optimizer.step()
        self.assertParity(twins)
        self.assertEqual(sum(everyone(len(calls.shapes))), len(twins.params))


@requires_gloo()
class TestMuonGroups(GroupParity, MultiProcContinuousTest):
    world_size = 4

    def strategies(self):
        """Each kind of parallelism alone and in pairs. Swapped pairs would only permute the mesh."""
        grid = grid_of(2, 2)
        found = [Strategy(grid_of(4), kind) for kind in ("fsdp", "tp", "ddp")]
        pairs = (("fsdp", "tp"), ("ddp", "fsdp"), ("tp", "cp"))
        return found + [Strategy(grid, *pair) for pair in pairs]

    # Parity

    def check(self, strategy, how, **options):
        twins = strategy.twins(how=how, **options)
        self.assertTrainsAlike(twins, 2, f"{strategy} {how} {options}")
        ranks = sorted(strategy.mesh.mesh.flatten().tolist())
        assignments = twins.optimizer.assignments
        self.assertEqual(sorted(assignments), ranks)
        self.assertEqual(everyone(assignments), [assignments] * 4)

    def test_fsdp_vs_single_device(self):
        for how in HOWS:
            self.check(Strategy(grid_of(4), "fsdp"), how)

    def test_tp_vs_single_device(self):
        # The dimensions of TP are 0, 1, -1, -2, and none.
        for how in HOWS:
            self.check(Strategy(grid_of(4), "tp"), how)

    def test_ddp_vs_single_device(self):
        self.check(Strategy(grid_of(4), "ddp"), "chunk")

    def test_cp_vs_single_device(self):
        self.check(Strategy(grid_of(4), "cp"), "chunk")

    def test_combinations_vs_single_device(self):
        for strategy, how in zip(self.strategies()[3:], HOWS, strict=True):
            self.check(strategy, how)

    def test_ranks_without_groups_are_alone(self):
        # A TP dimension without a TP group moves nothing.
        for options in ({}, {"tp_dim_per_param": {0: 1, 1: 0}}):
            config = create_auto_config(**options)
            twins = Twins([Cut(shape) for shape in SHAPES], config, seed=self.rank)
            with Collectives() as seen:
                twins.step()
            self.assertEqual(seen.calls, [])
            self.assertParity(twins)
            mine = {self.rank: list(range(len(SHAPES)))}
            self.assertEqual(twins.optimizer.assignments, mine)

    def test_second_spellings(self):
        tp = Strategy(grid_of(2, 2), "tp", "ddp")
        for name, dim in (("tp_dim_per_param", -2), ("tp_shard_dim", 1)):
            cuts = [tp.cut(shape, dim) for shape in SHAPES]
            self.assertTrainsAlike(Twins(cuts, tp.config(**{name: dim})), 2)
        hsdp = Strategy(grid_of(2, 2), "ddp", "fsdp")
        config = create_auto_config(
            shard_process_group=hsdp.group("fsdp"),
            replicate_process_group=hsdp.group("ddp"),
        )
        self.assertTrainsAlike(Twins([hsdp.cut(shape) for shape in SHAPES], config), 2)

    def test_tp_cuts_first_and_fsdp_the_rows_of_its_piece(self):
        grid = grid_of(2, 2)
        fsdp, tp = grid.get_coordinate()
        matrix = full(0, (8, 3))
        # A TP piece is rows 0 to 3 or 4 to 7. FSDP takes its first or its last two.
        row = 4 * tp + 2 * fsdp
        config = Strategy(grid, "fsdp", "tp").config(tp_dim_per_param=0)
        param = torch.nn.Parameter(matrix[row : row + 2].clone())
        optimizer = Muon([param], distributed_config=config)
        whole = config.gather_fn(param.detach(), 0, config.state)
        self.assertTrue(torch.equal(whole, matrix))
        single = torch.nn.Parameter(matrix.clone())
        single.grad = full(1, (8, 3))
        param.grad = single.grad[row : row + 2].clone()
        optimizer.step()
        Muon([single]).step()
        self.assertTrue(torch.equal(param.detach(), single.detach()[row : row + 2]))

    def test_cp_within_the_ranks_that_fsdp_shards_over(self):
        for name in "ab":
            config = create_auto_config(
                fsdp_process_group=dist.group.WORLD,
                cp_process_group=grid_of(2, 2).get_group(name),
            )
            strategy = Strategy(grid_of(4), "fsdp")
            self.check_once(Twins([strategy.cut(s) for s in SHAPES], config))

    def test_dtypes_flags_and_memory_formats(self):
        cases = (
            (torch.bfloat16, True, (True, 0)),
            (torch.float16, False, (False, 2)),
            (torch.float64, True, (True, 2)),
        )
        for strategy, case in zip(self.strategies()[::2], cases, strict=True):
            dtype, turned, (parallel, ahead) = case
            cuts = [strategy.cut(s, 1, "chunk", dtype, turned) for s in SHAPES]
            config = strategy.config(
                tp_dim_per_param=1, async_gpu_parallelism=parallel, prefetch_count=ahead
            )
            twins = Twins(cuts, config, nesterov=parallel, lr=0.1)
            self.assertTrainsAlike(twins, 2, f"{strategy} {dtype}")

    def test_indices_count_over_parameter_groups(self):
        strategy = Strategy(grid_of(2, 2), "fsdp", "tp")
        groups = [
            ([4, 0, 2], dict(lr=0.3, momentum=0.5, nesterov=False, weight_decay=0.2)),
            ([1, 3], dict(lr=torch.tensor(0.05), adjust_lr_fn="match_rms_adamw")),
            ([5], dict(ns_steps=3)),
        ]
        dims = [1, 0, None, 0, 1, 1]
        cuts = [strategy.cut(shape, dim) for shape, dim in zip(SHAPES, dims)]
        order = [i for indices, _ in groups for i in indices]
        by_index = {at: dims[i] for at, i in enumerate(order) if dims[i] is not None}
        config = strategy.config(tp_dim_per_param=by_index)
        self.assertTrainsAlike(Twins(cuts, config, groups))

    # The three functions outside of step()

    def test_gather_then_redistribute_is_the_identity(self):
        for strategy, how in zip(self.strategies()[1::2], HOWS, strict=True):
            twins = strategy.twins(SHAPES[1:6:2], how)
            dims = {i: d for i, d in enumerate(strategy.dims) if d is not None}
            unused = strategy.config(tp_dim_per_param=dims)
            for config in (twins.config, unused):
                with self.everywhere(f"{strategy} {how}"):
                    self.check_round_trip(config, twins.specs)
            twins.step()
            self.assertParity(twins, f"{strategy}")

    def check_round_trip(self, config, cuts):
        for i, spec in enumerate(cuts):
            config.state["current_param_idx"] = i
            # The second time, the layout is known.
            for seed in (i, 50 + i):
                matrix = full(seed, spec.shape)
                piece = place(matrix, spec)
                whole = config.gather_fn(piece, self.rank, config.state)
                self.assertTrue(torch.equal(whole, matrix), f"{spec}")
                with Collectives() as seen:
                    # Each rank cuts its own tensor, whatever the other ranks have.
                    given = whole + self.rank
                    mine = config.redistribute_fn(given, 0, config.state)
                    again = config.redistribute_fn(whole, 0, config.state)
                self.assertEqual(seen.calls, [])
                self.assertTrue(torch.equal(mine, place(given, spec)), f"{spec}")
                self.assertTrue(torch.equal(again, piece), f"{spec}")
        del config.state["current_param_idx"]

    def test_assign_fn_called_directly(self):
        strategy = Strategy(grid_of(2, 2), "fsdp", "tp")
        params = [place(full(0, s), strategy.cut(s, 1)) for s in SHAPES]
        config = strategy.config(tp_dim_per_param=1)
        assignments = config.assign_fn(params, config.state)
        owned = sorted(i for own in assignments.values() for i in own)
        self.assertEqual(owned, list(range(len(params))))
        self.assertEqual(everyone(assignments), [assignments] * 4)
        self.assertEqual(config.state["param_metadata"], {})

    def test_wrapped_functions_give_the_bits_of_the_engine(self):
        twins = Strategy(grid_of(2, 2), "fsdp", "tp").twins()
        config, calls = twins.config, []
        built = config.gather_fn

        def gather(piece, rank, state):
            calls.append(state["current_param_idx"])
            return built(piece, rank, state)

        config.gather_fn = gather
        self.assertTrainsAlike(twins, 2)
        self.assertEqual(calls, list(range(len(twins.params))) * 2)

    # DTensors

    def test_dtensors_and_pieces_cut_alike_train_alike(self):
        grid = grid_of(2, 2)
        for placements, strategy, dim in [
            ((S0,), Strategy(grid_of(4), "fsdp"), None),
            ((S1,), Strategy(grid_of(4), "tp"), 1),
            ((R,), Strategy(grid_of(4), "ddp"), None),
            ((R, S0), Strategy(grid, "ddp", "fsdp"), None),
            ((S0, S1), Strategy(grid, "fsdp", "tp"), 1),
        ]:
            twins = strategy.twins(dims=dim)
            placed = specs(strategy.mesh, [placements])
            dtensors = Twins(placed, create_dtensor_config())
            same = Twins(placed, create_auto_config())
            for _ in range(2):
                for each in (twins, dtensors, same):
                    each.step()
            with self.everywhere(f"{strategy}"):
                for other in (dtensors, same):
                    for mine, its in zip(twins.params, other.params):
                        self.assertTrue(torch.equal(mine.detach(), local(its.detach())))

    def test_dtensors_and_pieces_in_one_optimizer(self):
        strategy = Strategy(grid_of(2, 2), "fsdp", "tp")
        cuts = [strategy.cut(shape, 1) for shape in ((8, 8), (7, 5))]
        placed = specs(strategy.mesh, [(S0, S1)], [(8, 6), (7, 9)])
        mixed = [cuts[0], placed[0], placed[1], cuts[1]]
        self.check_once(Twins(mixed, strategy.config(tp_dim_per_param=1)))

    def test_replicas_of_a_dtensor_on_a_part_of_the_mesh(self):
        grid = grid_of(2, 2)
        for kind, placement in (("ddp", S0), ("cp", S1)):
            config = create_auto_config(
                **{f"{kind}_process_group": grid.get_group("a")}
            )
            self.check_once(Twins(specs(grid["b"], [(placement,)]), config))


@requires_gloo()
class TestMuonGroupsEightRanks(GroupParity, MultiProcContinuousTest):
    world_size = 8

    def test_three_dimensions(self):
        for kinds, how in [
            (("fsdp", "tp", "ddp"), "chunk"),
            (("tp", "cp", "fsdp"), "last"),
        ]:
            strategy = Strategy(grid_of(2, 2, 2), *kinds)
            shapes = [(16, 8), (7, 13), (3, 5), (9, 9), (1, 8)]
            self.check_once(strategy.twins(shapes, how))


if __name__ == "__main__":
    run_tests()
