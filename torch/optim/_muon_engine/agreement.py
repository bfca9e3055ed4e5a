"""Ranks check that they mean the same before anything travels.

An error that only one rank sees, raised there alone, leaves its peers waiting in a collective. So
every rank first reports whether it can go on, then a digest of what it knows. Whoever finds a
difference finds it on every rank of the group, and all raise the same error.
"""

from __future__ import annotations

import builtins
import hashlib
from typing import Any, NamedTuple, TYPE_CHECKING, TypeVar

import torch.distributed as dist


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup


_T = TypeVar("_T")
# Fields that follow from others, of this parameter or of another.
DERIVED = ("shards", "owner")


class Signature(NamedTuple):
    """What one rank knows about one parameter: its description, and fields in words."""

    description: str
    fields: tuple[tuple[str, str], ...]


def forth_and_back(groups: Sequence[_T]) -> list[_T]:
    """``groups``, which all ranks have in one order, three times forth and twice back.

    What one rank tells all of each group then reaches those that it is linked to through the groups: in
    meshes of any dimensions, and along any path of up to five groups.
    """
    back = list(reversed(groups))
    return [*groups, *back, *groups, *back, *groups]


def agree(
    shared: Sequence[tuple[ProcessGroup, Sequence[Signature]]],
    error: BaseException | None,
    unsettled: bool = False,
) -> list[bool]:
    """Raises on every rank of the groups if one of them has an error or they differ.

    Returns for each group whether one of its ranks is ``unsettled``, or one that it is linked to.

    Args:
        shared: this rank's groups, in the order that all ranks go through them, each with what the
            rank knows about the parameters that the group shares.
        error: what went wrong on this rank so far. It comes here instead of being raised, so that
            this rank, too, goes through every exchange before it leaves.
        unsettled: whether this rank has something to ask of others later.
    """
    alone = len(shared) == 1
    linked = False
    told: list[Sequence[bool]] = [()] * len(shared)
    for at, (group, signatures) in enumerate(shared):
        others, told[at], error = _compare(group, signatures, alone, unsettled, error)
        linked, unsettled = linked or others, any(told[at])
    if linked:
        # A group compared early does not know yet what a later one found.
        for at in forth_and_back(range(len(shared)))[len(shared) :]:
            group, signatures = shared[at]
            descriptions = _descriptions(signatures)
            told[at], error = exchange(group, unsettled, error, descriptions)
            unsettled = any(told[at])
    if error is not None:
        raise error
    return [any(ranks) for ranks in told]


def _compare(
    group: ProcessGroup,
    signatures: Sequence[Signature],
    alone: bool,
    unsettled: bool,
    error: BaseException | None,
) -> tuple[bool, list[bool], BaseException | None]:
    """Whether a rank of ``group`` is linked to others, which ranks are unsettled, and what is wrong.

    That is this rank's own error, else that of a rank of ``group``, else how their signatures differ.

    Args:
        alone: whether this is the only group of this rank.
    """
    fields = [signature.fields for signature in signatures]
    digest = hashlib.sha256(repr(fields).encode()).hexdigest()
    shared = _descriptions(signatures)
    told, error = exchange(group, (digest, alone, unsettled), error, shared)
    linked = not all(alone for _, alone, _ in told)
    # Every rank sees the same digests, and so does or does not go on to the second exchange.
    if error is None and len({digest for digest, _, _ in told}) > 1:
        everyone, error = exchange(group, list(signatures), None, shared)
        ranks = dist.get_process_group_ranks(group)
        difference = _first_difference(ranks, everyone)
        error = error or names_ranks(ValueError(difference))
    return linked, [unsettled for _, _, unsettled in told], error


def _descriptions(signatures: Sequence[Signature]) -> list[str]:
    return [signature.description for signature in signatures]


def names_ranks(error: BaseException) -> BaseException:
    """``error``, marked as one whose text names its ranks, so that peers repeat it as it is."""
    error._muon_names_ranks = True  # type: ignore[attr-defined]
    return error


def exchange(
    group: ProcessGroup,
    value: Any,
    error: BaseException | None,
    shared: Sequence[str] = (),
) -> tuple[list[Any], BaseException | None]:
    """``value`` of every rank of ``group``, in the group's order, and the first error of a rank.

    The error of this rank comes before those of others. Where ranks cannot be reached, an error names
    the ``shared`` parameters.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    report = None
    if error is not None:
        report = (type(error).__name__, str(error), hasattr(error, "_muon_names_ranks"))
    try:
        dist.all_gather_object(values, (report, value), group=group)
    except RuntimeError as failed:
        others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        which = f"{shared[0]}{more}" if shared else "parameters"
        raise error or RuntimeError(
            f"could not reach ranks {sorted(others)}, which share {which} with this one. One of them ended, failed, or did "
            f"not build its Muon within the timeout: {failed}"
        ) from failed
    if error is None:
        ranks = dist.get_process_group_ranks(group)
        for rank, (told, _) in zip(ranks, values, strict=True):
            if told is not None:
                error = _repeated(rank, *told)
                break
    return [value for _, value in values], error


def _repeated(rank: int, kind: str, text: str, names: bool) -> BaseException:
    """The error of ``rank``, of the same type where Python has it, for one ``except`` on all ranks."""
    text = text if names else f"rank {rank} reports: {text}"
    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        # A UnicodeError is the one kind that takes more than a text.
        if not issubclass(found, UnicodeError):
            return names_ranks(found(text))
    return names_ranks(RuntimeError(text))


def _first_difference(
    ranks: Sequence[int], everyone: Sequence[Sequence[Signature]]
) -> str:
    """The first difference: in primary fields (name, shape, placements) before derived ones."""
    first = everyone[0]
    for derived in (False, True):
        for rank, theirs in zip(ranks[1:], everyone[1:], strict=True):
            for mine, its in zip(first, theirs, strict=False):
                other = dict(its.fields)
                for field, value in mine.fields:
                    if (field in DERIVED) == derived and other.get(field) != value:
                        return (
                            f"ranks disagree about {mine.description}: {field} is {value} on rank {ranks[0]} and "
                            f"{other.get(field)} on rank {rank}. Ranks that share parameters have to build their Muon "
                            "from the same ones, in the same order, with the same options"
                        )
            if len(theirs) != len(first):
                longer = max(first, theirs, key=len)
                extra = longer[min(len(first), len(theirs))]
                return (
                    f"ranks disagree about the number of parameters that they share: {len(first)} on rank {ranks[0]} "
                    f"and {len(theirs)} on rank {rank}; {extra.description} is on one of them only"
                )
    return "ranks disagree about the parameters that they share"
