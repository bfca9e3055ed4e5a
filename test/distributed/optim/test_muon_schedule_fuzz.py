# Owner(s): ["oncall: distributed"]
"""Schedules of arbitrary layouts: the packs of all ranks, compared in one process."""

import itertools
from collections import Counter, defaultdict
from dataclasses import replace
from unittest import mock

import torch
from torch.optim._muon_engine.layouts import check_cover, Key, Layout, Region, Shards
from torch.optim._muon_engine.schedule import buckets, packs
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners, flops_of
from torch.optim._newton_schulz import NS_DTYPE
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.fuzz_settings import fuzz


from hypothesis import event, given, note, strategies as st


# Of a matrix; small ones are cut in every way that large ones are.
sides = st.integers(0, 9)
# Of matrices that differ in their work.
sizes = st.sampled_from((1, 3, 8, 17, 64, 100))


def halved(draw, box):
    """A rectangle (row, column, height, width) in up to four parts, of which some may be empty."""
    if draw(st.booleans()):
        return [box]
    row, column, height, width = box
    if draw(st.booleans()):
        at = draw(st.integers(0, height))
        parts = (row, column, at, width), (row + at, column, height - at, width)
    else:
        at = draw(st.integers(0, width))
        parts = (row, column, height, at), (row, column + at, height, width - at)
    return [small for part in parts for small in (halved(draw, part) if at else [part])]


