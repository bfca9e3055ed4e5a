"""Tables as plain text, on the terminal and in ``docs/data``."""

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch


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


def write(path: Path, arguments: Sequence[str], texts: Sequence[str]) -> None:
    """Writes the output of a command as a page of tables."""
    command = f"python -m tools.bench {shlex.join(arguments)}"
    title = f"# {path.stem}"
    machine = f"`{command}`, torch {torch.__version__}, {cores()} cores"
    page = [title, machine]
    for text in texts:
        page.append(f"```\n{text}\n```")
    content = "\n\n".join(page)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


def cores() -> int:
    of_this_process = os.sched_getaffinity(0)
    return len(of_this_process)
