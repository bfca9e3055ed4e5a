"""The exchange of what ranks know about matrices that process groups share. Only here do readers have collectives.

A group does not say how its ranks cut a matrix. So in each group, ranks tell each other their pieces, put them together,
and tell the next group the result.
"""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ..agreement import gather_values, raise_everywhere
from ..process_groups import listed, process_rank, Ranks
from .joins import Facts, facts_of, join
from .layout import check_cover, Layout
from .pieces import KINDS, LocalPieces, Piece


def complete(pieces: LocalPieces, error: BaseException | None = None) -> list[Layout]:
    """The layouts, with the pieces of all ranks put together. Raises the error of any rank of the grid."""
    facts = facts_of(pieces)
    described = {
        name: layout.describe()
        for name, layout in zip(facts.layouts, pieces.layouts, strict=True)
    }
    shared = list(described.values())
    order = _common_order(pieces)
    # Text -> the matrices that it is about.
    said: defaultdict[str, list[str]] = defaultdict(list)
    for text, of_text in pieces.warnings.items():
        said[text] += of_text
    for group in order:
        answers, error = gather_values(pieces.group_of[group], facts, error, shared)
        if error is not None:
            continue
        try:
            facts, hints = join(process_rank(), group, facts, answers, described)
            for hint, name in hints:
                said[hint].append(described[name])
        except Exception as problem:
            error = problem
    layouts: list[Layout] = []
    try:
        if error is None:
            layouts = _with_pieces_of_all(pieces.layouts, facts)
    except Exception as problem:
        error = problem
    # Ranks of the grid may see different contradictions, or none. All of them must raise.
    groups = [pieces.group_of[group] for group in order] + pieces.mesh_groups
    raise_everywhere(error, groups, shared)
    if all(min(ranks) == process_rank() for _, ranks in order):
        for text, named in said.items():
            warnings.warn(f"{listed(named)}: {text}", stacklevel=2)
    return layouts


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
