"""What happens to one bucket's matrices between its two hops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim._muon_engine.runtime.buffers import BucketBuffers
    from torch.optim._muon_engine.layouts import Region
    from torch.optim._muon_engine.schedule.buckets import Schedule


def pack(buffers: BucketBuffers, matrix: int, own: Callable[[Region], Tensor]) -> None:
    """Writes what this rank sends of ``matrix``; ``own`` gives its local part, by rectangle."""
    for region, view in buffers.gather_send.regions(matrix):
        view.copy_(own(region))


def assemble(
    schedule: Schedule,
    rank: int,
    buffers: BucketBuffers,
    matrix: int,
    own: Callable[[Region], Tensor],
    out: Tensor,
) -> Tensor:
    """Puts the whole matrix together on its owner.

    Args:
        own: gives a rectangle of the owner's own part, of shape (height, width), good until asked again.
        out: shape (rows, columns), dtype of the Newton-Schulz iteration; written to and returned.
    """
    layout = schedule.layouts[matrix]
    if layout.partial:
        return _sum_contributions(schedule, rank, buffers, matrix, own, out)
    if schedule.is_source(matrix, rank):
        for region in layout.shard_of(rank):
            region.of_matrix(out).copy_(own(region))
    for region, view in buffers.gather_recv.regions(matrix):
        region.of_matrix(out).copy_(view)
    return out


def _sum_contributions(
    schedule: Schedule,
    rank: int,
    buffers: BucketBuffers,
    matrix: int,
    own: Callable[[Region], Tensor],
    out: Tensor,
) -> Tensor:
    """Adds contributions in their order, which is the same whoever owns the matrix."""
    layout = schedule.layouts[matrix]
    total = torch.zeros(layout.shape, dtype=layout.dtype, device=out.device)
    received = buffers.gather_recv.regions(matrix)
    senders = buffers.gather_recv.senders(matrix)
    parts: list[tuple[int, Region, Tensor | None]] = [
        (layout.contribution_of(sender), region, view)
        for sender, (region, view) in zip(senders, received, strict=True)
    ]
    if schedule.is_source(matrix, rank):
        mine = layout.contribution_of(rank)
        parts += [(mine, region, None) for region in layout.shard_of(rank)]
    for _, region, view in sorted(parts, key=lambda part: part[0]):
        region.of_matrix(total).add_(own(region) if view is None else view)
    return out.copy_(total)


def pack_update(buffers: BucketBuffers, matrix: int, update: Tensor) -> None:
    """Writes each holder's rectangles of ``update`` into what the owner sends."""
    for region, view in buffers.scatter_send.regions(matrix):
        view.copy_(region.of_matrix(update))
