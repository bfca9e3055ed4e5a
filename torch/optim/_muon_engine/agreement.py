"""Ranks check that they mean the same before anything travels.

An error that only one rank sees, raised there alone, leaves its peers waiting in a collective. So
every rank first reports whether it can go on, then a digest of what it knows; whoever finds a
difference finds it on every rank of the group, and raises the same error.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, TYPE_CHECKING

import torch.distributed as dist


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Fields that follow from others, of this parameter or of another.
DERIVED = ("pieces", "owner")


class Fact(NamedTuple):
    """What one rank knows about one parameter: its description and fields in words."""

    description: str
    fields: tuple[tuple[str, str], ...]


def agree(
    shared: list[tuple[ProcessGroup, list[Fact]]],
    error: BaseException | None,
    flag: bool = False,
) -> bool:
    """Raises on every rank of the groups if one of them has an error or they differ.

    Args:
        shared: this rank's groups, in the order that all ranks go through them, each with what the
            rank knows about the parameters that the group shares.
        error: what went wrong on this rank so far. It comes here instead of being raised, so that
            this rank, too, goes through every exchange before it leaves.
        flag: something that is true or false of this rank.

    Returns:
        Whether ``flag`` is true of one of the ranks that are linked to this one.
    """
    for group, facts in shared:
        error = _compare(group, facts, error)
    # A group compared early does not know yet what a later one found. There and back again, what
    # one rank knows reaches all that it is linked to through the groups.
    for group, _ in (*shared, *reversed(shared)):
        reports = exchange_objects(group, (reported(error), flag))
        error = error or failure(group, [report for report, _ in reports])
        flag = any(its for _, its in reports)
    if error is not None:
        raise error
    return flag


def _compare(
    group: ProcessGroup, facts: list[Fact], error: BaseException | None
) -> BaseException | None:
    """This rank's own error, else that of a rank of ``group``, else how their facts differ."""
    digest = hashlib.sha256(repr([fact.fields for fact in facts]).encode()).hexdigest()
    reports = exchange_objects(group, (reported(error), digest))
    # Every rank sees the same reports, and so does or does not go on to the second exchange.
    if all(report is None for report, _ in reports) and len(set(reports)) > 1:
        everyone = exchange_objects(group, facts)
        ranks = dist.get_process_group_ranks(group)
        return ValueError(_first_difference(ranks, everyone))
    return error or failure(group, [report for report, _ in reports])


def reported(error: BaseException | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def failure(
    group: ProcessGroup, reports: list[tuple[str, str] | None]
) -> BaseException | None:
    """What the first rank of ``group`` with an error reports; None where all is well."""
    ranks = dist.get_process_group_ranks(group)
    for rank, report in zip(ranks, reports, strict=True):
        if report is not None:
            kind, text = report
            # The same type everywhere, so that a caller's `except` behaves alike on all ranks.
            known = {"AssertionError": AssertionError, "IndexError": IndexError}
            told = text.startswith(("ranks disagree", "rank "))
            return known.get(kind, ValueError)(
                text if told else f"rank {rank} reports: {text}"
            )
    return None


def _first_difference(ranks: list[int], everyone: list[list[Fact]]) -> str:
    """Names the first parameter and field that differ, what the rest follows from before what follows."""
    first = everyone[0]
    for derived in (False, True):
        for rank, facts in zip(ranks[1:], everyone[1:], strict=True):
            for ours, theirs in zip(first, facts, strict=False):
                other = dict(theirs.fields)
                for field, value in ours.fields:
                    if (field in DERIVED) == derived and other.get(field) != value:
                        return (
                            f"ranks disagree about {ours.description}: {field} is {value} on rank {ranks[0]} and "
                            f"{other.get(field)} on rank {rank}. Ranks that share parameters have to build their Muon "
                            "from the same ones, in the same order, with the same options"
                        )
            if len(facts) != len(first):
                longer = max(first, facts, key=len)
                extra = longer[min(len(first), len(facts))]
                return (
                    f"ranks disagree about the number of parameters that they share: {len(first)} on rank {ranks[0]} "
                    f"and {len(facts)} on rank {rank}; {extra.description} is on one of them only"
                )
    return "ranks disagree about the parameters that they share"


def exchange_objects(group: ProcessGroup, value: Any) -> list[Any]:
    """``value`` of every rank of ``group``, in the group's order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            "this rank waited in vain for the others of ranks "
            f"{dist.get_process_group_ranks(group)}, which share parameters with it, to build their Muon"
        ) from error
    return values
