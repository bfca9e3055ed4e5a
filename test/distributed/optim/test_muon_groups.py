# Owner(s): ["oncall: distributed"]
"""create_auto_config with matrices that were cut by hand, DTensors, experts and stages; its warnings and errors."""

from datetime import timedelta
from functools import partial
from itertools import product
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Muon
from torch.optim._muon_engine.layouts import exchange
from torch.optim.muon import (
    create_auto_config,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_config import NewtonSchulzCalls
from torch.testing._internal.distributed._muon.common_groups import Strategy
from torch.testing._internal.distributed._muon.common_muon import (
    Cut,
    everyone,
    full,
    grid_of,
    mesh_of,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


HOWS = ("chunk", "balanced", "last")


PAIRS = (("fsdp", "tp"), ("ddp", "fsdp"), ("tp", "cp"))


# Matrices that all ranks share, and those of each expert.
DENSE = [(8, 8), (7, 5), (3, 9)]


EXPERT = [(6, 4), (4, 6), (5, 5)]


class GroupParity(common_muon.OnCPU):
    def check(self, twins, total=None, message=""):
        """``twins`` train, and each matrix is orthogonalized once. Returns the collectives.

        ``total`` is how many matrices all ranks have together; as many as this one by default.
        """
        with NewtonSchulzCalls() as calls, Recorder() as seen:
            self.assertTrainsAlike(twins, 2, message)
        count = len(twins.params)
        # This process also runs the single one.
        found = sum(everyone(len(calls.shapes) - 2 * count))
        self.assertEqual(found, 2 * (count if total is None else total), message)
        return seen


class TestMuonGroups(GroupParity):
    def test_tp_vs_single_device(self):
        # The dimensions of TP are 0, 1, -1, -2, and none.
        for how in HOWS:
            with self.subTest(how=how):
                self.check(Strategy(grid_of(4), "tp").twins(how=how), message=how)

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

    def test_inside_of_another_default_device(self):
        twins = Twins(specs(mesh_of(4), [(S0,), (R,)], [(8, 8)]))
        twins.set_gradients()
        with torch.device("meta"):
            config = create_auto_config()
            twins.optimizer = Muon(twins.params, distributed_config=config)
            twins.optimizer.step()
        twins.single.step()
        self.assertParity(twins)

    def test_materialized_after_the_optimizer_was_built(self):
        """to_empty() makes other parameters. The step said "Cannot copy out of meta tensor"."""
        model = nn.Linear(4, 4, bias=False, device="meta")
        config = Strategy(grid_of(4), "ddp").config()
        optimizer = Muon(model.named_parameters(), distributed_config=config)
        model.to_empty(device="cpu")
        model.weight.grad = torch.ones(4, 4)
        pattern = "'weight'.*Build Muon after"
        self.assertRaisesEverywhere(optimizer.step, RuntimeError, pattern)

    def test_ranks_tell_each_other_each_kind_of_matrix_once(self):
        sizes = []
        for count in (4, 64):
            with Recorder() as seen:
                Strategy(grid_of(4), "fsdp").twins([(8, 8)] * count)
            sizes.append(sum(call.nbytes for call in seen.calls))
        # A few bytes for each matrix more. The shards of each would take hundreds.
        self.assertLess((sizes[1] - sizes[0]) / 60, 50, f"{sizes}")

    def test_forgotten_dimension(self):
        """Each rank of TP got the update of the owner's half, without a word."""
        strategy = Strategy(grid_of(2, 2), "fsdp", "tp")
        with self.assertWarnsOnce("different values, but tp_dim_per_param"):
            config = strategy.config(tp_dim_per_param={})
            Muon(
                [nn.Parameter(torch.full((3, 4), 1.0 + self.rank))],
                distributed_config=config,
            )

    def test_ddp_vs_single_device(self):
        self.check(Strategy(grid_of(4), "ddp").twins())

    def test_cp_vs_single_device(self):
        self.check(Strategy(grid_of(4), "cp").twins())
        config = create_auto_config(
            fsdp_process_group=dist.group.WORLD,
            cp_process_group=grid_of(2, 2).get_group("a"),
        )
        strategy = Strategy(grid_of(4), "fsdp")
        self.check(Twins([strategy.cut(s) for s in common_muon.SHAPES], config))

    def test_combinations_vs_single_device(self):
        swapped = DeviceMesh(common_muon.device().type, [[0, 3], [1, 2]])
        for kinds, how in zip([*PAIRS, ("fsdp",)], [*HOWS, "last"], strict=True):
            with self.subTest(kinds=kinds, how=how):
                mesh = grid_of(2, 2) if len(kinds) == 2 else grid_of(4)
                mesh = swapped if "ddp" in kinds else mesh
                twins = Strategy(mesh, *kinds).twins(how=how)
                self.check(twins, message=f"{kinds} {how}")
                assignments = twins.optimizer.assignments
                self.assertEqual(everyone(assignments), [assignments] * 4)

    def test_combinations_on_an_accelerator(self):
        """Regions of one parameter group go into one call there, and a batch has gaps where gradients are missing."""
        for kinds in PAIRS:
            with self.subTest(kinds=kinds):
                twins = Strategy(grid_of(2, 2), *kinds).twins()
                twins.step()
                common_muon.as_on_an_accelerator(twins.optimizer)
                for group in twins.optimizer.param_groups:
                    group["foreach"] = False
                self.assertTrainsAlike(twins, 2, f"{kinds}")
                count = len(twins.params)
                every = range(count)
                missing = every[::2], every[1:], every
                self.assertTrainsAlike(
                    twins, 3, f"{kinds}", missing=lambda step: missing[step]
                )

    def test_replicas_of_a_dtensor_on_a_part_of_the_mesh(self):
        grid = grid_of(2, 2)
        for kind, placement in (("ddp", S0), ("cp", S1)):
            with self.subTest(kind=kind, placement=placement):
                config = Strategy(grid["a"], kind).config()
                self.check(Twins(specs(grid["b"], [(placement,)]), config))

    def test_groups_that_contradict_a_dtensor(self):
        """The placements of a DTensor count. The contradiction is a warning."""
        world, half = dist.group.WORLD, grid_of(2, 2).get_group("a")
        words = ", ".join(map(str, dist.get_process_group_ranks(half)))
        rows, columns = r"(S\(0\)|Shard\(dim=0\))", r"(S\(1\)|Shard\(dim=1\))"
        whole = r"(R|Replicate\(\))\."
        for placement, pattern, kind, group, dim in (
            (S0, f"dimension 1.*{rows}", "tp", world, 1),
            (S1, f"dimension 0.*{columns}", "tp", world, 0),
            (R, f"dimension -1.* {whole}", "tp", world, -1),
            (S0, rf"tp.*\[{words}\].*{rows}", "tp", half, 0),
            (S0, rf"fsdp.*\[{words}\].*{rows}", "fsdp", half, {}),
            (R, f"fsdp.* {whole}", "fsdp", world, {}),
            (S0, f"ddp.*{rows}", "ddp", half, {}),
        ):
            with self.subTest(placement=placement, kind=kind, group=group, dim=dim):
                options = {f"{kind}_process_group": group, "tp_dim_per_param": dim}
                placed = specs(mesh_of(4), [(placement,)], [(8, 8), (7, 5)])
                # The first rank of each group says it.
                ranks = (0, 1) if group is half else (0,)
                with self.assertWarnsOnce(f"parameter 0 .*{pattern}", ranks):
                    twins = Twins(placed, create_auto_config(**options))
                self.assertTrainsAlike(twins, 1, pattern)
        tp = Strategy(mesh_of(4), "tp")
        with self.assertWarnsOnce():
            # A dict that lacks a DTensor says nothing about it.
            for placement, dim in ((S1, -1), (R, {}), (S1, {})):
                placed = specs(mesh_of(4), [(placement,)], [(8, 8)])
                Twins(placed, tp.config(tp_dim_per_param=dim))

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

    def assertRefused(
        self, pattern, config, shapes=((8, 8), (8, 8)), names=("w0", "w1"), **raised
    ):
        """Muon for parameters of ``shapes``, with ``names`` in this rank's order."""
        tensors = [torch.ones(shape) for shape in shapes]
        params = list(zip(names, map(nn.Parameter, tensors)))
        build = partial(Muon, params, distributed_config=config)
        self.assertRaisesEverywhere(build, pattern=pattern, **raised)
        self.assertTrue(all((tensor == 1).all() for tensor in tensors))

    def test_tp_dim_out_of_range(self):
        tp = Strategy(grid_of(4), "tp")
        for dim, given in ((2, 2), (-3, {1: -3} if self.rank == 2 else {})):
            with self.subTest(dim=dim):
                pattern = rf"dimension {dim}.*parameter [01].*\(8, 8\)"
                config = tp.config(tp_dim_per_param=given)
                self.assertRefused(pattern, config, kind=IndexError)
        self.assertRefused("parameter 0 'w0'.*tp_dim_per_param", tp.config())
        for here, there in [(0, 1), ({}, 1)]:
            with self.subTest(here=here, there=there):
                config = tp.config(tp_dim_per_param=there if self.rank == 3 else here)
                self.assertRefused("parameter 0 'w0'.*contradict.*[Rr]ank 3", config)

    def test_pieces_that_do_not_fit_together(self):
        other = {rank: (7, 6 if self.rank == rank else 5) for rank in (1, 2)}
        joined = "tp_process_group.*dimension 1.*differ in dimension 0"
        for kind, dims, shape, pattern in (
            ("tp", {0: 0, 1: 1}, (1 + self.rank, 6), joined),
            ("fsdp", {}, other[1], "fsdp_process_group.*differ in dimension 1"),
            ("ddp", {}, other[2], r"ddp_process_group.*shapes.*\(7, 6\)"),
        ):
            with self.subTest(kind=kind, dims=dims, shape=shape):
                config = Strategy(grid_of(4), kind).config(tp_dim_per_param=dims)
                pattern = f"parameter 1 'w1'.*{pattern}"
                self.assertRefused(pattern, config, [(8, 8), shape])

    def test_ranks_that_disagree(self):
        config = Strategy(grid_of(2, 2), "ddp", "fsdp").config()
        pattern = r"ranks disagree.*name is w\d on rank \d and w\d on rank \d"
        names = ("w1", "w0") if self.rank == 1 else ("w0", "w1")
        self.assertRefused(pattern, config, names=names)
        pattern = r"only supports 2D.*\[4, 4, 4\]"
        last = (4, 4, 4) if self.rank == 3 else (8, 8)
        self.assertRefused(pattern, config, [(8, 8), last])
        for kinds, few in ((("ddp", "fsdp"), [2]), (("fsdp", "cp"), [0, 1, 2])):
            with self.subTest(kinds=kinds, few=few):
                shapes = [(8, 8)] * (1 if self.rank in few else 2)
                config = Strategy(grid_of(2, 2), *kinds).config()
                self.assertRefused("ranks disagree about the number", config, shapes)

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
            with self.subTest(groups=groups):
                options = {
                    f"{kind}_process_group": group for kind, group in groups.items()
                }
                config = create_auto_config(**options, tp_dim_per_param=0)
                self.assertRefused("contradict|shapes", config)

    def test_group_on_one_rank_too_few(self):
        # The other rank of the pair can only notice that rank 0 does not come.
        short = timedelta(seconds=2)
        pairs = [dist.new_group(pair, timeout=short) for pair in ([0, 1], [2, 3])]
        own = pairs[self.rank // 2] if self.rank else None
        config = create_auto_config(ddp_process_group=own)
        pattern = r"could not reach ranks \[0\]"
        self.assertRefused(pattern, config, kind=RuntimeError, ranks=[1])

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


class TestMuonExperts(GroupParity):
    """The grid has data parallelism along "a" and expert parallelism along "b"."""

    def twins(self, ids=None, dense=DENSE, cut=Cut, dense_cut=Cut, order=(), **options):
        """Dense matrices, which all ranks share, and those of the experts ``ids``.

        By default, each rank has two experts, which the ranks of one ``ep_process_group`` do not share.
        """
        grid = grid_of(2, 2)
        at = 2 * grid.get_local_rank("b")
        matrices = [
            (dense_cut(shape), index, None) for index, shape in enumerate(dense)
        ]
        for expert in [at, at + 1] if ids is None else ids:
            for index, shape in enumerate(EXPERT):
                matrices.append((cut(shape), 100 * (expert + 1) + index, expert))
        if order:
            matrices = [matrices[index] for index in order]
        cuts, seeds, experts = zip(*matrices)
        options.setdefault("ep_process_group", grid.get_group("b"))
        config = create_auto_config(
            expert_assignments={
                index: e for index, e in enumerate(experts) if e is not None
            },
            **options,
        )
        return Twins(cuts, config, seeds=seeds)

    def test_ddp(self):
        grid = grid_of(2, 2)
        pair = tuple(dist.get_process_group_ranks(grid.get_group("a")))
        twins = self.twins(ddp_process_group=grid.get_group("a"))
        # The dense matrices twice, and four experts of three matrices.
        seen = self.check(twins, 18)
        used = {call.comm.ranks for call in seen.calls if call.splits}
        self.assertEqual(used, {pair})
        self.assertEqual(sorted(twins.optimizer.assignments), sorted(pair))
        # All ranks share the dense matrices. Two ranks share each expert.
        options = {"ddp_process_group": dist.group.WORLD}
        self.check(self.twins(**options), 15)
        seen = self.check(self.twins(dense=[], **options), 12)
        others = set(dist.get_process_group_ranks(grid.get_group("b"))) - {self.rank}
        self.assertEverywhere([f"{c}" for c in seen.calls if c.peers & others])

    def test_fsdp(self):
        grid = grid_of(2, 2)
        rows = Strategy(grid["a"], "fsdp").cut
        for group, dense_rows, total in (
            (grid.get_group("a"), rows, 18),
            (dist.group.WORLD, Strategy(grid_of(4), "fsdp").cut, 15),
        ):
            with self.subTest(total=total):
                twins = self.twins(
                    cut=rows, dense_cut=dense_rows, fsdp_process_group=group
                )
                self.check(twins, total)

    def test_experts_that_are_dtensors(self):
        pair = tuple(dist.get_process_group_ranks(grid_of(2, 2).get_group("a")))
        for placement, dense in ((S0, R), (S1, S0), (R, S1)):
            with self.subTest(placement=placement, dense=dense):
                twins = self.twins(
                    cut=lambda shape: Spec(shape, grid_of(2, 2)["a"], (placement,)),
                    dense_cut=lambda shape: Spec(shape, grid_of(4), (dense,)),
                )
                seen = self.check(twins, 15)
                ranks = {call.comm.ranks for call in seen.calls if call.splits}
                self.assertEqual(ranks, {pair, (0, 1, 2, 3)})

    def test_replicas_in_another_order(self):
        # The order within each expert and within the dense matrices stays.
        order = range(9) if self.rank < 2 else [6, 0, 7, 8, 1, 3, 4, 2, 5]
        twins = self.twins(order=order, ddp_process_group=dist.group.WORLD)
        self.check(twins, 15)

    def test_different_numbers_of_experts(self):
        ids = [[0], [1, 2], [], [3, 4, 5]][self.rank]
        world = dist.group.WORLD
        twins = self.twins(ids, ddp_process_group=world, ep_process_group=world)
        self.check(twins, 21)

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

    def test_matrices_of_a_plain_stack_have_numbers(self):
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        params = [torch.ones(3, 2, 4), torch.ones(2, 4)]
        options = {"distributed_config": config, "allow_batched_matrices": True}
        owners = sorted(Muon(params, **options).matrix_owners)
        with self.everywhere():
            self.assertEqual(owners, [(0, 0), (0, 1), (0, 2), (1, 0)])

    def test_gradient_on_some_holders_of_an_expert(self):
        for group in (grid_of(2, 2).get_group("a"), dist.group.WORLD):
            with self.subTest(group=group):
                twins = self.twins(ddp_process_group=group)
                twins.set_gradients()
                if self.rank == 3:
                    twins.params[len(DENSE)].grad = None
                pattern = "expert 2.*|parameter 3|Their error says how"
                # All ranks share the dense matrices of the second group.
                ranks = [1, 3] if group is not dist.group.WORLD else range(4)
                step = twins.optimizer.step
                self.assertRaisesEverywhere(step, RuntimeError, pattern, ranks)

    def test_ids_that_clash_within_one_ep_group(self):
        build = partial(self.twins, [0, 1], ddp_process_group=dist.group.WORLD)
        pattern = "expert [01].*one ep_process_group.*expert_assignments"
        self.assertRaisesEverywhere(build, ValueError, pattern)
        # Without other groups, ids that count on each rank do not clash.
        twins = self.twins([0, 1], ddp_process_group=grid_of(2, 2).get_group("b"))
        self.check(twins, 30)

    def test_shards_that_leave_a_gap_on_one_rank(self):
        gap = ValueError("gap") if self.rank == 2 else None
        build = partial(self.twins, ddp_process_group=dist.group.WORLD)
        with mock.patch.object(exchange, "check_cover", side_effect=gap):
            self.assertRaisesEverywhere(build, ValueError, "gap")

    def test_replicas_of_different_experts(self):
        grid, other = grid_of(2, 2), (6, 5) if self.rank == 2 else (6, 4)
        doubled = {0: 7, 1: 7} if self.rank < 2 else {0: 7}
        for shapes, ids, pattern, ranks in (
            ([(8, 8)] * 2, doubled, "disagree|contradict", None),
            ([other], {0: self.rank % 2}, r"expert 0.*\(6, 4\).*\(6, 5\)", [0, 2]),
        ):
            with self.subTest(shapes=shapes, ids=ids, ranks=ranks):
                config = create_auto_config(
                    ddp_process_group=grid.get_group("a"),
                    ep_process_group=grid.get_group("b"),
                    expert_assignments=ids,
                )
                build = partial(Twins, [Cut(shape) for shape in shapes], config)
                self.assertRaisesEverywhere(build, ValueError, pattern, ranks)


if __name__ == "__main__":
    run_tests()
