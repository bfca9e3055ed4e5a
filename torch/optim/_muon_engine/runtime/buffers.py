"""Moves pieces to owners and updates back: one packed all-to-all a hop.

Only the schedule decides what is sent, to whom and how much of it; gradients fill the buffers but
never change a call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.layouts import Region
    from torch.optim._muon_engine.schedule.buckets import (
        PackedRegion,
        Schedule,
        BucketSpec,
        Bucket,
        PackSpec,
    )


@dataclass
class Slot:
    """Buffers of one bucket in flight, in bytes.

    What a gather sends and what the scatter then receives share ``outer``: the first is over
    before the second begins.
    """

    outer: Tensor
    gathered: Tensor
    updates: Tensor


class PackedBuffer:
    """One side of a hop over one buffer: flat, by packed and by flag."""

    def __init__(self, side: PackSpec, buffer: Tensor, dtype: torch.dtype) -> None:
        self.flat = buffer[: side.numel * dtype.itemsize].view(dtype)
        self.splits = list(side.splits)
        self._regions: dict[int, list[tuple[Region, Tensor]]] = {}
        self._holders: dict[int, list[int]] = {}
        for packed in side.regions:
            self._regions.setdefault(packed.matrix, []).append(
                (packed.region, self._view(packed))
            )
            self._holders.setdefault(packed.matrix, []).append(packed.rank)
        places: dict[int, list[int]] = {}
        for flag in side.flags:
            places.setdefault(flag.matrix, []).append(flag.offset)
        self.matrices = list(places)
        # One row a matrix, one column a peer: all flags of a bucket are read or written at once.
        self.flag_places = torch.tensor(
            list(places.values()), dtype=torch.long, device=buffer.device
        )

    def _view(self, packed: PackedRegion) -> Tensor:
        region = packed.region
        return self.flat[packed.offset : packed.offset + region.numel].view(
            region.height, region.width
        )

    def regions(self, matrix: int) -> list[tuple[Region, Tensor]]:
        """The rectangles of ``matrix`` in this buffer, each with its view of shape (height, width)."""
        return self._regions.get(matrix, [])

    def senders(self, matrix: int) -> list[int]:
        """The ranks whose rectangles :meth:`regions` lists, in the same order."""
        return self._holders.get(matrix, [])

    def read_flags(self) -> Tensor:
        """Flags of shape (matrices, peers)."""
        return self.flat[self.flag_places]

    def write_flags(self, values: Tensor) -> None:
        """Writes ``values``, of shape (matrices,), for every peer."""
        if self.matrices:
            self.flat[self.flag_places] = values.to(self.flat.dtype)[:, None]


@dataclass
class BucketBuffers:
    """A bucket with its spec laid over a slot, and the work that is under way."""

    bucket: Bucket
    spec: BucketSpec
    group: ProcessGroup | None
    gather_send: PackedBuffer
    gather_recv: PackedBuffer
    scatter_send: PackedBuffer
    scatter_recv: PackedBuffer
    work: dist.Work | None = field(default=None)

    def start_gather(self) -> None:
        self._start(self.gather_recv, self.gather_send)

    def start_scatter(self) -> None:
        self._start(self.scatter_recv, self.scatter_send)

    def _start(self, recv: PackedBuffer, send: PackedBuffer) -> None:
        if self.group is None:
            return
        # The handle is kept until it is waited for: it alone keeps the buffers from reuse.
        self.work = dist.all_to_all_single(
            recv.flat,
            send.flat,
            output_split_sizes=recv.splits,
            input_split_sizes=send.splits,
            group=self.group,
            async_op=True,
        )

    def wait(self) -> None:
        if self.work is not None:
            work, self.work = self.work, None
            work.wait()


class Exchange:
    """The buckets of one rank, with persistent buffers: each group has a ring of slots."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        groups: dict[tuple[int, ...], ProcessGroup | None],
        device: torch.device,
        prefetch_count: int,
    ) -> None:
        self.prefetch_count = prefetch_count
        self.buckets: list[BucketBuffers] = []
        specs: list[tuple[Bucket, BucketSpec]] = []
        for bucket in schedule.buckets_of(rank):
            group = groups[bucket.group]
            order = (
                tuple(dist.get_process_group_ranks(group))
                if group is not None
                else bucket.group
            )
            specs.append((bucket, schedule.spec(bucket, rank, order)))
        slots = {
            group: self._ring([(r, p) for r, p in specs if r.group == group], device)
            for group in {r.group for r, _ in specs}
        }
        for bucket, spec in specs:
            ring = slots[bucket.group]
            slot = ring[bucket.index % len(ring)]
            self.buckets.append(
                BucketBuffers(
                    bucket,
                    spec,
                    groups[bucket.group],
                    PackedBuffer(spec.gather_send, slot.outer, bucket.gather_dtype),
                    PackedBuffer(spec.gather_recv, slot.gathered, bucket.gather_dtype),
                    PackedBuffer(spec.scatter_send, slot.updates, bucket.scatter_dtype),
                    PackedBuffer(spec.scatter_recv, slot.outer, bucket.scatter_dtype),
                )
            )

    def _ring(
        self, specs: list[tuple[Bucket, BucketSpec]], device: torch.device
    ) -> list[Slot]:
        """Slots for ``prefetch_count`` gathers ahead, the bucket at hand and the one on its way back."""

        def buffer(*sizes: int) -> Tensor:
            return torch.empty(max(sizes), dtype=torch.uint8, device=device)

        outer = [
            max(
                p.gather_send.numel * r.gather_dtype.itemsize,
                p.scatter_recv.numel * r.scatter_dtype.itemsize,
            )
            for r, p in specs
        ]
        gathered = [p.gather_recv.numel * r.gather_dtype.itemsize for r, p in specs]
        updates = [p.scatter_send.numel * r.scatter_dtype.itemsize for r, p in specs]
        return [
            Slot(buffer(*outer), buffer(*gathered), buffer(*updates))
            for _ in range(min(len(specs), self.prefetch_count + 2))
        ]

    def follower(self, current: BucketBuffers) -> BucketBuffers | None:
        """The bucket whose gather may start once ``current`` is on its way back."""
        index = current.bucket.index + self.prefetch_count + 1
        for buffers in self.buckets:
            if buffers.bucket.group == current.bucket.group and (
                buffers.bucket.index == index
            ):
                return buffers
        return None

    def drain(self) -> None:
        """Waits for whatever is under way, after an error."""
        for buffers in self.buckets:
            try:
                buffers.wait()
            except Exception:  # the error that led here is the one to report
                buffers.work = None