@st.composite
def tilings(draw, world):
    """Any rectangles on any ranks, with any numbers of replicas and contributions."""
    shape, count = (draw(sides), draw(sides)), draw(st.integers(1, world))
    # In some order, or those that share nodes.
    ranks = draw(st.permutations(range(world))) if draw(st.booleans()) else range(world)
    contributions = draw(st.integers(1, min(2, count)))
    ordered, regions, of_sum = [], [], []
    for number in range(contributions):
        mine = ranks[:count][number::contributions]
        sets = draw(st.integers(1, len(mine)))
        if draw(st.booleans()):
            # Rows, as FSDP cuts them, so that each rank has an element for each owner.
            edges = [shape[0] * i // sets for i in range(sets + 1)]
            boxes = [(a, 0, b - a, shape[1]) for a, b in itertools.pairwise(edges)]
            owned = range(sets)
        else:
            boxes = halved(draw, (0, 0, *shape))
            owned = [draw(st.integers(0, sets - 1)) for _ in boxes]
        shards = [[] for _ in range(sets)]
        for box, at in zip(boxes, owned, strict=True):
            if box[2] * box[3]:
                shards[at].append(box)
        # Each shard once, then replicas of some of them.
        more = [draw(st.integers(0, sets - 1)) for _ in mine[sets:]]
        for rank, which in zip(mine, [*range(sets), *more], strict=True):
            ordered.append(rank)
            regions.append(stored_together(shards[which]))
            of_sum.append(number)
    of_sum = tuple(of_sum) if contributions > 1 else ()
    shards = Shards(tuple(ordered), tuple(regions), of_sum)
    return Layout(Key(0), shape, torch.float32, shards, "a tiling")


def stored_together(boxes):
    """Regions without gaps in local storage."""
    regions, offset = [], 0
    for row, column, height, width in boxes:
        regions.append(Region(row, column, height, width, offset, width))
        offset += height * width
    return tuple(regions)


@st.composite
def worlds(draw):
    """Layouts of matrices that some of the ranks share, several of them cut in the same way."""
    world = draw(st.integers(1, 12))
    distinct = draw(st.lists(tilings(world), min_size=1, max_size=4))
    chosen = draw(st.lists(st.sampled_from(distinct), min_size=1, max_size=10))
    layouts = [replace(layout, key=Key(i)) for i, layout in enumerate(chosen)]
    return world, layouts


@st.composite
def schedules(draw):
    world, layouts = draw(worlds())
    owners = assign_owners(layouts)
    assigned = draw(st.booleans())
    if not assigned:
        owners = [draw(st.sampled_from(layout.group)) for layout in layouts]
    settings = {
        "one_owner_at_a_time": draw(st.booleans()),
        "ranks_per_node": draw(st.integers(1, 4)),
    }
    limits = {
        "MAX_BUCKETS": draw(st.integers(1, 5)),
        "BUCKET_BYTES": draw(st.sampled_from((4, 16, 100, 300, 2**20))),
        "MAX_REPLICAS": draw(st.sampled_from((1, 2, 4))),
        "MAX_PEERS": draw(st.sampled_from((1, 1, 2, 512))),
    }
    relay_bytes = draw(st.sampled_from((1, 20, 2**20)))
    return world, layouts, owners, assigned, settings, limits, relay_bytes


def stretched(parts, flops, owners):
    """How long buckets take, run sequentially: each as long as its busiest owner."""
    loads = [Counter() for _ in parts]
    for load, part in zip(loads, parts):
        for matrix in part:
            load[owners[matrix]] += flops[matrix]
    return sum(max(load.values(), default=0) for load in loads)


class TestMuonScheduleFuzz(TestCase):
    @fuzz(60)
    @given(st.lists(st.tuples(st.integers(0, 2), sizes, sizes), min_size=1, max_size=6))
    def test_buckets_are_nearly_the_best(self, drawn):
        """As many are as quick as any distribution of the matrices over them, or hardly slower."""
        owners = [owner for owner, *_ in drawn]
        layouts = [
            Layout(Key(i), tuple(shape), torch.float32, Shards((0, 1, 2), ((),) * 3))
            for i, (_, *shape) in enumerate(drawn)
        ]
        flops = list(map(flops_of, layouts))
        parts = [b.matrices for b in make_schedule(layouts, owners, NS_DTYPE).buckets]
        self.assertLessEqual(len(parts), max(Counter(owners).values()))
        places = itertools.product(range(len(parts)), repeat=len(layouts))
        best = min(
            stretched(
                [[m for m in where if where[m] == at] for at in set(where.values())],
                flops,
                owners,
            )
            for where in (dict(enumerate(place)) for place in places)
            if len(set(where.values())) == len(parts)
        )
        most = buckets.MAX_STRETCH * best
        self.assertLessEqual(stretched(parts, flops, owners), most)

    @fuzz(150)
    @given(schedules(), st.randoms(use_true_random=False))
    def test_any_schedule(self, drawn, random):
        world, layouts, owners, assigned, settings, limits, relay_bytes = drawn
        for layout in layouts:
            shards = layout.shards
            note(f"{shards.ranks} have {shards.regions} of {shards.contributions}")
            check_cover(layout)
        with (
            mock.patch.multiple(buckets, **limits),
            mock.patch.object(packs, "RELAY_BYTES", relay_bytes),
        ):
            made = make_schedule(layouts, owners, torch.bfloat16, **settings)
            self.check_sizes(made)
            for bucket in made.buckets:
                event("relayed" if bucket.relayed else f"nodes {bucket.node_size > 1}")
            self.check_packs(made)
            for rank in range(world):
                self.check_view(made, rank, random, assigned, settings)

    def check_sizes(self, schedule):
        """An owner gathers no more than the limit, but for what a slot of the largest matrices takes."""
        for bucket in schedule.buckets:
            numels = [layout.numel for layout in schedule.layouts]
            limit = buckets.BUCKET_BYTES // bucket.gather_dtype.itemsize + 3 * max(
                numels
            )
            for matrices in schedule.owned(bucket).values():
                gathered = sum(numels[m] for m in matrices)
                self.assertTrue(len(matrices) == 1 or gathered <= limit)

    def check_packs(self, schedule):
        """Both ends of a split agree. Each matrix and each update arrives, and no element twice."""
        arrived, owned_once = defaultdict(Counter), []
        for bucket in schedule.buckets:
            packs = {r: schedule.packs(bucket, r) for r in bucket.group}
            for phase in ("gather", "scatter"):
                sent, received = (
                    {
                        rank: self.splits(getattr(mine, f"{phase}_{side}"))
                        for rank, mine in packs.items()
                    }
                    for side in ("send", "recv")
                )
                for (i, a), (j, b) in itertools.product(enumerate(packs), repeat=2):
                    self.assertEqual(sent[a][j], received[b][i])
            for owner, matrices in schedule.owned(bucket).items():
                for matrix in matrices:
                    self.check_matrix(schedule, matrix, packs[owner].gather_recv)
                    own = schedule.layouts[matrix].shards.of(owner)
                    arrived[owner, matrix].update(own)
                owned_once += matrices
            for rank, mine in packs.items():
                for entry in mine.scatter_recv.regions:
                    arrived[rank, entry.matrix][entry.region] += 1
            self.check_relays(packs, arrived)
        self.assertEqual(sorted(owned_once), list(range(len(schedule.layouts))))
        for matrix, layout in enumerate(schedule.layouts):
            shards = layout.shards
            for rank in layout.group:
                # One contribution to a sum receives the update.
                taken = shards.contribution_of(schedule.owners[matrix])
                receives = shards.contribution_of(rank) == taken
                expected = Counter(shards.of(rank) if receives else ())
                self.assertEqual(arrived[rank, matrix], expected)

    def splits(self, pack):
        """The matrix, holder and place of each region that a peer sends or receives, for each peer."""
        entries, offset, found = list(pack.regions), 0, []
        for split in pack.splits:
            found.append([])
            end = offset + split
            while offset < end:
                self.assertEqual(entries[0].offset, offset)
                offset += entries[0].region.numel
                found[-1].append(entries.pop(0)[:3])
            self.assertEqual(offset, end)
        self.assertEqual(entries, [])
        return found

    def check_matrix(self, schedule, matrix, received):
        """The owner has each element of each contribution once, and is sent none that it holds."""
        shards, owner = schedule.layouts[matrix].shards, schedule.owners[matrix]
        found = [(owner, region) for region in shards.of(owner)]
        found += [e[1:3] for e in received.regions if e.matrix == matrix]
        for contribution in set(shards.contributions) or {0}:
            total = torch.zeros(schedule.layouts[matrix].shape)
            for rank, region in found:
                if shards.contribution_of(rank) == contribution:
                    region.of_matrix(total).add_(1)
            self.assertTrue(torch.equal(total, torch.ones_like(total)))

    def check_relays(self, packs, arrived):
        """A source relays results that it received or computed, and no two ranks wait for each other."""
        queues = {rank: list(mine.relays) for rank, mine in packs.items()}
        while any(queues.values()):
            # All replicas must reach a relay before they start another one, or they would deadlock.
            relay = next(
                relays[0]
                for relays in queues.values()
                if relays
                and all(
                    queues[rank] and queues[rank][0][:2] == relays[0][:2]
                    for rank in relays[0].replicas
                )
            )
            source = packs[relay.source]
            results = (*source.scatter_recv.regions, *source.kept.regions)
            results = {(entry.matrix, entry.region) for entry in results}
            for rank in relay.replicas:
                self.assertEqual(queues[rank].pop(0).pack.splits, relay.pack.splits)
                for entry in relay.pack.regions:
                    self.assertIn((entry.matrix, entry.region), results)
                    if rank != relay.source:
                        arrived[rank, entry.matrix][entry.region] += 1

    def check_view(self, schedule, rank, random, assigned, settings):
        """A rank knows its own matrices only, in an order of its own, and comes to the same buckets."""
        queues = {}
        for number, layout in enumerate(schedule.layouts):
            if rank in layout.group:
                queues.setdefault(layout.group, []).append(number)
        turns = [group for group, queue in queues.items() for _ in queue]
        random.shuffle(turns)
        numbers = [queues[group].pop(0) for group in turns]
        known = [
            replace(schedule.layouts[number], key=Key(i))
            for i, number in enumerate(numbers)
        ]
        owners = [schedule.owners[number] for number in numbers]
        if assigned:
            self.assertEqual(assign_owners(known), owners)
        mine = make_schedule(known, owners, torch.bfloat16, **settings)
        found = [
            replace(bucket, matrices=tuple(numbers[m] for m in bucket.matrices))
            for bucket in mine.buckets
        ]
        expected = [bucket for bucket in schedule.buckets if rank in bucket.group]
        self.assertEqual(
            [replace(b, matrices=tuple(sorted(b.matrices))) for b in found],
            [replace(b, matrices=tuple(sorted(b.matrices))) for b in expected],
        )
        # An owner and a holder pack their matrices in the same order.
        for one, other in zip(found, expected):
            self.assertEqual(schedule.owned(one), schedule.owned(other))


if __name__ == "__main__":
    run_tests()
