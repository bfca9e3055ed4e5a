"""Ranks meet over the store before they enter collectives that only some of them may know of."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d


if TYPE_CHECKING:
    from datetime import timedelta


# Default process group -> sorted ranks -> how often these have met. A new world counts anew.
_met: dict[int, dict[tuple[int, ...], int]] = {}


def meet(ranks: tuple[int, ...], timeout: timedelta | None, purpose: str) -> None:
    """Waits until all of ``ranks`` have come here.

    A collective would pair up with whatever collective the others start next. A key in the store
    pairs up with nothing.

    Raises:
        RuntimeError: some ranks did not come within ``timeout``; names them.
    """
    world = dist.group.WORLD
    if len(ranks) == 1 or world is None or dist.get_backend(world) == "fake":
        return
    store = distributed_c10d._get_default_store()
    met = _met.setdefault(id(world), {})
    for other in set(_met) - {id(world)}:
        del _met[other]
    number = met.get(ranks, 0)
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]

    def key(rank: int, number: int) -> str:
        return f"muon/{name}/{number}/{rank}"

    me = dist.get_rank()
    store.set(key(me, number), "here")
    keys = [key(rank, number) for rank in ranks]
    try:
        if timeout is None:
            store.wait(keys)
        else:
            store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [rank for rank in ranks if not store.check([key(rank, number)])]
        store.delete_key(key(me, number))
        raise RuntimeError(
            f"rank {me} {purpose}, and waited for ranks {missing}, which hold the same parameters, to do so too. "
            "All ranks have to change their parameters alike, before the same step()"
        ) from error
    met[ranks] = number + 1
    if number:
        # All have met again, so nobody waits for the last meeting any more.
        store.delete_key(key(me, number - 1))
