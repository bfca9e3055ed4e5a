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
    first, *rest = widths
    form = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in rest)])
    return "\n".join(form.format(*line).rstrip() for line in lines)


def write(path: Path, arguments: Sequence[str], texts: Sequence[str]) -> None:
    """Writes the output of a command as a page of tables."""
    command = f"python -m tools.bench {shlex.join(arguments)}"
    page = [
        f"# {path.stem}",
        f"`{command}`, torch {torch.__version__}, {cores()} cores",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join([*page, *(f"```\n{t}\n```" for t in texts)]) + "\n")


def cores() -> int:
    return len(os.sched_getaffinity(0))
