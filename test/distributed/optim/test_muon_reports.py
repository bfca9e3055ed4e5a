# Owner(s): ["oncall: distributed"]
"""The data that ranks of process groups exchange, at real sizes: one process plays all ranks."""

import pickle
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim._muon_engine.layouts import exchange, Key
from torch.optim._muon_engine.layouts.fsdp1 import interval_regions
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.model_shapes import MODELS
from torch.testing._internal.distributed.fake_pg import FakeStore


WORLD, REPLICAS = 1024, 8
SHARDS = WORLD // REPLICAS
# The matrices of one layer, which FSDP1 flattens to one parameter.
LAYER = 7


def rows_of(shapes, at):
    """Shard ``at`` of each matrix, where FSDP cuts rows: its own shape and regions."""
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
        self.shapes = MODELS["Llama 3 70B"].shapes

    def tearDown(self):
        dist.destroy_process_group()
        super().tearDown()

    def matrices(self, cut, dim, rank):
        """The matrices as ``rank`` knows them by itself."""
        replica, at = divmod(rank, SHARDS)
        first = replica * SHARDS
        cuts = (
            exchange.Cut("fsdp", tuple(range(first, first + SHARDS)), dim),
            exchange.Cut("ddp", tuple(range(at, WORLD, SHARDS))),
        )
        pieces = {}
        for i, (shape, regions) in enumerate(cut(self.shapes, at)):
            piece = exchange.Piece(shape, ((exchange.SPEAKER, regions),), cuts)
            piece = pieces.setdefault(piece, piece)
            yield exchange.LocalMatrix(Key(i), torch.float32, piece)

    def record(self, cut, dim, rank):
        mine = list(self.matrices(cut, dim, rank))
        pieces = list(dict.fromkeys(m.piece for m in mine))
        which = tuple(pieces.index(m.piece) for m in mine)
        told = exchange.Told(tuple(pieces), which, (None,) * len(mine))
        return exchange.Record(told, (rank,), 0)

    def layouts(self, cut, dim):
        """All layouts, and the sizes in bytes of the two messages of rank 0."""
        sizes = []

        def exchanged(group, known, error, described):
            self.assertIsNone(error)
            sizes.append(len(pickle.dumps(known)))
            kind, ranks = group
            if kind == "fsdp":
                return [{r: self.record(cut, dim, r)} for r in ranks], None
            answers = []
            for first in ranks:
                replica = range(first, first + SHARDS)
                answers.append({r: self.record(cut, dim, r) for r in replica})
            return answers, None

        mine = list(self.matrices(cut, dim, 0))
        groups = {(c.kind, c.ranks): (c.kind, c.ranks) for c in mine[0].piece.cuts}
        with mock.patch.object(exchange, "exchange", exchanged):
            layouts, equal = exchange.layouts_of(mine, groups, (0,), 0, None)
        self.assertEqual(equal, [])
        return layouts, sizes

    def test_each_kind_of_matrix_is_told_and_put_together_once(self):
        """560 matrices on 1,024 ranks. The reader checks that the shards tile each of them."""
        for cut, dim in ((rows_of, 0), (intervals_of, None)):
            layouts, sizes = self.layouts(cut, dim)
            self.assertEqual([layout.shape for layout in layouts], self.shapes)
            self.assertTrue(all(len(layout.group) == WORLD for layout in layouts))
            kinds = len({id(layout.shards) for layout in layouts})
            self.assertLessEqual(kinds, LAYER)
            # A few bytes per matrix, and some per kind. Names alone would be 16,000.
            self.assertLess(sizes[0], 6000)


if __name__ == "__main__":
    run_tests()
