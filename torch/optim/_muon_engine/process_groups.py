"""Process groups that span the holders of a matrix."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import timedelta

    from torch.distributed import ProcessGroup


# Rank tuple -> group made here. A group outlives the optimizers that asked for it: making one is a
# rendezvous, and the backends free their resources only with the process group itself.
_made: dict[tuple[tuple[int, ...], str], ProcessGroup] = {}
# Rank tuple -> how many were made, which is the same on all of its ranks.
_count: dict[tuple[int, ...], int] = {}


def spanning_group(
    ranks: tuple[int, ...], known: Iterable[ProcessGroup]
) -> ProcessGroup:
    """The group of exactly ``ranks``: the framework's where it has one, else made by its members.

    Args:
        ranks: sorted global ranks, this one among them.
        known: groups that the framework uses for these parameters; also give a made group its timeout.

    Every member has to call this for its groups in one order that all agree on.
    """
    known = list(known)
    world = dist.group.WORLD
    for group in [*known, *([world] if world is not None else [])]:
        if tuple(sorted(dist.get_process_group_ranks(group))) == ranks:
            return group
    backend = dist.get_backend_config(known[0] if known else None)
    cached = _made.get((ranks, backend))
    if cached is not None and _is_alive(cached):
        return cached
    with _named_alike(ranks):
        # Only the members meet: other pipeline stages may be elsewhere in their spec.
        made = dist.new_group(
            list(ranks),
            timeout=group_timeout(known),
            backend=backend,
            use_local_synchronization=True,
        )
    _made[ranks, backend] = made
    return made


@contextmanager
def _named_alike(ranks: tuple[int, ...]) -> Iterator[None]:
    """Lets ``new_group`` name a group of ``ranks`` by these alone.

    Members meet under the group's name, into which ``new_group`` mixes how many groups this rank has
    (in 2.15: has seen made). Where members differ in that, as ranks of unequal pipeline stages or with
    unequal experts do, each would wait under a name of its own until the timeout.
    """
    count = _count[ranks] = _count.get(ranks, 0) + 1
    name = hashlib.sha1(
        f"muon {count} {ranks}".encode(), usedforsecurity=False
    ).hexdigest()
    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original


def _is_alive(group: ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def group_timeout(known: Iterable[ProcessGroup]) -> timedelta | None:
    """The longest timeout among ``known``; None, which leaves the default, where they have none."""
    timeouts = []
    for group in known:
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            timeouts.append(getattr(options, "_timeout", None))
    return max((t for t in timeouts if t is not None), default=None)
