# Owner(s): ["oncall: distributed"]
"""create_auto_config with experts: Muon sends nothing between the ranks of an ep_process_group."""

import torch.distributed as dist
from torch.optim.muon import create_auto_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    Collectives,
    Cut,
    everyone,
    GlooOnCPU,
    grid_of,
    NewtonSchulzCalls,
    ParityAssertions,
    R,
    S0,
    S1,
    Spec,
    Strategy,
    Twins,
)


DENSE = [(8, 8), (7, 5), (3, 9)]
EXPERT = [(6, 4), (4, 6), (5, 5)]


class Experts(GlooOnCPU, ParityAssertions):
    """Dense matrices and matrices of experts, against one process."""

    def twins(self, ids, dense=DENSE, cut=Cut, dense_cut=Cut, order=None, **options):
        """Dense matrices, which all ranks share, and those of the experts ``ids``."""
        matrices = [(dense_cut(shape), i, None) for i, shape in enumerate(dense)]
        for expert in ids:
            for i, shape in enumerate(EXPERT):
                matrices.append((cut(shape), 100 * (expert + 1) + i, expert))
        if order is not None:
            matrices = [matrices[i] for i in order]
        cuts, seeds, experts = zip(*matrices)
        config = create_auto_config(
            expert_assignments={i: e for i, e in enumerate(experts) if e is not None},
            **options,
        )
        return Twins(cuts, config, seeds=seeds)

    def check(self, twins, total, message="", missing=()):
        """``total`` is how many matrices are orthogonalized on all ranks together."""
        self.assertTrainsAlike(twins, 1, message)
        twins.set_gradients(missing)
        with NewtonSchulzCalls() as calls, Collectives() as seen:
            twins.optimizer.step()
        twins.single.step()
        self.assertParity(twins, message)
        self.assertEqual(sum(everyone(len(calls.shapes))), total, message)
        return seen

    def assertNothingBetween(self, ep_group, seen):
        others = set(dist.get_process_group_ranks(ep_group)) - {self.rank}
        self.assertEverywhere(
            [
                f"{count} elements to rank {peer}"
                for call in seen.calls
                for peer, count in zip(call.ranks, call.sent)
                if count and peer in others
            ]
        )


