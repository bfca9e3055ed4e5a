"""The overlay's text of each file: whole files and hunks, and the commits that bring them."""

import configparser
import fnmatch
import re
from ast import literal_eval
from collections.abc import Callable, Mapping
from typing import NamedTuple

from . import files, git
from .errors import WrongTarget
from .payload import Source


SUBJECT = "optim: distributed Muon"


class Patch(NamedTuple):
    name: str
    hunks: bytes

    @property
    def paths(self) -> list[str]:
        found = re.findall(rb"^\+\+\+ b/([^\t\n]+)", self.hunks, re.MULTILINE)
        return [path.decode() for path in found]


def series(source: Source) -> list[Patch]:
    """The patches in the order of patches/series."""
    lines = source.patches.get("series", b"").decode().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    if missing := set(names) - source.patches.keys():
        raise WrongTarget(f"patches/series names {', '.join(missing)}: no such file")
    return [Patch(name, source.patches[name]) for name in names]


def paths(source: Source) -> list[str]:
    """The files that the overlay brings or changes."""
    return [*source.whole, *(rel for p in series(source) for rel in p.paths)]


def patched(patch: Patch, texts: Mapping[str, bytes]) -> dict[str, bytes]:
    """The texts with the hunks; hunks of files that are not in ``texts`` are left out.

    A scratch folder takes the hunks, so that a hunk that does not fit leaves the target
    alone, and an installed torch, which is no work tree, takes the same way.
    """
    with files.scratch_folder() as scratch:
        git.put(scratch, texts)
        command = ["apply", "--whitespace=nowarn", *(f"--include={r}" for r in texts)]

        def run(*more: str) -> str:
            done = git.git(scratch, *command, *more, data=patch.hunks, check=False)
            return done.stderr.decode(errors="replace") if done.returncode else ""

        # A tree that took the exported series has the hunks already.
        if run("--reverse", "--check") and (said := run()):
            raise WrongTarget(f"patches/{patch.name} does not fit this torch: {said}")
        return {rel: (scratch / rel).read_bytes() for rel in texts}


def overlay(
    source: Source, base: files.Texts, takes: Callable[[str], bool]
) -> tuple[dict[str, bytes], list[str]]:
    """The texts over ``base``, and the patches that do not fit; a hunk needs its file."""
    now = {rel: text for rel, text in source.whole.items() if takes(rel)}
    misfits = []
    for patch in series(source):
        known = {rel: now.get(rel, base.get(rel)) for rel in patch.paths if takes(rel)}
        texts = {rel: text for rel, text in known.items() if text is not None}
        try:
            new = patched(patch, texts) if texts else {}
        except WrongTarget as error:
            misfits.append(str(error))
            continue
        now |= {rel: text for rel, text in new.items() if text != texts[rel]}
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
    """The commits that bring the texts, by patches/stack.toml: message, texts of its files.

    One commit without ``stack``.
    """
    listed = stack_of(source.patches["stack.toml"].decode())
    patterns = {p: title for title, _, paths in listed for p in paths}
    parts: dict[str, dict[str, bytes]] = {title: {} for title, _, _ in listed}
    for rel, text in texts.items():
        found = [p for p in patterns if fnmatch.fnmatchcase(rel, p)]
        if not found:
            raise WrongTarget(f"patches/stack.toml has no commit for {rel}")
        parts[patterns[max(found, key=len)]][rel] = text
    found = [
        (f"{title}\n\n{why}", parts[title]) for title, why, _ in listed if parts[title]
    ]
    if stack:
        return found
    return [("\n\n* ".join([SUBJECT, *(m for m, _ in found)]), dict(texts))]
