# Owner(s): ["oncall: distributed"]
"""Schedules of arbitrary layouts, played by all ranks in one process."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import torch
from torch.optim._muon_engine.layouts import check_cover, Key, Layout, Region, Shards
from torch.optim._muon_engine.runtime import transport
from torch.optim._muon_engine.schedule import buckets, packs
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.fuzz_settings import fuzz


from hypothesis import event, given, note, strategies as st


class Call(NamedTuple):
    """The arguments of one all-to-all on one rank. ``ranks`` is the group, in its order."""

    recv: torch.Tensor
    send: torch.Tensor
    recv_splits: list[int]
    send_splits: list[int]
    ranks: tuple[int, ...]


def deliver(calls):
    """Makes the all-to-all of each group; ``calls`` has one call per rank."""
    for rank, call in calls.items():
        arriving = []
        for peer in call.ranks:
            sent = calls[peer].send.split(calls[peer].send_splits)
            arriving.append(sent[calls[peer].ranks.index(rank)])
        sizes = [len(piece) for piece in arriving]
        # Both ends must compute the same splits.
        if sizes != list(call.recv_splits):
            raise AssertionError(
                f"rank {rank} expects {call.recv_splits}, gets {sizes}"
            )
        call.recv.copy_(torch.cat(arriving))


def two_levels(schedule, bucket, rank, call, phase, arrived):
    """The all-to-alls of both levels, where ``arrived`` is the result of the first level."""
    levels = []

    def all_to_all(*given):
        levels.append(Call(*given))
        if len(levels) == 1 and arrived is not None:
            levels[0].recv.copy_(arrived)

    with mock.patch.object(transport, "all_to_all", all_to_all):
        passed_on = schedule.passed_on(bucket, rank)[phase == "scatter"]
        transport.two_level_all_to_all(
            *call[:4], *bucket.node_and_rail(rank), passed_on
        )
    return levels


def view(buffer, packed):
    region = packed.region
    flat = buffer[packed.offset : packed.offset + region.numel]
    return flat.view(region.height, region.width)


# Of a matrix; small ones are cut in every way that large ones are.
sides = st.integers(0, 9)


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


class TestMuonScheduleFuzz(TestCase):
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
            for kind in ("relayed", "node_size"):
                if any(
                    int(getattr(b, kind)) > (kind == "node_size") for b in made.buckets
                ):
                    event(kind)

            self.play(made)
            self.check_traffic(made)
            for rank in range(world):
                self.check_view(made, rank, random, assigned, settings)

    def play(self, schedule):
        """Runs every bucket; checks that each matrix and each update arrives, each element once."""
        # Elements of all matrices are distinct, positive, and exact in float32.
        self.whole = [
            torch.arange(1, layout.numel + 1).reshape(layout.shape) + 1000.0 * number
            for number, layout in enumerate(schedule.layouts)
        ]
        stored = {}
        for matrix, layout in enumerate(schedule.layouts):
            for rank, numel in zip(layout.shards.ranks, layout.shards.numels):
                stored[rank, matrix] = torch.full((numel,), -1.0)
                for region in layout.shards.of(rank):
                    part = region.of_matrix(self.whole[matrix])
                    region.of_local(stored[rank, matrix]).copy_(part)
        updates = {key: torch.zeros_like(local) for key, local in stored.items()}
        owned_once = []
        for bucket in schedule.buckets:
            packs = {r: schedule.packs(bucket, r) for r in bucket.group}
            owned = schedule.owned(bucket)
            owned_once += itertools.chain(*owned.values())
            sent = {
                rank: self.filled(
                    mine.gather_send,
                    lambda p, r=rank: p.region.of_local(stored[r, p.matrix]),
                )
                for rank, mine in packs.items()
            }
            received = self.exchange(schedule, bucket, packs, sent, "gather")
            for rank, mine in packs.items():
                for matrix in owned.get(rank, ()):
                    found = [
                        (p.region, view(received[rank], p))
                        for p in mine.gather_recv.regions
                        if p.matrix == matrix
                    ]
                    if schedule.is_source(matrix, rank):
                        found += [
                            (region, region.of_local(stored[rank, matrix]))
                            for region in schedule.layouts[matrix].shards.of(rank)
                        ]
                    self.check_matrix(schedule, matrix, found)
            sent = {
                rank: self.filled(mine.scatter_send, self.result)
                for rank, mine in packs.items()
            }
            received = self.exchange(schedule, bucket, packs, sent, "scatter")
            for rank, mine in packs.items():
                for p in mine.scatter_recv.regions:
                    target = p.region.of_local(updates[rank, p.matrix])
                    target.add_(view(received[rank], p))
                for matrix in owned.get(rank, ()):
                    for region in schedule.layouts[matrix].shards.of(rank):
                        part = region.of_matrix(self.whole[matrix])
                        region.of_local(updates[rank, matrix]).sub_(part)
            self.play_relays(packs, received, updates)
        self.assertEqual(sorted(owned_once), list(range(len(schedule.layouts))))
        for (rank, matrix), local in stored.items():
            # One contribution to a sum receives the update.
            times = int(schedule.receives(matrix, rank))
            self.assertEqual(updates[rank, matrix], -local * times)

    def result(self, packed):
        """A region of the update, which is the matrix with the opposite sign."""
        return packed.region.of_matrix(-self.whole[packed.matrix])

    def filled(self, pack, content):
        """The memory of ``pack``, each element written by a region."""
        flat = torch.full((sum(pack.splits),), float("nan"))
        for packed in pack.regions:
            view(flat, packed).copy_(content(packed))
        self.assertFalse(flat.isnan().any())
        return flat

    def exchange(self, schedule, bucket, packs, sent, phase):
        """Makes a gather or scatter. Returns the memory that each rank received."""
        received, calls = {}, {}
        for rank, mine in packs.items():
            send, recv = (getattr(mine, f"{phase}_{side}") for side in ("send", "recv"))
            received[rank] = torch.full((sum(recv.splits),), float("nan"))
            splits = list(recv.splits), list(send.splits)
            calls[rank] = Call(received[rank], sent[rank], *splits, bucket.group)
        if bucket.node_size == 1:
            deliver(calls)
            return received
        # The second level reads the result of the first one.
        arrived = {}
        for level in range(2):
            made = {
                rank: two_levels(schedule, bucket, rank, call, phase, arrived.get(rank))
                for rank, call in calls.items()
            }
            now = {rank: levels[level] for rank, levels in made.items()}
            deliver(now)
            arrived = {rank: call.recv for rank, call in now.items()}
        return received

    def check_matrix(self, schedule, matrix, found):
        """The owner has the whole matrix, each element of each contribution once."""
        layout = schedule.layouts[matrix]
        total = torch.zeros(layout.shape)
        for region, part in found:
            region.of_matrix(total).add_(part)
        times = len(set(layout.shards.contributions)) or 1
        self.assertEqual(total, times * self.whole[matrix])

    def play_relays(self, packs, received, updates):
        """Broadcasts along replicas the results that their sources received or computed."""
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
            got = {
                (p.matrix, p.region): view(received[relay.source], p)
                for p in source.scatter_recv.regions
            }
            got |= {(p.matrix, p.region): self.result(p) for p in source.kept.regions}
            for rank in relay.replicas:
                self.assertEqual(queues[rank].pop(0).pack.splits, relay.pack.splits)
                for p in relay.pack.regions if rank != relay.source else ():
                    target = p.region.of_local(updates[rank, p.matrix])
                    target.add_(got[p.matrix, p.region])

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
