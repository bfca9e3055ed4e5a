# Owner(s): ["oncall: distributed"]
"""create_auto_config with matrices that were cut by hand, and with DTensors; what it warns of and refuses."""

import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
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
    grid_of,
    local,
    mesh_of,
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
PAIRS = (("fsdp", "tp"), ("ddp", "fsdp"), ("tp", "cp"))


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

    # Parity

    def check(self, strategy, how, **options):
        twins = strategy.twins(how=how, **options)
        self.assertTrainsAlike(twins, 2, f"{strategy} {how} {options}")
        ranks = sorted(strategy.mesh.mesh.flatten().tolist())
        assignments = twins.optimizer.assignments
        self.assertEqual(sorted(assignments), ranks)
        self.assertEqual(everyone(assignments), [assignments] * 4)

    def test_tp_vs_single_device(self):
        # The dimensions of TP are 0, 1, -1, -2, and none.
        for kind in ("tp", "fsdp"):
            for how in HOWS:
                self.check(Strategy(grid_of(4), kind), how)

    def test_ddp_vs_single_device(self):
        self.check(Strategy(grid_of(4), "ddp"), "chunk")

    def test_cp_vs_single_device(self):
        self.check(Strategy(grid_of(4), "cp"), "chunk")

    def test_combinations_vs_single_device(self):
        # Swapped pairs would only permute the mesh.
        for kinds, how in zip(PAIRS, HOWS, strict=True):
            self.check(Strategy(grid_of(2, 2), *kinds), how)

    def test_tp_cuts_first_and_fsdp_the_rows_of_its_piece(self):
        grid = grid_of(2, 2)
        fsdp, tp = grid.get_coordinate()
        # A TP piece is rows 0 to 3 or 4 to 7. FSDP takes its first or its last two.
        rows = slice(4 * tp + 2 * fsdp, 4 * tp + 2 * fsdp + 2)
        config = Strategy(grid, "fsdp", "tp").config(tp_dim_per_param=0)
        single = nn.Parameter(full(0, (8, 3)))
        param = nn.Parameter(single.detach()[rows].clone())
        optimizer = Muon([param], distributed_config=config)
        whole = config.gather_fn(param.detach(), 0, config.state)
        self.assertTrue(torch.equal(whole, single.detach()))
        single.grad = full(1, (8, 3))
        param.grad = single.grad[rows].clone()
        optimizer.step()
        Muon([single]).step()
        self.assertTrue(torch.equal(param.detach(), single.detach()[rows]))

    def test_cp_within_the_ranks_that_fsdp_shards_over(self):
        for name in "ab":
            config = create_auto_config(
                fsdp_process_group=dist.group.WORLD,
                cp_process_group=grid_of(2, 2).get_group(name),
            )
            strategy = Strategy(grid_of(4), "fsdp")
            self.check_once(Twins([strategy.cut(s) for s in SHAPES], config))

    # The three functions outside of step()

    def test_gather_then_redistribute_is_the_identity(self):
        for kinds, how in zip(PAIRS, HOWS, strict=True):
            strategy = Strategy(grid_of(2, 2), *kinds)
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


