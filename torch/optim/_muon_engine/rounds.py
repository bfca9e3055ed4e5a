"""What happens to one round's matrices between its two hops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor


if TYPE_CHECKING:
    from torch.optim._muon_engine.exchange import RoundBuffers
    from torch.optim._muon_engine.plan import Plan


def pack(buffers: RoundBuffers, matrix: int, piece: Tensor) -> None:
    """Writes what this rank sends of ``matrix``; ``piece`` is its local part."""
    for rect, view in buffers.gather_send.rects(matrix):
        view.copy_(rect.of_local(piece))


def sends(buffers: RoundBuffers, matrix: int) -> bool:
    return bool(buffers.gather_send.rects(matrix))


def assemble(
    plan: Plan, rank: int, buffers: RoundBuffers, matrix: int, own: Tensor, out: Tensor
) -> Tensor:
    """Puts the whole matrix together on its owner.

    Args:
        own: the owner's local part of what is to be orthogonalized.
        out: shape (rows, columns), dtype of the Newton-Schulz iteration; written to and returned.
    """
    layout = plan.layouts[matrix]
    if layout.partial:
        return _sum_contributions(plan, rank, buffers, matrix, own, out)
    if plan.is_source(matrix, rank):
        for rect in layout.held_by(rank):
            rect.of_matrix(out).copy_(rect.of_local(own))
    for rect, view in buffers.gather_recv.rects(matrix):
        rect.of_matrix(out).copy_(view)
    return out


def _sum_contributions(
    plan: Plan, rank: int, buffers: RoundBuffers, matrix: int, own: Tensor, out: Tensor
) -> Tensor:
    """Adds contributions in their order, which is the same whoever owns the matrix."""
    layout = plan.layouts[matrix]
    total = torch.zeros(layout.shape, dtype=own.dtype, device=out.device)
    received = buffers.gather_recv.rects(matrix)
    senders = buffers.gather_recv.senders(matrix)
    parts = [
        (layout.contribution_of(sender), rect, view)
        for sender, (rect, view) in zip(senders, received, strict=True)
    ]
    if plan.is_source(matrix, rank):
        parts += [
            (layout.contribution_of(rank), rect, rect.of_local(own))
            for rect in layout.held_by(rank)
        ]
    for _, rect, view in sorted(parts, key=lambda part: part[0]):
        rect.of_matrix(total).add_(view)
    return out.copy_(total)


def pack_update(buffers: RoundBuffers, matrix: int, update: Tensor) -> None:
    """Writes each holder's rectangles of ``update`` into what the owner sends."""
    for rect, view in buffers.scatter_send.rects(matrix):
        view.copy_(rect.of_matrix(update))
