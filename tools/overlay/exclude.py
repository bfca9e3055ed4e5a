"""Our own lines in a checkout's ``.git/info/exclude``.

What the overlay links there must never show up in ``git status`` or in somebody's
``git add .``, and upstream's .gitignore is not ours to change. Linked work trees share
the file, so that each has a block of its own.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from pathlib import Path


def update(path: Path, name: str, lines: list[str]) -> None:
    """Put our block of that name into the file; no lines: take it out."""
    begin, end = (
        f"# {sign} distributed muon overlay ({name})" for sign in (">>>", "<<<")
    )
    text = path.read_text() if path.is_file() else ""
    kept = re.sub(rf"(?ms)^{re.escape(begin)}\n.*?^{re.escape(end)}\n", "", text)
    if kept and not kept.endswith("\n"):
        kept += "\n"
    block = [begin, *lines, end] if lines else []
    new = kept + "".join(line + "\n" for line in block)
    if new != text:
        path.parent.mkdir(exist_ok=True)
        half = path.with_name(path.name + ".muon-new")
        half.write_text(new)
        os.replace(half, path)


def escaped(rel: str) -> str:
    """The pattern that matches exactly this path."""
    special = "".join("\\" + c if c in "*?[]\\ !#" else c for c in rel)
    return "/" + special
