# Owner(s): ["oncall: distributed"]
"""Groups of many ranks: results that replicas pass on, and exchanges of two levels."""

import contextlib
import os
from collections import Counter
from unittest import mock

from torch.optim._muon_engine.runtime import relay_stream
from torch.optim._muon_engine.runtime.compute import MuonCompute
from torch.optim._muon_engine.runtime.connecting import connect
from torch.optim._muon_engine.schedule import buckets, levels, relays
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_layouts import shards_of
from torch.testing._internal.distributed._muon.common_muon import (
    grid_of,
    mesh_of,
    OnCPU,
    R,
    S0,
    specs,
    Twins,
)


def scheduled(layouts, **options):
    return make_schedule(layouts, assign_owners(layouts), **options)


class TestMuonLevels(TestCase):
    def test_no_rank_has_thousands_of_peers(self):
        for world, node in ((512, 1), (1024, 8), (4096, 16), (16384, 64)):
            with self.subTest(world=world, node=node):
                layouts = shards_of([(world, 8)] * 64, world)
                for bucket in scheduled(layouts, ranks_per_node=8).buckets:
                    self.assertEqual(bucket.node_size, node)
                    if node > 1:
                        ranks, rail = bucket.node_and_rail(world - 1)
                        self.assertEqual(ranks, tuple(range(world - node, world)))
                        self.assertEqual(rail, tuple(range(node - 1, world, node)))
                        self.assertLessEqual(len(ranks) + len(rail), 514)

    def test_nodes_of_several_kinds(self):
        """A group has nodes where equally many of its ranks stand together."""
        for ranks, peers, size in (
            (range(12), 11, 4),
            # One rank of each node: as many together as leaves the fewest peers.
            (range(0, 36, 4), 8, 3),
            # Four of one node, two of another.
            (range(6), 5, 2),
            (range(7), 6, 1),
            (range(12), 3, 1),
        ):
            with self.subTest(ranks=ranks, peers=peers, size=size):
                found = levels.node_size_of(tuple(ranks), peers, 4, 4)
                self.assertEqual(found, size, f"{ranks}")


@contextlib.contextmanager
def in_two_levels(ranks_per_node=4):
    """More than two peers are too many."""
    with (
        mock.patch.object(buckets, "MAX_PEERS", 2),
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_per_node)),
    ):
        yield


class TestMuonReplicas(TestCase):
    def test_few_replicas_relay_what_is_much_for_a_bucket(self):
        layouts = shards_of([(8, 8)] * 64, 1, replicas=2)
        with mock.patch.object(buckets, "BUCKET_BYTES", 256):
            schedule = make_schedule(layouts, assign_owners(layouts))
        relayed = {bucket.relayed for bucket in schedule.buckets}
        self.assertEqual(relayed, {True})

    def test_an_error_while_ranks_connect(self):
        """It waits for what is in flight."""
        runner = mock.Mock()
        runner.memory.allocate.side_effect = MemoryError("too little")
        with self.assertRaisesRegex(MemoryError, "too little"):
            connect(runner)
        runner.drain.assert_called_once_with()

    def test_a_relay_is_no_larger_than_its_limit(self):
        layouts = shards_of([(8, 8)] * 64, 1, replicas=4)
        with (
            mock.patch.object(buckets, "MAX_REPLICAS", 1),
            mock.patch.object(relays, "RELAY_BYTES", 300),
        ):
            schedule = make_schedule(layouts, assign_owners(layouts))
            sizes = set()
            for bucket in schedule.buckets:
                for rank in range(4):
                    for relay in schedule.relays(bucket, rank):
                        sizes.add(relay.pack.nbytes)
        # Two shards of 64 elements in bfloat16.
        self.assertEqual(max(sizes), 256)


class NoStream:
    """A stream of a device whose work is done at once."""

    def __init__(self):
        # The operations that ran on it, and waits between streams.
        self.seen = Counter()
        self.is_current = False

    def __enter__(self):
        self.is_current = True

    def __exit__(self, *exception):
        self.is_current = False

    def wait_stream(self, other):
        self.seen["wait_stream"] += 1

    def wait_event(self, event):
        self.seen["wait_event"] += 1

    def record_event(self):
        return "event"


