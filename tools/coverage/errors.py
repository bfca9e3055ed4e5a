"""Where a source file has its error paths."""

from __future__ import annotations

import ast


def error_lines(source: str) -> dict[int, str]:
    """Each line on which an error is raised or handled, and the source of that line.

    A handler counts by the first line of its body: that of ``except`` itself is executed
    whether or not it matches.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and not _is_abstract(node):
            found.add(node.lineno)
        elif isinstance(node, ast.ExceptHandler):
            found.add(node.body[0].lineno)
    lines = source.splitlines()
    return {line: lines[line - 1].strip() for line in sorted(found)}


def _is_abstract(node: ast.Raise) -> bool:
    """``raise NotImplementedError``: what subclasses have instead is executed."""
    return isinstance(node.exc, ast.Name) and node.exc.id == "NotImplementedError"
