"""What the bench reads of the engine's insides: the only module here that follows their shape."""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.optim import Muon
    from torch.optim._muon_engine.schedule.packs import Schedule


class AllToAll(NamedTuple):
    """One ``all_to_all_single`` of a step, as this rank calls it."""

    group: ProcessGroup
    dtype: torch.dtype
    send: tuple[int, ...]
    receive: tuple[int, ...]


def all_to_alls(optimizer: Muon) -> list[AllToAll]:
    """The collectives of a step, in the order of their buckets."""
    engine = optimizer._engine
    calls = []
    for bucket in engine.schedule.buckets:
        group = engine.groups.get(bucket.group)
        if group is not None:
            packs = engine.schedule.packs(bucket, engine.rank)
            for sent, received in (
                (packs.gather_send, packs.gather_recv),
                (packs.scatter_send, packs.scatter_recv),
            ):
                calls.append(AllToAll(group, sent.dtype, sent.splits, received.splits))
    return calls


def prepared_by(optimizer: Muon, rank: int) -> set[int]:
    """The parameters of which ``rank`` contributes its shard to what is orthogonalized."""
    schedule: Schedule = optimizer._engine.schedule
    return {
        layout.key.index
        for matrix, layout in enumerate(schedule.layouts)
        if schedule.is_source(matrix, rank)
    }
