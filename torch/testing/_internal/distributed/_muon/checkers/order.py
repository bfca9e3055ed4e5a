"""Plays the collectives of all ranks against each other."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.testing._internal.distributed._muon.checkers.recorder import Call


def disorder(calls_of_ranks: Mapping[int, list[Call]]) -> list[str]:
    """Where ranks launch other collectives or sizes than each other, and where each one is stuck.

    As on a device with one queue, a rank launches nothing before its last collective has started on all of its ranks.
    """
    problems = []
    left = {rank: calls[::-1] for rank, calls in calls_of_ranks.items()}
    has_moved = True
    while has_moved:
        has_moved = False
        for rank in left:
            if not left[rank]:
                continue
            comm = left[rank][-1].comm
            next_calls = [left[peer][-1] for peer in comm.ranks if left[peer]]
            if [call.comm for call in next_calls] != [comm] * len(comm.ranks):
                continue
            has_moved = True
            for peer in comm.ranks:
                left[peer].pop()
            by_rank = dict(zip(comm.ranks, next_calls))
            for (one, call), (other, its_call) in itertools.combinations(
                by_rank.items(), 2
            ):
                said, its_said = call.said[other], its_call.said[one]
                if said != its_said:
                    problems.append(f"{call}: {said} and {its_said}")
    for rank, calls in left.items():
        if calls:
            problems.append(f"rank {rank} is stuck at {calls[-1]}")
    return problems
