"""Every text that the overlay ever had, by this repository's history.

A squash merge loses the messages of commits, and a rebase their hashes. The texts stay.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import files, git, payload, versions
from .payload import DIRTY, Source


_CHANGE = re.compile(r"(?m)^:\d+ \d+ (\w+) (\w+) \w+\t(.+)$")


class Change(NamedTuple):
    """A file that a commit changed; git's names of its texts."""

    before: str
    after: str
    path: str


class History:
    def __init__(self, root: Path, source: Source) -> None:
        self._root = root
        self._has_git = source.name is not None
        self._hash_name = git.object_format((source.name or "").removesuffix(DIRTY))
        self._blobs: dict[str, set[str]] = {}
        # A stash is no place to keep an edit for good.
        for _, changes in self._commits("--branches", "--remotes", "--tags", "HEAD"):
            for change in changes:
                self._blobs.setdefault(change.path, set()).add(change.after)
        texts = source.patches.items()
        self._present = {f"{payload.PATCHES}/{name}": text for name, text in texts}
        self._present |= source.whole

    def has_path(self, path: str) -> bool:
        """Whether the overlay has a file there, or had one."""
        return path in self._blobs or path in self._present

    def has_text(self, path: str, text: bytes | None) -> bool:
        """Whether the overlay has that file, or had it. Empty files are anybody's."""
        if not text or versions.stock(path, text):
            return False
        if text == self._present.get(path):
            return True
        return self._blob(text) in self._blobs.get(path, ())

    def closest(self, texts: files.Texts) -> list[str]:
        """The commits whose files are those texts more often than any other's, oldest first.

        An older one is safe where several agree: a three-way merge finds what both sides
        have since. Neighbours that differ in their patches only are all returned.
        """
        blobs = {path: self._blob(text) for path, text in texts.items() if text}
        score, best = 0, 0
        found: list[str] = []
        for commit, changes in self._commits("--first-parent", "--reverse", "HEAD"):
            for change in changes:
                blob = blobs.get(change.path)
                if blob is not None:
                    score += (blob == change.after) - (blob == change.before)
            has_patch = any(c.path.startswith(payload.PATCHES) for c in changes)
            if score > best:
                best = score
                found = [commit]
            elif found and score == best and has_patch:
                found.append(commit)
        return found

    def _commits(self, *which: str) -> Iterator[tuple[str, list[Change]]]:
        """Commits and the files of the overlay that they change."""
        if not self._has_git:
            return
        # A merge has the changes against each of its parents.
        words = ("log", "--raw", "--no-abbrev", "--no-renames", "--format=%x01%H")
        paths = (*payload.ROOTS, payload.PATCHES)
        log = git.text(self._root, *words, *which, "--", *paths)
        for entry in log.split("\1")[1:]:
            commit, _, lines = entry.partition("\n")
            changes = [Change(*found) for found in _CHANGE.findall(lines)]
            yield commit, [c for c in changes if _is_ours(c.path)]

    def _blob(self, text: bytes) -> str:
        """The name of this text in this repository's git."""
        content = b"blob %d\0%b" % (len(text), text)
        return hashlib.new(self._hash_name, content, usedforsecurity=False).hexdigest()


def _is_ours(path: str) -> bool:
    return path.startswith(payload.PATCHES) or payload.is_source(path)
