"""The exchange of what ranks know about matrices that process groups share. Only here do readers have collectives.

A group does not say how its ranks cut a matrix. So in each group, ranks tell each other their pieces, put them together,
and tell the next group the result.
"""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ..agreement import (
    all_gather_object,
    Problem,
    raising_everywhere,
    reaching,
)
from ..process_groups import listed, process_rank, Ranks
from .joins import Facts, facts_of, join
from .layout import check_cover, Layout
from .pieces import KINDS, LocalPieces, Piece


def complete(pieces: LocalPieces) -> list[Layout]:
    """The layouts, with the pieces of all ranks put together. All ranks of the grid raise the error of one of them."""
    order = _common_order(pieces)
    # Ranks of the grid may see different contradictions, or none.
    groups = [pieces.group_of[group] for group in order] + pieces.mesh_groups
    shared = [layout.describe() for layout in pieces.layouts]
    # Text -> the matrices that it is about.
    said: defaultdict[str, list[str]] = defaultdict(list)
    for text, of_text in pieces.warnings.items():
        said[text] += of_text
    with raising_everywhere(groups, shared):
        facts = _facts_of_all(pieces, order, said)
        layouts = _with_pieces_of_all(pieces.layouts, facts)
    if all(min(ranks) == process_rank() for _, ranks in order):
        for text, named in said.items():
            warnings.warn(f"{listed(named)}: {text}", stacklevel=2)
    return layouts


def _facts_of_all(
    pieces: LocalPieces,
    order: Sequence[tuple[str, Ranks]],
    said: defaultdict[str, list[str]],
) -> Facts:
    """This rank's facts after the exchange in each group, in this ``order``. Raises an error of a rank after the last one."""
    facts = facts_of(pieces)
    described = dict(zip(facts.layouts, (l.describe() for l in pieces.layouts)))
    error = pieces.error
    for group in order:
        _, ranks = group
        told = facts if error is None else Problem.of(error)
        with reaching(ranks, [*described.values()]):
            answers = all_gather_object(told, pieces.group_of[group])
        for answer in answers:
            if isinstance(answer, Problem):
                error = error or answer.kind(answer.text)
        if error is not None:
            continue
        try:
            facts, hints = join(process_rank(), group, facts, answers, described)
            for hint, name in hints:
                said[hint].append(described[name])
        except Exception as problem:
            error = problem
    if error is not None:
        raise error
    return facts


def _common_order(pieces: LocalPieces) -> list[tuple[str, Ranks]]:
    """The order in which all ranks go through their groups: by kind, then larger groups first."""

    def place(group: tuple[str, Ranks]) -> tuple:
        kind, ranks = group
        return KINDS.index(kind), -len(ranks), sorted(ranks)

    return sorted(pieces.group_of, key=place)


def _with_pieces_of_all(layouts: Sequence[Piece], facts: Facts) -> list[Layout]:
    """``layouts``, with the shards that ``facts`` have of them. Raises ValueError unless these tile the matrix."""
    complete: list[Layout] = []
    for layout, joined in zip(layouts, facts.layouts.values(), strict=True):
        if layout.cuts:
            layout = replace(layout, shape=joined.shape, shards=joined.shards, cuts=())
        complete.append(layout)
    # Matrices with equal shards need one check.
    for layout in {layout.shards: layout for layout in reversed(complete)}.values():
        check_cover(layout)
    return complete
