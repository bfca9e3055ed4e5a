"""Our own lines in a checkout's ``.git/info/exclude``.

What the overlay links there must never show up in ``git status`` or in somebody's
``git add .``, and upstream's .gitignore is not ours to change. Linked work trees share
the file, so that each has a block of its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from pathlib import Path


_BEGIN = "# >>> distributed muon overlay ({name})"
_END = "# <<< distributed muon overlay ({name})"


def with_block(text: str, name: str, lines: list[str]) -> str:
    """The file's text with our block replaced; no lines: without the block."""
    begin, end = _BEGIN.format(name=name), _END.format(name=name)
    kept: list[str] = []
    inside = False
    for line in text.splitlines():
        if line == begin:
            inside = True
        elif line == end:
            inside = False
        elif not inside:
            kept.append(line)
    if lines:
        kept += [begin, *lines, end]
    return "".join(line + "\n" for line in kept)


def update(path: Path, name: str, lines: list[str]) -> None:
    text = path.read_text() if path.is_file() else ""
    new = with_block(text, name, lines)
    if new != text:
        path.parent.mkdir(exist_ok=True)
        half = path.with_name(path.name + ".muon-new")
        half.write_text(new)
        os.replace(half, path)


def escaped(rel: str) -> str:
    """The pattern that matches exactly this path."""
    special = "".join("\\" + c if c in "*?[]\\ !#" else c for c in rel)
    return "/" + special
