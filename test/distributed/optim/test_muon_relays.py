# Owner(s): ["oncall: distributed"]
"""Groups of many ranks: results that replicas pass on."""

from collections import Counter
from unittest import mock

from torch.optim._muon_engine.runtime.connecting import connect
from torch.optim._muon_engine.schedule import buckets, relays
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_layouts import shards_of
from torch.testing._internal.distributed._muon.common_muon import (
    grid_of,
    OnCPU,
    R,
    S0,
    specs,
    Twins,
)


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


class TestMuonRelays(OnCPU):
    """One of many replicas exchanges a shard with the owner, and passes the result on to the rest."""

    world_size = 8

    def connections(self, twins):
        """The collectives that the constructor makes on accelerators, so that backends connect."""
        with Recorder() as seen:
            connect(twins.optimizer._engine._make_runner())
        return seen

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


if __name__ == "__main__":
    run_tests()
