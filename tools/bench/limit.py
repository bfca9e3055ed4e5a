"""What no implementation that orthogonalizes each matrix once can undercut, part by part.

The limit is (Newton-Schulz of all matrices, one by one, on one thread of one process while the others
wait) / min(processes, cores), plus one blocking ``all_to_all_single`` after the other with the splits
of the engine's own buckets over memory that is there already, plus the elementwise passes that any
implementation makes over this rank's own storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import _newton_schulz as ns

from . import engine_view
from .contestants import LR, MOMENTUM, WEIGHT_DECAY


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Muon

    from .catalog import Shape
    from .engine_view import AllToAll
    from .layouts import Held


class NewtonSchulz:
    """The matrices of ``shapes`` through the optimizer's own iteration."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.matrices = [torch.randn(s).bfloat16() for s in shapes]

    def run(self) -> None:
        triple = ns.DEFAULT_A, ns.DEFAULT_B, ns.DEFAULT_C
        for matrix in self.matrices:
            ns.orthogonalize(matrix, triple, ns.DEFAULT_NS_STEPS, ns.EPS)


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
