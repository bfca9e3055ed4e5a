# Owner(s): ["oncall: distributed"]
"""A step of the distributed Muon: its computation, traffic and order, and the groups that it makes.

torch.optim.Muon makes the group of a matrix's holders with new_group(use_local_synchronization=True).
Each holder may have any number of groups before.
"""

import contextlib
import itertools
import shutil
import tempfile
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.optim import Muon
from torch.optim._muon_engine.process_groups import spanning_group
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_config import NewtonSchulzCalls
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

    def test_each_matrix_is_orthogonalized_once(self):
        for parallel in (True, False):
            with self.subTest(parallel=parallel):
                twins = Twins(self.placed(), create_dtensor_config(parallel))
                twins.set_gradients()
                with NewtonSchulzCalls() as calls:
                    twins.optimizer.step()
                owned = twins.optimizer.assignments
                for rank, shapes in enumerate(everyone(calls.shapes)):
                    expected = sorted(twins.specs[index].shape for index in owned[rank])
                    self.assertEqual(sorted(shapes), expected)
                every = sorted(itertools.chain(*owned.values()))
                self.assertEqual(every, [*range(len(twins.specs))])

    def test_hsdp_orthogonalizes_once_and_not_per_replica(self):
        twins = Twins(specs(grid_of(2, 2), [(R, S0)], [(8, 8)] * 4))
        twins.set_gradients()
        with NewtonSchulzCalls() as calls:
            twins.optimizer.step()
        self.assertEqual(everyone(len(calls.shapes)), [1] * 4)

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

    def test_mismatch_among_experts_is_an_error_on_all_ranks(self):
        """Ranks that share no expert with the mismatch waited for the others in the next exchange."""
        grid = grid_of(2, 2)
        layout = specs(grid, [(S0, R)], [(8, 8)] * 2)
        layout += specs(grid["b"], [(S0,)], [(6, 6)])
        twins = Twins(layout)
        twins.set_gradients(missing=(2,) if self.rank == 0 else ())
        # Ranks 0 and 1 share it.
        pattern = "some have none" if self.rank < 2 else "Their error says how"
        self.assertRaisesEverywhere(twins.optimizer.step, RuntimeError, pattern)
        twins.set_gradients()
        twins.optimizer.step()
        twins.single.step()
        self.assertParity(twins)

    def test_ranks_that_are_not_in_the_same_step(self):
        # With equal sizes, all exchanges would fit.
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * 8))
        twins.step()
        twins.set_gradients()
        before = [common_muon.local(param.detach()).clone() for param in twins.params]

        def fails():
            raise KeyError

        if self.rank == 2:
            # A step that the other ranks do not make.
            with contextlib.suppress(KeyError):
                twins.optimizer.step(fails)
        for _ in range(2):
            pattern = "not in the same step"
            self.assertRaisesEverywhere(twins.optimizer.step, RuntimeError, pattern)
        after = [common_muon.local(param.detach()) for param in twins.params]
        self.assertEqual(after, before)

    def test_mismatches_on_an_accelerator_are_seen_in_the_next_step(self):
        # A step does not wait for the device to learn the statuses of other ranks.
        placed = specs(grid_of(2, 2), [(S0, R), (S0, S1)], [(8, 8), (16, 12), (9, 7)])
        named = r"parameter 0.* \(8, 8\)"
        one_missing = (0,) if self.rank == 1 else ()
        # In its first step it waits, and nothing has moved.
        twins = Twins(placed)
        common_muon.as_on_an_accelerator(twins.optimizer)
        twins.set_gradients(one_missing)
        self.assertRaisesEverywhere(twins.optimizer.step, RuntimeError, named)
        self.assertTrainsAlike(twins)
        for look in (Muon.step, Muon.state_dict, Muon.synchronize):
            with self.subTest(look=look):
                twins = Twins(placed, weight_decay=0.2, foreach=False)
                twins.step()
                common_muon.as_on_an_accelerator(twins.optimizer)
                self.assertTrainsAlike(twins, 1, missing=lambda step: [1])
                self.assertTrainsAlike(twins, 1)
                twins.set_gradients(one_missing)
                with self.everywhere():
                    with self.assertNoLogs("torch.optim.muon", "WARNING"):
                        twins.optimizer.step()
                    with self.assertRaisesRegex(RuntimeError, named):
                        look(twins.optimizer)
                    # Raised once. After that, state_dict() only warns, so that a user can save.
                    with self.assertLogs("torch.optim.muon", "WARNING") as seen:
                        twins.optimizer.state_dict()
                    self.assertRegex(seen.output[0], named)
                    with self.assertRaisesRegex(RuntimeError, "Rebuild it"):
                        twins.optimizer.step()


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

    def errors(self, call, ranks):
        """The errors of those of ``ranks`` that get one."""
        outcome = self.outcome(call) if self.rank in ranks else None
        found = {}
        for rank, its_outcome in enumerate(everyone(outcome)):
            if its_outcome is not None:
                kind, text = its_outcome
                found[rank] = f"{kind}: {text}"
        return found

    def test_spanning_groups(self):
        """An existing group is used. Another is made once, and again after it was destroyed."""
        even, odd = dist.new_group((0, 2), WAIT), dist.new_group((1, 3), WAIT)
        if self.rank in (0, 2):
            mine, given = (0, 2), even
        else:
            mine, given = (1, 3), odd
        self.make_unequal_numbers_of_groups()
        before = len(dist.distributed_c10d._world.pg_names)
        with self.everywhere():
            self.assertIs(spanning_group(tuple(range(4)), []), dist.group.WORLD)
            self.assertIs(spanning_group(mine, [given]), given)
            self.assertEqual(len(dist.distributed_c10d._world.pg_names), before)
            # A world of another backend may not take tensors of these devices.
            kind = dist.get_backend_config(given)
            with mock.patch.object(
                dist, "get_backend_config", lambda g=None: g and kind
            ):
                world = spanning_group(tuple(range(4)), [given])
            self.assertIsNot(world, dist.group.WORLD)
            # Whichever of the framework's groups comes first.
            orders = [given, world], [world, given]
            alone = [spanning_group(mine[:1], order) for order in orders]
            self.assertIs(*alone)
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
        twins = Twins([common_muon.Spec((8, 8), part, (S0, S1))])
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
