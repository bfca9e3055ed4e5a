"""The overlay's text of each file: whole files and hunks, and the commits that bring them."""

import ast
import configparser
import fnmatch
import re
from ast import literal_eval
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..series.earlier import form_before, many_trees
from ..series.modules import module_of
from ..series.names import Missing
from . import files, git
from .errors import WorkFailed, WrongTarget
from .payload import Source


SUBJECT = "optim: distributed Muon"


class Patch(NamedTuple):
    name: str
    hunks: bytes

    def applied(self, rel: str, text: bytes) -> bytes:
        """The text of that file with the hunks."""
        # An installed torch is no work tree. A hunk that does not fit changes no target.
        options: dict[str, Any] = {"data": self.hunks, "env": git.ALONE}
        with git.scratch() as scratch:
            git.put(scratch, {rel: text})
            # A tree that took the exported series has the hunks already. An editor of a
            # patch need not count its lines.
            there = ("apply", "--recount", "--reverse", "--check")
            if not git.works(scratch, *there, **options):
                git.git(scratch, "apply", "--recount", "--whitespace=nowarn", **options)
            return (scratch / rel).read_bytes()


def series(source: Source) -> dict[str, Patch]:
    """The patches in the order of patches/series, by the file that each changes."""
    by_path: dict[str, Patch] = {}
    for name in source.patches.get("series", b"").decode().splitlines():
        if name and not name.startswith("#"):
            patch = Patch(name, source.patches.get(name, b""))
            rels = re.findall(rb"^\+\+\+ b/([^\t\n]+)", patch.hunks, re.MULTILINE)
            if len(rels) != 1 or rels[0].decode() in by_path:
                raise WrongTarget(f"patches/{name} must be the one patch of one file")
            by_path[rels[0].decode()] = patch
    return by_path


def paths(source: Source) -> list[str]:
    """The files that the overlay brings or changes."""
    return [*source.whole, *series(source)]


def overlay(
    source: Source, base: files.Texts
) -> tuple[dict[str, bytes], dict[str, str]]:
    """The texts over ``base``, and why a patch does not fit; a patch needs its file."""
    now, misfits = dict(source.whole), {}
    for rel, patch in series(source).items():
        text = base.get(rel)
        if text is None:
            continue
        try:
            new = patch.applied(rel, text)
        except WorkFailed as error:
            misfits[rel] = f"patches/{patch.name} does not fit this torch: {error}"
        else:
            now |= {} if new == text else {rel: new}
    return now, misfits


class Commit(NamedTuple):
    title: str
    why: str
    paths: list[str]
    # A stock file, and names that it takes from this commit's module.
    imports: list[str]
    # What comes with this commit into files of earlier ones.
    names: list[str]


def stack_of(text: str) -> list[Commit]:
    """The tables of patches/stack.toml; their TOML values are Python's literals."""
    parser = configparser.ConfigParser(
        {"imports": "[]", "names": "[]"}, interpolation=None
    )
    parser.read_string(text)
    tables = {name: parser[name] for name in parser.sections()}
    keys = Commit._fields[1:]
    return [
        Commit(literal_eval(name), *(literal_eval(table[key]) for key in keys))
        for name, table in tables.items()
    ]


def imported(text: bytes, module: str, names: list[str]) -> bytes | None:
    """The file with these names from that module; None if it does not define them all."""
    try:
        body = ast.parse(text).body
    except SyntaxError:  # of a newer Python
        return None
    lines, left = text.decode().splitlines(keepends=True), {*names}
    for node in reversed(body):
        target = node.targets[0] if isinstance(node, ast.Assign) else node
        name = getattr(target, "name", getattr(target, "id", None))
        if name in left:
            first = node.lineno - 1
            while lines[first - 1].startswith("#"):
                first -= 1
            del lines[first : node.end_lineno]
            left.remove(name)
    tops = [n.lineno for n in body if isinstance(n, ast.ImportFrom) and n.level]
    if left or not tops:
        return None
    words = "".join(f"    {name},\n" for name in names)
    lines.insert(tops[0] - 1, f"from .{module} import (\n{words})\n")
    return re.sub(r"\n{4,}", "\n\n\n", "".join(lines)).encode()


@many_trees()
def commits(
    source: Source, base: files.Texts, texts: Mapping[str, bytes], *, stack: bool = True
) -> list[tuple[str, dict[str, bytes]]]:
    """Message and texts of each commit of patches/stack.toml; without ``stack``, of one.

    A file is there in an earlier form, until all modules and names that it says are.
    """
    listed = stack_of(source.patches["stack.toml"].decode())
    patterns = {p: commit.title for commit in listed for p in commit.paths}
    parts: dict[str, dict[str, bytes]] = {commit.title: {} for commit in listed}
    for rel, text in texts.items():
        matching = [p for p in patterns if fnmatch.fnmatchcase(rel, p)]
        if not matching:
            raise WrongTarget(f"patches/stack.toml has no commit for {rel}")
        parts[patterns[max(matching, key=len)]][rel] = text
    made: list[tuple[str, dict[str, bytes]]] = []
    there: dict[str, bytes] = {}  # the last forms of the files that are there
    brought: dict[str, bytes] = {}
    later = {name for commit in listed for name in commit.names}
    for title, why, paths, imports, names in listed:
        later -= {*names}
        if not parts[title]:
            continue
        there |= parts[title]
        modules = map(module_of, texts.keys() - there.keys())
        missing = Missing(frozenset(modules), frozenset(later))
        now: dict[str, bytes] = {}
        for rel, text in there.items():
            form = form_before(rel, text, missing) if rel in source.whole else text
            if form != brought.get(rel):
                now[rel] = form
        stock = base.get(imports[0]) if imports else None
        if stock and (new := imported(stock, Path(paths[0]).stem, imports[1:])):
            now[imports[0]] = new
        brought |= now
        tests = fnmatch.filter(now, "test/*/test_*.py")
        plan = "".join(f"\n    python {rel}" for rel in tests)
        message = f"{title}\n\n{why.strip()}" + f"\n\nTest plan:\n{plan}" * bool(plan)
        made.append((message, now))
    if stack:
        return made
    return [("\n\n* ".join([SUBJECT, *(m for m, _ in made)]), dict(texts))]
