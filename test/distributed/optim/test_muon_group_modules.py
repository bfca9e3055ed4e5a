# Owner(s): ["oncall: distributed"]
"""create_auto_config beside the framework's own modules, and what it says where they contradict it."""

import contextlib
import time
import warnings
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    detect_tp_dims_from_model,
    partition_parameters,
)
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_modules import (
    data_parallel,
    make_model,
    tensor_parallel,
)
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    local,
    mesh_of,
    NewtonSchulzCalls,
    ParityAssertions,
    place,
    R,
    S0,
    S1,
    Spec,
    Strategy,
    Twins,
)


def train(model, optimizer, step, data_rank=0, width=12):
    """One step of ``optimizer`` on data that ranks of one ``data_rank`` have alike."""
    model(full(100 * step + data_rank, (6, width))).pow(2).mean().backward()
    with NewtonSchulzCalls() as calls:
        optimizer.step()
    model.zero_grad()
    return len(calls.shapes)


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@requires_gloo()
class TestMuonDDP(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 2

    def check(self, config=None, micro_batches=1, **options):
        model = data_parallel(make_model(), **options)
        matrices, biases = partition_parameters(model)
        self.assertEqual((len(matrices), len(biases)), (4, 4))
        singles = [torch.nn.Parameter(p.detach().clone()) for p in matrices]
        optimizer = Muon(matrices, distributed_config=config, lr=0.1)
        single = Muon(singles, lr=0.1)
        for step in range(4):
            for batch in range(micro_batches):
                last = batch == micro_batches - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    x = full(100 * step + 10 * batch + self.rank, (6, 12))
                    model(x).pow(2).mean().backward()
            for param, other in zip(matrices, singles):
                other.grad = param.grad.clone()
            with NewtonSchulzCalls() as calls:
                optimizer.step()
            single.step()
            model.zero_grad()
            total = sum(everyone(len(calls.shapes)))
            self.assertEqual(total, 8 if config is None else 4)
            problems = [
                f"parameter {i}"
                for i, (param, other) in enumerate(zip(matrices, singles))
                if not torch.equal(param.detach(), other.detach())
                or not torch.equal(
                    optimizer.state[param]["momentum_buffer"],
                    single.state[other]["momentum_buffer"],
                )
            ]
            self.assertEverywhere(problems, f"step {step}")
        values = [p.tolist() for p in matrices]
        self.assertEqual(everyone(values), [values] * 2)

    def test_ddp_vs_single_device(self):
        with no_warnings():
            self.check(create_auto_config(ddp_process_group=dist.group.WORLD))
            self.check(create_auto_config(replicate_process_group=dist.group.WORLD))

    def test_ddp_with_gradients_in_its_buckets(self):
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        self.check(config, gradient_as_bucket_view=True)

    def test_ddp_with_accumulated_gradients(self):
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        self.check(config, micro_batches=3)

    def test_ddp_without_a_config_is_as_before(self):
        self.check(None)


@requires_gloo()
class TestMuon2DParallelism(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def check(self, wrap, config, data_rank=0):
        """A model under ``config`` stays equal to one under create_dtensor_config."""
        models = [wrap(make_model()) for _ in range(2)]
        matrices = [partition_parameters(model)[0] for model in models]
        with no_warnings():
            optimizers = [
                Muon(matrices[0], lr=0.1, distributed_config=config),
                Muon(matrices[1], lr=0.1, distributed_config=create_dtensor_config()),
            ]
        for step in range(3):
            counts = [
                train(model, optimizer, step, data_rank)
                for model, optimizer in zip(models, optimizers)
            ]
            self.assertEqual(sum(everyone(counts[0])), 4)
            problems = [
                f"parameter {i} {mine.placements}"
                for i, (mine, its) in enumerate(zip(*matrices))
                if not torch.equal(local(mine.detach()), local(its.detach()))
            ]
            self.assertEverywhere(problems, f"step {step}")
        return matrices[0], optimizers

    def test_tensor_parallel(self):
        config = create_auto_config(
            tp_process_group=dist.group.WORLD,
            tp_dim_per_param=detect_tp_dims_from_model(
                partition_parameters(tensor_parallel(make_model(), mesh_of(4)))[0]
            ),
        )
        matrices, optimizers = self.check(
            lambda model: tensor_parallel(model, mesh_of(4)), config
        )
        self.assertEqual([p.placements for p in matrices], [(S0,), (S1,)] * 2)
        self.assertEqual(config.state["tp_dim_per_param"], {0: 0, 1: 1, 2: 0, 3: 1})
        self.assertEqual(optimizers[0].assignments, optimizers[1].assignments)

    def test_fully_shard(self):
        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        self.check(lambda model: fully_shard(model, mesh=mesh_of(4)), config, self.rank)

    def test_hsdp(self):
        grid = grid_of(2, 2)
        config = create_auto_config(
            fsdp_process_group=grid.get_group("b"),
            ddp_process_group=grid.get_group("a"),
        )
        matrices, _ = self.check(
            lambda model: fully_shard(model, mesh=grid), config, self.rank
        )
        self.assertEqual(matrices[0].placements, (R, S0))

    def test_fsdp_plus_tp(self):
        grid = grid_of(2, 2)

        def wrap(model):
            tensor_parallel(model, grid["b"])
            return fully_shard(model, mesh=grid["a"])

        config = create_auto_config(
            fsdp_process_group=grid.get_group("a"),
            tp_process_group=grid.get_group("b"),
            tp_dim_per_param={0: 0, 1: 1, 2: 0, 3: 1},
        )
        matrices, _ = self.check(wrap, config, self.rank // 2)
        # The same matrices cut by hand stand in the same places.
        strategy = Strategy(grid, "fsdp", "tp")
        with self.everywhere():
            for i, param in enumerate(matrices):
                whole = param.full_tensor()
                piece = place(whole, strategy.cut(whole.shape, i % 2))
                self.assertTrue(torch.equal(local(param.detach()), piece))

    def test_modules_trained_with_their_groups_equal_pieces_cut_by_hand(self):
        grid = grid_of(2, 2)
        strategy = Strategy(grid, "fsdp", "tp")
        model = tensor_parallel(make_model(), grid["b"])
        fully_shard(model, mesh=grid["a"])
        matrices, _ = partition_parameters(model)
        dims = {0: 0, 1: 1, 2: 0, 3: 1}
        cuts = [strategy.cut(p.shape, dims[i]) for i, p in enumerate(matrices)]
        pieces = [torch.nn.Parameter(local(p.detach()).clone()) for p in matrices]
        optimizer = Muon(
            matrices, distributed_config=strategy.config(tp_dim_per_param=dims)
        )
        by_hand = Muon(
            pieces, distributed_config=strategy.config(tp_dim_per_param=dims)
        )
        for step in range(3):
            x = full(step + self.rank // 2, (6, 12))
            model(x).pow(2).mean().backward()
            for param, piece in zip(matrices, pieces):
                piece.grad = local(param.grad).clone()
            optimizer.step()
            by_hand.step()
            model.zero_grad()
            with self.everywhere(f"step {step}"):
                for param, piece, cut in zip(matrices, pieces, cuts):
                    self.assertTrue(torch.equal(local(param.detach()), piece.detach()))
                    whole = place(param.detach().full_tensor(), cut)
                    self.assertTrue(torch.equal(whole, piece.detach()))

    def test_part_of_a_mesh_with_a_group_for_the_rest(self):
        grid = grid_of(2, 2)
        for kind in ("cp", "ddp"):
            config = create_auto_config(
                fsdp_process_group=grid.get_group("b"),
                **{f"{kind}_process_group": grid.get_group("a")},
            )
            # Data differ along "b", and are the same along "a".
            _, optimizers = self.check(
                lambda model: fully_shard(model, mesh=grid["b"]), config, self.rank % 2
            )
            mine, its = (o.assignments for o in optimizers)
            self.assertEqual(sorted(mine), [0, 1, 2, 3])
            self.assertEqual(len(its), 2)

    # Warnings

    def build(self, placements, mesh, **options):
        spec = Spec((8, 8), mesh, placements)
        param = torch.nn.Parameter(place(full(0, (8, 8)), spec))
        return Muon([("w0", param)], distributed_config=create_auto_config(**options))

    def check_warning(self, pattern, *placed, **options):
        self.assertWarnsOnce(pattern, lambda: self.build(*placed, **options))

    def test_one_warning_for_all_parameters(self):
        mesh, group = mesh_of(4), dist.group.WORLD
        params = [
            (
                f"w{i}",
                torch.nn.Parameter(place(full(i, (8, 8)), Spec((8, 8), mesh, (S0,)))),
            )
            for i in range(12)
        ]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            config = create_auto_config(tp_process_group=group, tp_dim_per_param=1)
            Muon(params, distributed_config=config)
        counts = everyone(len(warned))
        self.assertEqual(counts, [1, 0, 0, 0])
        if self.rank == 0:
            self.assertRegex(str(warned[0].message), "parameter 0 'w0'.* and 4 more: ")

    def test_tp_dim_that_contradicts_a_dtensor(self):
        group = dist.group.WORLD
        for placement, dim, pattern in [
            (S0, 1, r"parameter 0 'w0'.*dimension 1.*(S\(0\)|Shard\(dim=0\))"),
            (S1, 0, r"parameter 0 'w0'.*dimension 0.*(S\(1\)|Shard\(dim=1\))"),
            (S1, {}, r"parameter 0 'w0'.*does not cut.*(S\(1\)|Shard\(dim=1\))"),
            (R, -1, r"parameter 0 'w0'.*dimension -1.* (R|Replicate\(\))\."),
        ]:
            self.check_warning(
                pattern,
                (placement,),
                mesh_of(4),
                tp_process_group=group,
                tp_dim_per_param=dim,
            )
        with no_warnings():
            self.build((S1,), mesh_of(4), tp_process_group=group, tp_dim_per_param=-1)
            self.build((R,), mesh_of(4), tp_process_group=group, tp_dim_per_param={})

    def test_group_that_contradicts_a_dtensor(self):
        grid = grid_of(2, 2)
        ranks = sorted(grid["a"].mesh.tolist())
        words = ", ".join(map(str, ranks))
        for kind in ("fsdp", "tp"):
            self.check_warning(
                rf"parameter 0 'w0'.*{kind}_process_group.*\[{words}\].*(S\(0\)|Shard\(dim=0\))",
                (S0,),
                mesh_of(4),
                tp_dim_per_param=0,
                **{f"{kind}_process_group": grid.get_group("a")},
            )
        self.check_warning(
            r"parameter 0 'w0'.*fsdp_process_group.* (R|Replicate\(\))\.",
            (R,),
            mesh_of(4),
            fsdp_process_group=dist.group.WORLD,
        )

    def test_replicate_group_that_contradicts_a_dtensor(self):
        grid = grid_of(2, 2)
        self.check_warning(
            r"parameter 0 'w0'.*ddp_process_group.*(S\(0\)|Shard\(dim=0\))",
            (S0,),
            mesh_of(4),
            ddp_process_group=grid.get_group("a"),
        )

    def test_warned_or_not_the_dtensor_is_believed(self):
        grid = grid_of(2, 2)
        for options in (
            dict(tp_process_group=dist.group.WORLD, tp_dim_per_param=1),
            dict(fsdp_process_group=grid.get_group("b")),
            dict(ddp_process_group=grid.get_group("a")),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                placed = [Spec(s, mesh_of(4), (S0,)) for s in ((8, 8), (7, 5), (3, 9))]
                twins = Twins(placed, create_auto_config(**options))
            self.assertTrainsAlike(twins, message=f"{options}")

    def marked(self, mark, dims, **options):
        strategy = Strategy(mesh_of(4), "tp")
        cuts = [strategy.cut((8, 12), dim) for dim in dims]
        params = []
        for i, cut in enumerate(cuts):
            param = torch.nn.Parameter(place(full(i, cut.shape), cut))
            setattr(param, mark, -1 if dims[i] is None else dims[i])
            params.append((f"w{i}", param))
        config = strategy.config(**options)
        optimizer = Muon(params, distributed_config=config)
        singles = [torch.nn.Parameter(full(i, cut.shape)) for i, cut in enumerate(cuts)]
        for i, (single, (_, param), cut) in enumerate(zip(singles, params, cuts)):
            single.grad = full(50 + i, cut.shape)
            param.grad = place(single.grad, cut)
        optimizer.step()
        Muon(singles).step()
        with self.everywhere(f"{mark} {dims} {options}"):
            for single, (_, param), cut in zip(singles, params, cuts):
                expected = place(single.detach(), cut)
                self.assertTrue(torch.equal(param.detach(), expected))

    def test_marks_say_the_tp_dim_where_nothing_else_does(self):
        with no_warnings():
            for mark in ("tp_dim", "partition_dim"):
                self.marked(mark, [0, 1, None])
                self.marked(mark, [0, 1, None], tp_dim_per_param={0: 0, 1: -1})

    def test_mark_that_contradicts_tp_dim_per_param(self):
        for mark in ("tp_dim", "partition_dim"):
            for given, pattern in [
                ({0: 0}, r"parameter 1 'w1'.*does not cut.*1"),
                ({0: 0, 1: 1, 2: 0}, r"parameter 2 'w2'.*dimension 0.*-1"),
                (1, r"parameter 0 'w0'.*dimension 1.*0"),
            ]:
                # Each piece has a second dimension that would do.
                strategy = Strategy(mesh_of(4), "tp")
                params = []
                for i, dim in enumerate((0, 1, -1)):
                    param = torch.nn.Parameter(full(i, (8, 8)))
                    setattr(param, mark, dim)
                    params.append((f"w{i}", param))
                config = strategy.config(tp_dim_per_param=given)
                self.assertWarnsOnce(
                    pattern, lambda: Muon(params, distributed_config=config)
                )


@requires_gloo()
class TestMuonGroupErrors(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def outcome(self, build):
        start = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                build()
            found = None
        except Exception as error:
            found = type(error).__name__, str(error)
        return found, time.monotonic() - start

    def assertRaisesEverywhere(self, build, kind, pattern, ranks=range(4)):
        """``build`` raises on all of ``ranks`` before long, and what comes after it works."""
        outcomes = everyone(self.outcome(build))
        for rank, (outcome, seconds) in enumerate(outcomes):
            self.assertLess(seconds, 20, f"rank {rank} of {outcomes}")
            if rank not in ranks:
                self.assertIsNone(outcome, f"rank {rank} of {outcomes}")
                continue
            self.assertIsNotNone(outcome, f"rank {rank} of {outcomes}")
            self.assertEqual(outcome[0], kind.__name__, f"rank {rank}: {outcome}")
            self.assertRegex(outcome[1], pattern)
        for kinds in (("ddp", "fsdp"), ("fsdp", "tp")):
            twins = Strategy(grid_of(2, 2), *kinds).twins([(8, 8), (7, 5), (3, 9)])
            self.assertTrainsAlike(twins, 1)

    def build(self, config, shapes=((8, 8), (8, 8)), dtypes=(), names="01", rank=None):
        """``names`` are in this rank's order."""
        params = []
        for i, name in enumerate(names[: len(shapes)]):
            tensor = torch.ones(shapes[i], dtype=dict(enumerate(dtypes)).get(i))
            params.append((f"w{name}", torch.nn.Parameter(tensor)))
        before = [p.detach().clone() for _, p in params]
        try:
            return Muon(params, distributed_config=config)
        finally:
            for (_, param), value in zip(params, before):
                self.assertTrue(torch.equal(param.detach(), value))

    def strategies(self):
        grid = grid_of(2, 2)
        return [
            Strategy(grid_of(4), "fsdp"),
            Strategy(grid_of(4), "ddp"),
            Strategy(grid_of(4), "cp"),
            Strategy(grid, "ddp", "fsdp"),
            Strategy(grid, "fsdp", "cp"),
        ]

    # What one rank has

    def test_tp_dim_out_of_range(self):
        tp = Strategy(grid_of(4), "tp")
        for dim in (2, -3):
            for given in (dim, {1: dim}):
                self.assertRaisesEverywhere(
                    lambda: self.build(tp.config(tp_dim_per_param=given)),
                    IndexError,
                    rf"dimension {dim}.*parameter [01].*\(8, 8\)",
                )
            one = {1: dim} if self.rank == 2 else {}
            self.assertRaisesEverywhere(
                lambda: self.build(tp.config(tp_dim_per_param=one)),
                IndexError,
                rf"dimension {dim}.*parameter 1.*\(8, 8\)",
            )

    def test_wrong_tp_dim_raises(self):
        for group in (None, dist.group.WORLD):
            config = create_auto_config(tp_process_group=group, tp_dim_per_param={0: 3})
            with self.everywhere():
                with self.assertRaises(IndexError):
                    config.gather_fn(torch.ones(10, 20), 0, config.state)
                with self.assertRaises(IndexError):
                    config.redistribute_fn(torch.ones(10, 20), 0, config.state)

    def test_tp_dim_that_does_not_fit_the_pieces(self):
        tp = Strategy(grid_of(4), "tp")
        shapes = [(8, 8), (1 + self.rank, 6)]
        self.assertRaisesEverywhere(
            lambda: self.build(tp.config(tp_dim_per_param={0: 0, 1: 1}), shapes),
            ValueError,
            r"parameter 1 'w1'.*tp_process_group.*dimension 1.*differ in dimension 0",
        )

    def test_replicas_that_are_not_of_one_shape(self):
        for kind in ("ddp", "cp"):
            strategy = Strategy(grid_of(4), kind)
            shapes = [(8, 8), (7, 6 if self.rank == 2 else 5)]
            self.assertRaisesEverywhere(
                lambda: self.build(strategy.config(), shapes),
                ValueError,
                rf"parameter 1 'w1'.*{kind}_process_group.*shapes.*\(7, 6\)",
            )

    def test_rows_of_different_lengths(self):
        shapes = [(8, 8), (7, 6 if self.rank == 1 else 5)]
        self.assertRaisesEverywhere(
            lambda: self.build(Strategy(grid_of(4), "fsdp").config(), shapes),
            ValueError,
            r"parameter 1 'w1'.*fsdp_process_group.*differ in dimension 1",
        )

    def test_tp_group_without_tp_dims(self):
        self.assertRaisesEverywhere(
            lambda: self.build(Strategy(grid_of(4), "tp").config()),
            ValueError,
            "parameter 0 'w0'.*tp_dim_per_param",
        )

    def test_indices_that_do_not_exist(self):
        ddp, tp = Strategy(grid_of(4), "ddp"), Strategy(grid_of(4), "tp")
        for ranks in (range(4), [3]):
            wrong = {2: 0} if self.rank in ranks else {}
            for config, name in [
                (lambda: tp.config(tp_dim_per_param=wrong), "tp_dim_per_param"),
                (lambda: ddp.config(expert_assignments=wrong), "expert_assignments"),
            ]:
                self.assertRaisesEverywhere(
                    lambda: self.build(config()), ValueError, rf"{name}.*\[2\].*0 to 1"
                )

    def test_experts_without_their_numbers(self):
        with self.assertRaisesRegex(ValueError, "expert_assignments"):
            create_auto_config(ep_process_group=dist.group.WORLD)

    def test_one_rank_with_a_parameter_that_is_no_matrix(self):
        for strategy in self.strategies():
            shapes = [(8, 8), (4, 4, 4) if self.rank == 3 else (8, 8)]
            self.assertRaisesEverywhere(
                lambda: self.build(strategy.config(), shapes),
                ValueError,
                r"only supports 2D parameters.*\[4, 4, 4\]",
            )

    def test_pieces_of_one_rank_that_do_not_tile_the_matrix(self):
        def check(layout):
            raise ValueError(f"{layout.describe()} is not tiled")

        for strategy in self.strategies():

            def build():
                with contextlib.ExitStack() as stack:
                    if self.rank == 2:
                        name = "torch.optim._muon_engine.layouts.merge.check_cover"
                        stack.enter_context(mock.patch(name, check))
                    self.build(strategy.config())

            self.assertRaisesEverywhere(build, ValueError, "0 'w0'.*is not tiled")

    # Ranks that disagree

    def test_different_dtypes(self):
        for strategy in self.strategies():
            dtypes = [None, torch.bfloat16 if self.rank == 1 else None]
            self.assertRaisesEverywhere(
                lambda: self.build(strategy.config(), dtypes=dtypes),
                ValueError,
                r"'w1'.*dtype is torch.\w+ on rank \d and torch.\w+ on rank \d",
            )

    def test_different_order(self):
        for strategy in self.strategies():
            names = "10" if self.rank == 1 else "01"
            self.assertRaisesEverywhere(
                lambda: self.build(strategy.config(), names=names),
                ValueError,
                r"ranks disagree.*name is w\d on rank \d and w\d on rank \d",
            )

    def test_different_numbers(self):
        for strategy in self.strategies():
            shapes = [(8, 8)] * (1 if self.rank == 2 else 2)
            self.assertRaisesEverywhere(
                lambda: self.build(strategy.config(), shapes),
                ValueError,
                r"ranks disagree about the number.*[12] on rank \d and [12] on rank \d",
            )

    def test_different_tp_dims(self):
        tp = Strategy(grid_of(4), "tp")
        for here, there in [(0, 1), ({}, 1)]:
            dim = there if self.rank == 3 else here
            self.assertRaisesEverywhere(
                lambda: self.build(tp.config(tp_dim_per_param=dim)),
                ValueError,
                "ranks disagree about parameter 0 'w0'.*dimension.*rank 0.*rank 3",
            )

    def test_different_options(self):
        for strategy in self.strategies():
            config = strategy.config(prefetch_count=1 + (self.rank == 3))
            self.assertRaisesEverywhere(
                lambda: self.build(config),
                ValueError,
                "prefetch_count is 1.*2 on rank 3",
            )

    # Groups that contradict each other

    def test_fsdp_over_all_ranks_with_replicas_among_them(self):
        grid = grid_of(2, 2)
        for name in "ab":
            config = create_auto_config(
                fsdp_process_group=dist.group.WORLD,
                ddp_process_group=grid.get_group(name),
            )
            self.assertRaisesEverywhere(
                lambda: self.build(config), ValueError, "groups contradict each other"
            )

    def test_two_kinds_over_the_same_ranks(self):
        group = grid_of(2, 2).get_group("b")
        for kinds in (("tp", "ddp"), ("fsdp", "tp"), ("fsdp", "ddp")):
            groups = {f"{kind}_process_group": group for kind in kinds}
            config = create_auto_config(**groups, tp_dim_per_param=0)
            self.assertRaisesEverywhere(
                lambda: self.build(config), ValueError, "groups contradict each other"
            )

    def test_replicate_group_on_some_ranks_only(self):
        grid = grid_of(2, 2)
        # Both members of one pair of replicas have no group.
        config = create_auto_config(
            fsdp_process_group=grid.get_group("b"),
            ddp_process_group=grid.get_group("a") if self.rank % 2 else None,
        )
        self.assertRaisesEverywhere(
            lambda: self.build(config), ValueError, "groups contradict each other"
        )

    def test_shard_group_on_some_ranks_only(self):
        grid = grid_of(2, 2)
        config = create_auto_config(
            fsdp_process_group=grid.get_group("b") if self.rank < 2 else None,
            ddp_process_group=grid.get_group("a"),
        )
        self.assertRaisesEverywhere(
            lambda: self.build(config), ValueError, "shapes|contradict"
        )

    def test_group_on_one_rank_too_few(self):
        # Nothing but its own silence tells the others.
        pairs = [
            dist.new_group(pair, timeout=timedelta(seconds=3))
            for pair in ([0, 1], [2, 3])
        ]
        own = pairs[self.rank // 2]
        config = create_auto_config(ddp_process_group=own if self.rank else None)
        outcome, seconds = self.outcome(lambda: self.build(config))
        self.assertLess(max(everyone(seconds)), 30)
        found = [kind[0] if kind else None for kind in everyone(outcome)]
        self.assertEqual(found, [None, "RuntimeError", None, None])


if __name__ == "__main__":
    run_tests()
