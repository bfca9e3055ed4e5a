"""What ranks tell each other through the store: where they meet, and why a step failed."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .process_groups import is_dry_run, of_world, Ranks, short_name


# Seconds that ranks wait for a reason after a failed collective.
PATIENCE = 5.0
_GONE = KeyError, RuntimeError, ValueError
_MISSING = (
    "Ranks {} did not come to this step(), or no longer run. Under DDP's join(), all must make equally many steps. If a "
    "GradScaler skipped the step on them because of an inf, use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
)


def _store() -> dist.Store:
    return distributed_c10d._get_default_store()


def _missing(key: str, ranks: Sequence[int]) -> list[int]:
    """Those of ``ranks`` that :func:`_check_in` has not counted."""
    return [rank for rank in ranks if not _store().check([f"{key}/{rank}"])]


def _check_in(key: str) -> int:
    """Counts this rank at ``key``. Returns how many ranks are there."""
    _store().set(f"{key}/{dist.get_rank()}", "=")
    return _store().add(key, 1)


def rendezvous(ranks: Ranks, timeout: timedelta | None, name: str) -> None:
    """Waits over the store until all of ``ranks`` have come to ``name``. A collective would pair up with
    whichever collective the other ranks start next. A counter in the store pairs up with nothing. A
    RuntimeError names the ranks that did not come within ``timeout``.
    """
    if len(ranks) == 1 or dist.group.WORLD is None or is_dry_run():
        return
    store, me, met = _store(), dist.get_rank(), of_world("met")
    key = f"muon/met/{short_name(ranks)}/{name}/{met.get((ranks, name), 0)}"
    if _check_in(key) == len(ranks):
        store.set(f"{key}/all", "=")
    try:
        store.wait([f"{key}/all"], *([] if timeout is None else [timeout]))
    except RuntimeError as error:
        missing = _missing(key, ranks)
        # Otherwise a later rendezvous would count this rank as present.
        store.delete_key(f"{key}/{me}")
        store.add(key, -1)
        raise RuntimeError(
            f"rank {me} found changed parameters in step() and timed out waiting for ranks {missing}, which share "
            "parameters with it, to change them too. All of these ranks must make the change before the same step()"
        ) from error
    met[ranks, name] = met.get((ranks, name), 0) + 1


class FailureNotes:
    """The reasons for a failed step, which the ranks of each group leave and look up in the store. A group
    itself cannot carry them after a failure. Each rank makes a few requests, whatever the number of ranks; only
    the first rank to fail looks for each of the others. By its serial number among those over the ranks of a
    group, an optimizer tells its failure from another one's.
    """

    def __init__(self, serials: Mapping[Ranks, int], step: int) -> None:
        self._keys = {
            r: f"muon/failed/{short_name(r)}/{n}/{step}" for r, n in serials.items()
        }

    def leave(self, reason: str) -> None:
        """Tells the ranks that wait for this one why it does not complete the step."""
        with suppress(*_GONE):
            for key in self._keys.values():
                # A value of the store must not be empty.
                text = f"=Rank {dist.get_rank()} reports: {reason}"
                _store().set(f"{key}/answer", text)

    def take_back(self) -> None:
        """Deletes the notes again: this rank does complete the step."""
        with suppress(*_GONE):
            for key in self._keys.values():
                _store().delete_key(f"{key}/answer")

    def read(self) -> str:
        """A reason that a rank has left; "" if none has."""
        with suppress(*_GONE):
            for key in self._keys.values():
                if _store().check([f"{key}/answer"]):
                    return _store().get(f"{key}/answer").decode()[1:]
        return ""

    def wait_for_reason(self, among: Sequence[int]) -> str:
        """After a failed collective of the ranks ``among``: another rank's reason, or which ranks are missing.
        The first rank to come looks for the missing ranks, and tells the others.
        """
        groups = [ranks for ranks in self._keys if set(among) <= set(ranks)]
        with suppress(*_GONE, IndexError):
            ranks, store = groups[0], _store()
            key = self._keys[ranks]
            answer, count = f"{key}/answer", _check_in(key)
            if count == len(ranks) and not store.check([answer]):
                store.set(answer, "=")
            try:
                store.wait([answer], timedelta(seconds=PATIENCE + (count > 1)))
            except RuntimeError:
                if count > 1:
                    return ""
                store.set(answer, "=" + _MISSING.format(_missing(key, ranks)))
            return store.get(answer).decode()[1:]
        return ""
