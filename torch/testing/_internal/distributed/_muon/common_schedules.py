"""The schedule of the distributed Muon, played by all ranks in one process.

Layouts are made without a framework, and the exchanges are copies between local tensors.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple
from unittest import mock

import torch
from torch.optim._muon_engine.layouts import Layout, Region, Shards
from torch.optim._muon_engine.layouts.fsdp1 import interval_regions
from torch.optim._muon_engine.runtime import transport


def runs(indices):
    """Maximal runs of consecutive integers, as (first, length)."""
    found = []
    for i in indices:
        if found and found[-1][0] + found[-1][1] == i:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((i, 1))
    return found


def grid_layout(key, shape, mesh_shape, group, cuts):
    """Pieces by rows and columns; ``cuts`` has (tensor dimension or None, stride factor) a mesh dimension."""
    pieces = []
    for coordinate in itertools.product(*(range(size) for size in mesh_shape)):
        held = [list(range(shape[0])), list(range(shape[1]))]
        for i, size, (dim, factor) in zip(coordinate, mesh_shape, cuts):
            if dim is None:
                continue
            # As a strided shard: the i-th part of each of ``factor`` stretches.
            kept = []
            for stretch in torch.tensor(held[dim]).chunk(factor):
                parts = stretch.chunk(size)
                kept += parts[i].tolist() if i < len(parts) else []
            held[dim] = kept
        rows, columns = held
        regions, local_row = [], 0
        for row, height in runs(rows):
            local_column = 0
            for column, width in runs(columns):
                offset = local_row * len(columns) + local_column
                regions.append(Region(row, column, height, width, offset, len(columns)))
                local_column += width
            local_row += height
        pieces.append(tuple(regions))
    return Layout(
        key, shape, torch.float32, Shards(tuple(group), tuple(pieces)), "a grid"
    )


def flat_layout(key, shape, ranks, bounds):
    """Pieces that are intervals of the elements in row-major order, cut anywhere."""
    pieces = tuple(
        tuple(interval_regions(start, end, shape[1], 0))
        for start, end in itertools.pairwise(bounds)
    )
    return Layout(key, shape, torch.float32, Shards(tuple(ranks), pieces), "a flat one")


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


class World:
    """The local storage of all ranks, and the exchanges between them."""

    def __init__(self, layouts):
        self.layouts = layouts
        self.whole = [
            # Elements of all matrices are distinct, and exact in float32.
            torch.arange(1, layout.numel + 1).reshape(layout.shape).float()
            + 1000.0 * number
            for number, layout in enumerate(layouts)
        ]
        self.local = {}
        for number, layout in enumerate(layouts):
            for rank in layout.group:
                size = sum(region.numel for region in layout.shards.of(rank))
                storage = torch.full((size,), -1.0)
                for region in layout.shards.of(rank):
                    region.of_local(storage).copy_(region.of_matrix(self.whole[number]))
                self.local[rank, number] = storage

    def exchange(self, schedule, bucket, packs, sent, phase):
        """Makes a gather or scatter. Returns the memory that each rank received."""
        received, calls = {}, {}
        for rank in bucket.group:
            send, recv = (
                getattr(packs[rank], f"{phase}_{s}") for s in ("send", "recv")
            )
            received[rank] = torch.full((sum(recv.splits),), float("nan"))
            calls[rank] = Call(
                received[rank],
                sent[rank],
                list(recv.splits),
                list(send.splits),
                bucket.group,
            )
        if bucket.node_size == 1:
            deliver(calls)
            return received
        at = int(phase == "scatter")
        first = self.levels(schedule, bucket, calls, at, {})[0]
        deliver(first)
        arrived = {rank: call.recv for rank, call in first.items()}
        deliver(self.levels(schedule, bucket, calls, at, arrived)[1])
        return received

    @staticmethod
    def levels(schedule, bucket, calls, at, arrived):
        """The all-to-alls of both levels, where ``arrived`` is the result of the first level."""
        levels = {}, {}
        for rank, call in calls.items():
            made = []

            def all_to_all(*given, rank=rank, made=made):
                levels[len(made)][rank] = made_now = Call(*given)
                made.append(made_now)
                if len(made) == 1 and rank in arrived:
                    made_now.recv.copy_(arrived[rank])

            with mock.patch.object(transport, "all_to_all", all_to_all):
                transport.two_level_all_to_all(
                    *call[:4],
                    *bucket.node_and_rail(rank),
                    schedule.passed_on(bucket, rank)[at],
                )
        return levels

    @staticmethod
    def view(buffer, packed):
        region = packed.region
        flat = buffer[packed.offset : packed.offset + region.numel]
        return flat.view(region.height, region.width)


class PlayedSchedules:
    """To be put before a TestCase."""

    def play(self, world, schedule):
        """Runs every bucket; checks that each matrix and each update arrives, each element once."""
        updates = {key: torch.zeros_like(v) for key, v in world.local.items()}
        arrivals = {key: torch.zeros_like(v) for key, v in world.local.items()}
        owned_once = []
        for bucket in schedule.buckets:
            packs = {r: schedule.packs(bucket, r) for r in bucket.group}
            owned = schedule.owned(bucket)
            owned_once += itertools.chain(*owned.values())
            sent = {}
            for rank, mine in packs.items():
                for packed in mine.gather_send.regions:
                    self.assertTrue(schedule.is_source(packed.matrix, rank))
                sent[rank] = self.filled(
                    world,
                    mine.gather_send,
                    lambda p, r=rank: p.region.of_local(world.local[r, p.matrix]),
                )
            received = world.exchange(schedule, bucket, packs, sent, "gather")
            for rank, mine in packs.items():
                for matrix in owned.get(rank, ()):
                    gathered = [
                        p for p in mine.gather_recv.regions if p.matrix == matrix
                    ]
                    self.check_matrix(world, schedule, matrix, gathered, received[rank])
            sent = {
                rank: self.filled(
                    world,
                    mine.scatter_send,
                    lambda p: p.region.of_matrix(-world.whole[p.matrix]),
                )
                for rank, mine in packs.items()
            }
            received = world.exchange(schedule, bucket, packs, sent, "scatter")
            for rank, mine in packs.items():
                for p in mine.scatter_recv.regions:
                    found = world.view(received[rank], p)
                    p.region.of_local(updates[rank, p.matrix]).copy_(found)
                    p.region.of_local(arrivals[rank, p.matrix]).add_(1)
                for matrix in owned.get(rank, ()):
                    for region in schedule.layouts[matrix].shards.of(rank):
                        region.of_local(updates[rank, matrix]).copy_(
                            region.of_matrix(-world.whole[matrix])
                        )
                        region.of_local(arrivals[rank, matrix]).add_(1)
            self.play_relays(world, packs, received, updates, arrivals)
        self.assertEqual(sorted(owned_once), list(range(len(schedule.layouts))))
        for (rank, matrix), storage in world.local.items():
            # One contribution to a sum receives the update.
            times = int(schedule.receives(matrix, rank))
            self.assertEqual(updates[rank, matrix], -storage * times)
            self.assertEqual(
                arrivals[rank, matrix], torch.full_like(storage, float(times))
            )

    def filled(self, world, pack, content):
        """The memory of ``pack``, each element written by a region."""
        flat = torch.full((sum(pack.splits),), float("nan"))
        for packed in pack.regions:
            world.view(flat, packed).copy_(content(packed))
        self.assertFalse(flat.isnan().any())
        return flat

    def check_matrix(self, world, schedule, matrix, gathered, received):
        """The owner has the whole matrix, each element of each contribution once."""
        layout, owner = schedule.layouts[matrix], schedule.owners[matrix]
        out, writes = torch.zeros(layout.shape), torch.zeros(layout.shape)
        if schedule.is_source(matrix, owner):
            for region in layout.shards.of(owner):
                mine = region.of_local(world.local[owner, matrix])
                region.of_matrix(out).copy_(mine)
                region.of_matrix(writes).add_(1)
        for packed in gathered:
            packed.region.of_matrix(out).copy_(world.view(received, packed))
            packed.region.of_matrix(writes).add_(1)
        self.assertEqual(out, world.whole[matrix])
        times = len(set(layout.shards.contributions)) or 1
        self.assertEqual(writes, torch.full(layout.shape, float(times)))

    def play_relays(self, world, packs, received, updates, arrivals):
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
                (p.matrix, p.region): world.view(received[relay.source], p)
                for p in source.scatter_recv.regions
            }
            for p in source.kept.regions:
                got[p.matrix, p.region] = p.region.of_matrix(-world.whole[p.matrix])
            for rank in relay.replicas:
                self.assertEqual(queues[rank].pop(0).pack.splits, relay.pack.splits)
                if rank == relay.source:
                    continue
                for p in relay.pack.regions:
                    target = updates[rank, p.matrix]
                    p.region.of_local(target).copy_(got[p.matrix, p.region])
                    p.region.of_local(arrivals[rank, p.matrix]).add_(1)
