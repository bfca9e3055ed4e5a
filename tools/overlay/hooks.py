"""A file as it was before some of the modules that it imports: without its hooks for these.

A hook is an ``if`` without ``else`` whose body begins with an import of such a module, or a whole function that
has one elsewhere in its body.
"""

import ast
import functools
import re
from collections.abc import Iterable, Sequence
from importlib.util import resolve_name


def module_of(rel: str) -> str:
    """The name under which a file is imported."""
    return rel.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_by(node: ast.AST, package: str) -> set[str]:
    """The modules that a statement may import."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    name = "." * node.level + (node.module or "")
    module = resolve_name(name, package)
    return {module, *(f"{module}.{alias.name}" for alias in node.names)}


@functools.cache
def imports(rel: str, text: bytes) -> frozenset[str]:
    """The modules that a file may import, at its top or later; none of a text that is not Python here."""
    tree = _parsed(text)
    found: set[str] = set()
    for node in ast.walk(tree) if tree else ():
        found |= imported_by(node, _package(rel))
    return frozenset(found)


@functools.cache
def without(rel: str, text: bytes, missing: frozenset[str]) -> bytes:
    """The file without its hooks for the ``missing`` modules. What is no hook stays."""
    # Most files have none. Parsing all of them would take a second.
    if not re.search(rb"(?m)^ +(from|import) ", text):
        return text
    tree = _parsed(text)
    if tree is None or not missing & imports(rel, text):
        return text
    lines = text.decode().splitlines(keepends=True)
    cut = _Cut(lines, _package(rel), missing)
    cut.block(tree.body)
    cut.names_of_all(tree.body)
    made = "".join(line for line in cut.lines if line is not None).encode()
    # A hook of another form would leave half a statement.
    return made if _parsed(made) else text


def _package(rel: str) -> str:
    return ".".join(rel.split("/")[:-1])


def _parsed(text: bytes) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):  # of a newer Python, or with conflict markers
        return None


class _Cut:
    def __init__(self, lines: list[str], package: str, missing: frozenset[str]) -> None:
        # None for a line that is cut.
        self.lines: list[str | None] = [*lines]
        self._package = package
        self._missing = missing

    def block(self, body: Iterable[ast.stmt]) -> bool:
        """Cuts hooks out of these statements. Whether none of the statements is left."""
        left = [node for node in body if not self._statement(node)]
        return not left

    def names_of_all(self, body: Sequence[ast.stmt]) -> None:
        """Cuts the lines of functions that are gone out of ``__all__``."""
        gone = {
            f'"{getattr(node, "name", "")}",'
            for node in body
            if self.lines[node.lineno - 1] is None
        }
        for node in body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__":
                for at in range(node.lineno, node.end_lineno or 0):
                    if (self.lines[at] or "").strip() in gone:
                        self.lines[at] = None

    def _statement(self, node: ast.stmt) -> bool:
        """Cuts hooks out of a statement. Whether it is one, or nothing else was in it."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_gone = self._needs(node.body) or self.block(node.body)
        elif isinstance(node, ast.If) and self._is_hook(node):
            is_gone = not node.orelse
            if node.orelse:
                self._arm(node)
        else:
            is_empty = [self.block(block) for block in _blocks(node) if block]
            may_go = isinstance(node, (ast.ClassDef, ast.For, ast.If))
            is_gone = may_go and is_empty == [True]
        if is_gone:
            self._remove(node)
        return is_gone

    def _is_hook(self, node: ast.If) -> bool:
        for first in node.body:
            found = imported_by(first, self._package)
            if found & self._missing:
                return True
            if not found:
                return False
        return False

    def _needs(self, body: Iterable[ast.stmt]) -> bool:
        """Whether these statements import a missing module outside of hooks."""
        for node in body:
            if imported_by(node, self._package) & self._missing:
                return True
            blocks = _blocks(node)
            if isinstance(node, ast.If) and self._is_hook(node):
                blocks = [node.orelse]
            if any(map(self._needs, blocks)):
                return True
        return False

    def _arm(self, node: ast.If) -> None:
        """Cuts an arm of an ``if`` that has more arms. An ``else`` takes the place of a first arm."""
        self.block(node.orelse)
        first, body_end = node.orelse[0], node.body[-1].end_lineno or 0
        indent = first.col_offset - node.col_offset
        if (self.lines[node.lineno - 1] or "").lstrip().startswith("elif"):
            self._clear(node.lineno - 1, body_end)
        elif indent and not _has_long_strings(node.orelse):
            # There may be comments before and after the line of the `else`.
            start = body_end
            while not (self.lines[start] or "").lstrip().startswith("else"):
                start += 1
            self._clear(node.lineno - 1, start + 1)
            for at in range(start + 1, node.end_lineno or 0):
                self.lines[at] = _dedented(self.lines[at], indent)

    def _remove(self, node: ast.stmt) -> None:
        """Cuts a statement, with its decorators, the comment before it and the empty lines before that."""
        decorators = getattr(node, "decorator_list", [])
        start = min([node.lineno, *(each.lineno for each in decorators)]) - 1
        indent = " " * node.col_offset + "#"
        while start and (self.lines[start - 1] or "").startswith(indent):
            start -= 1
        while start and self.lines[start - 1] == "\n":
            start -= 1
        self._clear(start, node.end_lineno or node.lineno)

    def _clear(self, start: int, end: int) -> None:
        self.lines[start:end] = [None] * (end - start)


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of statements in a statement."""
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    return blocks + [handler.body for handler in getattr(node, "handlers", [])]


def _dedented(line: str | None, indent: int) -> str | None:
    # An empty line has no indent.
    return line[indent:] if line and line.startswith(" " * indent) else line


def _has_long_strings(body: Iterable[ast.stmt]) -> bool:
    """Whether a string there has several lines, whose indent is a part of it."""
    for node in body:
        for inner in ast.walk(node):
            if isinstance(inner, (ast.Constant, ast.JoinedStr)):
                if inner.lineno != inner.end_lineno:
                    return True
    return False
