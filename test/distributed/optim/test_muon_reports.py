# Owner(s): ["oncall: distributed"]
"""What ranks of process groups tell each other, at real sizes: one process plays all ranks."""

import pickle
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim._muon_engine.layouts import Key, merge, reports
from torch.optim._muon_engine.layouts.fsdp1 import interval_regions
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.model_shapes import MODELS
from torch.testing._internal.distributed.fake_pg import FakeStore


WORLD, REPLICAS = 1024, 8
SHARDS = WORLD // REPLICAS
# The matrices of one layer, which FSDP1 flattens to one parameter.
LAYER = 7


def rows_of(shapes, at):
    """Shard ``at`` of each matrix, where rows are cut: its shape and regions."""
    for rows, columns in shapes:
        step = -(-rows // SHARDS)
        rows = max(0, min(rows, (at + 1) * step) - at * step)
        yield (rows, columns), tuple(interval_regions(0, rows * columns, columns, 0))


def intervals_of(shapes, at):
    """Shard ``at`` of each matrix, where FSDP1 cuts the storage of a layer."""
    for first in range(0, len(shapes), LAYER):
        layer = shapes[first : first + LAYER]
        step = -(-sum(rows * columns for rows, columns in layer) // SHARDS)
        begin = 0
        for rows, columns in layer:
            end = begin + rows * columns
            start, stop = max(at * step, begin), min((at + 1) * step, end)
            local = start - begin, stop - begin, columns, start - at * step
            yield (rows, columns), tuple(interval_regions(*local))
            begin = end


class TestMuonReports(TestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
        # Ranks of one shard, then of one replica.
        self.shards = dist.new_group(list(range(SHARDS)))
        self.replicas = dist.new_group(list(range(0, WORLD, SHARDS)))
        self.shapes = MODELS["Llama 3 70B"].shapes

    def tearDown(self):
        dist.destroy_process_group()
        super().tearDown()

    def matrices(self, cut, dim, rank):
        """What ``rank``, one of the first replica's, knows of all matrices."""
        kinds = {}
        placements = (
            merge.GroupPlacement("fsdp", self.shards, dim),
            merge.GroupPlacement("ddp", self.replicas),
        )
        for i, (shape, regions) in enumerate(cut(self.shapes, rank)):
            part = merge.Part(shape, ((rank, regions),))
            yield merge.LocalMatrix(
                Key(i, 0, f"layers.{i // LAYER}.{i % LAYER}.weight"),
                torch.float32,
                kinds.setdefault(part, part),
                placements,
            )

    def merged(self, cut, dim):
        """All layouts, the longest report in bytes, and how many parts were put together."""
        lengths, calls = [], []

        def exchange(group, mine, error, names):
            self.assertIsNone(error)
            lengths.append(len(pickle.dumps(mine)))
            if not isinstance(mine.values[0], merge.Part):
                return [mine] * dist.get_world_size(group), None
            if group is self.replicas:
                everyone = [
                    mine._replace(
                        values=[
                            merge.Part(
                                part.shape,
                                tuple(
                                    (first + rank, has) for rank, has in part.holders
                                ),
                            )
                            for part in mine.values
                        ]
                    )
                    for first in range(0, WORLD, SHARDS)
                ]
                return everyone, None
            everyone = []
            for rank in range(SHARDS):
                parts = [m.part for m in self.matrices(cut, dim, rank)]
                report = reports.report_of([], parts, ())
                everyone.append(report._replace(digest=mine.digest))
            return everyone, None

        def joined(placement, parts):
            calls.append(len(parts))
            return original(placement, parts)

        original = merge._joined
        with (
            mock.patch.object(reports, "exchange", exchange),
            mock.patch.object(merge, "_joined", joined),
        ):
            groups = [("fsdp", self.shards), ("ddp", self.replicas)]
            mine = list(self.matrices(cut, dim, 0))
            layouts, warned = merge.merge(mine, groups, (0,), None)
        self.assertEqual(warned, [])
        return layouts, lengths, calls

    def test_each_kind_of_matrix_is_told_and_put_together_once(self):
        """Of 560 matrices on 1,024 ranks; that shards tile each of them is checked on the way."""
        for cut, dim in ((rows_of, 0), (intervals_of, None)):
            layouts, lengths, calls = self.merged(cut, dim)
            self.assertEqual([layout.shape for layout in layouts], self.shapes)
            self.assertTrue(all(len(layout.group) == WORLD for layout in layouts))
            kinds = len({id(layout.shards) for layout in layouts})
            self.assertLessEqual(kinds, LAYER)
            self.assertEqual(calls, [SHARDS] * kinds + [REPLICAS] * kinds)
            # Four bytes for each matrix and some for each kind; names alone would be 16,000.
            self.assertLess(lengths[0], 4096)


if __name__ == "__main__":
    run_tests()
