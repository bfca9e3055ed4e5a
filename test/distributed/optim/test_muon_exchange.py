# Owner(s): ["oncall: distributed"]
"""A step of the distributed Muon: its computation, traffic and order, and the groups that it makes.

torch.optim.Muon makes the group of a matrix's holders with new_group(use_local_synchronization=True).
Each holder may have any number of groups before.
"""

import itertools
import shutil
import tempfile
from datetime import timedelta

import torch.distributed as dist
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    everyone,
    grid_of,
    mesh_of,
    OnCPU,
    R,
    S0,
    S1,
    specs,
    Twins,
)
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder


class TestMuonExchange(OnCPU):
    def placed(self):
        shapes = [(8, 8), (7, 5), (3, 9), (1, 8), (16, 24)]
        meshes = mesh_of(4), grid_of(2, 2)
        layouts = (specs(mesh, all_placements(mesh), shapes) for mesh in meshes)
        return list(itertools.chain(*layouts))

    def collectives_of_a_step(self, twins, missing=()):
        twins.set_gradients(missing)
        with Recorder() as seen:
            twins.optimizer.step()
        return seen

    def test_two_collectives_a_bucket_and_one_of_statuses(self):
        # One matrix for each owner is one bucket, and four are four buckets.
        for matrices, exchanges in ((4, 2), (16, 8)):
            with self.subTest(matrices=matrices):
                twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * matrices))
                seen = self.collectives_of_a_step(twins)
                first, *others = seen.names
                self.assertEqual(first, "all_reduce")
                self.assertEqual(others, ["all_to_all_single"] * exchanges)
                ranks = {call.comm.ranks for call in seen.calls}
                self.assertEqual(ranks, {(0, 1, 2, 3)})
        twins = Twins(specs(mesh_of(1), [(S0,), (R,)]))
        self.assertEqual(self.collectives_of_a_step(twins).names, [])

    def test_gradients_do_not_change_the_calls(self):
        twins = Twins(self.placed())
        # The first step also compares the values of replicas.
        twins.step()
        usual = self.collectives_of_a_step(twins)
        self.assertEqual(everyone(usual.names), [usual.names] * 4)
        for missing in ([0], range(0, len(twins.params), 3), range(len(twins.params))):
            with self.subTest(missing=missing):
                now = self.collectives_of_a_step(twins, missing)
                self.assertEqual(now.launches, usual.launches)
        # Accelerators make the same calls even if ranks disagree about gradients.
        common_muon.as_on_an_accelerator(twins.optimizer)
        twins.set_gradients()
        for index, param in enumerate(twins.params):
            if index % 4 == self.rank:
                param.grad = None
        with Recorder() as seen:
            twins.optimizer.step()
        self.assertEqual(seen.launches, usual.launches)
        with self.assertRaisesRegex(RuntimeError, "gradient"):
            twins.optimizer.synchronize()


# Bounds the time that members would wait for each other under different names.
WAIT = timedelta(seconds=15)


def made(ranks):
    return dist.new_group(ranks, timeout=WAIT, use_local_synchronization=True)


class LocalGroups(common_muon.ParityAssertions):
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
                self.assertEqual(everyone(self.rank, group), sorted(ranks))
        # All of them know the group by one name.
        names = everyone(group.group_name if self.rank in ranks else None)
        self.assertEqual(len({names[rank] for rank in ranks}), 1, message)


class TestMuonSpanningGroups(LocalGroups, OnCPU):
    """Groups that only their members make."""

    def test_members_with_unequal_numbers_of_groups(self):
        before = dist.new_group(timeout=WAIT)
        self.make_unequal_numbers_of_groups()
        for ranks in ([0, 1], [1, 2, 3], [0, 3], [0, 1, 2, 3]):
            with self.subTest(ranks=ranks):
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
        # The rows of one matrix are among some of the ranks.
        self.assertIn(tuple(ranks), used)


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
