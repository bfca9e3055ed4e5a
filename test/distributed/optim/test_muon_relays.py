# Owner(s): ["oncall: distributed"]
"""Other ways of exchanging: relays along many replicas, and two levels for many peers."""

import contextlib
import os
from unittest import mock

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
# Muon.describe() says so.
RELAYED, IN_TWO_LEVELS = "relayed along replicas", "in two levels"


@contextlib.contextmanager
def relayed():
    """Two replicas are many, and a relay carries a few shards at a time."""
    with (
        mock.patch.object(buckets, "MAX_REPLICAS", 1),
        mock.patch.object(packs, "RELAY_BYTES", 200),
    ):
        yield


@contextlib.contextmanager
def in_two_levels(ranks_per_node=4):
    """More than two peers are too many."""
    with (
        mock.patch.object(buckets, "MAX_PEERS", 2),
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_per_node)),
    ):
        yield


@requires_gloo()
class TestMuonRelays(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    """One of many replicas exchanges a shard with the owner, and passes the result on to the rest.

    A rank with too many peers exchanges within its node first, then along its rail.
    """

    world_size = 8

    def check(self, twins, *words):
        self.assertTrainsAlike(twins, 2, str(twins.specs))
        page = twins.optimizer.describe()
        for said in words:
            self.assertTrue(any(everyone(said in page)), f"not {said}: {page}")

    def connections(self, twins):
        """The collectives that the constructor makes on accelerators, so that backends connect."""
        with Collectives() as seen:
            twins.optimizer._engine._pipeline().connect()
        return seen.calls

    def peers(self, call):
        """The ranks that an all-to-all sends something to."""
        return {rank for rank, sent in zip(call.ranks, call.sent) if sent}

    # Relays

    @relayed()
    def test_any_placement(self):
        grid = grid_of(2, 2, 2)
        for layout in (
            specs(grid_of(4, 2), all_placements(grid_of(4, 2)), SHAPES[:4]),
            # Groups within groups, each with replicas of its own.
            specs(grid["a"], [(R,)], SHAPES)
            + specs(grid["b", "c"], [(R, S0), (R, R)], SHAPES)
            + specs(grid, [(R, S0, R)], SHAPES),
        ):
            self.check(Twins(layout), RELAYED)

    def test_each_element_travels_once_and_within_one_replica(self):
        grid = grid_of(4, 2)
        layout = specs(grid, [(R, S0)], [(16, 8)] * 8)
        with relayed():
            twins = Twins(layout)
        with Collectives() as seen:
            twins.step()
        self.assertParity(twins)
        connections = self.connections(twins)
        mine = set(grid["b"].mesh.flatten().tolist())
        with self.everywhere():
            names = {"alltoall_base_", "broadcast_"}
            for calls in (connections, seen.calls):
                self.assertEqual({call.name for call in calls}, {*names, "allreduce_"})
            for call in seen.calls + connections:
                self.assertLessEqual(self.peers(call), mine)
            exchanged, passed_on = (
                sum(sum(call.sent) for call in seen.calls if call.name == name)
                for name in ("alltoall_base_", "broadcast_")
            )
            # Each rank owns one matrix, of which it has one half. Its replica's other rank has the other.
            self.assertEqual(exchanged, 64 + 64)
            # Half of each of the eight matrices.
            self.assertEqual(passed_on, 8 * 64)
        # Few replicas are served directly.
        twins = Twins(layout)
        with Collectives() as seen:
            twins.step()
        with self.everywhere():
            names = {call.name for call in seen.calls}
            self.assertEqual(names, {"alltoall_base_", "allreduce_"})

    @relayed()
    def test_gradient_that_one_replica_cannot_use(self):
        twins = Twins(specs(mesh_of(8), [(R,)], [(4, 6)] * 4))
        twins.set_gradients()
        if self.rank == 6:
            twins.params[1].grad = local(twins.params[1].grad)
        with self.everywhere():
            with self.assertRaisesRegex(RuntimeError, "parameter 1"):
                twins.optimizer.step()

    # Two levels

    def test_nodes_of_different_sizes(self):
        """Ranks that know different nodes would not pair up in a collective."""
        with in_two_levels(2 if self.rank == 5 else 4):
            self.assertRaisesEverywhere(
                lambda: Twins(specs(mesh_of(8), [(S0,)])),
                ValueError,
                "ranks per node is 4 on rank 0 and 2 on rank 5",
            )

    @in_two_levels(ranks_per_node=2)
    def test_process_groups(self):
        self.check(Strategy(mesh_of(8), "fsdp").twins(SHAPES), IN_TWO_LEVELS)
        strategy = Strategy(grid_of(2, 2, 2), "ddp", "fsdp", "tp")
        self.check(strategy.twins(SHAPES), IN_TWO_LEVELS)
        with relayed():
            self.check(strategy.twins(SHAPES), IN_TWO_LEVELS, RELAYED)

    @in_two_levels()
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
