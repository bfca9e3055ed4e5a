# Owner(s): ["oncall: distributed"]
"""Many peers: what holders and owners exchange goes through nodes first, then along rails."""

import os
from unittest import mock

from torch.distributed.tensor import DeviceMesh
from torch.optim._muon_engine.schedule import buckets
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    Collectives,
    EveryExchange,
    grid_of,
    mesh_of,
    OtherExchange,
    R,
    S0,
    S1,
    specs,
    Strategy,
    Twins,
)


SHAPES = [(16, 8), (9, 13), (3, 20), (5, 1)] * 3


class TwoLevels(OtherExchange):
    """As if more than two peers were too many, and a node held two or four ranks."""

    words = "in two levels"

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        # These processes make the tests of this class only.
        buckets.MAX_PEERS = 2
        super()._init_pg(rank, world_size, rdvz_file)

    def nodes_of(self, size):
        return mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(size))

    def exchanged(self):
        return self.nodes_of(4)

    def some_specs(self, *args):
        return specs(mesh_of(8), [(S0,), (S1,)], *args)


@requires_gloo()
class TestMuonTwoLevels(EveryExchange, TwoLevels, MultiProcContinuousTest):
    world_size = 8

    @parametrize("ranks_per_node", [2, 4])
    def test_any_placement(self, ranks_per_node):
        grid = grid_of(2, 2, 2)
        with self.nodes_of(ranks_per_node):
            for layout in (
                specs(mesh_of(8), [(S0,), (S1,)], SHAPES),
                specs(grid_of(2, 4), all_placements(grid_of(2, 4)), SHAPES[:4]),
                specs(grid, all_placements(grid), SHAPES[:1]),
                # Fewer rows than ranks; groups within groups.
                specs(mesh_of(8), [(S0,)], [(5, 3), (1, 1)])
                + specs(grid["b", "c"], [(S0, S1)], SHAPES),
            ):
                self.check(Twins(layout), str({spec.placements for spec in layout}))

    def test_process_groups(self):
        with self.nodes_of(2):
            for strategy in (
                Strategy(mesh_of(8), "fsdp"),
                Strategy(grid_of(4, 2), "fsdp", "tp"),
                Strategy(grid_of(2, 2, 2), "ddp", "fsdp", "tp"),
            ):
                self.check(strategy.twins(SHAPES), str(strategy))

    def test_results_are_relayed_afterwards(self):
        layout = specs(grid_of(2, 4), [(R, S0), (R, S1)], SHAPES)
        with self.nodes_of(2), mock.patch.object(buckets, "MAX_REPLICAS", 1):
            twins = Twins(layout)
            self.check(twins)
            self.assertIn("relayed along replicas", twins.optimizer.describe())

    def test_a_function_of_the_user_s_exchanges_directly(self):
        """One matrix at a time went in two hops, too, for which there were no groups."""
        config = create_dtensor_config()
        gather = config.gather_fn
        config.gather_fn = lambda piece, rank, state: gather(piece, rank, state)
        layout = specs(mesh_of(8), [(S0,), (R,)], SHAPES[:4])
        with self.nodes_of(2):
            self.assertTrainsAlike(Twins(layout, config), 2)

    def test_a_rank_exchanges_with_its_node_and_its_rail_only(self):
        with self.nodes_of(4):
            twins = Twins(specs(mesh_of(8), [(S0,)], [(16, 8)] * 8))
        with Collectives() as seen:
            twins.step()
        with Collectives() as first:
            # What the constructor does on accelerators.
            twins.optimizer._engine.pipeline.buffers.connect()
        node, rail = self.rank // 4, self.rank % 4
        near = {4 * node + place for place in range(4)}
        across = {rail, 4 + rail}
        problems = []
        for calls in (first.calls, seen.calls):
            partners = [
                {rank for rank, sent in zip(call.ranks, call.sent) if sent}
                for call in calls
            ]
            problems += [p for p in partners if not (p <= near or p <= across)]
        # Within the node, then along the rail, and back the same way.
        hops = [set(call.ranks) for call in seen.calls]
        if hops != [near, across, across, near]:
            problems.append(f"collectives among {hops}")
        self.assertEverywhere(problems)
        self.assertParity(twins)

    def test_a_group_that_forms_no_nodes_exchanges_directly(self):
        # Seven ranks have no equal nodes.
        mesh, problems = DeviceMesh("cpu", range(7)), []
        if self.rank < 7:
            with self.nodes_of(2):
                twins = Twins(specs(mesh, [(S0,)], SHAPES))
            problems += [self.words] * (self.words in twins.optimizer.describe())
        self.assertEverywhere(problems)


@requires_gloo()
class TestMuonTwoLevelsOfSixteen(TwoLevels, MultiProcContinuousTest):
    world_size = 16

    def test_fsdp_and_hsdp(self):
        for ranks_per_node in (2, 4):
            with self.nodes_of(ranks_per_node):
                for mesh, placements in (
                    (mesh_of(16), (S0,)),
                    (grid_of(2, 8), (R, S0)),
                    (grid_of(4, 4), (S0, S1)),
                ):
                    self.check(Twins(specs(mesh, [placements], SHAPES)))


instantiate_parametrized_tests(TestMuonTwoLevels)


if __name__ == "__main__":
    run_tests()