@requires_gloo()
class TestMuonExperts(Experts, MultiProcContinuousTest):
    """The grid has data parallelism along "a" and expert parallelism along "b"."""

    world_size = 4

    def groups(self):
        grid = grid_of(2, 2)
        return grid.get_group("a"), grid.get_group("b")

    def ids_here(self):
        """Two experts a rank; ranks of one ``ep_process_group`` hold different ones."""
        _, expert_rank = grid_of(2, 2).get_coordinate()
        return [2 * expert_rank, 2 * expert_rank + 1]

    # EP and one other kind

    def test_ep_alone_shares_nothing(self):
        twins = self.twins([self.rank], ep_process_group=dist.group.WORLD)
        seen = self.check(twins, 4 * len(DENSE + EXPERT))
        self.assertEqual(seen.calls, [])
        mine = {self.rank: list(range(len(DENSE + EXPERT)))}
        self.assertEqual(twins.optimizer.assignments, mine)

    def test_ddp(self):
        for kind in ("ddp", "cp"):
            data, experts = self.groups()
            options = {f"{kind}_process_group": data, "ep_process_group": experts}
            twins = self.twins(self.ids_here(), **options)
            seen = self.check(twins, 2 * len(DENSE) + 4 * len(EXPERT), kind)
            self.assertNothingBetween(experts, seen)
            pair = tuple(dist.get_process_group_ranks(data))
            used = {call.ranks for call in seen.calls if call.ranks}
            self.assertEqual(used, {pair})
            self.assertEqual(sorted(twins.optimizer.assignments), sorted(pair))

    def test_ddp_over_all_ranks(self):
        _, experts = self.groups()
        options = dict(ddp_process_group=dist.group.WORLD, ep_process_group=experts)
        # All ranks share the dense matrices. Two ranks share each expert.
        twins = self.twins(self.ids_here(), **options)
        self.check(twins, len(DENSE) + 4 * len(EXPERT))
        seen = self.check(self.twins(self.ids_here(), [], **options), 4 * len(EXPERT))
        self.assertNothingBetween(experts, seen)

    def test_fsdp(self):
        data, experts = self.groups()
        rows = Strategy(grid_of(2, 2)["a"], "fsdp")
        twins = self.twins(
            self.ids_here(),
            cut=rows.cut,
            dense_cut=rows.cut,
            fsdp_process_group=data,
            ep_process_group=experts,
        )
        seen = self.check(twins, 2 * len(DENSE) + 4 * len(EXPERT))
        self.assertNothingBetween(experts, seen)

    def test_fsdp_over_all_ranks(self):
        _, experts = self.groups()
        twins = self.twins(
            self.ids_here(),
            cut=Strategy(grid_of(2, 2)["a"], "fsdp").cut,
            dense_cut=Strategy(grid_of(4), "fsdp").cut,
            fsdp_process_group=dist.group.WORLD,
            ep_process_group=experts,
        )
        self.check(twins, len(DENSE) + 4 * len(EXPERT))

    def test_tp(self):
        data, experts = self.groups()
        for dim in (0, 1):
            along = Strategy(grid_of(2, 2)["a"], "tp")

            def cut(shape):
                return along.cut(shape, dim)

            twins = self.twins(
                self.ids_here(),
                cut=cut,
                dense_cut=cut,
                tp_process_group=data,
                tp_dim_per_param=dim,
                ep_process_group=experts,
            )
            seen = self.check(twins, 2 * len(DENSE) + 4 * len(EXPERT), f"{dim=}")
            self.assertNothingBetween(experts, seen)

    def test_experts_sharded_within_an_ep_group(self):
        # As documented: two ranks of an ep_process_group of all ranks shard one expert.
        for kind, options in (("fsdp", {}), ("tp", {"tp_dim_per_param": 0})):
            twins = self.twins(
                [self.rank // 2],
                [],
                cut=Strategy(grid_of(2, 2)["b"], "fsdp").cut,
                ep_process_group=dist.group.WORLD,
                **{f"{kind}_process_group": grid_of(2, 2).get_group("b")},
                **options,
            )
            self.check(twins, 2 * len(EXPERT), kind)

    def test_experts_that_are_dtensors(self):
        data, experts = self.groups()
        for placement, dense in ((S0, R), (S1, S0), (R, S1)):
            twins = self.twins(
                self.ids_here(),
                cut=lambda shape: Spec(shape, grid_of(2, 2)["a"], (placement,)),
                dense_cut=lambda shape: Spec(shape, grid_of(4), (dense,)),
                ep_process_group=experts,
            )
            seen = self.check(twins, len(DENSE) + 4 * len(EXPERT))
            ranks = {call.ranks for call in seen.calls if call.ranks}
            pair = tuple(dist.get_process_group_ranks(data))
            self.assertEqual(ranks, {pair, (0, 1, 2, 3)})

    def test_plain_experts_and_dense_dtensors(self):
        data, experts = self.groups()
        twins = self.twins(
            self.ids_here(),
            dense_cut=lambda shape: Spec(shape, grid_of(4), (S0,)),
            ddp_process_group=data,
            ep_process_group=experts,
        )
        self.check(twins, len(DENSE) + 4 * len(EXPERT))

    # Experts in different orders and numbers

    def order_here(self):
        if self.rank < 2:
            return list(range(len(DENSE) + 2 * len(EXPERT)))
        # The order within each expert and within the dense matrices stays.
        return [6, 0, 7, 8, 1, 3, 4, 2, 5]

    def test_replicas_in_another_order(self):
        data, experts = self.groups()
        for group, dense in ((data, 2 * len(DENSE)), (dist.group.WORLD, len(DENSE))):
            twins = self.twins(
                self.ids_here(),
                order=self.order_here(),
                ddp_process_group=group,
                ep_process_group=experts,
            )
            self.check(twins, dense + 4 * len(EXPERT))

    def test_different_numbers_of_experts(self):
        ids = [[0], [1, 2], [], [3, 4, 5]][self.rank]
        twins = self.twins(
            ids, ddp_process_group=dist.group.WORLD, ep_process_group=dist.group.WORLD
        )
        self.check(twins, len(DENSE) + 6 * len(EXPERT))

    def replicated(self, ids=None, group=None):
        """Experts, of which each has two replicas."""
        data, experts = self.groups()
        return self.twins(
            self.ids_here() if ids is None else ids,
            ddp_process_group=group or data,
            ep_process_group=experts,
        )

    def test_experts_without_gradients(self):
        twins = self.replicated()
        usual = self.check(twins, 2 * len(DENSE) + 4 * len(EXPERT))
        first = len(DENSE)
        # Experts 1 and 2.
        missing = range(first, first + len(EXPERT))
        if self.rank % 2 == 0:
            missing = range(first + len(EXPERT), first + 2 * len(EXPERT))
        seen = self.check(twins, 2 * len(DENSE) + 2 * len(EXPERT), missing=missing)
        self.assertEqual(seen.calls, usual.calls)

    def test_gradient_on_some_holders_of_an_expert(self):
        for group in (None, dist.group.WORLD):
            twins = self.replicated(group=group)
            twins.set_gradients()
            if self.rank == 3:
                twins.params[len(DENSE)].grad = None
            self.assertRaisesEverywhere(
                twins.optimizer.step, RuntimeError, "expert 2.*|parameter 3", [1, 3]
            )

    # Mistakes

    def test_ids_that_clash_within_one_ep_group(self):
        self.assertRaisesEverywhere(
            lambda: self.replicated([0, 1], dist.group.WORLD),
            ValueError,
            "expert [01].*one ep_process_group.*expert_assignments",
        )

    def test_one_rank_with_the_ids_of_another(self):
        ids = [0, 1] if self.rank == 1 else self.ids_here()
        self.assertRaisesEverywhere(
            lambda: self.replicated(ids, dist.group.WORLD), ValueError, "expert"
        )

    def build(self, shapes, ids):
        data, experts = self.groups()
        config = create_auto_config(
            ddp_process_group=data, ep_process_group=experts, expert_assignments=ids
        )
        return Twins(map(Cut, shapes), config)

    def test_replicas_that_give_a_parameter_different_ids(self):
        ids = {3: 7, 4: 7} if self.rank < 2 else {3: 7}
        self.assertRaisesEverywhere(
            lambda: self.build([(8, 8)] * 5, ids), ValueError, "disagree|contradict"
        )

    def test_expert_of_other_shapes_on_a_replica(self):
        shapes = [(8, 8), (6, 5) if self.rank == 2 else (6, 4)]
        self.assertRaisesEverywhere(
            lambda: self.build(shapes, {1: self.rank % 2}),
            ValueError,
            r"expert 0.*\(6, 4\).*\(6, 5\)",
            ranks=[0, 2],
        )


@requires_gloo()
class TestMuonExpertsEightRanks(Experts, MultiProcContinuousTest):
    """Experts along the last dimension of 2 x 2 x 2 ranks, other kinds along the rest."""

    world_size = 8

    def trained(self, *kinds, dense=DENSE):
        """The traffic of a step. FSDP cuts rows and TP cuts columns, if they are in ``kinds``."""
        grid = grid_of(2, 2, 2)
        strategy = Strategy(grid if len(kinds) == 3 else grid["a", "b"], *kinds)
        number = grid.get_local_rank("c")
        experts = [2 * number, 2 * number + 1]

        def cut(shape):
            return strategy.cut(shape, 1 if "tp" in kinds else None)

        options = {f"{kind}_process_group": strategy.group(kind) for kind in kinds}
        if "tp" in kinds:
            options["tp_dim_per_param"] = 1
        twins = self.twins(
            experts,
            dense,
            cut,
            cut,
            ep_process_group=grid.get_group("c"),
            **options,
        )
        owners = 1 if len(kinds) == 3 else 2
        total = owners * len(dense) + 4 * len(EXPERT)
        return self.check(twins, total, f"{strategy}")

    def test_one_kind_less(self):
        for kinds in (("fsdp", "tp"), ("ddp", "tp"), ("ddp", "fsdp")):
            seen = self.trained(*kinds)
            self.assertNothingBetween(grid_of(2, 2, 2).get_group("c"), seen)

    def test_fsdp_tp_ddp(self):
        # Replicas of the dense matrices hold different experts.
        for kinds in (("fsdp", "tp", "ddp"), ("tp", "fsdp", "ddp")):
            self.trained(*kinds)
            seen = self.trained(*kinds, dense=[])
            self.assertNothingBetween(grid_of(2, 2, 2).get_group("c"), seen)


if __name__ == "__main__":
    run_tests()
