# Owner(s): ["oncall: distributed"]
"""Process groups that only their members make, and what ranks tell each other through the store.

torch.optim.Muon makes the group of a matrix's holders with new_group(use_local_synchronization=True).
Each holder may have any number of groups before.
"""

import shutil
import tempfile
from datetime import timedelta
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.optim._muon_engine.process_groups import rendezvous, spanning_group
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    OnCPU,
    grid_of,
    ParityAssertions,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)
from torch.testing._internal.distributed._muon.common_rules import Recorder


# Bounds the time that members would wait for each other under different names.
WAIT = timedelta(seconds=15)


def made(ranks):
    return dist.new_group(ranks, timeout=WAIT, use_local_synchronization=True)


def met(group):
    """Which ranks take part in a sum over the group."""
    bits = torch.tensor([1 << dist.get_rank()])
    dist.all_reduce(bits, group=group)
    return [rank for rank in range(dist.get_world_size()) if bits.item() >> rank & 1]


class LocalGroups(ParityAssertions):
    def make_unequal_numbers_of_groups(self):
        self.make_groups_up_to(self.rank)
        counts = everyone(len(dist.distributed_c10d._world.pg_names))
        self.assertEqual(len(set(counts)), self.world_size)

    def make_groups_up_to(self, more):
        """This rank has as many groups as the one that has most, and ``more``."""
        world = dist.distributed_c10d._world
        most = max(everyone(len(world.pg_names)))
        while len(world.pg_names) < most + more:
            made([self.rank])

    def assertMeet(self, ranks, group, message=""):
        with self.everywhere(message):
            if self.rank in ranks:
                self.assertEqual(met(group), sorted(ranks))
        # All of them know the group by one name.
        names = everyone(group.group_name if self.rank in ranks else None)
        self.assertEqual(len({names[rank] for rank in ranks}), 1, message)


class TestMuonSpanningGroups(LocalGroups, OnCPU):
    # Groups that only their members make

    def test_members_with_unequal_numbers_of_groups(self):
        before = dist.new_group(timeout=WAIT)
        self.make_unequal_numbers_of_groups()
        for ranks in ([0, 1], [1, 2, 3], [0, 3], [0, 1, 2, 3]):
            self.assertMeet(ranks, made(ranks), f"{ranks}")
        # Members may list the ranks in different orders.
        self.assertMeet([0, 1, 2], made([2, 0, 1] if self.rank == 0 else [0, 1, 2]))
        # As the fifth positional argument, and without ranks.
        self.assertMeet([0, 1], dist.new_group([0, 1], WAIT, None, None, True))
        everybody = dist.new_group(timeout=WAIT, use_local_synchronization=True)
        self.assertMeet(range(4), everybody)
        # All ranks make this one. Its number names it.
        after = dist.new_group([0, 2], WAIT)
        self.assertMeet([0, 2], after)
        with self.everywhere():
            if self.rank in (0, 2):
                self.assertEqual(int(after.group_name), int(before.group_name) + 1)

    def errors(self, call, ranks):
        outcomes = everyone(self.outcome(call) if self.rank in ranks else None)
        return {rank: ": ".join(one) for rank, one in enumerate(outcomes) if one}

    def test_spanning_groups(self):
        """An existing group is used. Another is made once, and again after it was destroyed."""
        pairs = (0, 2), (1, 3)
        mine = pairs[self.rank % 2]
        given = [dist.new_group(pair, WAIT) for pair in pairs][self.rank % 2]
        self.make_unequal_numbers_of_groups()
        before = len(dist.distributed_c10d._world.pg_names)
        with self.everywhere():
            self.assertIs(spanning_group(tuple(range(4)), []), dist.group.WORLD)
            self.assertIs(spanning_group(mine, [given]), given)
            self.assertEqual(len(dist.distributed_c10d._world.pg_names), before)
        ranks = (0, 1, 3)
        for _ in range(2):
            group = spanning_group(ranks, []) if self.rank in ranks else None
            self.assertMeet(ranks, group)
            with self.everywhere():
                if self.rank in ranks:
                    self.assertIs(spanning_group(ranks, []), group)
                    configs = map(dist.get_backend_config, (group, None))
                    self.assertEqual(*configs)
                    # A user who recovers from a failure brings other groups.
                    self.assertIsNot(spanning_group(ranks, [given]), group)
                    dist.destroy_process_group(group)

    def test_rendezvous_names_the_ranks_that_do_not_come(self):
        ranks, late = (0, 1, 3), 1
        come = partial(rendezvous, ranks, timedelta(seconds=2), "test")
        self.assertEqual(self.errors(come, ranks), {})
        found = self.errors(come, {0, 3})
        # The second rank to give up may also name the first one.
        self.assertRegex(found[0], rf"RuntimeError: rank 0 .*ranks \[{late}(, 3)?\]")
        self.assertRegex(found[3], rf"RuntimeError: rank 3 .*ranks \[(0, )?{late}\]")
        # A rank that gave up does not count as present.
        found = self.errors(come, {late})
        self.assertRegex(found[late], r"rank 1 .*ranks \[0, 3\]")
        self.assertEqual(self.errors(come, ranks), {})


