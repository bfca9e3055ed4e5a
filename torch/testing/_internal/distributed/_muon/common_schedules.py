"""The schedule of the distributed Muon, played by all ranks in one process.

Layouts are made without a framework, and the exchanges are copies between local tensors.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from torch.optim._muon_engine.layouts import Layout, Region, Shards


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
    columns = shape[1]
    pieces = []
    for start, end in itertools.pairwise(bounds):
        regions, at = [], start
        while at < end:
            row, column = divmod(at, columns)
            if column or end - at < columns:
                width = min(columns - column, end - at)
                regions.append(Region(row, column, 1, width, at - start, columns))
                at += width
            else:
                height = (end - at) // columns
                regions.append(Region(row, 0, height, columns, at - start, columns))
                at += height * columns
        pieces.append(tuple(regions))
    return Layout(
        key, shape, torch.float32, Shards(tuple(ranks), tuple(pieces)), "a flat one"
    )


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

    def all_to_all(self, group, sides, buffers):
        """``sides``: rank -> (what it sends, what it receives); returns the received buffers."""
        received = {rank: [] for rank in group}
        for sender in group:
            pieces = buffers[sender].split(list(sides[sender][0].splits))
            for receiver, piece in zip(group, pieces):
                received[receiver].append(piece)
        for receiver in group:
            found = [len(piece) for piece in received[receiver]]
            # Both ends have to think alike of every segment.
            if found != list(sides[receiver][1].splits):
                raise AssertionError(
                    f"rank {receiver} expects {sides[receiver][1].splits}, gets {found}"
                )
        return {rank: torch.cat(pieces) for rank, pieces in received.items()}

    def two_hops(self, group, hops, buffers):
        """``hops``: rank -> its part of an exchange in two levels; returns the received buffers."""
        arrived = self.hop({rank: hops[rank].first for rank in group}, buffers)
        passed_on = {}
        for rank, flat in arrived.items():
            # By whom it goes to, then by whom it came from.
            sizes = torch.tensor(hops[rank].passed)
            chunks = flat.split(sizes.flatten().tolist())
            order = torch.arange(len(chunks)).view(sizes.shape).T.flatten()
            passed_on[rank] = torch.cat([chunks[i] for i in order])
        return self.hop({rank: hops[rank].second for rank in group}, passed_on)

    def hop(self, parts, buffers):
        """All-to-alls among the ranks of each part."""
        found = {}
        for ranks in {part.ranks for part in parts.values()}:
            sides = {
                rank: tuple(
                    SimpleNamespace(splits=splits)
                    for splits in (parts[rank].sends, parts[rank].receives)
                )
                for rank in ranks
            }
            found.update(self.all_to_all(ranks, sides, buffers))
        return found

    @staticmethod
    def view(buffer, packed):
        region = packed.region
        flat = buffer[packed.offset : packed.offset + region.numel]
        return flat.view(region.height, region.width)


class PlayedSchedules:
    """To be put before a TestCase."""

    def play(self, world, schedule, order=tuple):
        """Runs every bucket; checks that each matrix and each update arrives, each element once.

        Args:
            order: that a collective's group has its ranks in, of a bucket's group.
        """
        updates = {key: torch.zeros_like(v) for key, v in world.local.items()}
        arrivals = {key: torch.zeros_like(v) for key, v in world.local.items()}
        owned_once = []
        for bucket in schedule.buckets:
            group = order(bucket.group)
            specs = {rank: schedule.spec(bucket, rank, group) for rank in group}

            sent = {}
            for rank, spec in specs.items():
                side = spec.gather_send
                sent[rank] = torch.full((side.numel,), float("nan"))
                for packed in side.regions:
                    self.assertTrue(schedule.is_source(packed.matrix, rank))
                    world.view(sent[rank], packed).copy_(
                        packed.region.of_local(world.local[rank, packed.matrix])
                    )
                for flag in side.flags:
                    sent[rank][flag.offset] = -rank - 1
                self.assertFalse(sent[rank].isnan().any())
            received = self.exchanged(world, bucket, specs, sent, "gather")

            for rank, spec in specs.items():
                side = spec.gather_recv
                for matrix in spec.owned:
                    owned_once.append(matrix)
                    layout = schedule.layouts[matrix]
                    out = torch.zeros(layout.shape)
                    writes = torch.zeros(layout.shape)
                    if schedule.is_source(matrix, rank):
                        for region in layout.shards.of(rank):
                            region.of_matrix(out).copy_(
                                region.of_local(world.local[rank, matrix])
                            )
                            region.of_matrix(writes).add_(1)
                    for packed in side.regions:
                        if packed.matrix == matrix:
                            view = world.view(received[rank], packed)
                            packed.region.of_matrix(out).copy_(view)
                            packed.region.of_matrix(writes).add_(1)
                    self.assertEqual(out, world.whole[matrix])
                    # Once, and of a sum of contributions once each.
                    times = len(set(layout.shards.contributions)) or 1
                    self.assertEqual(writes, torch.full(layout.shape, float(times)))
                    flags = [f for f in side.flags if f.matrix == matrix]
                    speaking = set(layout.group) - {rank}
                    if bucket.relayed:
                        # One of many replicas speaks for all, and an empty shard says nothing.
                        speaking = {
                            r
                            for r in speaking
                            if schedule.is_source(matrix, r)
                            and not layout.shards.is_empty(r)
                        }
                    self.assertEqual(
                        sorted(f.rank for f in flags),
                        sorted(speaking),
                    )
                    for flag in flags:
                        value = received[rank][flag.offset].item()
                        self.assertEqual(value, -flag.rank - 1)

            for rank, spec in specs.items():
                side = spec.scatter_send
                sent[rank] = torch.full((side.numel,), float("nan"))
                for packed in side.regions:
                    view = packed.region.of_matrix(-world.whole[packed.matrix])
                    world.view(sent[rank], packed).copy_(view)
                for flag in side.flags:
                    sent[rank][flag.offset] = flag.matrix
                self.assertFalse(sent[rank].isnan().any())
            received = self.exchanged(world, bucket, specs, sent, "scatter")

            for rank, spec in specs.items():
                side = spec.scatter_recv
                for packed in side.regions:
                    target = updates[rank, packed.matrix]
                    packed.region.of_local(target).copy_(
                        world.view(received[rank], packed)
                    )
                    packed.region.of_local(arrivals[rank, packed.matrix]).add_(1)
                for flag in side.flags:
                    value = received[rank][flag.offset].item()
                    self.assertEqual(value, flag.matrix)
                for matrix in spec.owned:
                    for region in schedule.layouts[matrix].shards.of(rank):
                        region.of_local(updates[rank, matrix]).copy_(
                            region.of_matrix(-world.whole[matrix])
                        )
                        region.of_local(arrivals[rank, matrix]).add_(1)
            self.play_relays(world, specs, received, updates, arrivals)
        self.assertEqual(sorted(owned_once), list(range(len(schedule.layouts))))
        for (rank, matrix), storage in world.local.items():
            # Of contributions to a sum, one takes the update.
            times = int(schedule.receives(matrix, rank))
            self.assertEqual(updates[rank, matrix], -storage * times)
            self.assertEqual(
                arrivals[rank, matrix], torch.full_like(storage, float(times))
            )

    def exchanged(self, world, bucket, specs, sent, phase):
        """What each rank receives in a gather or scatter, in one hop or two."""
        if bucket.node_size > 1:
            hops = {r: getattr(spec, f"{phase}_hops") for r, spec in specs.items()}
            return world.two_hops(tuple(specs), hops, sent)
        sides = {
            r: (getattr(spec, f"{phase}_send"), getattr(spec, f"{phase}_recv"))
            for r, spec in specs.items()
        }
        return world.all_to_all(tuple(specs), sides, sent)

    def play_relays(self, world, specs, received, updates, arrivals):
        """Broadcasts along replicas what their sources got back or made."""
        queues = {rank: list(spec.relays) for rank, spec in specs.items()}
        while any(queues.values()):
            # One that all of its replicas come to next: else they would wait for each other.
            relay = next(
                relays[0]
                for relays in queues.values()
                if relays
                and all(
                    queues[rank] and queues[rank][0][:2] == relays[0][:2]
                    for rank in relays[0].replicas
                )
            )
            source = specs[relay.source]
            got = {}
            for side, buffer in (
                (source.scatter_recv, received[relay.source]),
                (source.kept, None),
            ):
                for packed in side.regions:
                    # What the source keeps of its own, it has just made.
                    got[packed.matrix, packed.region] = (
                        packed.region.of_matrix(-world.whole[packed.matrix])
                        if buffer is None
                        else world.view(buffer, packed)
                    )
            for rank in relay.replicas:
                self.assertEqual(queues[rank].pop(0).packed.splits, relay.packed.splits)
                if rank == relay.source:
                    continue
                for packed in relay.packed.regions:
                    target = updates[rank, packed.matrix]
                    packed.region.of_local(target).copy_(
                        got[packed.matrix, packed.region]
                    )
                    packed.region.of_local(arrivals[rank, packed.matrix]).add_(1)
