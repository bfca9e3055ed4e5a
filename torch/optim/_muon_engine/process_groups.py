"""Process groups over the holders of a matrix, and meetings of ranks without a collective."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.weak import WeakIdKeyDictionary


if TYPE_CHECKING:
    from collections.abc import Iterable
    from torch.distributed import ProcessGroup


# Groups made here, and how often ranks have met, for one default group after the other: a new world
# begins anew. (A multi-threaded test world has a default group for each thread.) A made group outlives
# the optimizers that asked for it, since backends free their resources only with the default group.
_made = WeakIdKeyDictionary()
_meetings = WeakIdKeyDictionary()


def spanning_group(
    ranks: tuple[int, ...], known: Iterable[ProcessGroup], what: str = "shards"
) -> ProcessGroup:
    """The group of exactly ``ranks``: the framework's where it has one, else made by its members.

    Every member has to call this for its groups in one order that all agree on.

    Args:
        ranks: sorted global ranks, this one among them.
        known: groups that the framework uses for these parameters; also give a made group its timeout.
        what: the ranks are to each other; a made group is described so where a backend names its groups.

    Raises:
        ValueError: the group would have to be made, and its members would wait for it under different
            names, which a torch without the overlay's patch gives them.
    """
    known = list(known)
    world = dist.group.WORLD
    for group in [*known, *([world] if world is not None else [])]:
        if tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    backend = dist.get_backend_config(known[0] if known else None)
    made = _made.setdefault(world, {})
    # Whoever goes on after a failure makes new groups, and a broken one is no use beside them.
    key = ranks, backend, tuple(sorted(group.group_name for group in known))
    cached = made.get(key)
    if cached is not None and _is_alive(cached):
        return cached
    timeout = group_timeout(known)
    _check_names(ranks, timeout)
    # Only the members meet: other pipeline stages may be elsewhere in their program.
    group = dist.new_group(
        list(ranks),
        timeout=timeout,
        backend=backend,
        use_local_synchronization=True,
        group_desc=f"muon {what}",
    )
    made[key] = group
    return group


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


def ranks_per_node() -> int:
    """How many consecutive ranks are near each other, as the launcher says, or by the accelerators here."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if here.isdecimal():
        return max(1, int(here))
    return max(1, torch.accelerator.device_count())


def is_dry_run() -> bool:
    """Whether the world is of the fake backend, whose collectives bring nothing."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def _check_names(ranks: tuple[int, ...], timeout: timedelta | None) -> None:
    """Raises where members would give the group different names, and so wait until the timeout."""
    if hasattr(distributed_c10d, "_local_sync_group_name"):
        return
    # Without the patch, the name says how many groups a process has, which may differ among members.
    name = distributed_c10d._hash_ranks_to_str(list(ranks))
    names = meet(ranks, timeout, "makes a process group", name)
    if len(set(names.values())) > 1:
        raise ValueError(
            f"ranks {list(ranks)} share matrices, and this torch cannot make a process group of them because they are "
            "in different numbers of groups (pytorch issue #173608). Apply the overlay's patch of "
            "distributed_c10d.py, or make the group before: flatten the dimensions of the DeviceMesh that these "
            f"{len(ranks)} ranks form, as in mesh['shard', 'tp']._flatten(), on all ranks"
        )


def _failure_key(group: ProcessGroup, what: str, rank: int) -> str:
    # Not the ranks: who goes on with a new group hears nothing of an older one.
    return f"muon/failed/{group.group_name}/{what}/{rank}"


def tell_failure(groups: Iterable[ProcessGroup], what: str, text: str) -> None:
    """Tells each of ``groups`` that ``what`` failed on this rank, and why; "" where a collective did.

    After a collective failed, or while others wait in one, only the store is left to tell it over.
    """
    for group in groups:
        # Of a group that somebody destroyed torch knows nothing, and the others are told all the same.
        with suppress(KeyError, RuntimeError, ValueError):
            store = distributed_c10d._get_default_store()
            # A value of the store must not be empty.
            store.set(_failure_key(group, what, dist.get_rank()), f"={text}")


def told_failures(
    group: ProcessGroup, what: str, patience: float = 5.0
) -> dict[int, str | None]:
    """By rank what is told of a failed ``what``; None of ranks that tell nothing within ``patience`` seconds.

    {} where the store has gone as well, or the group.
    """
    try:
        ranks = dist.get_process_group_ranks(group)
        keys = {rank: _failure_key(group, what, rank) for rank in ranks}
        store = distributed_c10d._get_default_store()
        with suppress(RuntimeError):
            store.wait(list(keys.values()), timedelta(seconds=patience))
        return {
            rank: store.get(key).decode()[1:] if store.check([key]) else None
            for rank, key in keys.items()
        }
    except (KeyError, RuntimeError, ValueError):
        return {}


def meet(
    ranks: tuple[int, ...], timeout: timedelta | None, purpose: str, value: str = ""
) -> dict[int, str]:
    """Waits over the store until all of ``ranks`` have come here, and returns their values.

    A collective would pair up with whatever collective the others start next. A key in the store
    pairs up with nothing.

    Raises:
        RuntimeError: some ranks did not come within ``timeout``; names them.
    """
    world = dist.group.WORLD
    if len(ranks) == 1 or world is None or is_dry_run():
        return dict.fromkeys(ranks, value)
    store = distributed_c10d._get_default_store()
    met = _meetings.setdefault(world, {})
    number, me = met.get(ranks, 0), dist.get_rank()
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    keys = {rank: f"muon/{name}/{number}/{rank}" for rank in ranks}
    # A value of the store must not be empty.
    store.set(keys[me], f"={value}")
    with suppress(RuntimeError):
        store.delete_key(f"{keys[me]}/gone")
    gone_before = {rank for rank in ranks if store.check([f"{keys[rank]}/gone"])}
    try:
        if timeout is None:
            store.wait(list(keys.values()))
        else:
            store.wait(list(keys.values()), timeout)
    except RuntimeError as error:
        # Else a later meeting would take this rank for one that has come, or ranks that wait beside it
        # would take it for one that has not.
        store.set(f"{keys[me]}/gone", "=")
        with suppress(RuntimeError):
            store.delete_key(keys[me])
        missing = [
            rank
            for rank, key in keys.items()
            if not store.check([key])
            and (rank in gone_before or not store.check([f"{key}/gone"]))
        ]
        raise RuntimeError(
            f"rank {me} {purpose}, and timed out waiting for ranks {missing}, which hold the same parameters, to do so "
            "too. All of these ranks have to do it before the same step()"
        ) from error
    values = {rank: store.get(key).decode()[1:] for rank, key in keys.items()}
    met[ranks] = number + 1
    if number:
        # All have met again, so nobody reads the keys of the last meeting any more.
        with suppress(RuntimeError):
            store.delete_key(f"muon/{name}/{number - 1}/{me}")
    return values
