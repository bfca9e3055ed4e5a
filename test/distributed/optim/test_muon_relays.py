# Owner(s): ["oncall: distributed"]
"""Other ways of exchanging: relays along many replicas, and two levels for many peers."""

import os
from unittest import mock

from torch.optim._muon_engine.runtime.transport import connect
from torch.optim._muon_engine.schedule import buckets, packs
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    Collectives,
    everyone,
    GlooOnCPU,
    grid_of,
    local,
    mesh_of,
    ParityAssertions,
    R,
    S0,
    specs,
    Strategy,
    Twins,
)


SHAPES = [(16, 8), (9, 13), (3, 20), (5, 1)] * 2


class OtherExchange(GlooOnCPU, ParityAssertions):
    world_size = 8
    # Muon.describe() says so.
    words: str

    def check(self, twins, message=""):
        self.assertTrainsAlike(twins, 2, message)
        said = everyone(self.words in twins.optimizer.describe())
        self.assertTrue(any(said), f"{message}: not {self.words}")

    def connections(self, twins):
        """The collectives that the constructor makes on accelerators, so that backends connect."""
        with Collectives() as seen:
            connect(twins.optimizer._engine._runner.buckets)
        return seen.calls

    def peers(self, call):
        """The ranks that an all-to-all sends something to."""
        return {rank for rank, sent in zip(call.ranks, call.sent) if sent}


@requires_gloo()
class TestMuonRelays(OtherExchange, MultiProcContinuousTest):
    """One of many replicas exchanges a shard with the owner, and passes the result on to the rest.

    Here, two replicas are many, and a relay carries a few shards at a time.
    """

    words = "relayed along replicas"

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        # These processes run only the tests of this class.
        buckets.MAX_REPLICAS, packs.RELAY_BYTES = 1, 200
        super()._init_pg(rank, world_size, rdvz_file)

    def test_any_placement(self):
        grid = grid_of(2, 2, 2)
        for layout in (
            specs(grid_of(4, 2), all_placements(grid_of(4, 2)), SHAPES[:4]),
            # Groups within groups, each with replicas of its own.
            specs(grid["a"], [(R,)], SHAPES)
            + specs(grid["b", "c"], [(R, S0), (R, R)], SHAPES)
            + specs(grid, [(R, S0, R)], SHAPES),
        ):
            self.check(Twins(layout), str({spec.placements for spec in layout}))

    def test_each_element_travels_once_and_within_one_replica(self):
        grid = grid_of(4, 2)
        layout = specs(grid, [(R, S0)], [(16, 8)] * 8)
        twins = Twins(layout)
        with Collectives() as seen:
            twins.step()
        self.assertParity(twins)
        connections = self.connections(twins)
        mine = set(grid["b"].mesh.flatten().tolist())
        with self.everywhere():
            names = {"alltoall_base_", "broadcast_"}
            self.assertEqual({call.name for call in connections}, names)
            self.assertEqual({call.name for call in seen.calls}, {*names, "allreduce_"})
            for call in seen.calls + connections:
                self.assertLessEqual(self.peers(call), mine)
            exchanged, relayed = (
                sum(sum(call.sent) for call in seen.calls if call.name == name)
                for name in ("alltoall_base_", "broadcast_")
            )
            # Each rank owns one matrix, of which it has one half. Its replica's other rank has the other.
            self.assertEqual(exchanged, 64 + 64)
            # Half of each of the eight matrices.
            self.assertEqual(relayed, 8 * 64)
        # Few replicas are served directly.
        with mock.patch.object(buckets, "MAX_REPLICAS", 4):
            twins = Twins(layout)
            with Collectives() as seen:
                twins.step()
        with self.everywhere():
            names = {call.name for call in seen.calls}
            self.assertEqual(names, {"alltoall_base_", "allreduce_"})

    def test_gradient_that_one_replica_cannot_use(self):
        twins = Twins(specs(mesh_of(8), [(R,)], [(4, 6)] * 4))
        twins.set_gradients()
        if self.rank == 6:
            twins.params[1].grad = local(twins.params[1].grad)
        with self.everywhere():
            with self.assertRaisesRegex(RuntimeError, "parameter 1"):
                twins.optimizer.step()


@requires_gloo()
class TestMuonTwoLevels(OtherExchange, MultiProcContinuousTest):
    """A rank with too many peers exchanges within its node first, then along its rail.

    Here, more than two peers are too many, and a node has two or four ranks.
    """

    words = "in two levels"

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        # These processes run only the tests of this class.
        buckets.MAX_PEERS = 2
        os.environ["LOCAL_WORLD_SIZE"] = "4"
        super()._init_pg(rank, world_size, rdvz_file)

    def nodes_of(self, size):
        return mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(size))

    def test_nodes_of_different_sizes(self):
        """Ranks that know different nodes would not pair up in a collective."""
        with self.nodes_of(2 if self.rank == 5 else 4):
            self.assertRaisesEverywhere(
                lambda: Twins(specs(mesh_of(8), [(S0,)])),
                ValueError,
                "ranks per node is 4 on rank 0 and 2 on rank 5",
            )

    def test_process_groups(self):
        with self.nodes_of(2):
            for strategy in (
                Strategy(mesh_of(8), "fsdp"),
                Strategy(grid_of(2, 2, 2), "ddp", "fsdp", "tp"),
            ):
                self.check(strategy.twins(SHAPES), str(strategy))
            with mock.patch.object(buckets, "MAX_REPLICAS", 1):
                twins = strategy.twins(SHAPES)
                self.check(twins, "relayed")
                self.assertIn(TestMuonRelays.words, twins.optimizer.describe())

    def test_a_rank_exchanges_with_its_node_and_its_rail_only(self):
        twins = Twins(specs(mesh_of(8), [(S0,)], [(16, 8)] * 8))
        with Collectives() as seen:
            twins.step()
        self.assertParity(twins)
        connections = self.connections(twins)
        node, rail = self.rank // 4, self.rank % 4
        near = {4 * node + place for place in range(4)}
        across = {rail, 4 + rail}
        with self.everywhere():
            for call in connections + seen.calls:
                partners = self.peers(call)
                self.assertTrue(partners <= near or partners <= across, f"{call}")
            # Within the node, then along the rail, there and back.
            levels = [set(call.ranks) for call in seen.calls if call.ranks]
            self.assertEqual(levels, [near, across, near, across])


if __name__ == "__main__":
    run_tests()
