"""Ranks check that they are about to build the same engine before anything moves.

If one rank raised an error alone, its peers would wait for it in a collective. So each rank brings its error and
a digest of its signatures to one all-gather per group, and all ranks come to the same conclusion.
"""

import ctypes
import hashlib
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from . import process_groups
from .process_groups import counters_of, device_of_group, larger_first, listed, Ranks


# Fields that follow from other fields, of this parameter or of another one.
DERIVED = ("shards", "owner")
_SAME_PARAMETERS = "Build Muon from the same parameters on all of them, in one order and with the same options"
_WHAT_MAKES_ONE_GRID = {
    "groups": "process groups of one grid, as those of a DeviceMesh",
    "assign_fn": "an assign_fn that returns the same on all of them",
}
_ONE_GRID = "Pass " + ", and ".join(_WHAT_MAKES_ONE_GRID.values())
_SAME_TYPE = (AssertionError, IndexError, TypeError, ValueError)


class Signature(NamedTuple):
    """One rank's view of one matrix: its description, and fields in words."""

    description: str
    fields: tuple[tuple[str, str], ...]


@dataclass
class Agreement:
    """The groups of ranks that share matrices with this rank."""

    # The process group of each; None for this rank alone.
    groups: dict[Ranks, ProcessGroup | None] = field(default_factory=dict)
    # The serial number of this optimizer among those over the same ranks.
    serials: dict[Ranks, int] = field(default_factory=dict)
    # Those that overlap others, on this rank or on another one of them, without containing these.
    overlapping: set[Ranks] = field(default_factory=set)


def agree(
    sharing: Mapping[Ranks, Sequence[ProcessGroup]],
    signatures: Mapping[Ranks, Sequence[Signature]],
    error: BaseException | None,
    is_lasting: bool,
    agreement: Agreement,
) -> None:
    """Makes the process group of all ranks that share matrices, and compares their signatures in it.
    ``sharing`` has the framework's groups among ranks that share matrices. The other ranks raise an ``error``
    of this rank, too. ``agreement`` has those keys of ``sharing`` that overlap another one of this rank's. It gets
    those that overlap another one of any rank's, the groups and the serial numbers.
    """
    groups, serials = agreement.groups, agreement.serials
    # If one group fails, this rank leaves a note for the ranks of all, which the next optimizer must not read.
    for ranks in sharing:
        if len(ranks) > 1:
            serials[ranks] = counters_of(ranks).optimizers
            counters_of(ranks).optimizers += 1
    for ranks in larger_first(sharing):
        groups[ranks] = None
        if len(ranks) == 1:
            continue
        counters, shared = counters_of(ranks), signatures[ranks]
        described = [signature.description for signature in shared]
        digest = hashlib.sha256(repr([s.fields for s in shared]).encode()).hexdigest()
        with _reaching(ranks, described, error):
            group = groups[ranks] = process_groups.spanning_group(ranks, sharing[ranks])
        own = digest, serials[ranks], ranks in agreement.overlapping
        answers, error = gather_values(group, own, error, described)
        digests, counted, overlaps = zip(*answers)
        if any(overlaps):
            agreement.overlapping.add(ranks)
        # All ranks see the same digests, so all of them or none compare their fields.
        if error is None and len(set(digests)) > 1:
            everyone, error = gather_values(group, list(shared), None, described)
            error = error or common(ValueError(_first_difference(ranks, everyone)))
        # Ranks that built other optimizers before go on with the largest number.
        serials[ranks] = max(counted)
        counters.optimizers = serials[ranks] + 1
        if error is None and is_lasting:
            # The next optimizer's owners start where those of this one stop.
            counters.first_owner = (counters.first_owner + len(shared)) % len(ranks)
    if error is not None:
        raise error


def common(error: BaseException) -> BaseException:
    """Marks an error whose text holds on all ranks, so that they do not add which rank reports it."""
    error._muon_common = True  # type: ignore[attr-defined]
    return error


