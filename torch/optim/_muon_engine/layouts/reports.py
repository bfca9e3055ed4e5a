"""What the ranks of a group tell each other of the matrices that they share, in few bytes.

A model has many layers and few kinds of matrices: a rank tells of each kind once. Names and dtypes, which
are the same on all ranks as a rule, travel as a digest.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TYPE_CHECKING

import torch.distributed as dist
from torch.optim._muon_engine.agreement import exchange, names_ranks


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.distributed import ProcessGroup


_IN_WORDS = {
    "called": "its name",
    "dtype": "its dtype",
    "dim": "the dimension that it is cut along (None: not at all)",
}


# What the members of a group call a matrix that they share: the expert's id, if it is an expert's, and
# its number among those. Ranks may hold others beside these.
Name = tuple["int | None", int]


class Entry(NamedTuple):
    """What one rank says of a matrix that a group shares, but for its part."""

    name: Name
    called: str | None = None
    dtype: str = ""
    dim: int | None = None


class Report(NamedTuple):
    """What one rank tells the others of a group, about each matrix in its table.

    ``digest`` stands for the table, which follows only where ranks have different ones. ``values`` are those
    that differ, and ``value_of`` says for each matrix which of them is its own.
    """

    digest: str
    ep_ranks: tuple[int, ...]
    values: list[Any]
    value_of: array[int]


@dataclass
class Answers:
    """What all ranks of a group told each other."""

    ranks: tuple[int, ...]
    reports: list[Report]
    # By digest: one, unless ranks hold different matrices, such as experts.
    tables: dict[str, list[Entry]]

    @cached_property
    def places(self) -> dict[str, dict[Name, int]]:
        """For each table the place of each name in it."""
        return {
            digest: {entry.name: at for at, entry in enumerate(table)}
            for digest, table in self.tables.items()
        }

    @property
    def alike(self) -> bool:
        """Whether all ranks told the same."""
        first = self.reports[0]
        return len(self.tables) == 1 and all(
            report.values == first.values and report.value_of == first.value_of
            for report in self.reports
        )

    def columns(self, table: Sequence[Entry]) -> Iterator[tuple[int | None, ...]]:
        """For each matrix in ``table`` which value each rank has of it; None where it has no such matrix."""
        if len(self.tables) == 1:
            yield from zip(*(report.value_of for report in self.reports), strict=True)
            return
        told = [(self.places[r.digest], r.value_of) for r in self.reports]
        for name, *_ in table:
            yield tuple(
                value_of[places[name]] if name in places else None
                for places, value_of in told
            )

    def check_entries(self, name: Name, members: Sequence[int], where: str) -> None:
        """Raises unless ``members`` say the same of their matrix ``name``."""
        # All have the same entries.
        if len(self.tables) == 1:
            return
        entries = {
            digest: table[self.places[digest][name]]
            for digest, table in self.tables.items()
            if name in self.places[digest]
        }
        first = entries[self.reports[members[0]].digest]
        for i in members[1:]:
            other = entries[self.reports[i].digest]
            for field, in_words in _IN_WORDS.items():
                mine, its = getattr(first, field), getattr(other, field)
                if mine != its:
                    raise names_ranks(
                        ValueError(
                            f"ranks disagree about {where}: {in_words} is {mine} on rank {self.ranks[members[0]]} "
                            f"and {its} on rank {self.ranks[i]}"
                        )
                    )

    def check_counts(self) -> None:
        """Raises unless all ranks share as many matrices that are no expert's."""
        numbers = {
            digest: sum(entry.name[0] is None for entry in table)
            for digest, table in self.tables.items()
        }
        counts = [numbers[report.digest] for report in self.reports]
        for rank, count in zip(self.ranks, counts, strict=True):
            if count != counts[0]:
                raise names_ranks(
                    ValueError(
                        f"ranks disagree about the number of parameters that they share: {counts[0]} on rank "
                        f"{self.ranks[0]} and {count} on rank {rank}. Ranks of a process group have to build their Muon "
                        "from the same ones; those of experts are told apart by expert_assignments"
                    )
                )


def tell(
    group: ProcessGroup,
    mine: Report,
    table: list[Entry],
    error: BaseException | None,
    names: Sequence[str],
) -> tuple[Answers, BaseException | None]:
    """What the ranks of ``group`` tell, or the error of one.

    Args:
        mine: this rank's report of ``table``; see :func:`report_of`.
        error: what went wrong on this rank so far.
        names: the matrices, for an error where ranks cannot be reached.
    """
    reports, error = exchange(group, mine, error, names)
    tables = {mine.digest: table}
    # Every rank sees the same digests, and so does or does not go on to the second exchange.
    if error is None and any(report.digest != mine.digest for report in reports):
        everyone, error = exchange(group, table, None, names)
        if error is None:
            told = zip(reports, everyone, strict=True)
            tables = {report.digest: its for report, its in told}
    ranks = tuple(dist.get_process_group_ranks(group))
    return Answers(ranks, reports, tables), error


def report_of(
    table: list[Entry], values: Iterable[Any], ep_ranks: tuple[int, ...]
) -> Report:
    """What this rank tells: of ``values`` those that are different objects, and which is whose."""
    numbers: dict[int, int] = {}
    different, value_of = [], array("I")
    for value in values:
        number = numbers.setdefault(id(value), len(different))
        if number == len(different):
            different.append(value)
        value_of.append(number)
    digest = hashlib.sha256(repr(table).encode()).hexdigest()
    return Report(digest, ep_ranks, different, value_of)


def some_of(ranks: tuple[int, ...]) -> str:
    """``ranks`` in a text whose length does not grow with them."""
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"{list(ranks[:16])}{more}"
