"""What is wrong with the comments, the catalogue or the page."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from .catalog import all_ids, NAMED_TESTS, SECTIONS


if TYPE_CHECKING:
    from .tags import Shown

# Requirement -> fingerprint of its block in the documents.
BLOCKS = Path(__file__).with_name("blocks.json")


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
    known = json.loads(BLOCKS.read_text())
    for section in SECTIONS:
        if not section.blocks:
            continue
        blocks = python_blocks((folder / section.document).read_text())
        if len(blocks) != len(section.requirements):
            found.append(
                f"{section.document} has {len(blocks)} Python blocks, the catalogue "
                f"{len(section.requirements)}"
            )
        for required, block in zip(section.requirements, blocks):
            if known.get(required.id) != digest(block):
                found.append(f"{required.id}: its block has changed")
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


def accept(folder: Path) -> None:
    """Takes down what the documents' blocks are now, once somebody has read them."""
    found = {
        required.id: digest(block)
        for section in SECTIONS
        if section.blocks
        for required, block in zip(
            section.requirements,
            python_blocks((folder / section.document).read_text()),
        )
    }
    BLOCKS.write_text(json.dumps(found, indent=1) + "\n")


def digest(block: str) -> str:
    """A fingerprint of a block's words, wherever its lines break."""
    return hashlib.sha256(" ".join(block.split()).encode()).hexdigest()[:12]


def python_blocks(text: str) -> list[str]:
    """Fenced Python blocks, those in list items included."""
    return re.findall(r"^ *```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)


def rows_of(text: str, priority: str) -> int:
    """How many list items without items of their own a priority of TESTING.md has."""
    part = re.search(rf"^### {priority}:.*?(?=^#)", text, re.MULTILINE | re.DOTALL)
    lines = part[0].splitlines() if part else []
    items = [line for line in lines if re.match(r" *- ", line)]
    return sum(not item.endswith(":") for item in items)
