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

    def check(self, twins, total, message=""):
        """``total`` is how many matrices are orthogonalized on all ranks together."""
        self.assertTrainsAlike(twins, 1, message)
        twins.set_gradients()
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

    def twins(self, ids=None, *args, **options):
        """By default, each rank has two experts, which the ranks of one ``ep_process_group`` do not share."""
        grid = grid_of(2, 2)
        at = 2 * grid.get_local_rank("b")
        options.setdefault("ep_process_group", grid.get_group("b"))
        return super().twins([at, at + 1] if ids is None else ids, *args, **options)

    # EP and one other kind

    def test_ep_alone_shares_nothing(self):
        twins = self.twins([self.rank], ep_process_group=dist.group.WORLD)
        seen = self.check(twins, 4 * len(DENSE + EXPERT))
        self.assertEqual(seen.calls, [])
        mine = {self.rank: list(range(len(DENSE + EXPERT)))}
        self.assertEqual(twins.optimizer.assignments, mine)

    def test_ddp(self):
        grid = grid_of(2, 2)
        pair = tuple(dist.get_process_group_ranks(grid.get_group("a")))
        for kind in ("ddp", "cp"):
            twins = self.twins(**{f"{kind}_process_group": grid.get_group("a")})
            seen = self.check(twins, 2 * len(DENSE) + 4 * len(EXPERT), kind)
            self.assertNothingBetween(grid.get_group("b"), seen)
            used = {call.ranks for call in seen.calls if call.ranks}
            self.assertEqual(used, {pair})
            self.assertEqual(sorted(twins.optimizer.assignments), sorted(pair))

    def test_ddp_over_all_ranks(self):
        # All ranks share the dense matrices. Two ranks share each expert.
        options = {"ddp_process_group": dist.group.WORLD}
        self.check(self.twins(**options), len(DENSE) + 4 * len(EXPERT))
        seen = self.check(self.twins(dense=[], **options), 4 * len(EXPERT))
        self.assertNothingBetween(grid_of(2, 2).get_group("b"), seen)

    def test_fsdp(self):
        grid = grid_of(2, 2)
        rows = Strategy(grid["a"], "fsdp").cut
        for group, dense_rows, owners in (
            (grid.get_group("a"), rows, 2),
            (dist.group.WORLD, Strategy(grid_of(4), "fsdp").cut, 1),
        ):
            twins = self.twins(cut=rows, dense_cut=dense_rows, fsdp_process_group=group)
            self.check(twins, owners * len(DENSE) + 4 * len(EXPERT))

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
        pair = tuple(dist.get_process_group_ranks(grid_of(2, 2).get_group("a")))
        for placement, dense in ((S0, R), (S1, S0), (R, S1)):
            twins = self.twins(
                cut=lambda shape: Spec(shape, grid_of(2, 2)["a"], (placement,)),
                dense_cut=lambda shape: Spec(shape, grid_of(4), (dense,)),
            )
            seen = self.check(twins, len(DENSE) + 4 * len(EXPERT))
            ranks = {call.ranks for call in seen.calls if call.ranks}
            self.assertEqual(ranks, {pair, (0, 1, 2, 3)})

    # Experts in different orders and numbers

    def test_replicas_in_another_order(self):
        # The order within each expert and within the dense matrices stays.
        order = range(9) if self.rank < 2 else [6, 0, 7, 8, 1, 3, 4, 2, 5]
        twins = self.twins(order=order, ddp_process_group=dist.group.WORLD)
        self.check(twins, len(DENSE) + 4 * len(EXPERT))

    def test_different_numbers_of_experts(self):
        ids = [[0], [1, 2], [], [3, 4, 5]][self.rank]
        world = dist.group.WORLD
        twins = self.twins(ids, ddp_process_group=world, ep_process_group=world)
        self.check(twins, len(DENSE) + 6 * len(EXPERT))

    def test_gradient_on_some_holders_of_an_expert(self):
        for group in (grid_of(2, 2).get_group("a"), dist.group.WORLD):
            twins = self.twins(ddp_process_group=group)
            twins.set_gradients()
            if self.rank == 3:
                twins.params[len(DENSE)].grad = None
            self.assertRaisesEverywhere(
                twins.optimizer.step, RuntimeError, "expert 2.*|parameter 3", [1, 3]
            )

    # Mistakes

    def test_ids_that_clash_within_one_ep_group(self):
        self.assertRaisesEverywhere(
            lambda: self.twins([0, 1], ddp_process_group=dist.group.WORLD),
            ValueError,
            "expert [01].*one ep_process_group.*expert_assignments",
        )

    def test_replicas_of_different_experts(self):
        grid, other = grid_of(2, 2), (6, 5) if self.rank == 2 else (6, 4)
        doubled = {0: 7, 1: 7} if self.rank < 2 else {0: 7}
        for shapes, ids, pattern, ranks in (
            ([(8, 8)] * 2, doubled, "disagree|contradict", None),
            ([other], {0: self.rank % 2}, r"expert 0.*\(6, 4\).*\(6, 5\)", [0, 2]),
        ):
            config = create_auto_config(
                ddp_process_group=grid.get_group("a"),
                ep_process_group=grid.get_group("b"),
                expert_assignments=ids,
            )
            cuts = [Cut(shape) for shape in shapes]
            self.assertRaisesEverywhere(
                lambda: Twins(cuts, config), ValueError, pattern, ranks
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
