# Owner(s): ["oncall: distributed"]
"""A step of the distributed Muon: its collectives, and the groups and stages of ranks among which it makes them."""

import shutil
import tempfile
from datetime import timedelta

import torch.distributed as dist
from torch.optim.muon import create_auto_config
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    as_on_an_accelerator,
    Cut,
    everyone,
    grid_of,
    mesh_of,
    OnCPU,
    R,
    S0,
    specs,
    Strategy,
    Twins,
)


class TestMuonExchange(OnCPU):
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
        placed = specs(mesh_of(4), all_placements(mesh_of(4)))
        placed += specs(grid_of(2, 2), all_placements(grid_of(2, 2)))
        twins = Twins(placed)
        # The first step also compares the values of replicas.
        twins.step()
        usual = self.collectives_of_a_step(twins)
        self.assertEqual(everyone(usual.names), [usual.names] * 4)
        now = self.collectives_of_a_step(twins, range(0, len(placed), 3))
        self.assertEqual(now.launches, usual.launches)
        # Accelerators make the same calls even if ranks disagree about gradients.
        as_on_an_accelerator(twins.optimizer)
        now = self.collectives_of_a_step(twins, range(self.rank, len(placed), 4))
        self.assertEqual(now.launches, usual.launches)
        with self.assertRaisesRegex(RuntimeError, "gradient"):
            twins.optimizer.synchronize()

    def test_stages_of_different_sizes_at_different_times(self):
        """One stage makes two steps before the other one builds its optimizer."""
        grid = grid_of(2, 2)
        stage = grid.get_local_rank("a")
        stages = {"pp_stage_id": stage, "pp_num_stages": 2}
        config = Strategy(grid, "pp", "ddp").config(**stages)
        shapes = [[(8, 6), (5, 7), (4, 4)], [(16, 4)]][stage]
        # A key in the store says so, because a collective would bring the stages together.
        store = dist.distributed_c10d._get_default_store()
        done = [f"rank {rank} has made two steps" for rank in (0, 1)]
        if stage:
            store.wait(done, self.timeout)
        twins = Twins(map(Cut, shapes), config)
        for _ in range(2):
            twins.step()
        if not stage:
            store.set(done[self.rank], "yes")
        self.assertParity(twins)
        ranks = grid["b"].mesh.tolist()
        self.assertEqual(sorted(twins.optimizer.assignments), ranks)

    def test_experts_that_each_rank_numbers_from_zero(self):
        """Ranks of one ep_process_group never hold replicas of an expert."""
        world = dist.group.WORLD
        groups = {"ddp_process_group": world, "ep_process_group": world}
        config = create_auto_config(**groups, expert_assignments={0: 0})
        twins = Twins([Cut((6, 4))], config, seeds=[self.rank])
        self.assertTrainsAlike(twins, 1)
        self.assertEqual(twins.optimizer.assignments, {self.rank: [0]})


# Bounds the time that members would wait for each other under different names.
WAIT = timedelta(seconds=15)


def made(ranks):
    return dist.new_group(ranks, timeout=WAIT, use_local_synchronization=True)


class TestMuonLocalGroups(OnCPU):
    """Groups that only their members make, which may have any number of groups before."""

    def make_unequal_numbers_of_groups(self):
        for _ in range(self.rank):
            made([self.rank])

    def assertMeet(self, ranks, group):
        with self.everywhere(f"{ranks}"):
            if self.rank in ranks:
                self.assertEqual(everyone(self.rank, group), sorted(ranks))

    def test_members_with_unequal_numbers_of_groups(self):
        before = dist.new_group(timeout=WAIT)
        self.make_unequal_numbers_of_groups()
        for ranks in ([0, 1], [1, 2, 3], [0, 3], [0, 1, 2, 3]):
            self.assertMeet(ranks, made(ranks))
        # Members may list the ranks in different orders.
        self.assertMeet([0, 1, 2], made([2, 0, 1] if self.rank == 0 else [0, 1, 2]))
        # All ranks make this one. Its number names it.
        after = dist.new_group([0, 2], WAIT)
        self.assertMeet([0, 2], after)
        with self.everywhere():
            if self.rank in (0, 2):
                self.assertEqual(int(after.group_name), int(before.group_name) + 1)

    def test_names_start_again_with_the_world(self):
        """A restarted process counts from the beginning, so the others must do so too."""
        folder = everyone(tempfile.mkdtemp())[0]
        ranks = [0, 1, 2, 3]
        self.make_unequal_numbers_of_groups()
        names = []
        for time in range(3):
            # The other ranks may still need this one's store to make their group.
            dist.barrier()
            dist.destroy_process_group()
            self._init_pg(self.rank, self.world_size, f"{folder}/{time}")
            names.append([made(ranks).group_name for _ in range(2)])
            self.assertMeet(ranks, made(ranks))
        with self.everywhere():
            self.assertEqual(names, [names[0]] * 3)
            self.assertNotEqual(*names[0])
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    run_tests()
