# Owner(s): ["oncall: distributed"]
"""create_auto_config: plain matrices that were cut by hand, modules of the framework, and experts."""

import itertools
import os
import random
import sys

import torch
import torch.distributed as dist
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
)
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
    held,
    local,
    NewtonSchulzCalls,
    ParityAssertions,
    place,
    R,
    S0,
    S1,
    SHAPES,
    specs,
    strategies,
    Strategy,
    TP_DIMS,
    Twins,
)
from torch.utils.flop_counter import FlopCounterMode


@requires_gloo()
class TestMuonGroups(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    # Parity

    def check(self, *kinds, mesh=None, hows=("chunk", "balanced", "last"), **options):
        strategy = Strategy(mesh or grid_of(*[4, 2][: len(kinds)] * len(kinds)), *kinds)
        for how in hows:
            twins = strategy.twins(how=how, **options)
            self.assertTrainsAlike(twins, message=f"{strategy} {how}")
            ranks = sorted(strategy.mesh.mesh.flatten().tolist())
            self.assertEqual(sorted(twins.optimizer.assignments), ranks)
            self.assertEqual(
                everyone(twins.optimizer.assignments), [twins.optimizer.assignments] * 4
            )

    def test_fsdp_vs_single_device(self):
        self.check("fsdp", mesh=grid_of(4))

    def test_tp_vs_single_device(self):
        self.check("tp", mesh=grid_of(4))
        for dim in (0, 1, -1, -2, None):
            self.check("tp", mesh=grid_of(4), dims=dim, hows=["chunk"])

    def test_ddp_vs_single_device(self):
        self.check("ddp", mesh=grid_of(4), hows=["chunk"])

    def test_cp_vs_single_device(self):
        self.check("cp", mesh=grid_of(4), hows=["chunk"])

    def test_combinations_vs_single_device(self):
        for strategy in strategies()[4:]:
            for how in ("chunk", "balanced", "last"):
                twins = strategy.twins(how=how)
                self.assertTrainsAlike(twins, 2, f"{strategy} {how}")

    def test_without_groups_each_rank_is_alone(self):
        twins = Twins(
            [Cut(shape) for shape in SHAPES], create_auto_config(), seed=self.rank
        )
        with Collectives() as seen:
            twins.step()
        self.assertEqual(seen.calls, [])
        self.assertParity(twins)
        self.assertEqual(
            twins.optimizer.assignments, {self.rank: list(range(len(SHAPES)))}
        )

    def test_tp_dims_without_a_tp_group_move_nothing(self):
        config = create_auto_config(tp_dim_per_param={0: 1, 1: 0})
        twins = Twins([Cut((8, 8)), Cut((7, 5))], config, seed=9 * self.rank)
        with Collectives() as seen:
            twins.step()
        self.assertEqual(seen.calls, [])
        self.assertParity(twins)

    def test_int_for_all_tp_dims(self):
        for dim in (0, 1, -1, -2):
            strategy = Strategy(grid_of(2, 2), "tp", "ddp")
            cuts = [strategy.cut(shape, dim) for shape in SHAPES]
            for name in ("tp_dim_per_param", "tp_shard_dim"):
                self.assertTrainsAlike(Twins(cuts, strategy.config(**{name: dim})), 2)

    def test_other_names_of_the_groups(self):
        hsdp = Strategy(grid_of(2, 2), "ddp", "fsdp")
        config = create_auto_config(
            shard_process_group=hsdp.group("fsdp"),
            replicate_process_group=hsdp.group("ddp"),
        )
        twins = Twins([hsdp.cut(shape) for shape in SHAPES], config)
        self.assertTrainsAlike(twins)
        usual = hsdp.twins().optimizer.assignments
        self.assertEqual(twins.optimizer.assignments, usual)

    def test_tp_cuts_first_and_fsdp_the_rows_of_its_piece(self):
        grid = grid_of(2, 2)
        fsdp, tp = grid.get_coordinate()
        matrix = full(0, (8, 3))
        # Of rows 0 to 3 or 4 to 7, which are one TP piece, the first or the last two.
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
            twins = Twins([strategy.cut(shape) for shape in SHAPES], config)
            with NewtonSchulzCalls() as calls:
                twins.set_gradients()
                twins.optimizer.step()
            twins.single.step()
            self.assertParity(twins)
            self.assertEqual(sum(everyone(len(calls.shapes))), len(SHAPES))

    def test_dtypes(self):
        for strategy in strategies()[::3]:
            for dtype in (torch.bfloat16, torch.float16, torch.float64):
                shapes, dims = [(8, 8), (7, 5), (3, 9), (33, 16)], [0, 1, None, 1]
                cuts = [
                    strategy.cut(shape, dim, dtype=dtype)
                    for shape, dim in zip(shapes, dims)
                ]
                config = strategy.config(tp_dim_per_param={0: 0, 1: 1, 3: 1})
                for nesterov in (True, False):
                    twins = Twins(cuts, config, nesterov=nesterov, lr=0.1)
                    self.assertTrainsAlike(twins, 2, f"{strategy} {dtype}")

    def test_pieces_that_are_not_contiguous(self):
        for strategy in strategies():
            cuts = [strategy.cut(shape, 1, turned=True) for shape in SHAPES]
            twins = Twins(cuts, strategy.config(tp_dim_per_param=1))
            self.assertTrainsAlike(twins, 2, f"{strategy}")

    def test_prefetch_and_async_change_nothing(self):
        for strategy in (
            Strategy(grid_of(4), "fsdp"),
            Strategy(grid_of(2, 2), "fsdp", "tp"),
            Strategy(grid_of(2, 2), "ddp", "fsdp"),
        ):
            for parallel in (True, False):
                for prefetch in (0, 1, 2):
                    flags = dict(
                        async_gpu_parallelism=parallel, prefetch_count=prefetch
                    )
                    twins = strategy.twins(flags=flags)
                    self.assertTrainsAlike(twins, 2, f"{strategy} {flags}")

    def test_parameter_groups_have_their_own_hyperparameters(self):
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

    def test_parameters_added_later(self):
        strategy = Strategy(grid_of(2, 2), "ddp", "fsdp")
        twins = strategy.twins()
        twins.step()
        spec = strategy.cut((13, 6), how="last")
        twins.specs.append(spec)
        twins.seeds.append(77)
        for params, optimizer, value in (
            (twins.singles, twins.single, full(77, spec.shape)),
            (twins.params, twins.optimizer, place(full(77, spec.shape), spec)),
        ):
            params.append(torch.nn.Parameter(value))
            optimizer.add_param_group({"params": params[-1:], "lr": 0.4})
        self.assertTrainsAlike(twins)

    def test_replicas_are_equal_after_many_steps(self):
        for strategy in (
            Strategy(grid_of(4), "ddp"),
            Strategy(grid_of(2, 2), "ddp", "tp"),
        ):
            twins = strategy.twins(dims=None, weight_decay=0.1)
            for _ in range(20):
                twins.step()
            self.assertParity(twins)
            mine = [
                (strategy.cut(s.shape, d).cuts, p.detach().tolist())
                for s, d, p in zip(twins.specs, strategy.dims, twins.params)
            ]
            for i, found in enumerate(zip(*everyone(mine))):
                for (cuts, values), (others, theirs) in itertools.combinations(
                    found, 2
                ):
                    if cuts == others:
                        self.assertEqual(values, theirs, f"{strategy} {i}")

    def test_random_strategies(self):
        """To see one again: MUON_TEST_SEED=... and the seed that was printed."""
        given = os.environ.get("MUON_TEST_SEED")
        seed = int(given) if given else everyone(random.randrange(10**6))[0]
        if self.rank == 0:
            print(f"MUON_TEST_SEED={seed}", file=sys.stderr)
        rng = random.Random(seed)
        grids = [(4,), (2, 2), (1, 4), (4, 1), (2, 1, 2)]
        for trial in range(20):
            grid = grid_of(*rng.choice(grids))
            kinds = rng.sample(("fsdp", "tp", "ddp", "cp"), grid.ndim)
            strategy = Strategy(grid, *kinds)
            n = rng.randint(1, 10)
            dims = [rng.choice(TP_DIMS) for _ in range(n)]
            cuts = [
                strategy.cut(
                    (rng.randint(1, 40), rng.randint(1, 40)),
                    dim,
                    rng.choice(("chunk", "balanced", "last")),
                    rng.choice((torch.float32, torch.float32, torch.bfloat16)),
                    rng.random() < 0.2,
                )
                for dim in dims
            ]
            order = rng.sample(range(n), n)
            halves = [order[: n // 2], order[n // 2 :]]
            groups = [
                (
                    half,
                    dict(
                        lr=rng.choice((0.01, 0.1)),
                        momentum=rng.choice((0.0, 0.5, 0.95)),
                        weight_decay=rng.choice((0.0, 0.1)),
                        nesterov=rng.random() < 0.5,
                        ns_steps=rng.choice((1, 3, 5)),
                        adjust_lr_fn=rng.choice((None, "match_rms_adamw")),
                    ),
                )
                for half in halves
                if half
            ]
            config = strategy.config(
                tp_dim_per_param={
                    at: dims[i] for at, i in enumerate(order) if dims[i] is not None
                },
                async_gpu_parallelism=rng.random() < 0.75,
                prefetch_count=rng.choice((0, 1, 2, 5)),
            )
            twins = Twins(cuts, config, groups, seed=rng.randint(0, 10**6))
            for step in range(3):
                missing = [i for i in range(n) if rng.random() < 0.2]
                twins.set_gradients(missing)
                with NewtonSchulzCalls() as calls, Collectives() as seen:
                    twins.optimizer.step()
                twins.single.step()
                message = f"MUON_TEST_SEED={seed} trial {trial} {strategy} step {step}"
                self.assertParity(twins, message)
                self.assertLessEqual(
                    {call.name for call in seen.calls}, {"alltoall_base_"}, message
                )
                total = sum(everyone(len(calls.shapes)))
                self.assertEqual(total, n - len(missing), message)

    # The three functions outside of step()

    def test_gather_then_redistribute_is_the_identity(self):
        for i, strategy in enumerate(strategies()):
            for how in ("balanced", "last")[: 1 + i % 2]:
                twins = strategy.twins(SHAPES[1:6:2], how)
                unused = strategy.config(**self.tp_dims(strategy))
                for config in (twins.config, unused):
                    with self.everywhere(f"{strategy} {how}"):
                        self.check_round_trip(config, twins.specs)
                twins.step()
                self.assertParity(twins, f"{strategy}")

    def tp_dims(self, strategy):
        dims = {i: d for i, d in enumerate(strategy.dims) if d is not None}
        return {"tp_dim_per_param": dims}

    def check_round_trip(self, config, cuts):
        for i, spec in enumerate(cuts):
            config.state["current_param_idx"] = i
            # The second time, it is known where the pieces are.
            for seed in (i, 50 + i):
                matrix = full(seed, spec.shape)
                piece = place(matrix, spec)
                whole = config.gather_fn(piece, self.rank, config.state)
                self.assertTrue(torch.equal(whole, matrix), f"{spec}")
                with Collectives() as seen:
                    # Its own piece of what it is given, whatever the others have.
                    given = whole + self.rank
                    mine = config.redistribute_fn(given, 0, config.state)
                    again = config.redistribute_fn(whole, 0, config.state)
                self.assertEqual(seen.calls, [])
                self.assertTrue(torch.equal(mine, place(given, spec)), f"{spec}")
                self.assertTrue(torch.equal(again, piece), f"{spec}")
        del config.state["current_param_idx"]

    def test_assign_fn_called_directly(self):
        for strategy in strategies():
            twins = strategy.twins()
            config = strategy.config(**self.tp_dims(strategy))
            assignments = config.assign_fn(twins.params, config.state)
            owned = sorted(i for own in assignments.values() for i in own)
            self.assertEqual(owned, list(range(len(twins.params))))
            self.assertEqual(assignments, twins.optimizer.assignments)
            self.assertEqual(everyone(assignments), [assignments] * 4)
            self.assertEqual(config.state["param_metadata"], {})

    def test_wrapped_functions_give_the_bits_of_the_engine(self):
        for strategy in strategies()[::2]:
            twins = strategy.twins()
            config, calls = twins.config, []
            built = config.gather_fn

            def gather(piece, rank, state):
                calls.append(state["current_param_idx"])
                return built(piece, rank, state)

            config.gather_fn = gather
            self.assertTrainsAlike(twins, 2, f"{strategy}")
            self.assertEqual(calls, list(range(len(twins.params))) * 2)

    # What a step computes and sends

    def test_each_matrix_is_orthogonalized_once(self):
        for strategy in strategies():
            twins = strategy.twins()
            for missing in ([], [1, 4]):
                twins.set_gradients(missing)
                with (
                    NewtonSchulzCalls() as calls,
                    FlopCounterMode(display=False) as counter,
                ):
                    twins.optimizer.step()
                expected = 0
                for i, spec in enumerate(twins.specs):
                    if i not in missing:
                        short, long = sorted(spec.shape)
                        expected += 5 * (2 * 2 * short * short * long + 2 * short**3)
                total = sum(everyone(counter.get_total_flops()))
                self.assertEqual(total, expected, f"{strategy}")
                total = sum(everyone(len(calls.shapes)))
                self.assertEqual(total, len(twins.specs) - len(missing))

    def test_work_is_balanced_over_all_ranks(self):
        for strategy in strategies():
            twins = strategy.twins([(24, 24)] * 4 + [(8, 8)] * 4)
            twins.set_gradients()
            with FlopCounterMode(display=False) as counter:
                twins.optimizer.step()
            flops = everyone(counter.get_total_flops())
            self.assertEqual(flops, [flops[0]] * 4, f"{strategy}")

    def test_bytes_sent_are_what_the_groups_need(self):
        for strategy in strategies():
            for how in ("chunk", "last"):
                twins = strategy.twins(how=how)
                twins.set_gradients()
                with Collectives() as seen:
                    twins.optimizer.step()
                mine = [0] * 4
                for call in seen.calls:
                    self.assertEqual(call.itemsize, 2)
                    for peer, elements in zip(call.ranks, call.sent):
                        mine[peer] += elements
                self.assertEqual(
                    everyone(mine),
                    self.expected_traffic(twins, strategy),
                    f"{strategy}",
                )

    def expected_traffic(self, twins, strategy):
        """Elements from each rank to each other one, from the cuts alone.

        What an owner lacks comes to it from its own replica, and each rank gets what it holds; a flag
        of each matrix travels with it, there and back.
        """
        owners = {i: r for r, own in twins.optimizer.assignments.items() for i in own}
        ours = [sorted(held(spec)) for spec in twins.specs]
        holdings = everyone(ours)
        replicas = everyone([strategy.replica(dim) for dim in strategy.dims])
        traffic = [[0] * 4 for _ in range(4)]
        for i, owner in owners.items():
            for rank in set(range(4)) - {owner}:
                traffic[rank][owner] += 1
                traffic[owner][rank] += 1 + len(holdings[rank][i])
                if replicas[rank][i] == replicas[owner][i]:
                    lacking = set(holdings[rank][i]) - set(holdings[owner][i])
                    traffic[rank][owner] += len(lacking)
        return traffic

    def test_two_collectives_a_bucket_whatever_gradients_are_missing(self):
        for strategy in strategies():
            twins = strategy.twins([(8, 8)] * 8)
            sequences = []
            for missing in ([], [0, 3], range(8)):
                twins.set_gradients(missing)
                with Collectives() as seen:
                    twins.optimizer.step()
                sequences.append(seen.calls)
                self.assertEqual(
                    set(seen.names()), {("alltoall_base_", (0, 1, 2, 3))}, f"{strategy}"
                )
                self.assertIn(len(seen.calls), (4, 6, 8))
                self.assertEqual(everyone(seen.names()), [seen.names()] * 4)
            self.assertEqual(sequences[1:], sequences[:1] * 2)

    def test_gradient_on_some_holders_only(self):
        for strategy in strategies():
            twins = strategy.twins([(8, 8)] * 3)
            twins.set_gradients()
            if self.rank == 2:
                twins.params[1].grad = None
            with self.everywhere(f"{strategy}"):
                with self.assertRaisesRegex(RuntimeError, "parameter 1 .*8, 8"):
                    twins.optimizer.step()

    # DTensors and hand-cut pieces of the same matrices

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
            dtensors = Twins(
                specs(strategy.mesh, [placements]), create_dtensor_config()
            )
            same = Twins(specs(strategy.mesh, [placements]), create_auto_config())
            for _ in range(3):
                for each in (twins, dtensors, same):
                    each.step()
            with self.everywhere(f"{strategy}"):
                for other in (dtensors, same):
                    self.assertEqual(
                        other.optimizer.assignments, twins.optimizer.assignments
                    )
                    for mine, its in zip(twins.params, other.params):
                        self.assertTrue(torch.equal(mine.detach(), local(its.detach())))

    def test_dtensors_beside_pieces(self):
        strategy = Strategy(grid_of(2, 2), "fsdp", "tp")
        cuts = [strategy.cut(shape, 1) for shape in ((8, 8), (7, 5))]
        placed = specs(strategy.mesh, [(S0, S1)], [(8, 6), (7, 9)])
        mixed = [cuts[0], placed[0], placed[1], cuts[1]]
        twins = Twins(mixed, strategy.config(tp_dim_per_param=1))
        self.assertTrainsAlike(twins)
        with Collectives() as seen, NewtonSchulzCalls() as calls:
            twins.set_gradients()
            twins.optimizer.step()
        self.assertEqual({call.ranks for call in seen.calls}, {(0, 1, 2, 3)})
        self.assertEqual(sum(everyone(len(calls.shapes))), 4)

    def test_replicas_of_a_dtensor_on_a_part_of_the_mesh(self):
        grid = grid_of(2, 2)
        for kind in ("ddp", "cp"):
            for placement in (S0, S1):
                config = create_auto_config(
                    **{f"{kind}_process_group": grid.get_group("a")}
                )
                twins = Twins(specs(grid["b"], [(placement,)]), config)
                with NewtonSchulzCalls() as calls:
                    twins.set_gradients()
                    twins.optimizer.step()
                twins.single.step()
                self.assertParity(twins)
                self.assertEqual(sum(everyone(len(calls.shapes))), len(SHAPES))
                self.assertTrainsAlike(twins)


@requires_gloo()
class TestMuonGroupsEightRanks(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 8

    def test_three_dimensions(self):
        for kinds, how in [
            (("fsdp", "tp", "ddp"), "chunk"),
            (("ddp", "fsdp", "tp"), "last"),
            (("tp", "cp", "fsdp"), "balanced"),
        ]:
            strategy = Strategy(grid_of(2, 2, 2), *kinds)
            twins = strategy.twins([(16, 8), (7, 13), (3, 5), (9, 9), (1, 8)], how)
            twins.set_gradients()
            twins.single.step()
            with NewtonSchulzCalls() as calls:
                twins.optimizer.step()
            self.assertParity(twins, f"{strategy} {how}")
            self.assertEqual(sum(everyone(len(calls.shapes))), 5)
            twins.step()
            self.assertParity(twins, f"{strategy} {how}")


if __name__ == "__main__":
    run_tests()