@requires_gloo()
class TestMuonGroupWarnings(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    """The placements of a DTensor count. Groups and dimensions that contradict them are a warning."""

    world_size = 4

    def test_one_warning_for_all_parameters(self):
        placed = specs(mesh_of(4), [(S0,)], [(8, 8)] * 12)
        config = Strategy(mesh_of(4), "tp").config(tp_dim_per_param=1)
        pattern = "parameter 0 .* and 4 more: "
        self.assertWarnsOnce(pattern, lambda: Twins(placed, config))

    def test_groups_that_contradict_a_dtensor(self):
        world, half = dist.group.WORLD, grid_of(2, 2).get_group("a")
        words = ", ".join(map(str, dist.get_process_group_ranks(half)))
        rows, columns = r"(S\(0\)|Shard\(dim=0\))", r"(S\(1\)|Shard\(dim=1\))"
        whole = r"(R|Replicate\(\))\."
        for placement, pattern, kind, group, dim in (
            (S0, f"dimension 1.*{rows}", "tp", world, 1),
            (S1, f"dimension 0.*{columns}", "tp", world, 0),
            (S1, f"tp.*{columns}", "tp", world, {}),
            (R, f"dimension -1.* {whole}", "tp", world, -1),
            (S0, rf"tp.*\[{words}\].*{rows}", "tp", half, 0),
            (S0, rf"fsdp.*\[{words}\].*{rows}", "fsdp", half, {}),
            (R, f"fsdp.* {whole}", "fsdp", world, {}),
            (S0, f"ddp.*{rows}", "ddp", half, {}),
        ):
            options = {f"{kind}_process_group": group, "tp_dim_per_param": dim}
            twins = []
            placed = specs(mesh_of(4), [(placement,)], [(8, 8), (7, 5)])
            self.assertWarnsOnce(
                f"parameter 0 .*{pattern}",
                lambda: twins.append(Twins(placed, create_auto_config(**options))),
            )
            # The DTensor counts.
            self.assertTrainsAlike(twins[0], 1, pattern)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for placement, dim in ((S1, -1), (R, {})):
                placed = specs(mesh_of(4), [(placement,)], [(8, 8)])
                config = Strategy(mesh_of(4), "tp").config(tp_dim_per_param=dim)
                Twins(placed, config)

    def test_marks_say_the_tp_dim_if_the_user_does_not(self):
        strategy, dims = Strategy(mesh_of(4), "tp"), (0, 1, None)
        for mark in ("tp_dim", "partition_dim"):
            twins = Twins(
                [strategy.cut((8, 12), d) for d in dims],
                strategy.config(tp_dim_per_param={0: 0, 1: 1}),
            )
            for param, dim in zip(twins.params, dims):
                setattr(param, mark, -1 if dim is None else dim)
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                config = strategy.config()
                twins.optimizer = Muon(twins.params, distributed_config=config)
            self.assertTrainsAlike(twins, 1, mark)


@requires_gloo()
class TestMuonGroupErrors(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def assertRefused(
        self,
        pattern,
        config,
        shapes=((8, 8), (8, 8)),
        error=ValueError,
        ranks=None,
        **of,
    ):
        """Muon for parameters of ``shapes``. ``of`` may give dtypes, and names in this rank's order."""
        tensors = [
            torch.ones(shape, dtype=dtype)
            for shape, dtype in zip(shapes, of.get("dtypes", (None, None)))
        ]
        params = list(zip(of.get("names", ("w0", "w1")), map(nn.Parameter, tensors)))
        self.assertRaisesEverywhere(
            lambda: Muon(params, distributed_config=config), error, pattern, ranks
        )
        self.assertTrue(all((tensor == 1).all() for tensor in tensors))

    # Mistakes of one rank or of all

    def test_tp_dims(self):
        tp = Strategy(grid_of(4), "tp")
        for dim, given in ((2, 2), (-3, {1: -3} if self.rank == 2 else {})):
            self.assertRefused(
                rf"dimension {dim}.*parameter [01].*\(8, 8\)",
                tp.config(tp_dim_per_param=given),
                error=IndexError,
            )
        self.assertRefused("parameter 0 'w0'.*tp_dim_per_param", tp.config())
        for here, there in [(0, 1), ({}, 1)]:
            config = tp.config(tp_dim_per_param=there if self.rank == 3 else here)
            self.assertRefused("parameter 0 'w0'.*contradict.*[Rr]ank 3", config)

    def test_indices_that_do_not_exist(self):
        wrong = {2: 0} if self.rank == 3 else {}
        for kind, name in (("tp", "tp_dim_per_param"), ("ddp", "expert_assignments")):
            config = Strategy(grid_of(4), kind).config(**{name: wrong})
            self.assertRefused(rf"{name}.*\[2\].*0 to 1", config)

    def test_pieces_that_do_not_fit_together(self):
        other = {rank: (7, 6 if self.rank == rank else 5) for rank in (1, 2)}
        joined = "tp_process_group.*dimension 1.*differ in dimension 0"
        for kind, dims, shape, pattern in (
            ("tp", {0: 0, 1: 1}, (1 + self.rank, 6), joined),
            ("fsdp", {}, other[1], "fsdp_process_group.*differ in dimension 1"),
            ("ddp", {}, other[2], r"ddp_process_group.*shapes.*\(7, 6\)"),
        ):
            config = Strategy(grid_of(4), kind).config(tp_dim_per_param=dims)
            pattern = f"parameter 1 'w1'.*{pattern}"
            self.assertRefused(pattern, config, [(8, 8), shape])

    # Ranks that disagree

    def test_ranks_that_disagree(self):
        config = Strategy(grid_of(2, 2), "ddp", "fsdp").config()
        self.assertRefused(
            r"'w1'.*dtype is torch.\w+ on rank \d and torch.\w+ on rank \d",
            config,
            dtypes=[None, torch.bfloat16 if self.rank == 1 else None],
        )
        self.assertRefused(
            r"ranks disagree.*name is w\d on rank \d and w\d on rank \d",
            config,
            names=("w1", "w0") if self.rank == 1 else ("w0", "w1"),
        )
        self.assertRefused(
            r"only supports 2D parameters.*\[4, 4, 4\]",
            config,
            [(8, 8), (4, 4, 4) if self.rank == 3 else (8, 8)],
        )
        for kinds, few in ((("ddp", "fsdp"), [2]), (("fsdp", "cp"), [0, 1, 2])):
            self.assertRefused(
                "ranks disagree about the number",
                Strategy(grid_of(2, 2), *kinds).config(),
                [(8, 8)] * (1 if self.rank in few else 2),
            )

    def test_groups_that_contradict_each_other(self):
        grid = grid_of(2, 2)
        all_ranks, a, b = dist.group.WORLD, grid.get_group("a"), grid.get_group("b")
        for groups in (
            {"fsdp": all_ranks, "ddp": a},
            {"tp": b, "ddp": b},
            {"fsdp": b, "tp": b},
            # Both members of one pair of replicas have no group.
            {"fsdp": b, "ddp": a if self.rank % 2 else None},
            {"fsdp": b if self.rank < 2 else None, "ddp": a},
        ):
            options = {f"{kind}_process_group": group for kind, group in groups.items()}
            config = create_auto_config(**options, tp_dim_per_param=0)
            self.assertRefused("contradict|shapes", config)

    def test_group_on_one_rank_too_few(self):
        # The other rank of the pair can only notice that rank 0 does not come.
        short = timedelta(seconds=2)
        pairs = [dist.new_group(pair, timeout=short) for pair in ([0, 1], [2, 3])]
        own = pairs[self.rank // 2] if self.rank else None
        self.assertRefused(
            r"could not reach ranks \[0\]",
            create_auto_config(ddp_process_group=own),
            error=RuntimeError,
            ranks=[1],
        )


if __name__ == "__main__":
    run_tests()
