"""Parts of a page that commands write, each between two lines that name it."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from pathlib import Path


def put(page: Path, name: str, text: str) -> None:
    """Replaces the part of ``name``.

    Raises:
        ValueError: the page has no place for it.
    """
    first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, begin, rest = page.read_text().partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {first!r} and {last!r}")
    page.write_text(before + begin + text + end + after)
