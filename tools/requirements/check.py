"""What is wrong with the comments, the catalogue or the page."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from .catalog import all_ids, NAMED_TESTS, SECTIONS


if TYPE_CHECKING:
    from pathlib import Path

    from .tags import Shown


def holes(shown: list[Shown], tests: dict[str, list[str]]) -> list[str]:
    """Requirements that nothing shows, and comments that name none."""
    known = all_ids()
    named = Counter(id for one in shown for id in one.ids)
    found = [f"{id} is shown by nothing" for id in known if not named[id]]
    for one in shown:
        for id in one.ids:
            if id not in known:
                found.append(f"{one.path}:{one.line}: no requirement is called {id!r}")
    for group, names in NAMED_TESTS.items():
        for name in names:
            if f"{group}::{name}" not in tests:
                found.append(f"there is no test {group}::{name}")
    return found


def against_documents(folder: Path) -> list[str]:
    """Where the catalogue and the documents in ``folder`` differ in what they list."""
    found = []
    for section in SECTIONS:
        if section.blocks:
            text = (folder / section.document).read_text()
            there, here = python_blocks(text), len(section.requirements)
            if there != here:
                found.append(
                    f"{section.document} has {there} Python blocks, the catalogue {here}"
                )
    text = (folder / "TESTING.md").read_text()
    there = set(re.findall(r"def (test_\w+)\(self", text)) - {"test_feature"}
    here = {name for names in NAMED_TESTS.values() for name in names}
    found += [f"TESTING.md names {name}, the catalogue not" for name in there - here]
    found += [f"TESTING.md does not name {name}" for name in here - there]
    for section in SECTIONS:
        if re.match(r"P\d", section.title):
            there, here = rows_of(text, section.title[:2]), len(section.requirements)
            # One row may be several requirements here, never the other way round.
            if there > here:
                found.append(f"{section.title[:2]} has {there} rows, only {here} here")
    return found


def python_blocks(text: str) -> int:
    """Fenced Python blocks, those in list items included."""
    return len(re.findall(r"^ *```python", text, re.MULTILINE))


def rows_of(text: str, priority: str) -> int:
    """How many list items without items of their own a priority of TESTING.md has."""
    part = re.search(rf"^### {priority}:.*?(?=^#)", text, re.MULTILINE | re.DOTALL)
    lines = part[0].splitlines() if part else []
    items = [line for line in lines if re.match(r" *- ", line)]
    return sum(not item.endswith(":") for item in items)
