"""An earlier form of a file: as it was before some modules, and before some names.

A commit of the series brings modules, which are whole files, and names: an option, and what exists only for it. Before
that commit, an option is not an argument that does nothing. It is not there.

Of a file of Python, an earlier form lacks

- hooks: an ``if`` whose body begins with an import of a later module, a function that has such an import elsewhere
  in its body, and a later module's import at the top;
- each item of a list (an argument, a parameter, a key of a dict, a name that is imported) that says a later name;
- each statement that says one outside of such a list;
- tests that say one;
- in docstrings, the entries and the sentences about a later name;
- imports, private functions and local names that only these things used.

Where a condition asks for a later option, the option has its default, which is false: of ``if a or later``, ``if a``
is left, and of ``x if later else y`` only ``y``.
"""

import ast
import functools
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager

from .modules import imported_by, package_of
from .names import Missing, Names, NoForm
from .statements import Statements
from .text import Text
from .unused import unused_names


@functools.cache
def imports(rel: str, text: bytes) -> frozenset[str]:
    """The modules that a file may import, at its top or later; none of a text that is not Python here."""
    tree = _parsed(text)
    found: set[str] = set()
    for node in ast.walk(tree) if tree else ():
        found |= imported_by(node, package_of(rel))
    return frozenset(found)


def form_before(rel: str, text: bytes, missing: Missing) -> bytes:
    """The file's form before what is ``missing``. It is the file itself if no rule leads to one."""
    if not rel.endswith(".py"):
        return text
    # Most files say little of what is missing, and so have few forms.
    words = _words(text)
    names = missing.names & words
    modules = frozenset(m for m in missing.modules if m.rpartition(".")[2] in words)
    if modules:
        modules &= imports(rel, text)
    if not (names or modules):
        return text
    try:
        return made_form(rel, text, Missing(modules, names))
    except NoForm:
        return text


@functools.cache
def _words(text: bytes) -> frozenset[str]:
    return frozenset(word.decode() for word in re.findall(rb"\w+", text))


@contextmanager
def many_trees() -> Iterator[None]:
    """Where many forms are made. Syntax trees are many objects without cycles, and looking for some takes time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@functools.cache
def made_form(rel: str, text: bytes, missing: Missing) -> bytes:
    """The form before what is ``missing``, which the text says. Raises NoForm if no rule leads to one."""
    tree = _parsed(text)
    if tree is None:
        raise NoForm("no Python")
    # What nothing uses any more goes, too. Then more may be without use.
    unused: set[tuple[str, str]] = set()
    while True:
        cuts = Text(text)
        statements = Statements(
            cuts,
            package_of(rel),
            missing.modules,
            Names(missing, unused),
            is_test="/test_" in rel,
        )
        statements.block(tree.body)
        # Two empty lines are enough.
        made = re.sub(rb"\n{4,}", b"\n\n\n", cuts.made())
        if made == text:
            return text
        form = _parsed(made)
        if form is None:
            raise NoForm("what is left is no Python")
        more = unused_names(tree, form)
        more |= statements.gone_functions
        if more <= unused:
            return made
        unused |= more


@functools.cache
def _parsed(text: bytes) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):  # of a newer Python, or with conflict markers
        return None
