# Owner(s): ["module: optimizer"]
"""Layouts of distributed Muon: pure functions of shapes and placements."""

import unittest
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import run_tests, TestCase


if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Placement, Shard
    from torch.optim._muon_engine.layouts import dtensor as dtensor_layouts
    from torch.optim._muon_engine.layouts.dtensor import (
        _order_of_cuts,
        device_of,
        DTensorLayouts,
    )
    from torch.optim._muon_engine.layouts.layout import (
        check_cover,
        Key,
        Layout,
        Region,
        Shards,
    )
    from torch.testing._internal.distributed._muon.common_layouts import rows_of
    from torch.testing._internal.distributed._muon.fake_ranks import FakeRanks

else:
    FakeRanks = object


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestCover(TestCase):
    def check(self, *pieces):
        shards = Shards(tuple(range(len(pieces))), pieces)
        layout = Layout(Key(3, 0, "w"), (4, 6), torch.float32, shards, "made up")
        check_cover(layout)

    def test_no_tilings(self):
        def rows(start, stop):
            return rows_of((4, 6), start, stop)

        for name, pieces, text in (
            ("half of the rows", [rows(0, 2)], "hold 12 of 24 elements"),
            ("an empty shard", [rows(0, 2), ()], "hold 12 of 24"),
            ("a gap", [rows(0, 1), rows(2, 4)], "of 24"),
            ("nothing", [()], "hold 0 of 24"),
            ("a row twice", [rows(0, 3), rows(2, 4)], "overlap"),
            # As many elements as the matrix has, but other ones.
            ("a row twice, and one missing", [rows(0, 2), rows(1, 3)], "overlap"),
            ("rows beyond the end", [rows(0, 2), rows(3, 5)], "hold 24 of 24"),
            (
                "a row twice on one rank",
                [(Region(0, 0, 2, 6, 0, 6), Region(1, 0, 2, 6, 12, 6))],
                "overlap",
            ),
            ("columns beyond the end", [(Region(0, 1, 4, 6, 0, 6),)], "of 24"),
        ):
            pattern = rf"parameter 3 'w' of shape \(4, 6\).*{text}.*made up"
            with self.subTest(name):
                with self.assertRaisesRegex(ValueError, pattern):
                    self.check(*pieces)


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestSources(TestCase):
    def test_owners_take_shards_of_their_own_replica(self):
        """Also owners with empty shards: a matrix with two rows has two shards over the four ranks of a replica."""
        rows = [(Region(row, 0, 1, 6, 0, 6),) for row in range(2)]
        regions = (*rows, (), ()) * 3
        shards = Shards(tuple(range(12)), regions)
        for owner in range(12):
            first_of_replica = owner - owner % 4
            for row in range(2):
                for holder in range(row, 12, 4):
                    with self.subTest(owner=owner, holder=holder):
                        source = shards.source(holder, owner)
                        self.assertEqual(source, first_of_replica + row)

    def test_shards_with_unequal_numbers_of_replicas(self):
        """The sources of a shard are replicas of it, and an owner takes its own shard from nobody."""
        first, second = ((Region(row, 0, 1, 6, 0, 6),) for row in range(2))
        shards = Shards(tuple(range(5)), (first, second, first, first, second))
        for owner in range(5):
            self.assertEqual(shards.source(owner, owner), owner)
            self.assertIn(shards.source(0, owner), (0, 2, 3))
            self.assertIn(shards.source(1, owner), (1, 4))


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestDTensorLayouts(FakeRanks, TestCase):
    def test_partial_that_is_no_sum(self):
        self.as_rank(1, 4)
        dtensor = self.dtensor((2, 2), Partial("max"), Shard(0))
        with self.assertRaisesRegex(ValueError, "parameter 2 'w'.*Partial"):
            DTensorLayouts().of(Key(2, 0, "w"), dtensor)

    def test_parameters_on_a_cpu_in_a_group_of_accelerators(self):
        """The group's device has the communication buffers."""
        of_group, param = torch.device("cuda", 3), torch.ones(4, 3)
        gpus, both = (
            mock.Mock(_device_types=kinds) for kinds in (["cuda"], ["cpu", "cuda"])
        )
        with mock.patch.object(
            dtensor_layouts, "device_of_group", return_value=of_group
        ):
            found = dtensor_layouts.device_of([param], [both, gpus])
            self.assertEqual(found, of_group)
            found = dtensor_layouts.device_of([param], [both])
            self.assertEqual(found.type, "cpu")

    def test_ranks_that_share_matrices_of_a_stack(self):
        """Fewer than those of the mesh."""
        self.as_rank(0, 4)
        stack = self.dtensor((2, 2), Shard(0), Shard(1), shape=(2, 3, 5))
        sharing = DTensorLayouts().sharing([stack])
        self.assertEqual({*sharing}, {(0, 1, 2, 3), (0, 1)})

    def test_ranks_that_share_a_flattened_stack(self):
        """Those of the mesh."""
        self.as_rank(0, 4)
        stack = self.dtensor((2, 2), Shard(0), Shard(1), shape=(2, 3, 5))
        sharing = DTensorLayouts().sharing([stack], flattened_params={0})
        self.assertEqual({*sharing}, {(0, 1, 2, 3)})

    def test_offloaded_parameters(self):
        """Their mesh communicates between accelerators."""
        self.as_rank(0, 2)
        tensor, current = self.dtensor((2,), Shard(0)), torch.device("cuda", 1)
        with mock.patch.object(dtensor_layouts, "current_device", lambda kind: current):
            self.assertEqual(dtensor_layouts.device_of([tensor], []).type, "cpu")
            tensor.device_mesh._device_type = "cuda"
            self.assertEqual(dtensor_layouts.device_of([tensor], []), current)

    def test_mesh_without_this_rank(self):
        self.as_rank(2, 4)
        mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
        with self.assertRaisesRegex(ValueError, "parameter 1.*not in the mesh"):
            DTensorLayouts().of(Key(1), self.dtensor(mesh, Shard(0)))

    def test_local_tensor_of_another_size(self):
        self.as_rank(0, 2)
        dtensor = self.dtensor((2,), Shard(0))
        dtensor._local_tensor = torch.ones(3, 3)
        with self.assertRaisesRegex(ValueError, r"local tensor has shape \(3, 3\)"):
            DTensorLayouts().of(Key(0), dtensor)

    def test_placement_of_an_unknown_kind(self):
        class Odd(Placement):
            def no(self, *given):
                return False

            is_shard = is_replicate = is_partial = no

        with self.assertRaisesRegex(ValueError, "neither a shard, a replica"):
            _order_of_cuts((Odd(),), (2,), 0)

    def test_groups_of_a_flattened_mesh(self):
        """Ranks that a flattened mesh joins hear of the errors of those that share a DTensor."""
        self.as_rank(0, 4)
        ranks = torch.arange(4).view(2, 2)
        grid = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))
        dtensor = self.dtensor(grid["a"], Shard(0))
        before = DTensorLayouts().sharing([dtensor])
        flattened = grid._flatten("both").get_group()
        after = DTensorLayouts().sharing([dtensor])
        self.assertEqual(after, {(0, 2): [*before[0, 2], flattened]})

    def test_meshes_of_different_device_types(self):
        self.as_rank(0, 2)
        dtensors = [self.dtensor((2,), Shard(0)) for _ in range(2)]
        other = mock.PropertyMock(side_effect=["cpu", "xpu"])
        with mock.patch.object(DeviceMesh, "device_type", other):
            with self.assertRaisesRegex(ValueError, "device types.*cpu.*xpu"):
                device_of(dtensors)


if __name__ == "__main__":
    run_tests()
