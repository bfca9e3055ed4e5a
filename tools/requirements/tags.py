"""Reads which requirements the tests and examples say that they show."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    from pathlib import Path


_TAG = re.compile(r"# Shows: (.+)")


class Shown(NamedTuple):
    """A test, class or function, and what it shows.

    Args:
        path: from the repository's root.
        name: ``Class::function``, empty for a whole file.
        line: of its definition.
        ids: of requirements.
    """

    path: str
    name: str
    line: int
    ids: tuple[str, ...]


def shown_in(path: str, source: str) -> list[Shown]:
    """What the comments in ``source`` say, each for the innermost definition around it."""
    places = definitions(source)
    found = []
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for index, token in enumerate(tokens):
        tag = _TAG.fullmatch(token.string) if token.type == tokenize.COMMENT else None
        if tag is None:
            continue
        words = tag[1]
        # A comma at the end of the line: it goes on in the next one.
        for after in tokens[index + 1 :]:
            if not words.endswith(","):
                break
            if after.type == tokenize.COMMENT:
                words += after.string.removeprefix("#")
        name, line = _around(places, token.start[0])
        ids = tuple(word.strip() for word in words.split(","))
        found.append(Shown(path, name, line, ids))
    return found


def definitions(source: str) -> list[tuple[str, int, int]]:
    """(``Class::function``, first line, last line) of each; those inside come later."""
    found = []

    def visit(node: ast.AST, outside: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            names = outside
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                names = (*outside, child.name)
                found.append(("::".join(names), child.lineno, child.end_lineno or 0))
            visit(child, names)

    visit(ast.parse(source), ())
    return found


def _around(places: list[tuple[str, int, int]], line: int) -> tuple[str, int]:
    found = ("", 1)
    for name, first, last in places:
        if first <= line <= last:
            found = (name, first)
    return found


def read_tree(root: Path) -> tuple[list[Shown], dict[str, list[str]]]:
    """All that is shown under ``root``, and where each ``Class::test`` is defined."""
    shown: list[Shown] = []
    tests: dict[str, list[str]] = {}
    for folder in ("test", "examples"):
        for path in sorted((root / folder).rglob("*.py")):
            rel = path.relative_to(root).as_posix()
            source = path.read_text()
            shown += shown_in(rel, source)
            for name in methods(source) if folder == "test" else ():
                tests.setdefault(name, []).append(rel)
    return shown, tests


def methods(source: str) -> set[str]:
    """``Class::method`` of each class, those that it inherits within the file included."""
    classes = {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }

    def of(name: str) -> set[str]:
        node = classes.get(name)
        if node is None:
            return set()
        own = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        bases = [of(base.id) for base in node.bases if isinstance(base, ast.Name)]
        return own.union(*bases)

    return {f"{name}::{method}" for name in classes for method in of(name)}
