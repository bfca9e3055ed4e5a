# Owner(s): ["oncall: distributed"]
"""The schedule of the distributed Muon as the pure function that it is: all ranks played in one process."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import torch
from torch.optim._muon_engine.layouts import Key, Layout, Region, Shards
from torch.optim._muon_engine.schedule import buckets
from torch.optim._muon_engine.schedule.buckets import BUCKET_BYTES, make_schedule
from torch.optim._muon_engine.schedule.owners import (
    assign_owners,
    newton_schulz_flops,
)
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_schedules import (
    grid_layout,
    PlayedSchedules,
    World,
)
from torch.testing._internal.distributed._muon.model_shapes import MODELS


def cut(length, parts):
    """Start and end of each part, as FSDP cuts rows."""
    step = -(-length // parts)
    return [(min(length, i * step), min(length, i * step + step)) for i in range(parts)]


def layouts_of(shapes, ranks, regions_of):
    """Matrices of one placement; ``regions_of`` gives the regions of a shape, by rank."""
    shards = {shape: Shards(tuple(ranks), regions_of(shape)) for shape in set(shapes)}
    return [
        Layout(Key(i), shape, torch.float32, shards[shape])
        for i, shape in enumerate(shapes)
    ]


def shards_of(shapes, fsdp, tp=1, replicas=1):
    """Matrices whose columns TP cuts, and whose rows FSDP."""

    def regions(shape):
        rows, columns = shape
        of_one = tuple(
            (Region(a, c, b - a, d - c, 0, d - c),) if b > a and d > c else ()
            for a, b in cut(rows, fsdp)
            for c, d in cut(columns, tp)
        )
        return of_one * replicas

    return layouts_of(shapes, range(fsdp * tp * replicas), regions)


def expert_layouts(model, world, ep):
    """The matrices of rank 0: the dense ones over all ranks, its experts over every ``ep``-th."""
    ranks = tuple(range(0, world, ep))
    experts = model.expert * (model.n_experts // ep)
    few = layouts_of(
        experts, ranks, lambda shape: shards_of([shape], len(ranks))[0].shards.regions
    )
    found = [*shards_of(model.dense, world), *few]
    return [replace(layout, key=Key(i)) for i, layout in enumerate(found)]


class TestMuonSchedule(PlayedSchedules, TestCase):
    def test_no_rank_has_thousands_of_peers(self):
        for world, node in ((512, 1), (1024, 8), (4096, 16), (16384, 64)):
            layouts = shards_of([(world, 8)] * 64, world)
            owners = assign_owners(layouts)
            schedule = make_schedule(layouts, owners, torch.bfloat16, ranks_per_node=8)
            for bucket in schedule.buckets:
                self.assertEqual(bucket.node_size, node)
                if node > 1:
                    ranks, rail = bucket.node_and_rail(world - 1)
                    self.assertEqual(ranks, tuple(range(world - node, world)))
                    self.assertEqual(rail, tuple(range(node - 1, world, node)))
                    self.assertLessEqual(len(ranks) + len(rail), 514)

    def test_nodes_of_several_kinds(self):
        """A group has nodes where equally many of its ranks stand together."""
        for ranks, peers, size in (
            (range(12), 11, 4),
            # One rank of each node: as many together as leaves the fewest peers.
            (range(0, 36, 4), 8, 3),
            # Four of one node, two of another.
            (range(6), 5, 2),
            (range(7), 6, 1),
            (range(12), 3, 1),
        ):
            with mock.patch.object(buckets, "MAX_PEERS", 4):
                found = buckets._node_size(tuple(ranks), peers, 4)
            self.assertEqual(found, size, f"{ranks}")

    def test_replicas_send_once_and_the_owner_s_own_first(self):
        # Two replicas, (0, 1) and (2, 3), of two halves.
        layout = grid_layout(Key(0), (8, 4), (2, 2), range(4), [(None, 1), (0, 1)])
        for owner in range(4):
            schedule = make_schedule([layout], [owner], torch.bfloat16)
            sources = [rank for rank in range(4) if schedule.is_source(0, rank)]
            self.assertEqual(sources, [0, 1] if owner < 2 else [2, 3])

    def equal_matrices(self, count, world=4, shape=(8, 8)):
        return [
            grid_layout(Key(i), shape, (world,), range(world), [(0, 1)])
            for i in range(count)
        ]

    def test_few_buckets_whatever_the_number_of_matrices(self):
        for count, few in [(1, 1), (4, 1), (8, 2), (16, 4), (100, 4)]:
            layouts = self.equal_matrices(count)
            schedule = make_schedule(layouts, assign_owners(layouts), torch.bfloat16)
            self.assertEqual(len(schedule.buckets), few, f"{count} matrices")

    def test_a_round_gives_owners_equal_work(self):
        layouts = self.equal_matrices(32)
        schedule = make_schedule(layouts, assign_owners(layouts), torch.bfloat16)
        for bucket in schedule.buckets:
            owners = sorted(schedule.owners[m] for m in bucket.matrices)
            self.assertEqual(owners, [0, 0, 1, 1, 2, 2, 3, 3])

    def test_buckets_are_bounded_in_bytes(self):
        layouts = self.equal_matrices(40)
        owners = assign_owners(layouts)
        for limit in (2**8, 2**9, 2**12):
            schedule = make_schedule(
                layouts, owners, torch.bfloat16, bucket_bytes=limit
            )
            self.play(World(layouts), schedule)
            for bucket in schedule.buckets:
                for rank in range(4):
                    for pack in schedule.packs(bucket, rank)[:4]:
                        self.assertLessEqual(pack.nbytes, limit)
        # A bucket holds at least one matrix. No owner waits for another's.
        schedule = make_schedule(layouts, owners, torch.bfloat16, bucket_bytes=1)
        for bucket in schedule.buckets:
            self.assertEqual(sorted(owners[m] for m in bucket.matrices), [0, 1, 2, 3])
        self.play(World(layouts), schedule)

    def test_every_owner_works_in_every_bucket(self):
        """Buckets, run sequentially, take hardly longer than the busiest owner's own work.

        A matrix of 28672 x 8192 is above the bound of a bucket. When it had a bucket of its own, the
        buckets of Llama 3 70B took 51 times as long on 64 ranks. One of 18432 x 7168 takes as long as 33
        experts, of which 13 fitted next to it: DeepSeek-V3's took 1.45 times as long on 1,024.
        """
        for name, *cut in (
            ("GPT-2 124M", 16384),
            ("Llama 3 8B", 64, 1, 256),
            ("Llama 3 70B", 64),
            ("Llama 3 70B", 256, 64),
        ):
            self.assertShort(shards_of(MODELS[name].shapes, *cut), f"{name} {cut}")
        model = MODELS["DeepSeek-V3"]
        for world, ep in ((64, 8), (16384, 64)):
            layouts = expert_layouts(model, world, ep)
            self.assertShort(layouts, f"DeepSeek-V3, EP {ep} on {world}")
        # An eighth of the experts, over an eighth of 1,024 ranks.
        shapes = model.dense + model.expert * 32
        self.assertShort(shards_of(shapes, 128), "DeepSeek-V3 on 128")

    def assertShort(self, layouts, message):
        # One pass over the owners does not pack DeepSeek-V3's experts next to its large matrices quite
        # as tightly (1.107 on 1,024 ranks).
        most = 1.2 if "DeepSeek" in message else 1.1
        owners = assign_owners(layouts)
        schedule = make_schedule(layouts, owners, torch.bfloat16)
        work = [newton_schulz_flops(layout.shape) for layout in layouts]
        one_by_one, busy = Counter(), {}
        for bucket in schedule.buckets:
            loads = Counter()
            for m in bucket.matrices:
                loads[owners[m]] += work[m]
            one_by_one[bucket.group] += max(loads.values())
            busy.setdefault(bucket.group, Counter()).update(loads)
        for group, loads in busy.items():
            alone = max(loads.values())
            self.assertLessEqual(one_by_one[group], most * alone, message)
            self.assertSlotsAreSmall(schedule, group, message)

    def assertSlotsAreSmall(self, schedule, group, message):
        """An owner gathers no more in three slots than their bounds, plus a largest matrix for each."""
        largest = max(layout.numel for layout in schedule.layouts)
        slots = [0, 0, 0]
        of_group = [bucket for bucket in schedule.buckets if bucket.group == group]
        for at, bucket in enumerate(of_group):
            gathered = Counter()
            for m in bucket.matrices:
                gathered[schedule.owners[m]] += schedule.layouts[m].numel
            slots[at % 3] = max(slots[at % 3], *gathered.values())
        self.assertLessEqual(sum(slots), 3 * (BUCKET_BYTES // 2 + largest), message)

    def test_one_owner_at_a_time_in_rank_order(self):
        layouts = self.equal_matrices(10)
        schedule = make_schedule(
            layouts, assign_owners(layouts), torch.bfloat16, one_owner_at_a_time=True
        )
        turns = [
            {schedule.owners[m] for m in bucket.matrices} for bucket in schedule.buckets
        ]
        self.assertEqual([len(turn) for turn in turns], [1] * len(turns))
        turns = [turn.pop() for turn in turns]
        self.assertEqual(turns, sorted(turns))
        self.assertEqual(set(turns), {0, 1, 2, 3})

    def test_contributions_travel_in_their_own_dtype(self):
        whole = (Region(0, 0, 4, 4, 0, 4),)
        shards = Shards((0, 1), (whole, whole), contributions=(0, 1))
        partial = Layout(Key(0), (4, 4), torch.float32, shards)
        other = shards_of([(4, 4)], 2)[0]
        schedule = make_schedule([partial, other], [0, 1], torch.bfloat16)
        dtypes = {
            m: (bucket.gather_dtype, bucket.scatter_dtype)
            for bucket in schedule.buckets
            for m in bucket.matrices
        }
        self.assertEqual(dtypes[0], (torch.float32, torch.bfloat16))
        self.assertEqual(dtypes[1], (torch.bfloat16, torch.bfloat16))
        # The owner needs both contributions. One of the two receives the update.
        self.assertTrue(schedule.is_source(0, 0) and schedule.is_source(0, 1))
        self.assertTrue(schedule.receives(0, 0))
        self.assertFalse(schedule.receives(0, 1))


if __name__ == "__main__":
    run_tests()
