"""Tables as plain text."""

from collections.abc import Iterable, Sequence


def render(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligns the first column to the left and the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    for first, *others in lines:
        cells = [first.ljust(widths[0])]
        for cell, width in zip(others, widths[1:], strict=True):
            cells.append(cell.rjust(width))
        aligned.append("  ".join(cells).rstrip())
    return "\n".join(aligned)
