"""What the bench reads of the engine's insides: the only module here that follows their shape."""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.optim import Muon


class Hop(NamedTuple):
    """One ``all_to_all_single`` of a step, as this rank calls it."""

    group: ProcessGroup
    dtype: torch.dtype
    send: tuple[int, ...]
    receive: tuple[int, ...]


def hops_of(optimizer: Muon) -> list[Hop]:
    """The collectives of a step, in the order of their rounds. ``optimizer`` has made a step."""
    hops = []
    for buffers in _pipeline(optimizer).exchange.buckets:
        if buffers.group is None:
            continue
        for sent, received in (
            (buffers.gather_send, buffers.gather_recv),
            (buffers.scatter_send, buffers.scatter_recv),
        ):
            hops.append(
                Hop(
                    buffers.group,
                    sent.flat.dtype,
                    tuple(sent.splits),
                    tuple(received.splits),
                )
            )
    return hops


def blended_by(optimizer: Muon, rank: int) -> set[int]:
    """The parameters of which ``rank`` contributes a piece to what is orthogonalized."""
    schedule = _pipeline(optimizer).schedule
    return {
        layout.key.index
        for matrix, layout in enumerate(schedule.layouts)
        if schedule.is_source(matrix, rank)
    }


def _pipeline(optimizer: Muon):
    return optimizer._distributed_config._engine._pipeline()
