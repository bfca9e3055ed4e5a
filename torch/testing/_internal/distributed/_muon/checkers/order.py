"""Compares the records of ranks: whether they launch the same collectives, and whether some rank is stuck."""

from __future__ import annotations

import itertools
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
        for (rank, calls), (other, its_calls) in itertools.combinations(
            of_ranks.items(), 2
        ):
            # A communicator pairs up its calls by their number.
            for call, its_call in zip(calls, its_calls, strict=False):
                said, its_said = call.said[other], its_call.said[rank]
                if said != its_said:
                    found.append(f"{call}: {said} and {its_said}")
    return found


def deadlock(logs: Mapping[int, Log], in_turn: bool = False) -> list[str]:
    """The launch or wait at which each rank is stuck; nothing if all ranks come to their ends.

    A collective finishes when all of its ranks have launched it. With ``in_turn`` a rank launches nothing
    before its last collective has started on all of its ranks, as on a device with one queue.
    """
    positions = dict.fromkeys(logs, 0)
    there: dict[tuple[Comm, int], set[int]] = defaultdict(set)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, log in logs.items():
            while positions[rank] < len(log):
                what, call = log[positions[rank]]
                arrived = there[call.comm, call.number]
                if what == "launch":
                    arrived.add(rank)
                is_complete = len(arrived) == len(call.comm.ranks)
                if not is_complete and (what == "wait" or in_turn):
                    break
                positions[rank] += 1
                has_moved = True
    stuck = []
    for rank, log in logs.items():
        if positions[rank] < len(log):
            what, call = log[positions[rank]]
            arrived = there[call.comm, call.number]
            stuck.append(
                f"rank {rank} is at the {what} of {call}, to which ranks {arrived} have come"
            )
    return stuck
