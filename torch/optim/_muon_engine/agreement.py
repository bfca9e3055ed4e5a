"""How ranks learn whether they agree, before anything moves.

If one rank raised an error alone, its peers would wait for it in a collective. So ranks compare bytes: an all-reduce
takes the maximum of each byte and of its complement. All ranks have the same byte if and only if the two maxima add up
to 255. A rank without an opinion sends zero twice. Ranks send texts only if they differ, or if one of them has a problem.
"""

import ctypes
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import ProcessGroup

from .process_groups import device_of_group, naming, process_rank, short_hash


# All comparisons of a rank send as many bytes at once, so that ranks which confuse them get an error instead of another
# size.
BYTES = 2048
# Fields that follow from other fields, of this parameter or of another one.
DERIVED = ("shards", "owner")
_SAME_TYPE = (AssertionError, IndexError, TypeError, ValueError)


# One rank's view of one matrix: its description, and fields in words.
Signature = tuple[str, Mapping[str, str]]


def reported(error: Exception) -> Exception:
    """An error of this rank, or one that another rank has reported to it, as other ranks raise it."""
    kind = type(error) if type(error) in _SAME_TYPE else RuntimeError
    text = str(error)
    if " reports: " not in text:
        text = f"rank {process_rank()} reports: {text}"
    return kind(text)


def with_complements(values: Sequence[int], tables: int = 1) -> Tensor:
    """The bytes that a rank sends in ``tables``, with their complements; zeros for those without an opinion."""
    flat = torch.zeros(tables * BYTES, dtype=torch.uint8, device="cpu")
    flat[: len(values)] = torch.tensor([*values], dtype=torch.uint8, device="cpu")
    complements = torch.where(flat == 0, 0, 255 - flat)
    return torch.stack([flat.view(-1, BYTES), complements.view(-1, BYTES)], 1)


def differences(reduced: Tensor) -> Tensor:
    """Which bytes ranks have different opinions of, from reduced tables of shape (tables, 2, bytes)."""
    largest, complements = reduced.short().unbind(1)
    return (largest + complements > 255).flatten()


class Meeting(NamedTuple):
    """The ranks of ``groups`` compare ``signatures``. They meet in one group after another."""

    groups: Sequence[ProcessGroup]
    signatures: Sequence[Signature]


def gathered_along(groups: Sequence[ProcessGroup], value: Any) -> dict[int, Any]:
    """Rank -> its value, of all ranks that meet in ``groups``, one after another. Unlike ``dist.all_gather_object``, this needs
    no NumPy.
    """
    values = {process_rank(): value}
    for group in groups:
        own = torch.frombuffer(bytearray(pickle.dumps(values)), dtype=torch.uint8)
        own = own.to(device_of_group(group))
        numel = torch.tensor([len(own)], device=own.device)
        numels = numel.repeat(group.size())
        dist.all_gather(list(numels.split(1)), numel, group=group)
        padded = own.new_zeros(max(numels.tolist()))
        padded[: len(own)] = own
        gathered = padded.repeat(group.size(), 1)
        dist.all_gather(list(gathered.unbind()), padded, group=group)
        for of_rank, size in zip(gathered.cpu(), numels.tolist()):
            # Copies of ctypes have at most 2 GiB.
            pickled = (ctypes.c_char * size).from_address(of_rank.data_ptr())
            values |= pickle.loads(pickled)
    return dict(sorted(values.items()))


def agree(meetings: Sequence[Meeting], own_error: Exception | None) -> None:
    """Ranks compare their signatures, in one order of meetings. All of them raise an error of one of them, or ValueError for
    the first difference.
    """
    problem = None if own_error is None else reported(own_error)
    # Parameters may be fake, but this exchange is real.
    with unset_fake_temporarily():
        for meeting in meetings:
            described = (description for description, _ in meeting.signatures)
            with naming("comparison", meeting.groups, described):
                problem = _disagreement(meeting, problem)
    try:
        if own_error is not None:
            raise own_error
        if problem is not None:
            raise problem
    finally:
        # The error refers to this frame, and so to the memory of all frames of its traceback.
        del own_error, problem


def _disagreement(meeting: Meeting, problem: Exception | None) -> Exception | None:
    """The error of a rank of the meeting, or how their signatures differ; None if all agree. All ranks must call this."""
    fields = [fields for _, fields in meeting.signatures]
    has_problem = problem is not None
    table = with_complements([1 + has_problem, *short_hash(fields).encode()])
    table = table.to(device_of_group(meeting.groups[0]))
    for group in meeting.groups:
        dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    if not has_problem and not differences(table).any():
        return None
    own = problem, list(meeting.signatures)
    answers = gathered_along(meeting.groups, own)
    for theirs, _ in answers.values():
        if theirs is not None:
            return theirs
    everyone = {rank: signatures for rank, (_, signatures) in answers.items()}
    text = first_difference(everyone)
    text = text or "ranks disagree about the parameters that they share"
    return ValueError(
        f"{text}. Ranks that share parameters must have the same ones, in one order and with the same options; process groups of "
        "one grid, as those of a DeviceMesh; and an assign_fn that returns the same",
    )


def first_difference(everyone: Mapping[int, Sequence[Signature]]) -> str:
    """The first difference between what ranks have told, in words; "" without any. One that follows from others comes last."""
    (first_rank, first), *others = everyone.items()
    derived = ""
    for rank, theirs in others:
        for (described, fields), (_, its_fields) in zip(first, theirs):
            for name, value in fields.items():
                other = its_fields.get(name)
                if other == value:
                    continue
                text = f"ranks disagree about {described}: {name} is {value} on rank {first_rank} and {other} on rank {rank}"
                if name not in DERIVED:
                    return text
                derived = derived or text
        if len(theirs) != len(first):
            extra, _ = max(first, theirs, key=len)[min(len(first), len(theirs))]
            return (
                f"ranks disagree about the number of matrices that they share: {len(first)} on rank {first_rank} and "
                f"{len(theirs)} on rank {rank}; only one of them has {extra}"
            )
    return derived
