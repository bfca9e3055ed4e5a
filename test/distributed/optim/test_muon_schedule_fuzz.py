# Owner(s): ["oncall: distributed"]
"""Schedules of arbitrary layouts, played by all ranks in one process."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import torch
from torch.optim._muon_engine.layouts import check_cover, Key, Layout, Region, Shards
from torch.optim._muon_engine.schedule import buckets, packs
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_schedules import (
    flat_layout,
    grid_layout,
    PlayedSchedules,
    World,
)
from torch.testing._internal.distributed._muon.fuzz_settings import (
    fuzz,
    skip_without_hypothesis,
)


skip_without_hypothesis(__name__)
from hypothesis import event, given, note, strategies as st


# Of a matrix; small ones are cut in every way that large ones are.
sides = st.integers(0, 9)
# Of the ranks of one layout: 12 of them form a grid in many ways.
MOST_RANKS = 12
MESHES = [(1,), (2,), (3,), (5,), (8,), (2, 2), (3, 2), (2, 4), (4, 3), (1, 3)]
MESHES += [(2, 2, 2), (3, 1, 2)]


def ranks_of(draw, world, count):
    """``count`` of the ranks, in the order that some framework has them in."""
    return draw(st.permutations(range(world)))[:count]


@st.composite
def grids(draw, world):
    """As a device mesh cuts, strided and uneven."""
    fitting = [mesh for mesh in MESHES if torch.Size(mesh).numel() <= world]
    mesh = draw(st.sampled_from(fitting))
    cut = st.tuples(st.sampled_from((0, 1, None)), st.integers(1, 3))
    cuts = [draw(cut) for _ in mesh]
    ranks = ranks_of(draw, world, torch.Size(mesh).numel())
    return grid_layout(Key(0), (draw(sides), draw(sides)), mesh, ranks, cuts)


@st.composite
def flats(draw, world):
    """As FSDP1 cuts, anywhere."""
    shape = draw(sides), draw(sides)
    count = draw(st.integers(1, min(world, 6)))
    numel = shape[0] * shape[1]
    inner = sorted(draw(st.integers(0, numel)) for _ in range(count - 1))
    ranks = ranks_of(draw, world, count)
    return flat_layout(Key(0), shape, ranks, [0, *inner, numel])


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
    shape = draw(sides), draw(sides)
    ranks = ranks_of(draw, world, draw(st.integers(1, min(world, 8))))
    contributions = draw(st.integers(1, min(2, len(ranks))))
    pieces, of_sum = [], []
    for number in range(contributions):
        mine = ranks[number::contributions]
        sets = draw(st.integers(1, len(mine)))
        shards = [[] for _ in range(sets)]
        for row, column, height, width in halved(draw, (0, 0, *shape))[:64]:
            if height * width:
                shards[draw(st.integers(0, sets - 1))].append(
                    (row, column, height, width)
                )
        stored = [stored_together(boxes) for boxes in shards]
        for at, _ in enumerate(mine):
            # Each shard once, then replicas of some of them.
            which = at if at < sets else draw(st.integers(0, sets - 1))
            pieces.append(stored[which])
            of_sum.append(number)
    ordered = [
        rank for number in range(contributions) for rank in ranks[number::contributions]
    ]
    shards = Shards(
        tuple(ordered), tuple(pieces), tuple(of_sum) if contributions > 1 else ()
    )
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
    world = draw(st.integers(1, MOST_RANKS))
    kinds = st.one_of(grids(world), flats(world), tilings(world))
    distinct = draw(st.lists(kinds, min_size=1, max_size=4))
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
        "max_buckets": draw(st.integers(1, 5)),
        "bucket_bytes": draw(st.sampled_from((4, 16, 100, 300, 2**20))),
        "max_replicas": draw(st.sampled_from((1, 2, 4))),
        "ranks_per_node": draw(st.integers(1, 4)),
    }
    peers = draw(st.sampled_from((1, 1, 2, 512)))
    relay_bytes = draw(st.sampled_from((1, 20, 2**20)))
    return world, layouts, owners, assigned, settings, peers, relay_bytes


class TestMuonScheduleFuzz(PlayedSchedules, TestCase):
    @fuzz(150)
    @given(schedules(), st.randoms(use_true_random=False))
    def test_any_schedule(self, drawn, random):
        world, layouts, owners, assigned, settings, peers, relay_bytes = drawn
        for layout in layouts:
            shards = layout.shards
            note(f"{shards.ranks} have {shards.regions} of {shards.contributions}")
            check_cover(layout)
        with (
            mock.patch.object(buckets, "MAX_PEERS", peers),
            mock.patch.object(packs, "RELAY_BYTES", relay_bytes),
        ):
            made = make_schedule(layouts, owners, torch.bfloat16, **settings)
            for kind in ("relayed", "node_size"):
                if any(
                    int(getattr(b, kind)) > (kind == "node_size") for b in made.buckets
                ):
                    event(kind)

            self.play(World(layouts), made)
            self.check_traffic(made)
            for rank in range(world):
                self.check_view(made, rank, random, assigned, settings)

    def check_traffic(self, schedule):
        """No rank sends an element that it need not send."""
        found = Counter()
        for bucket in schedule.buckets:
            for rank in bucket.group:
                mine = schedule.packs(bucket, rank)
                for packed in (*mine.gather_send.regions, *mine.scatter_send.regions):
                    found[packed.matrix] += packed.region.numel
                for replicas, source, pack in mine.relays:
                    for packed in pack.regions if source == rank else ():
                        copies = len(replicas) - 1
                        found[packed.matrix] += copies * packed.region.numel
        for matrix, (layout, owner) in enumerate(
            zip(schedule.layouts, schedule.owners)
        ):
            shards = layout.shards
            sets = [ranks for ranks in shards.replica_sets if owner not in ranks]
            held = dict(zip(shards.ranks, shards.numels))
            needed = sum(held[ranks[0]] for ranks in sets)
            needed += sum(
                held[rank]
                for rank in layout.group
                if rank != owner and schedule.receives(matrix, rank)
            )
            self.assertEqual(found[matrix], needed)

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
