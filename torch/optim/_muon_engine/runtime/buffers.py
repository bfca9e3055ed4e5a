"""Moves pieces to owners and updates back: one packed all-to-all a hop.

Only the plan decides what is sent, to whom and how much of it; gradients fill the buffers but
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
    from torch.optim._muon_engine.layouts import Rect
    from torch.optim._muon_engine.schedule.buckets import (
        Chunk,
        Plan,
        Program,
        Round,
        Side,
    )


@dataclass
class Slot:
    """Buffers of one round in flight, in bytes.

    What a gather sends and what the scatter then receives share ``outer``: the first is over
    before the second begins.
    """

    outer: Tensor
    gathered: Tensor
    updates: Tensor


class Half:
    """One side of a hop over one buffer: flat, by chunk and by flag."""

    def __init__(self, side: Side, buffer: Tensor, dtype: torch.dtype) -> None:
        self.flat = buffer[: side.numel * dtype.itemsize].view(dtype)
        self.splits = list(side.splits)
        self._rects: dict[int, list[tuple[Rect, Tensor]]] = {}
        self._holders: dict[int, list[int]] = {}
        for chunk in side.chunks:
            self._rects.setdefault(chunk.matrix, []).append(
                (chunk.rect, self._view(chunk))
            )
            self._holders.setdefault(chunk.matrix, []).append(chunk.rank)
        places: dict[int, list[int]] = {}
        for flag in side.flags:
            places.setdefault(flag.matrix, []).append(flag.offset)
        self.matrices = list(places)
        # One row a matrix, one column a peer: all flags of a round are read or written at once.
        self.flag_places = torch.tensor(
            list(places.values()), dtype=torch.long, device=buffer.device
        )

    def _view(self, chunk: Chunk) -> Tensor:
        rect = chunk.rect
        return self.flat[chunk.offset : chunk.offset + rect.numel].view(
            rect.height, rect.width
        )

    def rects(self, matrix: int) -> list[tuple[Rect, Tensor]]:
        """The rectangles of ``matrix`` in this buffer, each with its view of shape (height, width)."""
        return self._rects.get(matrix, [])

    def senders(self, matrix: int) -> list[int]:
        """The ranks whose rectangles :meth:`rects` lists, in the same order."""
        return self._holders.get(matrix, [])

    def read_flags(self) -> Tensor:
        """Flags of shape (matrices, peers)."""
        return self.flat[self.flag_places]

    def write_flags(self, values: Tensor) -> None:
        """Writes ``values``, of shape (matrices,), for every peer."""
        if self.matrices:
            self.flat[self.flag_places] = values.to(self.flat.dtype)[:, None]


@dataclass
class RoundBuffers:
    """A round with its program laid over a slot, and the work that is under way."""

    round: Round
    program: Program
    group: ProcessGroup | None
    gather_send: Half
    gather_recv: Half
    scatter_send: Half
    scatter_recv: Half
    work: dist.Work | None = field(default=None)

    def start_gather(self) -> None:
        self._start(self.gather_recv, self.gather_send)

    def start_scatter(self) -> None:
        self._start(self.scatter_recv, self.scatter_send)

    def _start(self, recv: Half, send: Half) -> None:
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
    """The rounds of one rank, with persistent buffers: each group has a ring of slots."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        groups: dict[tuple[int, ...], ProcessGroup | None],
        device: torch.device,
        prefetch_count: int,
    ) -> None:
        self.prefetch_count = prefetch_count
        self.rounds: list[RoundBuffers] = []
        programs: list[tuple[Round, Program]] = []
        for round_ in plan.rounds_of(rank):
            group = groups[round_.group]
            order = (
                tuple(dist.get_process_group_ranks(group))
                if group is not None
                else round_.group
            )
            programs.append((round_, plan.program(round_, rank, order)))
        slots = {
            group: self._ring([(r, p) for r, p in programs if r.group == group], device)
            for group in {r.group for r, _ in programs}
        }
        for round_, program in programs:
            ring = slots[round_.group]
            slot = ring[round_.index % len(ring)]
            self.rounds.append(
                RoundBuffers(
                    round_,
                    program,
                    groups[round_.group],
                    Half(program.gather_send, slot.outer, round_.gather_dtype),
                    Half(program.gather_recv, slot.gathered, round_.gather_dtype),
                    Half(program.scatter_send, slot.updates, round_.scatter_dtype),
                    Half(program.scatter_recv, slot.outer, round_.scatter_dtype),
                )
            )

    def _ring(
        self, programs: list[tuple[Round, Program]], device: torch.device
    ) -> list[Slot]:
        """Slots for ``prefetch_count`` gathers ahead, the round at hand and the one on its way back."""

        def buffer(*sizes: int) -> Tensor:
            return torch.empty(max(sizes), dtype=torch.uint8, device=device)

        outer = [
            max(
                p.gather_send.numel * r.gather_dtype.itemsize,
                p.scatter_recv.numel * r.scatter_dtype.itemsize,
            )
            for r, p in programs
        ]
        gathered = [p.gather_recv.numel * r.gather_dtype.itemsize for r, p in programs]
        updates = [p.scatter_send.numel * r.scatter_dtype.itemsize for r, p in programs]
        return [
            Slot(buffer(*outer), buffer(*gathered), buffer(*updates))
            for _ in range(min(len(programs), self.prefetch_count + 2))
        ]

    def follower(self, current: RoundBuffers) -> RoundBuffers | None:
        """The round whose gather may start once ``current`` is on its way back."""
        index = current.round.index + self.prefetch_count + 1
        for buffers in self.rounds:
            if buffers.round.group == current.round.group and (
                buffers.round.index == index
            ):
                return buffers
        return None

    def drain(self) -> None:
        """Waits for whatever is under way, after an error."""
        for buffers in self.rounds:
            try:
                buffers.wait()
            except Exception:  # the error that led here is the one to report
                buffers.work = None
