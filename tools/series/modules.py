"""Files and the modules that they import."""

import ast
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


def package_of(rel: str) -> str:
    """The package in which a file is."""
    return ".".join(rel.split("/")[:-1])
