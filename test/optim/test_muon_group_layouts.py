# Owner(s): ["module: optimizer"]
"""Layouts over process groups and of FSDP1, as one rank reads them."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.optim._muon_engine.layouts.groups import GroupsReader
from torch.optim._muon_engine.layouts.layout import Key
from torch.optim._muon_engine.layouts.pieces import Cut, LocalPieces
from torch.optim._muon_engine.layouts.tp_dims import TPDims
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_layouts import rows_of
from torch.testing._internal.distributed._muon.fake_ranks import FakeRanks


class TestGroupLayouts(FakeRanks, TestCase):
    def test_fsdp1_over_tp_of_more_than_one_mesh_dimension(self):
        self.as_rank(0, 4)
        dtensor = self.dtensor((2, 2), Shard(0), Shard(1))
        collector = GroupsReader({})._collector(LocalPieces({}, None), None)
        with self.assertRaisesRegex(ValueError, "weight.*mesh of 2 dim.*fully_shard"):
            collector.tp_of_spec(0, "weight", dtensor._spec)

    def test_dtensor_on_the_mesh_of_tensor_parallelism(self):
        """It shows which parameters TP cut: a plain one is whole, though an int says a dimension for all."""
        self.as_rank(0, 4)
        ranks = torch.arange(4).view(2, 2)
        grid = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        for on, expected in ((grid, None), (grid["tp"], None), (grid["dp"], 1)):
            with self.subTest(on=on):
                placements = [Shard(0)] * on.ndim
                params = [self.dtensor(on, *placements), torch.ones(4, 3)]
                dims = TPDims({"tp_dim_default": 1}, grid.get_group("tp"))
                dims.look_at(params, None)
                self.assertEqual(dims.of_plain(1), expected)

    def test_digests_of_values(self):
        """Sums that only a wider dtype tells apart are different values."""
        regions, cuts = rows_of((1, 2), 0, 1), (Cut("tp", (0, 1), 0),)
        for dtype, large in ((torch.bfloat16, 2.0**9), (torch.float32, 2.0**25)):
            digests = set()
            for small in (0.0, 1.0):
                pieces = LocalPieces({}, None)
                param = torch.tensor([[large, small]], dtype=dtype)
                pieces.add_piece(Key(0), param, (1, 2), regions, cuts)
                digests.add(pieces.digests[Key(0)])
            with self.subTest(dtype=dtype):
                self.assertEqual(len(digests), 2)


if __name__ == "__main__":
    run_tests()
