# Owner(s): ["oncall: distributed"]
"""The plan of the distributed Muon as the pure function that it is: all ranks played in one process."""

import math
import random
from collections import Counter
from itertools import chain
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim._muon_engine import plan
from torch.optim._muon_engine.plan import (
    assign_owners,
    cut_into_buckets,
    make_plan,
    order_of_operations,
)
from torch.optim._muon_engine.params import checked, Matrix, Param
from torch.optim._muon_engine.regions import Layout, Region
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.checkers.accelerator import Accelerator
from torch.testing._internal.distributed._muon.checkers.ranks import (
    PlacedMatrices,
    Program,
    Rank,
)
from torch.testing._internal.distributed._muon.common_muon import S0


# The matrices of Llama 3 70B, nearly those of 405B, and those of DeepSeek-V3, whose experts are an eighth.
LLAMA = [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)]
LARGER = [(2 * rows, 2 * columns) for rows, columns in LLAMA]
ATTENTION = (1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)
LARGE, EXPERT = ([(rows, 7168), (rows, 7168), (7168, rows)] for rows in (18432, 2048))
DEEPSEEK = [*ATTENTION] * 61 + LARGE * 3 + [*EXPERT, (256, 7168)] * 58
DEEPSEEK += EXPERT * 58 * 32


def rows_of(shape, grid):
    """A layout whose columns hold rows of a matrix, as FSDP cuts them."""
    rows, columns = shape
    step = math.ceil(rows / len(grid[0]))
    shards = []
    for start in range(0, step * len(grid[0]), step):
        height = min(step, max(0, rows - start))
        region = Region(start, 0, height, columns, 0, columns)
        shards.append((region,) if height else ())
    return Layout(grid, tuple(shards))


def matrices_of(shapes, grid):
    layouts = {shape: rows_of(shape, grid) for shape in set(shapes)}
    return [
        Matrix(Param(index, torch.empty(shape, device="meta")), shape, layouts[shape])
        for index, shape in enumerate(shapes)
    ]


def grid_of(replicas, shards, first=0):
    return tuple(
        tuple(range(first + row * shards, first + (row + 1) * shards))
        for row in range(replicas)
    )


class TestRegions(TestCase):
    def test_no_tilings(self):
        """Regions that leave a gap, overlap, or are out of place are an error that names the matrix."""
        upper, lower = Region(0, 0, 2, 4, 0, 4), Region(2, 0, 2, 4, 0, 4)
        for regions, problem in (
            ([upper], "its pieces hold 8 of 16 elements"),
            ([upper, lower._replace(row=1)], "hold 16 of 16 elements, and overlap"),
            ([upper, lower._replace(row=3)], "its pieces hold 16 of 16 elements"),
        ):
            layout = Layout((tuple(range(len(regions))),), tuple(zip(regions)))
            matrix = Matrix(Param(0, torch.empty(4, 4), "w"), (4, 4), layout, "made up")
            with self.assertRaisesRegex(ValueError, f"'w'.*{problem}.*made up"):
                checked([matrix])

    def test_local_tensor_that_is_too_small(self):
        region = Region(0, 0, 2, 4, 8, 4)
        with self.assertRaisesRegex(ValueError, "does not hold"):
            region.of_local(torch.zeros(3, 4))


class TestOwners(TestCase):
    def test_ties(self):
        """They begin at a place of the grid, and rows come before ranks. Lighter matrices follow the least work."""
        for grid, start, expected in (
            (grid_of(1, 3), 0, [0, 1, 2, 2]),
            (grid_of(1, 3), 2, [2, 0, 1, 1]),
            (grid_of(3, 1), 1, [1, 2, 0, 0]),
            (grid_of(2, 2), 0, [0, 2, 1, 3]),
            (grid_of(2, 2), 3, [3, 1, 2, 0]),
        ):
            with self.subTest(grid=grid, start=start):
                matrices = matrices_of([(8, 8), (8, 8), (4, 4), (4, 4)], grid)
                found = assign_owners(matrices, {grid: start})
                self.assertEqual([*found.values()], expected)

    def test_work_in_other_grids(self):
        """It counts if all ranks know of it, as they do in a grid that contains theirs."""
        matrices = matrices_of([(64, 64), (8, 8)], grid_of(1, 4))
        for first in range(2):
            matrices += matrices_of([(8, 8)] * 2, grid_of(1, 2, first))
        owners = assign_owners(matrices)
        self.assertEqual([*owners.values()], [0, 1, 1, 1, 2, 1])


