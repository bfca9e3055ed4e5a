# Owner(s): ["oncall: distributed"]
"""Groups that their members alone make, and meetings of ranks over the store.

torch.optim.Muon makes the groups of a matrix's holders by new_group(use_local_synchronization=True).
Each of them may have had any number of groups before.
"""

import os
import shutil
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.optim._muon_engine.process_groups import (
    meet,
    spanning_group,
    tell_failure,
    told_failures,
)
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
    spawn_threads_and_init_comms,
)
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    GlooOnCPU,
    ParityAssertions,
    without_local_names,
)


# What members that wait for each other under different names lose.
WAIT = timedelta(seconds=15)


def made(ranks):
    """The group of ``ranks``, which the members alone make."""
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

    def assertOneName(self, ranks, group, message=""):
        """All of ``ranks`` know the group by one name."""
        mine = group.group_name if self.rank in ranks else None
        names = everyone(mine)
        self.assertEqual(len({names[rank] for rank in ranks}), 1, message)

    def assertMeet(self, ranks, group, message=""):
        with self.everywhere(message):
            if self.rank in ranks:
                self.assertEqual(met(group), sorted(ranks))
        self.assertOneName(ranks, group, message)


@requires_gloo()
class TestMuonProcessGroups(LocalGroups, GlooOnCPU, MultiProcContinuousTest):
    world_size = 4

    def test_members_with_unequal_numbers_of_groups(self):
        self.make_unequal_numbers_of_groups()
        for ranks in ([0, 1], [0, 2], [1, 2], [1, 2, 3], [0, 3], [0, 1, 2, 3]):
            self.assertMeet(ranks, made(ranks), f"{ranks}")

    def test_twice_over_the_same_ranks(self):
        self.make_unequal_numbers_of_groups()
        ranks = [1, 3]
        first, second = made(ranks), made(ranks)
        self.assertMeet(ranks, first)
        self.assertMeet(ranks, second)
        with self.everywhere():
            if self.rank in ranks:
                self.assertNotEqual(first.group_name, second.group_name)

    def test_again_after_being_destroyed(self):
        self.make_unequal_numbers_of_groups()
        ranks = [0, 2, 3]
        names = []
        for time in range(3):
            group = made(ranks)
            self.assertMeet(ranks, group, f"time {time}")
            if self.rank in ranks:
                names.append(group.group_name)
                dist.destroy_process_group(group)
        # What its members wrote under an old name is in the store still.
        with self.everywhere():
            self.assertEqual(len(set(names)), len(names))

    def test_ways_to_name_the_ranks(self):
        self.make_unequal_numbers_of_groups()
        # Of one group each member may list the ranks in its own order.
        ranks = [2, 0, 1] if self.rank == 0 else [0, 1, 2]
        self.assertMeet([0, 1, 2], made(ranks))
        # In the place of the fifth argument, and with the ranks by keyword.
        self.assertMeet([0, 1], dist.new_group([0, 1], WAIT, None, None, True))
        by_keyword = dist.new_group(
            use_local_synchronization=True, timeout=WAIT, ranks=[2, 3]
        )
        self.assertMeet([2, 3], by_keyword)
        everybody = dist.new_group(timeout=WAIT, use_local_synchronization=True)
        self.assertMeet(range(4), everybody)

    def test_ordinary_groups_after_unequal_numbers_of_groups(self):
        before = dist.new_group(timeout=WAIT)
        self.make_unequal_numbers_of_groups()
        # All ranks make these, named by how many such groups there are.
        after = dist.new_group([0, 2], WAIT)
        self.assertMeet([0, 2], after)
        last = dist.new_group(timeout=WAIT)
        with self.everywhere():
            self.assertEqual(int(last.group_name), int(before.group_name) + 2)

    def test_no_member_makes_nothing(self):
        before = len(dist.distributed_c10d._world.pg_names)
        ranks = [rank for rank in range(4) if rank != self.rank]
        with self.everywhere():
            self.assertFalse(isinstance(made(ranks), dist.ProcessGroup))
            self.assertEqual(len(dist.distributed_c10d._world.pg_names), before)


