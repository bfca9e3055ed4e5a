"""Names that a file uses, and that an earlier form of it only defines."""

import ast
import functools
import re


class Uses:
    """What a file defines, and what it reads."""

    def __init__(self, tree: ast.Module) -> None:
        # Names that are read somewhere, but not only in their own definitions.
        self.read: set[str] = set()
        # What the file imports, and its private functions, classes, constants and methods.
        self.private: set[str] = set()
        # Function -> the names that it assigns by ``name = ...``, and those that it reads.
        self.assigned: dict[str, set[str]] = {}
        self.loaded: dict[str, set[str]] = {}
        self._walk(tree, [], [])

    def _walk(self, node: ast.AST, scopes: list[str], owners: list[str]) -> None:
        """``scopes`` are the functions around ``node``, and ``owners`` the names that are being defined."""
        for inner in ast.iter_child_nodes(node):
            match inner:
                case ast.Name(name):
                    if not isinstance(inner.ctx, ast.Store):
                        self._add(name, owners)
                        for scope in scopes:
                            self.loaded[scope].add(name)
                case ast.Attribute(_, name):
                    self._add(name, owners)
                case ast.arg() | ast.FunctionDef() | ast.AnnAssign() | ast.Call():
                    self._read_annotations(inner, owners)
                case ast.Import(aliases) | ast.ImportFrom(_, aliases):
                    self.private |= {alias.asname or alias.name for alias in aliases}
            match inner:
                case ast.Assign([ast.Name("__all__")], ast.List(names)):
                    for name in names:
                        self._add(ast.literal_eval(name), owners)
                case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
                    for scope in scopes:
                        self.assigned[scope].add(name)
                    is_constant = isinstance(node, (ast.Module, ast.ClassDef))
                    if is_constant and name.startswith("_"):
                        self.private.add(name)
            if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
                self._define(inner, scopes, owners)
            else:
                self._walk(inner, scopes, owners)

    def _define(
        self,
        node: ast.FunctionDef | ast.ClassDef,
        scopes: list[str],
        owners: list[str],
    ) -> None:
        if node.name.startswith("_") and not node.name.startswith("__"):
            self.private.add(node.name)
        # Functions have the names of those around them.
        scope = ".".join([*owners, node.name])
        if isinstance(node, ast.FunctionDef):
            self.assigned.setdefault(scope, set())
            self.loaded.setdefault(scope, set())
            scopes = [*scopes, scope]
        self._walk(node, scopes, [*owners, node.name])

    def _read_annotations(self, node: ast.AST, owners: list[str]) -> None:
        """Reads types that are strings."""
        match node:
            case ast.arg(_, annotation) | ast.AnnAssign(_, annotation):
                types = [annotation]
            case ast.FunctionDef():
                types = [node.returns]
            case ast.Call(ast.Name("cast"), [first, *_]):
                types = [first]
            case _:
                types = []
        for of_type in filter(None, types):
            for inner in ast.walk(of_type):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    for name in re.findall(r"\w+", inner.value):
                        self._add(name, owners)

    def _add(self, name: str, owners: list[str]) -> None:
        if name not in owners:
            self.read.add(name)


@functools.cache
def uses_of(tree: ast.Module) -> Uses:
    """Those of a tree that many forms are compared with."""
    return Uses(tree)


def unused_names(full: ast.Module, form: ast.Module) -> set[tuple[str, str]]:
    """(Function or "", name): what the file uses, and its form only defines."""
    before, now = uses_of(full), Uses(form)
    found = {("", name) for name in now.private & before.read - now.read}
    for scope, assigned in now.assigned.items():
        unread = assigned - now.loaded[scope]
        for name in unread & before.loaded.get(scope, set()):
            found.add((scope, name))
    return found
