"""This repository's files for PyTorch, and the texts that they had before."""

import re
from pathlib import Path
from typing import NamedTuple

from . import git
from .errors import Refused


ROOT = Path(__file__).resolve().parents[2]
# A file below these folders is in PyTorch under the same path.
FOLDERS = ("torch", "test/optim", "test/distributed/optim")
MUON = "torch/optim/_muon.py"
# Hunks for files that upstream owns. The first is also a mail for upstream.
PATCHES = re.compile(r"patches/(upstream/0001-c10d-local-groups|\d+-[^/]+)\.patch")
_HUNKS = re.compile(
    rb"(?ms)^--- a/(\S+)\n\+\+\+ b/\S+\n.*?(?=^--- a/|^diff --git |^-- $|\Z)"
)


class Hunks(NamedTuple):
    """The lines that one patch changes in a file of PyTorch."""

    path: str
    patch: str  # the file of this repository
    text: bytes


def hunks_of(patch: str, text: bytes) -> list[Hunks]:
    return [Hunks(m[1].decode(), patch, m[0]) for m in _HUNKS.finditer(text)]


def files(folder: Path) -> dict[str, Path]:
    """Path in a folder of this repository -> the module for PyTorch."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        found[file.relative_to(folder).as_posix()] = file
    return found


def patches(root: Path) -> list[Hunks]:
    found = []
    for file in sorted((root / "patches").rglob("*.patch")):
        path = file.relative_to(root).as_posix()
        if PATCHES.fullmatch(path):
            found += hunks_of(path, file.read_bytes())
    return found


def name(root: Path, *more: str) -> str:
    """This repository's commit, marked if files for PyTorch, or more, differ from it."""
    words = ("status", "--porcelain", "--", *FOLDERS, "patches", *more)
    changed = git.ask(root, *words)
    return git.ask(root, "rev-parse", "HEAD") + "-dirty" * bool(changed)


class Ours:
    """The overlay in this repository's git.

    Its history has each text that the overlay ever had, so a checkout needs no record.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = name(root)
        self.files = git.tree(root, "HEAD", *FOLDERS)
        self.patches = patches(root)
        self.known: dict[str, set[str]] = {}
        found = {*self.patches}
        log = ("log", "-m", "--format=", "--all", "--reflog", "--")
        for path, blob in git.changes(root, *log, *FOLDERS, "patches"):
            if PATCHES.fullmatch(path):
                found.update(hunks_of(path, git.text(root, blob)))
            else:
                self.known.setdefault(path, set()).add(blob)
        # All hunks that a file may have. The longest come first: an earlier text may have a part of it.
        self.hunks: dict[str, list[Hunks]] = {}
        for hunks in sorted(found, key=lambda hunks: len(hunks.text), reverse=True):
            self.hunks.setdefault(hunks.path, []).append(hunks)

    def refuse_changes(self) -> None:
        """Raise if a text would not be in the history."""
        if self.name.endswith("-dirty"):
            raise Refused(f"commit the changes of {self.root} first: `git status`")

    def closest(self, wanted: dict[str, str]) -> str:
        """The newest commit that has these blobs, or most of them."""

        def count(commit: str) -> int:
            return len(git.tree(self.root, commit, *wanted).items() & wanted.items())

        commits = git.ask(self.root, "rev-list", "HEAD", "--", *wanted).split()
        return max(commits, key=count, default="HEAD")