@requires_gloo()
class TestMuonSpanningGroups(LocalGroups, GlooOnCPU, MultiProcContinuousTest):
    """What Muon asks for: a group of exactly some ranks, and values of ranks without a collective."""

    world_size = 4

    def spanning(self, ranks, known=()):
        return spanning_group(ranks, known) if self.rank in ranks else None

    def outcome(self, call, ranks):
        """What ``call`` raises on each of ``ranks``, by rank."""
        found = ""
        if self.rank in ranks:
            try:
                call()
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
        return {rank: told for rank, told in enumerate(everyone(found)) if told}

    def test_a_group_that_is_there_is_taken(self):
        all_ranks, pairs = (0, 1, 2, 3), ((0, 2), (1, 3))
        given = [dist.new_group(pair, WAIT) for pair in pairs][self.rank % 2]
        mine = pairs[self.rank % 2]
        before = len(dist.distributed_c10d._world.pg_names)
        with self.everywhere():
            self.assertIs(spanning_group(all_ranks, []), dist.group.WORLD)
            self.assertIs(spanning_group(mine, [given]), given)
            self.assertEqual(len(dist.distributed_c10d._world.pg_names), before)

    def test_a_group_is_made_once(self):
        self.make_unequal_numbers_of_groups()
        ranks = (0, 1, 3)
        group = self.spanning(ranks)
        self.assertMeet(ranks, group)
        with self.everywhere():
            self.assertIs(self.spanning(ranks), group)

    def test_without_the_patch_unequal_numbers_are_an_error(self):
        self.make_unequal_numbers_of_groups()
        # No group of another test has these ranks.
        ranks = (1, 2, 3)
        with without_local_names():
            found = self.outcome(lambda: spanning_group(ranks, []), ranks)
        self.assertEqual(sorted(found), list(ranks))
        for text in found.values():
            self.assertRegex(
                text, r"ValueError: ranks \[1, 2, 3\] share matrices.*173608"
            )
            self.assertRegex(text, "flatten .* these 3 ranks")
        # Nobody is left waiting, and with the patch there is nothing to say.
        self.assertMeet(ranks, self.spanning(ranks))

    def test_without_the_patch_equal_numbers_will_do(self):
        ranks = (0, 2, 3)
        self.make_groups_up_to(0)
        with without_local_names():
            group = self.spanning(ranks)
        self.assertMeet(ranks, group)

    def test_values_of_those_who_meet(self):
        for time in range(3):
            for ranks in ((0, 1, 2, 3), (1, 3), (0, 2, 3)):
                with self.everywhere(f"{ranks} {time}"):
                    if self.rank in ranks:
                        # Of others too, a value may be empty.
                        value = "" if self.rank == 3 else f"{self.rank} at {time}"
                        found = meet(ranks, WAIT, "is here", value)
                        expected = {r: f"{r} at {time}" for r in ranks if r != 3}
                        expected |= {3: ""} if 3 in ranks else {}
                        self.assertEqual(found, expected)

    def test_failures_are_told_to_groups_that_are_there(self):
        """A group that somebody destroyed hid the error that was to be told."""
        gone, there = dist.new_group([0, 1, 2, 3]), dist.group.WORLD
        dist.destroy_process_group(gone)
        tell_failure([gone, there], "step 7", f"of rank {self.rank}")
        with self.everywhere():
            self.assertEqual(told_failures(gone, "step 7"), {})
            told = {rank: f"of rank {rank}" for rank in range(4)}
            self.assertEqual(told_failures(there, "step 7"), told)

    def test_those_who_do_not_come_are_named(self):
        ranks, late = (0, 1, 3), 1
        wait = timedelta(seconds=2)
        found = self.outcome(lambda: meet(ranks, wait, "is here"), {0, 3})
        for rank in (0, 3):
            self.assertRegex(
                found[rank], rf"RuntimeError: rank {rank} is here.*ranks \[{late}\]"
            )
        self.assertEqual(sorted(found), [0, 3])
        # Who waited in vain is not taken for one that came the next time.
        found = self.outcome(lambda: meet(ranks, wait, "is here"), {late})
        self.assertRegex(found[late], r"rank 1 is here.*ranks \[0, 3\]")
        self.assertEqual(self.outcome(lambda: meet(ranks, WAIT, "is here"), ranks), {})


@requires_gloo()
class TestMuonWorldMadeAgain(LocalGroups, GlooOnCPU, MultiProcContinuousTest):
    world_size = 2

    def test_names_begin_anew_with_the_world(self):
        """A process that was restarted counts from the beginning, and the others have to as well."""
        folder = everyone(tempfile.mkdtemp())[0]
        self.make_unequal_numbers_of_groups()
        made([0, 1])
        names = []
        for time in range(2):
            names.append(made([0, 1]).group_name)
            dist.destroy_process_group()
            rendezvous = os.path.join(folder, str(time))
            self._init_pg(self.rank, self.world_size, rendezvous)
        group = made([0, 1])
        self.assertMeet([0, 1], group)
        names.append(group.group_name)
        second = made([0, 1])
        self.assertMeet([0, 1], second)
        names.append(second.group_name)
        # The second of the first world, then the first and its like of later ones.
        with self.everywhere():
            self.assertEqual(names[1], names[2])
            self.assertEqual(names[0], names[3])
            self.assertNotEqual(names[0], names[1])
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


class TestMuonThreadedWorld(TestCase):
    def test_each_thread_counts_for_itself(self):
        """Ranks that are threads, as in upstream's tests of one process, share the module's counts."""
        names = {}
        self.make_groups(names)
        self.assertEqual(sorted(names), [0, 1, 2, 3])
        self.assertEqual(len(set(map(tuple, names.values()))), 1)
        self.assertEqual(len(set(names[0])), 2)

    @spawn_threads_and_init_comms(world_size=4)
    def make_groups(self, names):
        everybody = list(range(4))
        names[dist.get_rank()] = [made(everybody).group_name for _ in range(2)]


if __name__ == "__main__":
    run_tests()
