"""A script in the percent format, as Jupytext and VS Code know it, in cells.

A line ``# %%`` begins a code cell, ``# %% [markdown]`` a text cell, which is comments
or one string in triple quotes. What stands before the first of them is no cell.

Two tags say where a cell is alive, by Jupytext's names. ``tags=["active-py"]`` is for
the script alone. ``tags=["active-ipynb"]`` is for the notebook alone: in the script,
the lines of such a cell are comments.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple


MARKER = re.compile(r"# %%(?P<markdown> \[markdown\])?(?: tags=(?P<tags>\[.*\]))?")
SCRIPT_ONLY, NOTEBOOK_ONLY = "active-py", "active-ipynb"


class Cell(NamedTuple):
    kind: str  # "code" or "markdown"
    lines: list[str]


def cells_of(script: str) -> list[Cell]:
    """The cells that the notebook of ``script`` has.

    Raises:
        ValueError: a marker is not understood, or a line of a cell should be a comment.
    """
    cells: list[Cell] = []
    for marker, first, lines in _parts(script):
        tags = json.loads(marker["tags"] or "[]")
        unknown = set(tags) - {SCRIPT_ONLY, NOTEBOOK_ONLY}
        if unknown:
            raise ValueError(f"line {first}: unknown tags {sorted(unknown)}")
        if SCRIPT_ONLY in tags:
            continue
        kind = "markdown" if marker["markdown"] else "code"
        if kind == "markdown":
            lines = _text(lines, first)
        elif NOTEBOOK_ONLY in tags:
            lines = _uncommented(lines, first)
        if lines := _stripped(lines):
            cells.append(Cell(kind, lines))
    return cells


def _parts(script: str) -> list[tuple[re.Match, int, list[str]]]:
    """Each marker with its line number and the lines up to the next one."""
    parts: list[tuple[re.Match, int, list[str]]] = []
    for number, line in enumerate(script.splitlines(), 1):
        if line.startswith("# %%"):
            marker = MARKER.fullmatch(line)
            if marker is None:
                raise ValueError(f"line {number}: {line!r} is not understood")
            parts.append((marker, number, []))
        elif parts:
            parts[-1][2].append(line)
    return parts


def _stripped(lines: list[str]) -> list[str]:
    """Without the blank lines at both ends."""
    filled = [i for i, line in enumerate(lines) if line.strip()]
    return lines[filled[0] : filled[-1] + 1] if filled else []


def _text(lines: list[str], first: int) -> list[str]:
    text = "\n".join(lines).strip()
    if text.startswith('"""'):
        if not text.endswith('"""') or text.count('"""') != 2:
            raise ValueError(f"line {first}: a text cell is one string, and no more")
        return text[3:-3].split("\n")
    return _uncommented(lines, first)


def _uncommented(lines: list[str], first: int) -> list[str]:
    result = []
    for number, line in enumerate(lines, first + 1):
        if line.strip() and line != "#" and not line.startswith("# "):
            raise ValueError(f"line {number}: {line!r} is not a comment")
        result.append(line[2:])
    return result


def notebook_of(script: str) -> str:
    """The notebook of ``script``, without any output, as the text of an .ipynb file."""
    cells = []
    for number, (kind, lines) in enumerate(cells_of(script), 1):
        cell = {
            "cell_type": kind,
            # Equal scripts make equal notebooks.
            "id": f"cell-{number:02}",
            "metadata": {},
            "source": "\n".join(lines).splitlines(keepends=True),
        }
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(dict(sorted(cell.items())))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