class TestMuonMeshGroups(LocalGroups, OnCPU):
    """No group of the framework spans a part of a mesh of several dimensions. Muon makes it."""

    world_size = 8

    def test_ranks_that_have_different_numbers_of_groups(self):
        """new_group() names a group after the number of this rank's groups. Members wait under that name."""
        part = grid_of(2, 2, 2)["a", "c"]
        ranks = sorted(part.mesh.flatten().tolist())
        self.make_groups_up_to(self.rank % 3)
        self.assertEqual(len({rank % 3 for rank in ranks}), 3)
        placed = specs(part, [(S0, S1), (R, S0)], [(8, 8), (7, 5)])
        twins = Twins(placed, seed=30 * ranks[0])
        self.assertTrainsAlike(twins, 2)
        self.assertEqual(sorted(twins.optimizer.assignments), ranks)
        with Recorder() as seen:
            twins.step()
        used = {call.comm.ranks for call in seen.calls if call.splits}
        self.assertEqual(used, {tuple(ranks)})

    def test_group_has_the_longest_timeout_of_its_mesh(self):
        part = grid_of(2, 2, 2)["a", "b"]
        for group, seconds in zip(part.get_all_groups(), (37, 41)):
            _set_pg_timeout(timedelta(seconds=seconds), group)
        twins = Twins([Spec((8, 8), part, (S0, S1))])
        original = dist.all_to_all_single
        with mock.patch.object(dist, "all_to_all_single", wraps=original) as seen:
            twins.step()
        self.assertParity(twins)
        (used,) = {call.kwargs["group"] for call in seen.call_args_list}
        self.assertNotIn(used, part.get_all_groups())
        options = used._get_backend(torch.device("cpu")).options
        self.assertEqual(options._timeout, timedelta(seconds=41))


class TestMuonWorldMadeAgain(LocalGroups, OnCPU):
    world_size = 2

    def test_names_start_again_with_the_world(self):
        """A restarted process counts from the beginning, so the others must do so too."""
        folder = everyone(tempfile.mkdtemp())[0]
        self.make_unequal_numbers_of_groups()
        names = []
        for time in range(3):
            if time:
                # The other rank may still need this one's store to make its group.
                dist.barrier()
                dist.destroy_process_group()
                self._init_pg(self.rank, self.world_size, f"{folder}/{time}")
            names.append([made([0, 1]).group_name for _ in range(2)])
            self.assertMeet([0, 1], made([0, 1]))
        with self.everywhere():
            self.assertEqual(names, [names[0]] * 3)
            self.assertNotEqual(*names[0])
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    run_tests()
