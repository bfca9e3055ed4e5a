"""What happens to one round's matrices between its two hops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim._muon_engine.runtime.buffers import RoundBuffers
    from torch.optim._muon_engine.layouts import Rect
    from torch.optim._muon_engine.schedule.buckets import Plan


def pack(buffers: RoundBuffers, matrix: int, own: Callable[[Rect], Tensor]) -> None:
    """Writes what this rank sends of ``matrix``; ``own`` gives its local part, by rectangle."""
    for rect, view in buffers.gather_send.rects(matrix):
        view.copy_(own(rect))


def assemble(
    plan: Plan,
    rank: int,
    buffers: RoundBuffers,
    matrix: int,
    own: Callable[[Rect], Tensor],
    out: Tensor,
) -> Tensor:
    """Puts the whole matrix together on its owner.

    Args:
        own: gives a rectangle of the owner's own part, of shape (height, width), good until asked again.
        out: shape (rows, columns), dtype of the Newton-Schulz iteration; written to and returned.
    """
    layout = plan.layouts[matrix]
    if layout.partial:
        return _sum_contributions(plan, rank, buffers, matrix, own, out)
    if plan.is_source(matrix, rank):
        for rect in layout.held_by(rank):
            rect.of_matrix(out).copy_(own(rect))
    for rect, view in buffers.gather_recv.rects(matrix):
        rect.of_matrix(out).copy_(view)
    return out


def _sum_contributions(
    plan: Plan,
    rank: int,
    buffers: RoundBuffers,
    matrix: int,
    own: Callable[[Rect], Tensor],
    out: Tensor,
) -> Tensor:
    """Adds contributions in their order, which is the same whoever owns the matrix."""
    layout = plan.layouts[matrix]
    total = torch.zeros(layout.shape, dtype=layout.dtype, device=out.device)
    received = buffers.gather_recv.rects(matrix)
    senders = buffers.gather_recv.senders(matrix)
    parts: list[tuple[int, Rect, Tensor | None]] = [
        (layout.contribution_of(sender), rect, view)
        for sender, (rect, view) in zip(senders, received, strict=True)
    ]
    if plan.is_source(matrix, rank):
        mine = layout.contribution_of(rank)
        parts += [(mine, rect, None) for rect in layout.held_by(rank)]
    for _, rect, view in sorted(parts, key=lambda part: part[0]):
        rect.of_matrix(total).add_(own(rect) if view is None else view)
    return out.copy_(total)


def pack_update(buffers: RoundBuffers, matrix: int, update: Tensor) -> None:
    """Writes each holder's rectangles of ``update`` into what the owner sends."""
    for rect, view in buffers.scatter_send.rects(matrix):
        view.copy_(rect.of_matrix(update))
