"""Writes docs/requirements.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .catalog import NAMED_TESTS, SECTIONS


if TYPE_CHECKING:
    from .tags import Shown


HEAD = """\
# What shows what

Each requirement of the project's documents, and the tests and examples that show it. Written by
`python -m tools.requirements` from the comments `# Shows:` in tests and examples; a test compares. Each
example is run by a test, too. The words are this page's; where they differ from what PyTorch does, see
[differences.md](differences.md).

"""


def page(shown: list[Shown], tests: dict[str, list[str]]) -> str:
    """The page's text.

    Args:
        shown: by tests and examples.
        tests: the files that define each ``Class::test``.
    """
    by_id: dict[str, list[Shown]] = {}
    for one in shown:
        for id in one.ids:
            by_id.setdefault(id, []).append(one)
    parts = [HEAD]
    for section in SECTIONS:
        heading = section.title
        if section.document not in heading and section.document.endswith(".md"):
            heading = f"{section.document}: {heading}"
        kind = "block" if section.blocks else "requirement"
        parts.append(f"## {heading}\n\n| {kind} | shown by |\n|---|---|\n")
        for required in section.requirements:
            # One that several comments of a function name stands there once.
            cells = dict.fromkeys(map(_link, by_id.get(required.id, [])))
            cell = ", ".join(cells) or "**nothing**"
            parts.append(f"| {required.words} | {cell} |\n")
        parts.append("\n")
    parts.append(
        "## TESTING.md: the tests that it names\n\n| test | where |\n|---|---|\n"
    )
    for group, names in NAMED_TESTS.items():
        for name in names:
            files = tests.get(f"{group}::{name}", [])
            cell = ", ".join(f"[{path}](../{path})" for path in files) or "**nothing**"
            parts.append(f"| `{group}::{name}` | {cell} |\n")
    return "".join(parts).rstrip("\n").replace("|\n##", "|\n\n##") + "\n"


def _link(one: Shown) -> str:
    short = one.path.rpartition("/")[2]
    return f"[{one.name.rpartition('::')[2] or short}](../{one.path})"
