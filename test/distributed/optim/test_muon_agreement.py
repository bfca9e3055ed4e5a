# Owner(s): ["oncall: distributed"]
"""Layouts of distributed Muon on several ranks: what DTensors store, and what ranks agree on."""

import itertools

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim._muon_engine.agreement import agreeing, Agreement, Signature
from torch.optim._muon_engine.layouts.dtensor import DTensorLayouts
from torch.optim._muon_engine.layouts.layout import check_cover, Key
from torch.testing._internal import common_distributed
from torch.testing._internal.common_utils import run_tests


# Even, uneven, with fewer rows or columns than ranks, and with one row or column.
SHAPES = (8, 8), (7, 5), (3, 9), (9, 2), (1, 6), (6, 1)
PLACEMENTS = Shard(0), Shard(1), Replicate()


@common_distributed.requires_gloo()
class TestMuonAgreement(common_distributed.MultiProcContinuousTest):
    world_size = 4

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def meshes(self):
        """One of four ranks, and a grid of two by two."""
        return init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))

    def check_regions(self, numbers, mesh, placements):
        """Each rank's regions have the elements that its local tensor has, and all of them."""
        tensor = distribute_tensor(numbers, mesh, placements, src_data_rank=None)
        local = tensor.to_local()
        (layout,) = DTensorLayouts().of(Key(0), tensor)
        check_cover(layout)
        self.assertEqual(layout.shape, numbers.shape)
        self.assertEqual(layout.holders, (0, 1, 2, 3))
        found = 0
        for region in layout.shards.of(self.rank):
            stored = region.of_local(local)
            expected = region.of_matrix(numbers)
            self.assertEqual(stored, expected, rtol=0, atol=0)
            found += stored.numel()
        self.assertEqual(found, local.numel())

    def test_regions_are_what_dtensors_store(self):
        for mesh in self.meshes():
            for placements in itertools.product(PLACEMENTS, repeat=mesh.ndim):
                for rows, columns in SHAPES:
                    numbers = torch.arange(rows * columns).reshape(rows, columns)
                    with self.subTest(placements=placements, shape=numbers.shape):
                        self.check_regions(numbers, mesh, placements)

    def test_regions_of_strided_shards(self):
        """FSDP over tensor parallelism, and shards of which each has several runs of rows."""
        line, grid = self.meshes()
        strided = _StridedShard(0, split_factor=2)
        for mesh, placements in (
            (grid, (strided, Shard(0))),
            (grid, (strided, Shard(1))),
            (line, (strided,)),
        ):
            for rows, columns in SHAPES:
                numbers = torch.arange(rows * columns).reshape(rows, columns)
                with self.subTest(placements=placements, shape=numbers.shape):
                    self.check_regions(numbers, mesh, placements)

    def agreed(self, fields, error=None):
        """What :func:`agreeing` raises, or "", and what it found."""
        everyone = tuple(range(self.world_size))
        agreement = Agreement()
        reader = mock.Mock(sharing={everyone: [dist.group.WORLD]})
        text = ""
        try:
            with agreeing(reader, agreement, True) as signatures:
                if error is not None:
                    raise error
                signature = Signature("parameter 0", tuple(fields.items()))
                signatures[everyone] = [signature]
        except (RuntimeError, ValueError) as raised:
            text = f"{type(raised).__name__}: {raised}"
        return text, agreement

    def test_ranks_with_equal_signatures(self):
        everyone = tuple(range(self.world_size))
        serials = []
        for _ in range(2):
            text, agreement = self.agreed({"shape": "(8, 8)", "owner": "1"})
            self.assertEqual(text, "")
            group = agreement.groups[everyone]
            self.assertEqual(dist.get_process_group_ranks(group), [*everyone])
            serials.append(agreement.serials[everyone])
        # The next optimizer over these ranks has the next number.
        self.assertEqual(serials[1], serials[0] + 1)

    def test_ranks_with_other_fields(self):
        """All of them name the first field that differs, and go on together."""
        shape = "(8, 8)" if self.rank != 2 else "(8, 9)"
        text, _ = self.agreed({"name": "w", "shape": shape, "owner": "1"})
        self.assertRegex(text, r"ValueError: .*shape")
        self.assertIn("(8, 9)", text)
        self.assertEqual(self.agreed({"shape": "(8, 8)"})[0], "")

    def test_error_of_one_rank(self):
        """It raises its own, and the others raise one of the same type that names it."""
        error = ValueError("no such parameter") if self.rank == 1 else None
        text, _ = self.agreed({"shape": "(8, 8)"}, error)
        expected = "ValueError: rank 1 reports: no such parameter"
        if self.rank == 1:
            expected = "ValueError: no such parameter"
        self.assertEqual(text, expected)
        self.assertEqual(self.agreed({"shape": "(8, 8)"})[0], "")


if __name__ == "__main__":
    run_tests()
