"""What no implementation that orthogonalizes each matrix once can undercut, part by part.

The limit is (Newton-Schulz of all matrices, one by one, on one thread of one process while the
others wait) / min(processes, cores), plus one blocking ``all_to_all_single`` after the other with
the splits of the engine's own buckets, over buffers that are there already. The second limit adds the
elementwise passes that any implementation makes over this rank's own storage. The third is the second
with Newton-Schulz as it is when all ranks do their own matrices at once, which share caches, memory and
the power that the processor may take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import _muon

from . import engine_view
from .contestants import LR, MOMENTUM, WEIGHT_DECAY


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.optim import Muon

    from .catalog import Shape
    from .engine_view import AllToAll
    from .layouts import Held


class NewtonSchulz:
    """The matrices of ``shapes``, all or some of them, through the optimizer's own iteration."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.matrices = [torch.randn(s).bfloat16() for s in shapes]

    def run(self, indices: Iterable[int] | None = None) -> None:
        for i in range(len(self.matrices)) if indices is None else indices:
            _muon._zeropower_via_newtonschulz(
                self.matrices[i],
                (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C),
                _muon.DEFAULT_NS_STEPS,
                _muon.EPS,
            )


class Exchange:
    """Bare collectives: no packing, nothing overlapped."""

    def __init__(self, calls: Sequence[AllToAll]) -> None:
        self.calls = [
            (
                call,
                torch.zeros(sum(call.send), dtype=call.dtype),
                torch.zeros(sum(call.receive), dtype=call.dtype),
            )
            for call in calls
        ]

    def run(self) -> None:
        for call, sent, received in self.calls:
            dist.all_to_all_single(
                received, sent, list(call.receive), list(call.send), group=call.group
            )


def fused(calls: Sequence[AllToAll]) -> list[AllToAll]:
    """``calls`` with all buckets of a group in one: what does not depend on how work is cut."""
    merged: dict[tuple, AllToAll] = {}
    for i, call in enumerate(calls):
        key = (call.group, call.dtype, i % 2)
        before = merged.get(key)
        if before is not None:
            call = call._replace(
                send=_added(before.send, call.send),
                receive=_added(before.receive, call.receive),
            )
        merged[key] = call
    return list(merged.values())


def _added(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


class Elementwise:
    """Momentum, look-ahead into bf16, weight decay and the update, on this rank's storage.

    The look-ahead is made of the shards that travel or are needed here; a replica that neither owns
    a matrix nor is asked for its shard has none to make.
    """

    def __init__(self, held: Sequence[Held], optimizer: Muon) -> None:
        prepared = engine_view.prepared_by(optimizer, dist.get_rank())
        self.shards: list[tuple[Tensor, ...]] = []
        for i, h in enumerate(held):
            momentum = h.part_of(optimizer.state[h.param]["momentum_buffer"])
            update = torch.randn_like(momentum).bfloat16()
            ahead = torch.empty_like(update) if i in prepared else None
            self.shards.append((h.local, h.local_grad, momentum, ahead, update))

    @torch.no_grad()
    def run(self) -> None:
        for param, grad, momentum, ahead, update in self.shards:
            momentum.lerp_(grad, 1 - MOMENTUM)
            if ahead is not None:
                torch.lerp(grad, momentum, MOMENTUM, out=ahead)
            param.mul_(1 - LR * WEIGHT_DECAY)
            param.add_(update, alpha=-LR)
