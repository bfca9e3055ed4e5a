"""The overlay's text of each file: whole files and hunks, and the commits that bring them."""

import configparser
import fnmatch
import re
from ast import literal_eval
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
        how: dict[str, Any] = {"data": self.hunks, "env": git.ALONE}
        with git.scratch() as scratch:
            git.put(scratch, {rel: text})
            # A tree that took the exported series has the hunks already. An editor of a
            # patch need not count its lines.
            there = ("apply", "--recount", "--reverse", "--check")
            if not git.works(scratch, *there, **how):
                git.git(scratch, "apply", "--recount", "--whitespace=nowarn", **how)
            return (scratch / rel).read_bytes()


def series(source: Source) -> dict[str, Patch]:
    """The patches in the order of patches/series, by the file that each changes."""
    found: dict[str, Patch] = {}
    for name in source.patches.get("series", b"").decode().splitlines():
        if name and not name.startswith("#"):
            patch = Patch(name, source.patches.get(name, b""))
            rels = re.findall(rb"^\+\+\+ b/([^\t\n]+)", patch.hunks, re.MULTILINE)
            if len(rels) != 1 or rels[0].decode() in found:
                raise WrongTarget(f"patches/{name} must be the one patch of one file")
            found[rels[0].decode()] = patch
    return found


def paths(source: Source) -> list[str]:
    """The files that the overlay brings or changes."""
    return [*source.whole, *series(source)]


def overlay(
    source: Source, base: files.Texts, takes: Callable[[str], bool]
) -> tuple[dict[str, bytes], dict[str, str]]:
    """The texts over ``base``, and why a patch does not fit; a patch needs its file."""
    now = {rel: text for rel, text in source.whole.items() if takes(rel)}
    misfits = {}
    for rel, patch in series(source).items():
        text = base.get(rel)
        if text is None or not takes(rel):
            continue
        try:
            new = patch.applied(rel, text)
        except WorkFailed as error:
            misfits[rel] = f"patches/{patch.name} does not fit this torch: {error}"
        else:
            now |= {} if new == text else {rel: new}
    return now, misfits


def stack_of(text: str) -> list[tuple[str, str, list[str]]]:
    """Title, reason and path patterns of each commit; its TOML values are Python's literals."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(text)
    return [
        (literal_eval(t), literal_eval(of["why"]).strip(), literal_eval(of["paths"]))
        for t, of in parser.items()
        if t != parser.default_section
    ]


def commits(
    source: Source, texts: Mapping[str, bytes], *, stack: bool = True
) -> list[tuple[str, dict[str, bytes]]]:
    """Message and texts of each commit of patches/stack.toml; without ``stack``, of one."""
    listed = stack_of(source.patches["stack.toml"].decode())
    patterns = {p: title for title, _, paths in listed for p in paths}
    parts: dict[str, dict[str, bytes]] = {title: {} for title, _, _ in listed}
    for rel, text in texts.items():
        found = [p for p in patterns if fnmatch.fnmatchcase(rel, p)]
        if not found:
            raise WrongTarget(f"patches/stack.toml has no commit for {rel}")
        parts[patterns[max(found, key=len)]][rel] = text
    made = []
    for title, why, _ in listed:
        tests = fnmatch.filter(parts[title], "test/*/test_*.py")
        plan = "".join(f"\n    python {rel}" for rel in tests)
        message = f"{title}\n\n{why}" + f"\n\nTest plan:\n{plan}" * bool(plan)
        if parts[title]:
            made.append((message, parts[title]))
    if stack:
        return made
    return [("\n\n* ".join([SUBJECT, *(m for m, _ in made)]), dict(texts))]
