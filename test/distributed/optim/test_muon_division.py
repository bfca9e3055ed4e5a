# Owner(s): ["oncall: distributed"]
"""Which matrices are divided among several owners, and their place in the schedule: pure functions."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import torch
from torch.optim._muon_engine.layouts.layout import Key, Layout, Shards
from torch.optim._muon_engine.layouts.divide import divide
from torch.optim._muon_engine.schedule import buckets, division
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.division import Class, divided
from torch.optim._muon_engine.schedule.owners import assign_owners, newton_schulz_flops
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_layouts import (
    rows_of,
    shards_of,
)


class Time(NamedTuple):
    """How long the owners of a matrix take."""

    seconds: float
    owners: int


def busiest(taken, members, ranks):
    """Seconds of the busiest rank, one matrix after another, each to the owners that are free first."""
    busy = [0.0] * ranks

    def free_from(team):
        return max(busy[rank] for rank in team)

    longest_first = sorted(taken.items(), key=lambda entry: -entry[1].seconds)
    for matrix_class, time in longest_first:
        starts = range(0, ranks - time.owners + 1, time.owners)
        teams = [range(start, start + time.owners) for start in starts]
        for _ in range(members[matrix_class]):
            team = min(teams, key=free_from)
            end = free_from(team) + time.seconds
            for rank in team:
                busy[rank] = end
    return max(busy)


class TestMuonDivision(TestCase):
    """``owners_per_matrix="auto"``."""

    def drawn(self, draw):
        """Matrices, the ranks of a group on nodes that it fills or not, and the numbers of owners to choose from."""
        per_node, nodes = draw.choice((1, 2, 8, 8)), draw.randint(1, 8)
        each = range(min(per_node, draw.choice((1, 2, 4, 7, 8))))
        group = [node * per_node + place for node in range(nodes) for place in each]
        if len(each) > 1 and draw.random() < 0.3:
            group.pop()
        near = min(Counter(rank // per_node for rank in group).values())
        members, numbers = {}, {}
        for _ in range(draw.randint(1, 3)):
            rows = draw.choice((2047, 2048, 16384, 32768))
            columns = draw.choice((2047, 2048, 16384, 32768))
            shards = draw.choice((1, 1, 2, 3, 16, 32))
            algorithm = draw.choice(("quintic", "gram"))
            matrix_class = Class((rows, columns), algorithm, shards)
            members[matrix_class] = draw.choice((1, 1, 2, 9))
            numbers[matrix_class] = self.choices(matrix_class, len(group), near)
        return members, numbers, group, per_node, near

    def choices(self, matrix_class, ranks, near):
        """The numbers of owners that a class may have in a group of ``ranks``, ``near`` of them on a node."""
        choices = [1]
        if min(matrix_class.shape) <= 2047:
            return choices
        shards = matrix_class.shards
        for owners_of_each in range(2, ranks + 1):
            is_within_a_node = owners_of_each <= near
            are_whole_nodes = near > 1 and owners_of_each % near == 0
            if not (is_within_a_node or are_whole_nodes):
                continue
            if shards == 1:
                is_choice = owners_of_each in (2, 4, 8, 16, 32, 64)
            elif owners_of_each == shards:
                is_choice = True
            else:
                # With other numbers, the replicas of some shards relay more than others.
                is_power = owners_of_each in (2, 4, 8, 16, 32, 64)
                fills_nodes = owners_of_each % near == 0
                is_choice = is_power and fills_nodes and shards % owners_of_each == 0
            if is_choice:
                choices.append(owners_of_each)
        return choices

    def cost(self, counts, members, ranks, near):
        """The seconds of H100s for Newton-Schulz, and with all that a division makes slower."""
        taken, largest_block = {}, 0
        for matrix_class, count in counts.items():
            seconds = self.seconds_of_owners(matrix_class, count, near)
            taken[matrix_class] = Time(seconds, count)
            block = math.prod(matrix_class.shape) / count
            largest_block = max(largest_block, block)
        busy = busiest(taken, members, ranks)
        # The first gather and the last scatter have nothing to hide behind.
        bytes_per_second = 450e9 if ranks == near else 50e9
        alone = 4 * largest_block / bytes_per_second
        # Each further owner makes packs smaller.
        slower = 1 + 0.02 * (max(counts.values()) - 1)
        return busy, (busy + alone) * slower

    def seconds_of_owners(self, matrix_class, count, near):
        """How long ``count`` owners of one matrix take for Newton-Schulz."""
        flops = newton_schulz_flops(
            matrix_class.shape, ns_algorithm=matrix_class.algorithm
        )
        # Between nodes, their ranks share the wires.
        bytes_per_second = 450e9
        if count > near:
            bytes_per_second = min(450e9, 50e9 * near)
        # In each iteration, the Gram matrix is summed.
        side = min(matrix_class.shape)
        received = (count - 1) / count * 10 * side**2
        latency = 3 * (count - 1) * 0.47e-6
        return flops / 494.5e12 / count + 5 * (received / bytes_per_second + latency)

    def test_best_division(self):
        """It is hardly slower than the fastest of all, and saves more than 2 % where it differs from one owner."""
        draw, found = random.Random(3), Counter()
        for _ in range(300):
            members, numbers, group, per_node, near = self.drawn(draw)
            best, seconds = division.best_division(members, group, per_node)
            choices, totals = [], []
            for choice in itertools.product(*numbers.values()):
                counts = dict(zip(members, choice, strict=True))
                _, total = self.cost(counts, members, len(group), near)
                choices.append(counts)
                totals.append(total)
            self.assertIn(best, choices)
            busy, total = self.cost(best, members, len(group), near)
            self.assertEqual(seconds, busy, atol=0, rtol=1e-6)
            self.assertLess(total, 1.03 * min(totals))
            one_owner_each, its_total = choices[0], totals[0]
            if best != one_owner_each:
                self.assertLess(total, 0.98 * its_total)
            found.update(best.values())
        self.assertGreater(len(found), 4, found)

    def test_classes_have_their_own_numbers(self):
        large, middle, small = (32768, 8192), (2048, 32768), (2047, 32768)
        # Ranks of a smaller group have many.
        others = shards_of([large] * 64, 32)
        # The number of matrices of each shape, and of blocks in the group of 64 ranks.
        for number, matrices, blocks in (
            ("auto", {large: 2, middle: 4, small: 4}, {large: 32, middle: 4, small: 4}),
            # Two owners for each matrix of more work than a rank has on average.
            (2, {large: 2, middle: 4, small: 4}, {large: 4, middle: 8, small: 4}),
            (2, {large: 9, middle: 4, small: 4}, {large: 18, middle: 4, small: 4}),
            (2, {large: 64}, {large: 64}),
        ):
            with self.subTest(number=number, matrices=matrices):
                shapes = list(Counter(matrices).elements())
                found = Counter()
                for layout in divided(shards_of(shapes, 64) + others, number, 8):
                    found[layout.full_shape, len(layout.holders)] += 1
                self.assertEqual(found.pop((large, 32)), 64)
                for shape, count in blocks.items():
                    self.assertEqual(found.pop((shape, 64)), count)
                self.assertFalse(found)
        # A frozen matrix takes no time, and no rank.
        one, other = shards_of([large, large], 2)
        with mock.patch.object(division, "FLOPS", 1):
            found = divided([one, replace(other, frozen=True)], "auto", 2)
            found = [layout.key.block[1] for layout in found]
        self.assertEqual(found, [2, 2, 1])

    def test_blocks_of_a_matrix_share_a_bucket(self):
        """Classes have different numbers of owners, so blocks stood at different places of the queues."""
        draw = random.Random(5)
        for _ in range(150):
            sides = [(draw.randint(1, 6), draw.randint(1, 2)) for _ in range(30)]
            some = sides[: draw.randint(2, 30)]
            shapes = [(8 * rows, 8 * columns) for rows, columns in some]
            layouts, blocks = shards_of(shapes, 4), []
            counts = {shape: draw.choice((1, 2, 3, 4)) for shape in shapes}
            for layout in layouts:
                blocks += divide(layout, counts[layout.shape])
            options = {"one_owner_at_a_time": draw.choice((False, True))}
            options["slots"] = draw.choice((2, 3, 4))
            with mock.patch.object(buckets, "BUCKET_BYTES", draw.choice((64, 256))):
                found = make_schedule(blocks, assign_owners(blocks), **options)
            for bucket in found.buckets:
                together = set(bucket.matrices)
                for block in bucket.matrices:
                    number, count = blocks[block].key.block
                    first = block - number
                    for other in range(first, first + count):
                        self.assertIn(other, together)
            every = []
            for bucket in found.buckets:
                every += bucket.matrices
            self.assertEqual(sorted(every), list(range(len(blocks))))

    def test_replicas(self):
        layouts = shards_of([(32768, 8192)], 4, replicas=16)
        self.assertEqual(len(divided(layouts, "auto", 8)), 4)

    def test_algorithms(self):
        """Newton-Schulz that takes less time is worth fewer owners."""
        shape = (16384, 4096)
        # In products of squares of 4096. On accelerators, "symmetric" has the default's products.
        for algorithm, expected in (("quintic", 45), ("symmetric", 45), ("gram", 30)):
            with self.subTest(algorithm):
                flops = newton_schulz_flops(shape, ns_algorithm=algorithm)
                self.assertEqual(flops / 2 / 4096**3, expected)
        for other in ((8192, 4096), (1024, 8192)):
            with self.subTest(other=other):
                default = newton_schulz_flops(other, ns_algorithm="quintic")
                gram = newton_schulz_flops(other, ns_algorithm="gram")
                self.assertEqual(gram, default)
        (layout,) = shards_of([shape], 8)
        self.assertEqual(Class.of(layout, "gram").algorithm, "gram")

    def test_matrices_without_elements(self):
        """They were a division by zero."""
        best = division.best_division({Class((8, 0)): 3, Class((8, 8)): 1}, range(2), 2)
        self.assertEqual(best[0], {Class((8, 0)): 1, Class((8, 8)): 1})

    def test_divided_and_heavy_matrices_come_first(self):
        """The owners of a divided matrix come to its collectives together."""
        light, heavy, middle = shards_of([(8, 8), (32, 32), (16, 16)], 2)
        layouts = [light, heavy, *divide(middle, 2)]
        owner_of = [0, 0, 0, 1]
        for options, expected in (
            ({}, [[2, 1, 0, 3]]),
            # Matrices of one owner wait until it has no divided ones.
            ({"one_owner_at_a_time": True}, [[2, 3], [1, 0]]),
        ):
            with self.subTest(options=options):
                with mock.patch.object(buckets, "MAX_BUCKETS", 1):
                    found = make_schedule(layouts, owner_of, **options).buckets
                self.assertEqual([[*bucket.matrices] for bucket in found], expected)

    def test_nodes_that_nobody_names(self):
        """Each rank is a node."""
        whole = rows_of((4096, 8192), 0, 4096)
        shards = Shards(tuple(range(16)), (whole,) * 16)
        layouts = [Layout(Key(0), (4096, 8192), torch.float32, shards)]
        found = [layout.key for layout in divided(layouts, "auto")]
        expected = [layout.key for layout in divided(layouts, "auto", 1)]
        self.assertEqual(found, expected)
        of_nodes = [layout.key for layout in divided(layouts, "auto", 8)]
        self.assertNotEqual(of_nodes, expected)


if __name__ == "__main__":
    run_tests()