def gather_values(
    group: ProcessGroup,
    value: Any,
    error: BaseException | None,
    shared: Sequence[str] = (),
) -> tuple[list[Any], BaseException | None]:
    """Returns ``value`` of every rank of ``group`` in the group's order, and the first error of a rank. This
    rank's own error comes first. If ranks cannot be reached, it names the ``shared`` parameters.
    """
    report, me = None, dist.get_rank()
    if error is not None:
        kind = type(error) if type(error) in _SAME_TYPE else RuntimeError
        is_common = hasattr(error, "_muon_common")
        report = kind, str(error) if is_common else f"rank {me} reports: {error}"
    with _reaching(dist.get_process_group_ranks(group), shared, error):
        answers = all_gather_object((report, value), group)
    reports = [report for report, _ in answers if report is not None]
    if error is None and reports:
        kind, text = reports[0]
        error = common(kind(text))
    return [value for _, value in answers], error


def raise_everywhere(error: Any, groups: Iterable[Any], names: Sequence = ()) -> None:
    """Raises ``error``, or one of another rank of ``groups``. All ranks must make this call in one order."""
    for group in groups:
        _, error = gather_values(group, None, error, names)
    try:
        if error is not None:
            raise error
    finally:
        del error


@contextmanager
def _reaching(
    ranks: Sequence[int], shared: Sequence[str], error: BaseException | None
) -> Iterator[None]:
    """Raises ``error``, or else a RuntimeError that names the other ranks, if a collective fails."""
    try:
        yield
    except process_groups.OWN_ERRORS:
        raise
    except RuntimeError as failed:
        others = sorted(set(ranks) - {dist.get_rank()})
        raise error or RuntimeError(
            f"could not reach ranks {others}, which share {listed(shared, 1) or 'parameters'} with this one. One of them "
            f"ended, failed, or did not build its Muon within the timeout: {failed}"
        ) from failed


def all_gather_object(value: Any, group: ProcessGroup) -> list[Any]:
    """Like ``dist.all_gather_object``, which needs NumPy."""
    pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    gathered = all_gather_uneven(pickled.to(device_of_group(group)), group)
    received = [tensor.cpu() for tensor in gathered]
    return [pickle.loads(ctypes.string_at(t.data_ptr(), len(t))) for t in received]


def all_gather_uneven(flat: Tensor, group: ProcessGroup) -> list[Tensor]:
    """The 1D tensor of each rank of ``group``. Their lengths may differ, so they travel with padding."""
    count = dist.get_world_size(group)
    numel = torch.tensor([len(flat)], device=flat.device)
    sizes = numel.repeat(count)
    dist.all_gather(list(sizes.split(1)), numel, group=group)
    padded = flat.new_zeros(max(sizes.tolist()))
    padded[: len(flat)] = flat
    gathered = flat.new_empty(count, len(padded))
    dist.all_gather(list(gathered.unbind()), padded, group=group)
    return [row[:size] for row, size in zip(gathered, sizes.tolist())]


def _first_difference(ranks: Ranks, everyone: Sequence[Sequence[Signature]]) -> str:
    """The first difference. Primary fields (name, shape, placement) come before derived ones."""
    first = everyone[0]
    for derived in (False, True):
        for rank, others in zip(ranks[1:], everyone[1:], strict=True):
            for one, another in zip(first, others, strict=False):
                for (name, value), (_, other) in zip(one.fields, another.fields):
                    if (name in DERIVED) == derived and other != value:
                        advice = _ONE_GRID if derived else _SAME_PARAMETERS
                        return (
                            f"ranks disagree about {one.description}: {name} is {value} on rank {ranks[0]} and {other} on rank "
                            f"{rank}. {advice}"
                        )
            if len(others) != len(first):
                extra = max(first, others, key=len)[min(len(first), len(others))]
                return (
                    f"ranks disagree about the number of matrices that they share: {len(first)} on rank {ranks[0]} "
                    f"and {len(others)} on rank {rank}; only one of them has {extra.description}"
                )
    return "ranks disagree about the parameters that they share"
