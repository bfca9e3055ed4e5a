"""What ranks tell each other through the store: who has come, and why a step failed."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .process_groups import Ranks, short_name


# Seconds that ranks wait for a reason after a failed collective.
PATIENCE = 5.0
_GONE = KeyError, RuntimeError, ValueError
_MISSING = (
    "Ranks {} did not come to this step(), or no longer run. Under DDP's join(), all must make equally many steps. If a "
    "GradScaler skipped the step on them because of an inf, use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
)


def default_store() -> dist.Store:
    return distributed_c10d._get_default_store()


def missing(key: str, ranks: Sequence[int]) -> list[int]:
    """Those of ``ranks`` that :func:`check_in` has not counted."""
    return [rank for rank in ranks if not default_store().check([f"{key}/{rank}"])]


def check_in(key: str) -> int:
    """Counts this rank at ``key``. Returns how many ranks are there."""
    default_store().set(f"{key}/{dist.get_rank()}", "=")
    return default_store().add(key, 1)


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
                default_store().set(f"{key}/answer", text)

    def take_back(self) -> None:
        """Deletes the notes again: this rank does complete the step."""
        with suppress(*_GONE):
            for key in self._keys.values():
                default_store().delete_key(f"{key}/answer")

    def read(self) -> str:
        """A reason that a rank has left; "" if none has."""
        with suppress(*_GONE):
            for key in self._keys.values():
                if default_store().check([f"{key}/answer"]):
                    return default_store().get(f"{key}/answer").decode()[1:]
        return ""

    def wait_for_reason(self, among: Sequence[int]) -> str:
        """After a failed collective of the ranks ``among``: another rank's reason, or which ranks are missing.
        The first rank to come looks for the missing ranks, and tells the others.
        """
        groups = [ranks for ranks in self._keys if set(among) <= set(ranks)]
        with suppress(*_GONE, IndexError):
            ranks, store = groups[0], default_store()
            key = self._keys[ranks]
            answer, count = f"{key}/answer", check_in(key)
            if count == len(ranks) and not store.check([answer]):
                store.set(answer, "=")
            try:
                store.wait([answer], timedelta(seconds=PATIENCE + (count > 1)))
            except RuntimeError:
                if count > 1:
                    return ""
                store.set(answer, "=" + _MISSING.format(missing(key, ranks)))
            return store.get(answer).decode()[1:]
        return ""
