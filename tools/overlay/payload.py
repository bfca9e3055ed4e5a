"""This repository's files for PyTorch, and the texts that they had before."""

import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from . import git
from .errors import Refused, WrongTarget


ROOT = Path(__file__).resolve().parents[2]
COMMAND = shlex.join([sys.executable, str(ROOT / "setup_overlay.py")])
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


def is_source(path: str) -> bool:
    return path.endswith((".py", "/README.md"))


def files(root: Path) -> dict[str, Path]:
    """Path in PyTorch -> the file here."""
    found = {}
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            path = file.relative_to(root).as_posix()
            if file.is_file() and is_source(path):
                found[path] = file
    if MUON not in found:
        raise WrongTarget(f"{root} has no {MUON}: it is not a whole overlay")
    return found


def patches(root: Path) -> list[Hunks]:
    found = []
    for file in sorted((root / "patches").rglob("*.patch")):
        path = file.relative_to(root).as_posix()
        if PATCHES.fullmatch(path):
            found += hunks_of(path, file.read_bytes())
    return found


def name(root: Path) -> str | None:
    """This repository's commit, marked if files for PyTorch differ from it; None: no git here."""
    done = git.git(root, "rev-parse", "--show-toplevel", check=False)
    if b"dubious ownership" in done.stderr:  # another user's clone
        raise WrongTarget(done.stderr.decode().strip())
    top = done.stdout.decode().strip()
    if not top or Path(top).resolve() != root.resolve():
        return None
    changed = git.ask(root, "status", "--porcelain", "--", *FOLDERS, "patches")
    return git.ask(root, "rev-parse", "HEAD") + "-dirty" * bool(changed)


def refuse_conflicts(root: Path) -> None:
    lines = git.names(root, "ls-files", "--unmerged", "-z")
    if lines:
        paths = sorted({line.partition("\t")[2] for line in lines})
        raise Refused(
            "resolve the conflicts in this repository:\n  " + "\n  ".join(paths)
        )


class Ours:
    """The overlay in this repository's git.

    Its history has each text that the overlay ever had, so a checkout needs no record.
    """

    def __init__(self, root: Path) -> None:
        if name(root) is None:
            raise WrongTarget(f"{root} is not a git repository: clone it")
        self.root = root
        self.commit = _present(root)
        self.files = git.tree(root, self.commit, *FOLDERS)
        self.known: dict[str, set[str]] = {}
        patches: dict[str, str] = {}  # blob -> a path that it had
        # A stash is no place to keep an edit for good.
        log = ("log", "-m", "--format=", "--exclude=refs/stash", "--all", "--")
        for path, before, after in git.changes(root, *log, *FOLDERS, "patches"):
            if PATCHES.fullmatch(path):
                patches[after] = path
            elif path.startswith(FOLDERS):
                self.known.setdefault(path, set()).update({before, after})
        now = git.tree(root, self.commit, "patches")
        self.patches = self._hunks(
            {b: p for p, b in now.items() if PATCHES.fullmatch(p)}
        )
        # All hunks that a file may have. The longest come first: an earlier text may have a part of it.
        self.hunks: dict[str, list[Hunks]] = {}
        all_hunks = [*self.patches, *self._hunks(patches)]
        for hunks in sorted(all_hunks, key=lambda hunks: -len(hunks.text)):
            self.hunks.setdefault(hunks.path, []).append(hunks)

    def _hunks(self, patches: dict[str, str]) -> list[Hunks]:
        found = []
        for path, text in zip(patches.values(), git.texts(self.root, [*patches])):
            found += hunks_of(path, text or b"")
        return found

    def closest(self, wanted: dict[str, str]) -> str:
        """The commit that has these blobs, or most of them."""
        commits = git.ask(self.root, "rev-list", "HEAD", "--", *wanted).split()
        listed = ("for-each-ref", "--format=%(objectname)", "refs/overlay")
        commits += git.ask(self.root, *listed).split()
        best, most = "HEAD", -1
        for commit in commits:
            blobs = git.tree(self.root, commit, *wanted)
            same = len(blobs.items() & wanted.items())
            if same > most:
                best, most = commit, same
            if same == len(wanted):
                break
        return best


def _present(root: Path) -> str:
    """HEAD, or a commit of the present files, so that their texts are known later."""
    with tempfile.TemporaryDirectory(prefix="distributed-muon-") as folder:
        env = {"GIT_INDEX_FILE": f"{folder}/index"}
        for role in ("AUTHOR", "COMMITTER"):
            env |= {
                f"GIT_{role}_NAME": "overlay",
                f"GIT_{role}_EMAIL": "overlay@invalid",
            }
        git.git(root, "read-tree", "HEAD", env=env)
        there = [top for top in (*FOLDERS, "patches") if (root / top).exists()]
        git.git(root, "add", "--all", "--", *there, env=env)
        tree = git.ask(root, "write-tree", env=env)
        ref = f"refs/overlay/{tree}"
        for same in ("HEAD", ref):
            if (
                git.ask(
                    root, "rev-parse", "-q", "--verify", f"{same}^{{tree}}", check=False
                )
                == tree
            ):
                return git.ask(root, "rev-parse", same)
        message = "The overlay with changes that were not committed"
        made = git.ask(root, "commit-tree", tree, "-p", "HEAD", "-m", message, env=env)
        git.git(root, "update-ref", ref, made)
        return made
