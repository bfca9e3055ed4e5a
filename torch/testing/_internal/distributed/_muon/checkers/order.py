"""Compares the records of ranks: whether they launch the same collectives, and whether some rank is stuck."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from torch.testing._internal.distributed._muon.checkers.recorder import Call, Comm


if TYPE_CHECKING:
    from collections.abc import Mapping


Log = list[tuple[str, Call]]


def disagreements(logs: Mapping[int, Log]) -> list[str]:
    """Where the ranks of a communicator launch other collectives, or other sizes."""
    queues: dict[Comm, dict[int, list[Call]]] = defaultdict(dict)
    for rank, log in logs.items():
        for what, call in log:
            if what == "launch":
                queues[call.comm].setdefault(rank, []).append(call)
    found = []
    for comm, of_ranks in queues.items():
        counts = {rank: len(of_ranks.get(rank, ())) for rank in comm.ranks}
        if len(set(counts.values())) > 1:
            found.append(f"{comm}: ranks launch {counts} collectives")
        for a, mine in of_ranks.items():
            for b, its in of_ranks.items():
                for one, other in zip(mine, its, strict=False):
                    if a < b and one.said[b] != other.said[a]:
                        found.append(f"{one}: {one.said[b]} and {other.said[a]}")
    return found


def deadlock(logs: Mapping[int, Log], in_turn: bool = False) -> list[str]:
    """The launch or wait at which each rank is stuck; nothing if all ranks come to their ends.

    A collective finishes when all of its ranks have launched it. With ``in_turn`` a rank launches nothing
    before its last collective has started on all of its ranks, as on a device with one queue.
    """
    at = dict.fromkeys(logs, 0)
    there: dict[tuple[Comm, int], set[int]] = defaultdict(set)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, log in logs.items():
            while at[rank] < len(log):
                what, call = log[at[rank]]
                arrived = there[call.comm, call.number]
                if what == "launch":
                    arrived.add(rank)
                if (what == "wait" or in_turn) and len(arrived) < len(call.comm.ranks):
                    break
                at[rank] += 1
                has_moved = True
    return [
        f"rank {rank} is at the {what} of {call}, to which ranks {there[call.comm, call.number]} have come"
        for rank, log in logs.items()
        for what, call in log[at[rank] : at[rank] + 1]
    ]