class TestMuonRelays(OnCPU):
    """One of many replicas exchanges a shard with the owner, and passes the result on to the rest.

    A rank with too many peers exchanges within its node first, then along its rail.
    """

    world_size = 8

    def connections(self, twins):
        """The collectives that the constructor makes on accelerators, so that backends connect."""
        with Recorder() as seen:
            connect(twins.optimizer._engine._make_runner())
        return seen

    def test_relays_on_a_stream_of_their_own(self):
        """As on accelerators: updates are applied beside the next bucket's Newton-Schulz. A CPU has the same bits."""
        beside, compute = NoStream(), NoStream()
        applied = []
        apply_relayed = MuonCompute.apply_relayed

        def seen(its, bucket, relay, inputs):
            applied.append(beside.is_current)
            apply_relayed(its, bucket, relay, inputs)

        patches = (
            mock.patch.object(buckets, "MAX_REPLICAS", 1),
            mock.patch.object(relays, "RELAY_BYTES", 200),
            mock.patch.object(relay_stream, "new_stream", lambda device: beside),
            mock.patch.object(
                relay_stream.RelayExecutor, "_current_stream", lambda its: compute
            ),
            mock.patch.object(MuonCompute, "apply_relayed", seen),
        )
        layout = specs(grid_of(4, 2), [(R, S0)], [(16, 8)] * 32)
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            twins = Twins(layout)
            self.assertTrainsAlike(twins, 3)
            # A step without some gradients, and one that fails.
            twins.step(missing=[3])
            self.assertParity(twins)
            failing = mock.patch.object(
                MuonCompute, "apply_updates", side_effect=ArithmeticError("no")
            )
            before = compute.seen["wait_stream"]
            twins.set_gradients()
            with failing:
                self.assertRaisesEverywhere(twins.optimizer.step, ArithmeticError, "no")
        with self.everywhere():
            self.assertTrue(applied)
            self.assertTrue(all(applied))
            # The gather of the fourth bucket takes the memory of the first one.
            self.assertGreater(compute.seen["wait_event"], 0)
            self.assertEqual(compute.seen["wait_stream"], before + 1)

    def test_each_element_travels_once_and_within_one_replica(self):
        grid = grid_of(4, 2)
        layout = specs(grid, [(R, S0)], [(16, 8)] * 8)
        # Two replicas are many, and a relay carries a few shards at a time.
        few = mock.patch.object(buckets, "MAX_REPLICAS", 1)
        with few, mock.patch.object(relays, "RELAY_BYTES", 200):
            twins = Twins(layout)
        with Recorder() as seen:
            twins.step()
        self.assertParity(twins)
        connections = self.connections(twins)
        mine = set(grid["b"].mesh.flatten().tolist())
        with self.everywhere():
            names = {"all_to_all_single", "broadcast"}
            for recorded in (connections, seen):
                with self.subTest(recorded=recorded):
                    self.assertEqual({*recorded.names}, {*names, "all_reduce"})
                    for call in recorded.calls:
                        self.assertLessEqual(call.peers, mine)
            elements = Counter()
            for call in seen.calls:
                elements[call.name] += call.nbytes // call.itemsize
            exchanged = elements["all_to_all_single"]
            passed_on = elements["broadcast"]
            # Each rank owns one matrix, of which it has one half. Its replica's other rank has the other.
            self.assertEqual(exchanged, 128)
            # Half of each of the eight matrices.
            self.assertEqual(passed_on, 512)
        # Few replicas are served directly.
        twins = Twins(layout)
        with Recorder() as seen:
            twins.step()
        with self.everywhere():
            self.assertEqual({*seen.names}, {"all_to_all_single", "all_reduce"})

    def test_nodes_of_different_sizes(self):
        with in_two_levels(2 if self.rank == 5 else 4):
            self.assertRaisesEverywhere(
                lambda: Twins(specs(mesh_of(8), [(S0,)])),
                ValueError,
                "LOCAL_WORLD_SIZE is 4 on rank 0 and 2 on rank 5.*nodes of equal size",
            )

    @in_two_levels()
    def test_a_rank_exchanges_with_its_node_and_its_rail_only(self):
        twins = Twins(specs(mesh_of(8), [(S0,)], [(16, 8)] * 8))
        with Recorder() as seen:
            twins.step()
        self.assertParity(twins)
        connections = self.connections(twins)
        node, rail = self.rank // 4, self.rank % 4
        near = {4 * node + place for place in range(4)}
        across = {rail, 4 + rail}
        with self.everywhere():
            for call in connections.calls + seen.calls:
                self.assertTrue(call.peers <= near or call.peers <= across, f"{call}")
            # Within the node, then along the rail, there and back.
            levels = [{*call.comm.ranks} for call in seen.calls if call.splits]
            self.assertEqual(levels, [near, across, near, across])


if __name__ == "__main__":
    run_tests()