class TestOrder(TestCase):
    def order(self, counts_of_grids, prefetch, is_serial):
        buckets = []
        for grid, count in counts_of_grids:
            buckets += [(grid, number) for number in range(count)]
        operations = order_of_operations(buckets, prefetch, is_serial)
        return " ".join(f"{phase.name[0]}{index}" for phase, index in operations)

    def test_order(self):
        """Names begin with the phase: gather, compute, forward and apply."""
        row, both = grid_of(1, 4), grid_of(2, 2)
        for grids, prefetch, is_serial, expected in (
            ([(row, 4)], 1, False, "G0 G1 C0 G2 C1 A0 G3 C2 A1 C3 A2 A3"),
            ([(row, 2)], 0, True, "G0 C0 A0 G1 C1 A1"),
            ([(row, 1)], 3, False, "G0 C0 A0"),
            # With replicas of shards, the updates of a bucket travel along the column during the next one.
            ([(both, 3)], 1, False, "G0 G1 C0 G2 C1 F0 C2 F1 A0 F2 A1 A2"),
            ([(both, 2)], 0, True, "G0 C0 F0 A0 G1 C1 F1 A1"),
            # Grids one after another, but for the first gathers and the last results.
            (
                [(row, 2), (both, 2)],
                0,
                False,
                "G2 G0 C2 G3 C3 F2 C0 G1 C1 A0 F3 A2 A3 A1",
            ),
        ):
            with self.subTest(grids=grids, prefetch=prefetch):
                found = self.order(grids, prefetch, is_serial)
                self.assertEqual(found, expected)

    def test_each_rank_runs_a_part_of_one_order(self):
        """So no ranks wait for each other in a circle, whatever grids overlap."""
        for seed in range(100):
            draw = random.Random(seed)
            buckets = []
            for _ in range(draw.randint(1, 5)):
                ranks = draw.sample(range(6), draw.choice((2, 2, 3, 4, 6)))
                rows = draw.choice([n for n in (1, 2, 3) if len(ranks) % n == 0])
                grid = tuple(tuple(ranks[row::rows]) for row in range(rows))
                count = draw.randint(1, 5)
                buckets += [(grid, number) for number in range(count)]
            buckets = list(dict.fromkeys(buckets))
            prefetch = draw.randint(0, 3)

            def order_of(some, prefetch=prefetch):
                operations = order_of_operations(some, prefetch)
                return [(phase, *some[index]) for phase, index in operations]

            every = order_of(buckets)
            for rank in range(6):
                own = [b for b in buckets if any(rank in row for row in b[0])]
                draw.shuffle(own)
                expected = [operation for operation in every if operation[1:] in own]
                self.assertEqual(order_of(own), expected, f"{seed=} {rank=}")


class TestBuckets(TestCase):
    def test_every_owner_works_in_every_bucket(self):
        """Buckets, run sequentially, take hardly longer than the busiest owner's own work.

        A matrix of 28672 x 8192 is above the bound of a bucket. One of 18432 x 7168 takes as long as 33
        experts, of which 13 fitted next to it: DeepSeek-V3's took 1.45 times as long on 1,024.
        """
        for shapes, grid in (
            (LLAMA * 80, grid_of(1, 64)),
            (LLAMA * 80, grid_of(64, 256)),
            (LLAMA * 80, grid_of(8, 8)),
            # Most matrices are above the bound, so that buckets for small ones were empty.
            (LARGER * 126, grid_of(1, 64)),
            # An eighth of the experts, over an eighth of 1,024 ranks.
            (DEEPSEEK, grid_of(1, 128)),
        ):
            with self.subTest(count=len(shapes)):
                self.check(matrices_of(shapes, grid))

    def check(self, matrices):
        owners = assign_owners(matrices)
        buckets = cut_into_buckets(owners, matrices)
        members = sorted(m.index for bucket in buckets for m in bucket)
        self.assertEqual(members, list(range(len(matrices))))
        largest = max(matrix.numel for matrix in matrices)
        sequential, busy = 0, Counter()
        for at, bucket in enumerate(buckets):
            work, gathered = Counter(), Counter()
            for matrix in bucket:
                work[owners[matrix]] += matrix.flops
            sequential += max(work.values())
            busy.update(work)
            # Three buckets may be in flight, each with a bound and a largest matrix.
            for matrix in chain(*buckets[at : at + 3]):
                gathered[owners[matrix]] += matrix.numel
            most = 3 * (plan.BUCKET_BYTES // 2 + largest)
            self.assertLessEqual(max(gathered.values()), most)
        self.assertLessEqual(sequential, 1.1 * max(busy.values()))

    def test_rounds_are_bounded(self):
        """Along a column, each update arrives once, in pieces of rows."""
        for shape, replicas, shards in (((64, 8), 4, 1), ((40, 16), 2, 3)):
            matrices = matrices_of([shape] * 5, grid_of(replicas, shards))
            owners = assign_owners(matrices)
            for rank in range(replicas * shards):
                with mock.patch.object(plan, "ROUND_BYTES", 600):
                    found = make_plan(owners, rank)
                received = Counter()
                for bucket in found.buckets:
                    for planned in bucket.rounds:
                        for move in planned.moves:
                            received[move.matrix] += move.region.numel
                        # A row of a larger matrix may be longer than a peer's share.
                        self.assertLessEqual(2 * sum(planned.sizes), 600)
                for matrix in matrices:
                    self.assertEqual(received[matrix], matrix.layout.numel_of(rank))


class TestBuilding(TestCase):
    def test_an_error_while_ranks_connect(self):
        """One rank, alone. All ranks raise the error of one that has too little memory, before they connect."""
        program = Program(2, (PlacedMatrices((0, 1), (S0,), (256, 64)),))
        full, broken = torch.OutOfMemoryError("no memory"), RuntimeError("broken")

        def taken(storage):
            # All tables are smaller than the memory of a bucket.
            if storage.nbytes() > 4096:
                raise full

        for place, function, effect, words in (
            (Accelerator, "_count", taken, "^no memory"),
            (dist, "all_reduce", full, "^no memory"),
            (dist, "all_to_all_single", broken, "the gather of .* failed.*broken"),
        ):
            with Rank(program, 1, "lazy:0") as rank, Accelerator():
                with mock.patch.object(place, function, side_effect=effect):
                    with self.assertRaisesRegex(RuntimeError, words):
                        rank.build()


if __name__ == "__main__":
    run_tests()
