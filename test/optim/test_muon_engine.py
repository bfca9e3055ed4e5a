# Owner(s): ["module: optimizer"]
"""Layouts, owners and schedules of distributed Muon: pure functions, so no process has to be started."""

import itertools
import math
import random
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Muon
from torch.optim._muon_engine.agreement import forth_and_back
from torch.optim._muon_engine.layouts import (
    check_cover,
    Key,
    larger_first,
    Layout,
    Region,
    Shards,
)
from torch.optim._muon_engine.schedule.owners import (
    assign_owners,
    by_rank,
    check_assignments,
    newton_schulz_flops,
)
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import (
        distribute_tensor,
        DTensor,
        Partial,
        Placement,
        Replicate,
        Shard,
    )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.optim._muon_engine.layouts.dtensor import _cut, DTensorReader
    from torch.optim._muon_engine.layouts.fsdp1 import FlatMatrix
    from torch.optim._muon_engine.layouts.groups import _LocalReader, ParallelGroups
    from torch.testing._internal.distributed.fake_pg import FakeStore


def rows_of(shape, start, stop):
    """One rank's piece: whole rows."""
    if stop <= start or not shape[1]:
        return ()
    return (Region(start, 0, stop - start, shape[1], 0, shape[1]),)


def row_layout(index, shape, ranks, shards=None):
    """Rows cut into ``shards`` parts over ``ranks``, which repeat them as often as they can."""
    shards = shards or len(ranks)
    edges = [shape[0] * i // shards for i in range(shards + 1)]
    pieces = [rows_of(shape, *edges[i % shards :][:2]) for i in range(len(ranks))]
    held = Shards(tuple(ranks), tuple(pieces))
    return Layout(Key(index), tuple(shape), torch.float32, held, "made up")


def random_layouts(rng, count, ranks, shards=None):
    sizes = [1, 3, 8, 17, 64, 100, 256]
    return [
        row_layout(i, (rng.choice(sizes), rng.choice(sizes)), ranks, shards)
        for i in range(count)
    ]


def loads_of(layouts, owners, ranks):
    loads = dict.fromkeys(ranks, 0)
    for layout, owner in zip(layouts, owners):
        loads[owner] += newton_schulz_flops(layout.shape)
    return [loads[rank] for rank in ranks]


class TestForthAndBack(TestCase):
    def reached(self, groups, source):
        knows = {source}
        for ranks in forth_and_back(larger_first(groups)):
            if not knows.isdisjoint(ranks):
                knows |= set(ranks)
        return knows

    def check(self, groups):
        ranks = set().union(*groups)
        for source in ranks:
            self.assertEqual(self.reached(groups, source), ranks, f"{groups}")

    def test_paths(self):
        for size in range(2, 7):
            for order in itertools.permutations(range(size)):
                pairs = itertools.pairwise(order)
                self.check([tuple(sorted(pair)) for pair in pairs])

    def test_meshes(self):
        for shape in [(2, 2), (4, 4), (2, 3, 4), (3, 3, 3), (2, 2, 2, 2, 2)]:
            mesh = torch.arange(math.prod(shape)).view(shape)
            lines = (mesh.movedim(d, -1).reshape(-1, s) for d, s in enumerate(shape))
            self.check([tuple(line) for grid in lines for line in grid.tolist()])


class TestCover(TestCase):
    def layout(self, shape, *pieces, contributions=()):
        shards = Shards(tuple(range(len(pieces))), pieces, contributions)
        return Layout(Key(3, 0, "w"), shape, torch.float32, shards, "made up")

    def test_tilings(self):
        whole = rows_of((4, 6), 0, 4)
        quarters = [
            (Region(row, column, 2, 3, 0, 3),) for row in (0, 2) for column in (0, 3)
        ]
        # Part of a row, whole rows, part of a row: what an interval of a flat tensor is.
        interval = (
            (
                Region(0, 0, 2, 6, 0, 6),
                Region(2, 0, 1, 2, 12, 6),
            ),
            (Region(2, 2, 1, 4, 0, 6), Region(3, 0, 1, 6, 4, 6)),
        )
        for layout in (
            self.layout((4, 6), whole),
            self.layout((4, 6), whole, whole),
            self.layout((4, 6), whole, ()),
            self.layout((4, 6), *quarters),
            self.layout((4, 6), *reversed(quarters)),
            self.layout((4, 6), *quarters, *quarters),
            self.layout((4, 6), *interval),
            self.layout((4, 6), whole, whole, contributions=(0, 1)),
            self.layout((0, 6), (), ()),
        ):
            self.assertIsNone(check_cover(layout))

    def test_gap(self):
        for pieces in (
            [rows_of((4, 6), 0, 2)],
            [rows_of((4, 6), 0, 1), rows_of((4, 6), 2, 4)],
            [(Region(0, 0, 4, 5, 0, 5),)],
            [()],
        ):
            with self.assertRaisesRegex(
                ValueError, r"parameter 3 'w' of shape \(4, 6\).*of 24 elements"
            ):
                check_cover(self.layout((4, 6), *pieces))

    def test_overlap(self):
        for pieces in (
            [rows_of((4, 6), 0, 3), rows_of((4, 6), 2, 4)],
            # As many elements as the matrix has, and yet not the matrix.
            [rows_of((4, 6), 0, 2), rows_of((4, 6), 1, 3)],
            [(Region(0, 0, 4, 4, 0, 4),), (Region(0, 3, 4, 2, 0, 2),)],
            [(Region(0, 0, 2, 6, 0, 6), Region(1, 0, 2, 6, 12, 6))],
        ):
            with self.assertRaisesRegex(ValueError, "parameter 3 'w'.*overlap"):
                check_cover(self.layout((4, 6), *pieces))

    def test_out_of_bounds(self):
        for pieces in (
            [rows_of((4, 6), 0, 2), rows_of((4, 6), 3, 5)],
            [(Region(0, 1, 4, 6, 0, 6),)],
            [rows_of((4, 6), 0, 5)],
        ):
            with self.assertRaisesRegex(ValueError, "parameter 3 'w'"):
                check_cover(self.layout((4, 6), *pieces))

    def test_each_contribution_covers(self):
        whole, half = rows_of((4, 6), 0, 4), rows_of((4, 6), 0, 2)
        with self.assertRaisesRegex(ValueError, "12 of 24"):
            check_cover(self.layout((4, 6), whole, half, contributions=(0, 1)))

    def test_replica_sets(self):
        layout = row_layout(0, (4, 6), (5, 6, 7, 8), shards=2)
        self.assertEqual(layout.shards.replica_sets, ((5, 7), (6, 8)))


class TestOwners(TestCase):
    def test_flops(self):
        # Each iteration makes two products with the n x n Gram matrix's sides and one square of it.
        self.assertEqual(newton_schulz_flops((3, 7), 1), 2 * (2 * 3 * 3 * 7) + 2 * 27)
        self.assertEqual(newton_schulz_flops((7, 3)), newton_schulz_flops((3, 7)))
        self.assertEqual(
            newton_schulz_flops((3, 7), 10), 10 * newton_schulz_flops((3, 7), 1)
        )
        self.assertEqual(newton_schulz_flops((0, 7)), 0)

    def test_within_four_thirds_of_the_best(self):
        rng = random.Random(0)
        for _ in range(40):
            ranks = tuple(range(rng.choice([2, 3])))
            layouts = random_layouts(rng, rng.randint(1, 7), ranks)
            costs = [newton_schulz_flops(layout.shape) for layout in layouts]
            best = min(
                max(
                    sum(cost for cost, where in zip(costs, choice) if where == rank)
                    for rank in ranks
                )
                for choice in itertools.product(ranks, repeat=len(layouts))
            )
            found = max(loads_of(layouts, assign_owners(layouts), ranks))
            self.assertLessEqual(found, best * 4 / 3)

    def test_balance_of_many(self):
        rng = random.Random(1)
        for world_size in (2, 5, 8, 64):
            ranks = tuple(range(world_size))
            layouts = random_layouts(rng, 30 * world_size, ranks)
            loads = loads_of(layouts, assign_owners(layouts), ranks)
            heaviest = max(newton_schulz_flops(layout.shape) for layout in layouts)
            bound = max(sum(loads) / world_size, heaviest)
            self.assertLessEqual(max(loads), bound * 4 / 3)

    def test_replicas_and_shards_own_alike(self):
        # Eight equal matrices, two shards on each of four replicas: every rank has its one.
        layouts = [row_layout(i, (8, 8), tuple(range(8)), shards=2) for i in range(8)]
        self.assertEqual(sorted(assign_owners(layouts)), list(range(8)))
        replicated = [
            row_layout(i, (8, 8), tuple(range(8)), shards=1) for i in range(8)
        ]
        self.assertEqual(sorted(assign_owners(replicated)), list(range(8)))

    def test_work_for_a_wider_group_counts(self):
        # A dense matrix of all ranks goes to rank 0, so that rank 1 gets the experts of both.
        dense, experts = row_layout(0, (32, 32), (0, 1, 2, 3)), []
        for i in range(1, 9):
            experts.append(row_layout(i, (8, 8), (0, 1) if i % 2 else (2, 3)))
        owners = assign_owners([dense, *experts])
        self.assertEqual(owners[0], 0)
        self.assertEqual(owners[1::2], [1] * 4)
        self.assertEqual(sorted(owners[2::2]), [2, 2, 3, 3])
        # Ranks 2 and 3 know nothing of the others' experts.
        self.assertEqual(assign_owners([dense, *experts[1::2]])[1:], owners[2::2])
        # A chain of groups counts each matrix once.
        middle = [row_layout(i, (16, 16), (0, 1)) for i in range(9, 11)]
        owners = assign_owners([dense, *middle, *experts])
        self.assertEqual(owners[1:3], [1, 1])

    def test_fewest_bytes_where_the_load_is_equal(self):
        pieces = (rows_of((8, 8), 0, 1), rows_of((8, 8), 1, 8))
        layout = Layout(Key(0), (8, 8), torch.float32, Shards((4, 9), pieces))
        self.assertEqual(assign_owners([layout]), [9])

    def test_the_same_on_every_rank(self):
        layouts = random_layouts(random.Random(2), 40, (0, 1, 2, 3), shards=2)
        owners = assign_owners(layouts)
        for _ in range(3):
            self.assertEqual(assign_owners(list(layouts)), owners)
        # Whichever order the framework lists the ranks in.
        turned = [
            Layout(
                one.key,
                one.shape,
                one.dtype,
                Shards(one.group[::-1], one.shards.regions[::-1]),
            )
            for one in layouts
        ]
        self.assertEqual(assign_owners(turned), owners)
        self.assertEqual(assign_owners(iter(layouts)), owners)

    def test_groups_do_not_see_each_other(self):
        # Rank 0 is in both groups, but rank 2 does not know what rank 1 has.
        rng = random.Random(3)
        first = random_layouts(rng, 9, (0, 1))
        second = random_layouts(rng, 7, (0, 2))
        alone = assign_owners(first), assign_owners(second)
        mixed = list(
            itertools.chain.from_iterable(itertools.zip_longest(first, second))
        )
        mixed = [layout for layout in mixed if layout is not None]
        owners = assign_owners(mixed)
        for group, expected in zip(((0, 1), (0, 2)), alone):
            found = [owner for one, owner in zip(mixed, owners) if one.group == group]
            self.assertEqual(found, expected)

    def test_owners_hold_the_matrix(self):
        rng = random.Random(4)
        layouts = [
            row_layout(i, (8, 4), tuple(sorted(rng.sample(range(10), 3))))
            for i in range(30)
        ]
        for layout, owner in zip(layouts, assign_owners(layouts)):
            self.assertIn(owner, layout.group)
        self.assertEqual(assign_owners([]), [])

    def test_by_rank(self):
        self.assertEqual(by_rank([0, 1, 2], [4, 2, 4]), {2: [1], 4: [0, 2]})
        # A flat parameter of two matrices stands with its first.
        self.assertEqual(by_rank([0, 0, 1], [1, 0, 0]), {0: [1], 1: [0]})

    def test_check_assignments(self):
        names = ["first", "second"]
        self.assertIsNone(check_assignments({0: [1], 1: [0]}, names, 2))
        self.assertIsNone(check_assignments({7: (1, 0)}, names, None))
        for assignments, kind, words in (
            ({0: [0]}, AssertionError, "second"),
            ({0: [0, 1], 1: [1]}, AssertionError, "second"),
            ({0: [0, 1, 2]}, AssertionError, r"\[2\]"),
            ({2: [0, 1]}, ValueError, "rank 2"),
            ({2: [], 0: [0, 1]}, ValueError, "rank 2"),
        ):
            with self.assertRaisesRegex(kind, words):
                check_assignments(assignments, names, 2)


@instantiate_parametrized_tests
class TestSchedule(TestCase):
    def schedule(self, layouts, **options):
        return make_schedule(layouts, assign_owners(layouts), torch.bfloat16, **options)

    def assert_every_matrix_once(self, schedule):
        seen = [m for bucket in schedule.buckets for m in bucket.matrices]
        self.assertEqual(sorted(seen), list(range(len(schedule.layouts))))

    def test_number_of_rounds(self):
        for count, world_size, expected in (
            (1, 4, 1),
            (4, 4, 1),
            (8, 4, 2),
            (16, 4, 4),
            (100, 4, 4),
            (400, 4, 4),
            (200, 1, 4),
        ):
            ranks = tuple(range(world_size))
            layouts = [row_layout(i, (64, 64), ranks) for i in range(count)]
            schedule = self.schedule(layouts)
            self.assertEqual(
                len(schedule.buckets), expected, f"{count} on {world_size}"
            )
            self.assert_every_matrix_once(schedule)

    def test_rounds_of_mixed_sizes(self):
        rng = random.Random(0)
        for world_size in (2, 3, 8):
            layouts = random_layouts(rng, 20 * world_size, tuple(range(world_size)))
            schedule = self.schedule(layouts)
            self.assertLessEqual(len(schedule.buckets), 4)
            self.assert_every_matrix_once(schedule)
            indices = [r.index for r in schedule.buckets]
            self.assertEqual(indices, list(range(len(indices))))

    def test_owners_have_the_same_work_in_a_round(self):
        ranks = (0, 1, 2, 3)
        layouts = [row_layout(i, (64, 64), ranks) for i in range(64)]
        schedule = self.schedule(layouts)
        for bucket in schedule.buckets:
            owned = [schedule.owners[m] for m in bucket.matrices]
            self.assertEqual([owned.count(rank) for rank in ranks], [4] * 4)

    def test_byte_bound(self):
        ranks = (0, 1)
        layouts = [row_layout(i, (64, 64), ranks) for i in range(40)]
        size = 64 * 64 * 2
        for at_once in (1, 2, 3, 7):
            bound = size * at_once
            schedule = self.schedule(layouts, bucket_bytes=bound)
            self.assert_every_matrix_once(schedule)
            self.assertGreaterEqual(len(schedule.buckets), 20 // at_once)
            for bucket, rank in itertools.product(schedule.buckets, ranks):
                spec = schedule.spec(bucket, rank, ranks)
                for side in (spec.gather_send, spec.gather_recv):
                    moved = sum(packed.region.numel for packed in side.regions)
                    self.assertLessEqual(moved * 2, bound)

    def test_byte_bound_below_one_matrix(self):
        layouts = [row_layout(i, (64, 64), (0, 1)) for i in range(6)]
        schedule = self.schedule(layouts, bucket_bytes=10)
        self.assert_every_matrix_once(schedule)
        for bucket in schedule.buckets:
            owned = [schedule.owners[m] for m in bucket.matrices]
            self.assertEqual(len(owned), len(set(owned)))

    @parametrize("shards", [1, 2, 4])
    def test_one_owner_at_a_time(self, shards):
        ranks = (0, 1, 2, 3)
        layouts = random_layouts(random.Random(1), 21, ranks, shards)
        schedule = self.schedule(layouts, one_owner_at_a_time=True)
        self.assert_every_matrix_once(schedule)
        turns = []
        for bucket in schedule.buckets:
            (owner,) = {schedule.owners[m] for m in bucket.matrices}
            turns.append(owner)
        self.assertEqual(turns, sorted(turns))
        self.assertEqual(set(turns), set(schedule.owners))

    def test_groups_in_one_order(self):
        # Ranks meet in groups that overlap, so each has to come upon them in the same order.
        groups = [(0, 1, 2, 3), (0, 1), (2, 3), (1, 2)]
        rng = random.Random(2)
        layouts = [
            row_layout(i, (rng.choice([8, 64]), 32), rng.choice(groups))
            for i in range(60)
        ]
        for one_owner_at_a_time in (False, True):
            options = {"one_owner_at_a_time": one_owner_at_a_time}
            schedule = self.schedule(layouts, **options)
            self.assert_every_matrix_once(schedule)
            for rank in range(4):
                # What this rank knows gives the same buckets, in the same order.
                mine = [i for i, one in enumerate(layouts) if rank in one.group]
                known = self.schedule([layouts[i] for i in mine], **options)
                self.assertEqual(
                    [
                        (r.group, r.index, [mine[m] for m in r.matrices])
                        for r in known.buckets
                    ],
                    [
                        (r.group, r.index, list(r.matrices))
                        for r in schedule.buckets
                        if rank in r.group
                    ],
                )

    def test_owner_without_a_piece(self):
        layout = row_layout(0, (4, 4), (0, 1))
        with self.assertRaisesRegex(ValueError, "rank 2.*parameter 0.*no piece"):
            make_schedule([layout], [2], torch.bfloat16)

    def exchange(self, schedule, bucket, side_of, order):
        """Plays one hop: what stands in each rank's buffers is checked against its peers'."""
        specs = {rank: schedule.spec(bucket, rank, order) for rank in order}
        for sender, receiver in itertools.product(order, repeat=2):
            send, recv = side_of(specs[sender])[0], side_of(specs[receiver])[1]
            to, start = order.index(receiver), order.index(sender)
            self.assertEqual(send.splits[to], recv.splits[start])
            if sender == receiver:
                self.assertEqual(send.splits[to], 0)
                continue
            ranges = [
                (sum(send.splits[:to]), send.splits[to], send),
                (sum(recv.splits[:start]), recv.splits[start], recv),
            ]
            segments = []
            for begin, length, side in ranges:
                segments.append(
                    [
                        (one.matrix, getattr(one, "region", None), one.offset - begin)
                        for one in (*side.regions, *side.flags)
                        if begin <= one.offset < begin + length
                    ]
                )
            self.assertEqual(*segments)
        return specs

    @parametrize("shards", [1, 2, 4])
    @parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
    def test_what_travels(self, shards, order):
        layouts = random_layouts(random.Random(3), 30, (0, 1, 2, 3), shards)
        schedule = self.schedule(layouts)
        arrived = dict.fromkeys(range(len(layouts)), 0)
        returned = {(m, rank): 0 for m in range(len(layouts)) for rank in order}
        for bucket in schedule.buckets:
            for side_of in (
                lambda p: (p.gather_send, p.gather_recv),
                lambda p: (p.scatter_send, p.scatter_recv),
            ):
                specs = self.exchange(schedule, bucket, side_of, order)
            for rank, spec in specs.items():
                owned = [m for m in bucket.matrices if schedule.owners[m] == rank]
                self.assertEqual(list(spec.owned), owned)
                for packed in spec.gather_recv.regions:
                    self.assertEqual(schedule.owners[packed.matrix], rank)
                    arrived[packed.matrix] += packed.region.numel
                for packed in spec.scatter_recv.regions:
                    returned[packed.matrix, rank] += packed.region.numel
        for m, layout in enumerate(layouts):
            owner = schedule.owners[m]
            held = {
                rank: sum(region.numel for region in layout.shards.of(rank))
                for rank in order
            }
            # No element enters its owner twice, nor where the owner has it already.
            self.assertEqual(arrived[m], layout.numel - held[owner])
            for rank in order:
                expected = 0 if rank == owner else held[rank]
                self.assertEqual(returned[m, rank], expected)

    def test_the_owners_own_replica_sends(self):
        # Shards (0, 1) and their replicas (2, 3): within a replica is the shorter way.
        layout = row_layout(0, (8, 4), (0, 1, 2, 3), shards=2)
        for owner, source in ((0, 1), (1, 0), (2, 3), (3, 2)):
            schedule = make_schedule([layout], [owner], torch.bfloat16)
            sources = {rank for rank in range(4) if schedule.is_source(0, rank)}
            self.assertEqual(sources, {owner, source})

    def test_contributions_travel_in_their_own_dtype(self):
        whole = rows_of((4, 4), 0, 4)
        shards = Shards((0, 1), (whole, whole), contributions=(0, 1))
        partial = Layout(Key(0), (4, 4), torch.float32, shards)
        schedule = make_schedule(
            [partial, row_layout(1, (4, 4), (0, 1))], [0, 1], torch.bfloat16
        )
        dtypes = {
            m: (r.gather_dtype, r.scatter_dtype)
            for r in schedule.buckets
            for m in r.matrices
        }
        self.assertEqual(dtypes[0], (torch.float32, torch.bfloat16))
        self.assertEqual(dtypes[1], (torch.bfloat16, torch.bfloat16))
        # Both contributions are needed at the owner; one of the two takes the update.
        self.assertTrue(schedule.is_source(0, 0) and schedule.is_source(0, 1))
        self.assertTrue(schedule.receives(0, 0))
        self.assertFalse(schedule.receives(0, 1))


class FakeWorld(TestCase):
    def as_rank(self, rank, world_size):
        """A process group that answers for ``rank`` without any other process."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=world_size
        )

    def tearDown(self):
        if dist.is_initialized():
            dist.destroy_process_group()
        super().tearDown()


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
class TestDryRuns(FakeWorld):
    """Any rank of a world steps alone over the fake backend, to see what memory it would need."""

    def dtensor(self, shape, mesh, placements):
        local, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
        return DTensor.from_local(
            torch.ones(local),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )

    def test_any_rank_steps(self):
        # DTensor keeps equal meshes apart by nothing, so each world has a shape of its own.
        for shape, rank in (
            ((4,), 0),
            ((3,), 2),
            ((1024,), 5),
            ((512,), 511),
            ((64, 16), 1023),
            ((32, 16), 5),
        ):
            world = math.prod(shape)
            self.as_rank(rank, world)
            mesh = DeviceMesh("cpu", torch.arange(world).view(shape))
            placements = (*[Replicate()] * (len(shape) - 1), Shard(0))
            params = [
                nn.Parameter(self.dtensor(size, mesh, placements))
                for size in [(32, 8), (16, 48), (7, 5)] * 3
            ]
            optimizer = Muon(params, distributed_config="auto")
            for _ in range(2):
                for p in params:
                    p.grad = self.dtensor(p.shape, mesh, placements)
                optimizer.step()
            buffers = optimizer._engine.pipeline.buffers
            self.assertGreater(len(buffers.buckets), 0)
            buffers.connect()


@unittest.skipIf(not dist.is_available(), "torch.distributed is not in this build")
@instantiate_parametrized_tests
class TestDTensorReader(FakeWorld):
    SHAPES = [(8, 6), (7, 5), (1, 6), (3, 2), (5, 1)]

    def mesh(self, shape, names=None):
        size = torch.Size(shape).numel()
        return DeviceMesh("cpu", torch.arange(size).view(shape), mesh_dim_names=names)

    def numbered(self, shape):
        return torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)

    def assert_layout_tells_where(self, layout, rank, local):
        """Each rectangle of ``rank`` is where the layout says, in the matrix and in storage."""
        matrix = self.numbered(layout.shape)
        covered = torch.zeros_like(local)
        for region in layout.shards.of(rank):
            self.assertEqual(region.of_local(local), region.of_matrix(matrix))
            region.of_local(covered).add_(1)
        self.assertEqual(covered, torch.ones_like(local))

    @parametrize("mesh_shape", [(1,), (2,), (3,), (5,), (2, 2), (3, 2), (2, 2, 2)])
    def test_as_distribute_tensor(self, mesh_shape):
        world_size = torch.Size(mesh_shape).numel()
        kinds = [Shard(0), Shard(1), Replicate()]
        if len(mesh_shape) == 1:
            kinds += [Shard(-1), Shard(-2)]
        combinations = list(itertools.product(kinds, repeat=len(mesh_shape)))
        shapes = self.SHAPES if len(mesh_shape) < 3 else self.SHAPES[1:2]
        first = {}
        for rank in range(world_size):
            self.as_rank(rank, world_size)
            mesh, reader = self.mesh(mesh_shape), DTensorReader()
            for shape, placements in itertools.product(shapes, combinations):
                dtensor = distribute_tensor(
                    self.numbered(shape), mesh, placements, src_data_rank=None
                )
                layout = reader.read_dtensor(Key(0), dtensor)
                self.assert_layout_tells_where(layout, rank, dtensor.to_local())
                self.assertEqual(layout.shape, shape)
                self.assertEqual(layout.group, tuple(range(world_size)))
                self.assertEqual(layout.shards.contributions, ())
                # All ranks read the same.
                known = first.setdefault((shape, placements), layout)
                self.assertEqual(layout.shards.regions, known.shards.regions)
                check_cover(layout)

    def test_fully_shard_over_tensor_parallel(self):
        # The rows of the second cut are strided: TP cuts first, though its dimension comes last.
        shapes = {0: [(12, 6), (9, 5), (2, 3)], 1: [(12, 6), (7, 5), (2, 3)]}
        for rank, dim, which in itertools.product(range(6), (0, 1), range(3)):
            shape = shapes[dim][which]
            self.as_rank(rank, 6)
            mesh = self.mesh((3, 2), ("dp", "tp"))
            module = nn.Linear(shape[1], shape[0], bias=False)
            module.weight = nn.Parameter(
                distribute_tensor(
                    self.numbered(shape), mesh["tp"], [Shard(dim)], src_data_rank=None
                )
            )
            fully_shard(module, mesh=mesh["dp"])
            layout = DTensorReader().read_dtensor(Key(0), module.weight.data)
            self.assert_layout_tells_where(
                layout, rank, module.weight.to_local().detach()
            )
            check_cover(layout)

    def test_submesh(self):
        self.as_rank(5, 8)
        mesh = self.mesh((2, 4), ("outer", "inner"))["inner"]
        dtensor = distribute_tensor(
            self.numbered((8, 3)), mesh, [Shard(0)], src_data_rank=None
        )
        layout = DTensorReader().read_dtensor(Key(0), dtensor)
        self.assertEqual(layout.shards.ranks, (4, 5, 6, 7))
        self.assertEqual(layout.shards.of(5), (Region(2, 0, 2, 3, 0, 3),))

    def test_partial(self):
        self.as_rank(1, 4)
        mesh = self.mesh((2, 2))
        dtensor = DTensor.from_local(
            torch.ones(4, 3), mesh, [Partial(), Shard(0)], run_check=False
        )
        layout = DTensorReader().read_dtensor(Key(0), dtensor)
        self.assertEqual(layout.shape, (8, 3))
        self.assertEqual(layout.shards.contributions, (0, 0, 1, 1))
        self.assertTrue(layout.shards.partial)
        self.assertEqual(layout.shards.regions[0], layout.shards.regions[2])
        with self.assertRaisesRegex(ValueError, "parameter 2 'w'.*sum"):
            other = DTensor.from_local(
                torch.ones(4, 3), mesh, [Partial("max"), Shard(0)], run_check=False
            )
            DTensorReader().read_dtensor(Key(2, 0, "w"), other)

    def test_mesh_without_this_rank(self):
        self.as_rank(2, 4)
        mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
        dtensor = DTensor.from_local(
            torch.ones(4, 3), mesh, [Shard(0)], run_check=False
        )
        with self.assertRaisesRegex(ValueError, "parameter 1.*not in the mesh"):
            DTensorReader().read_dtensor(Key(1), dtensor)

    def test_local_tensor_of_another_size(self):
        self.as_rank(0, 2)
        dtensor = DTensor.from_local(
            torch.ones(3, 3),
            self.mesh((2,)),
            [Shard(0)],
            run_check=False,
            shape=torch.Size((8, 3)),
            stride=(3, 1),
        )
        with self.assertRaisesRegex(ValueError, r"local tensor has shape \(3, 3\)"):
            DTensorReader().read_dtensor(Key(0), dtensor)

    def test_placement_of_an_unknown_kind(self):
        class Odd(Placement):
            def no(self, *given):
                return False

            is_shard = is_replicate = is_partial = no

        with self.assertRaisesRegex(ValueError, "here: .*neither a shard, a replica"):
            _cut(Odd(), torch.arange(4), 0, 2, "here")

    def test_fsdp1_over_tp_of_more_than_one_mesh_dimension(self):
        self.as_rank(0, 4)
        mesh = self.mesh((2, 2))
        dtensor = DTensor.from_local(
            torch.ones(4, 4), mesh, [Shard(0), Shard(1)], run_check=False
        )
        matrix = FlatMatrix("weight", (8, 8), (), dtensor._spec, True)
        reader = _LocalReader(ParallelGroups(), None)
        with self.assertRaisesRegex(ValueError, "weight.*mesh of 2 dim.*fully_shard"):
            reader._tp_of_spec(Key(0), matrix, matrix.tp)

    def test_meshes_of_different_device_types(self):
        self.as_rank(0, 2)
        dtensors = [
            DTensor.from_local(
                torch.ones(4, 3), self.mesh((2,)), [Shard(0)], run_check=False
            )
            for _ in range(2)
        ]
        other = mock.PropertyMock(side_effect=["cpu", "xpu"])
        with mock.patch.object(DeviceMesh, "device_type", other):
            with self.assertRaisesRegex(ValueError, "device types.*cpu.*xpu"):
                DTensorReader().device_of(dtensors)


if __name__ == "__main__":
    run_tests()
