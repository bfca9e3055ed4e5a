"""What the bench reads of the engine's insides: the only module here that follows their shape."""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.optim import Muon
    from torch.optim._muon_engine.runtime.pipeline import Pipeline
    from torch.optim._muon_engine.schedule.specs import Schedule


class AllToAll(NamedTuple):
    """One ``all_to_all_single`` of a step, as this rank calls it."""

    group: ProcessGroup
    dtype: torch.dtype
    send: tuple[int, ...]
    receive: tuple[int, ...]


def all_to_alls(optimizer: Muon) -> list[AllToAll]:
    """The collectives of a step, in the order of their buckets. ``optimizer`` has made a step."""
    calls = []
    for buffers in _pipeline(optimizer).buffers.buckets:
        if buffers.group is None:
            continue
        for sent, received in (
            (buffers.gather_send, buffers.gather_recv),
            (buffers.scatter_send, buffers.scatter_recv),
        ):
            calls.append(
                AllToAll(
                    buffers.group,
                    sent.flat.dtype,
                    tuple(sent.splits),
                    tuple(received.splits),
                )
            )
    return calls


def schedule(optimizer: Muon) -> Schedule:
    """The buckets of a step, for all ranks. ``optimizer`` has made a step."""
    return _pipeline(optimizer).schedule


def prepared_by(optimizer: Muon, rank: int) -> set[int]:
    """The parameters of which ``rank`` contributes its shard to what is orthogonalized."""
    schedule = _pipeline(optimizer).schedule
    return {
        layout.key.index
        for matrix, layout in enumerate(schedule.layouts)
        if schedule.is_source(matrix, rank)
    }


def _pipeline(optimizer: Muon) -> Pipeline:
    pipeline = optimizer._engine.pipeline
    if pipeline is None:
        raise ValueError("it has to make a step first, through the engine")
    return pipeline
