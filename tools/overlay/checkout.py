"""A PyTorch git checkout, whose originals git has."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from . import git
from .errors import WrongTarget
from .tree import Target


if TYPE_CHECKING:
    from . import manifest


class Checkout(Target):
    kind = "checkout"
    # Where commits bring the overlay's own modules, and what all of those name.
    _OWN = ("torch/optim/_muon.py", "torch/optim/muon.py", "torch/optim/_muon_engine")
    _MARK = "_muon_engine"

    def __init__(self, root: Path, version: str, git_dir: Path, common: Path) -> None:
        super().__init__(root, version)
        self.words = f"PyTorch {version} checkout {root}"
        # Of this work tree alone; linked ones share the rest of .git.
        self.git_dir = git_dir
        self.keep = git_dir / "muon_overlay"
        self.lock = common
        self.exclude = common / "info" / "exclude"

    def dirty(self, rels: list[str]) -> set[str]:
        """Changed, staged, deleted, conflicting or untracked among these paths."""
        if not rels:
            return set()
        entries = git.lines(
            self.root, "status", "--porcelain", "-z", "--no-renames",
            "--untracked-files=all", "--ignored=matching", "--", *rels,
        )  # fmt: skip
        dirty = {entry[3:] for entry in entries}
        # git names a wholly ignored folder once, with a slash, not its files.
        folders = tuple(name for name in dirty if name.endswith("/"))
        return {rel for rel in rels if rel in dirty or rel.startswith(folders)}

    def commits(self) -> tuple[str | None, list[str]]:
        """The newest commit here without the overlay, and those since that changed it.

        None: the history that this clone has does not reach back to one.
        """
        since: list[str] = []
        at = "HEAD"
        while self._holds(at):
            last = self._git("log", "-1", "--format=%H", at, "--", *self._OWN)
            since.append(last)
            at = f"{last}^"
            if git.git(
                self.root, "rev-parse", "-q", "--verify", at, check=False
            ).returncode:
                return None, since
        return self._git("rev-parse", at), since

    def _holds(self, commit: str) -> bool:
        command = ["grep", "-q", "-e", self._MARK, commit, "--", *self._OWN]
        return git.git(self.root, *command, check=False).returncode == 0

    def _git(self, *args: str) -> str:
        return git.git(self.root, *args).stdout.decode().strip()

    def at(self, commit: str, rels: list[str]) -> dict[str, bytes | None]:
        """The texts of a commit, as git would write them into the work tree."""
        command = ["ls-tree", "-r", "--name-only", "-z", commit, "--", *rels]
        there = set(git.lines(self.root, *command)) if rels else set()
        smudged = ("cat-file", "--filters")
        return {
            rel: git.git(self.root, *smudged, f"{commit}:{rel}").stdout
            if rel in there
            else None
            for rel in rels
        }

    def originals(
        self, found: manifest.Manifest | None, rels: list[str]
    ) -> dict[str, bytes | None]:
        base, since = self.commits()
        if base is None:
            return {}
        out = self.at(base, [*rels, "version.txt"])
        version = out.pop("version.txt")
        if since and version != self.read("version.txt"):
            return {}  # upstream's files have moved on under the overlay
        if not since:
            clean = set(rels) - self.dirty(rels)
            out |= {rel: self.read(rel) for rel in clean}  # whatever git's filters do
        return out

    def way_out(self, rels: list[str], found: manifest.Manifest | None) -> str:
        where = shlex.quote(str(self.root))
        base, since = self.commits()
        if since:
            return (
                "They may be edits of the overlay: `setup_overlay.py pull --checkout "
                f"{where}` takes these into this repository. Else git undoes the overlay's "
                f"commits, newest first:\n  git -C {where} revert {' '.join(since)}"
            )
        return (
            "Edits of the overlay's files are taken into this repository by\n"
            f"  setup_overlay.py pull --checkout {where}\n"
            "Commit or undo any other change there first."
        )

    def tracked(self, rels: list[str]) -> set[str]:
        return (
            set(git.lines(self.root, "ls-files", "-z", "--", *rels)) if rels else set()
        )

    def head(self) -> str:
        return self._git("rev-parse", "HEAD")


def find_checkout(where: str | Path) -> Checkout:
    root = Path(where).expanduser().resolve()
    lacks = f"{root} is not a PyTorch checkout"
    if not root.is_dir():
        raise WrongTarget(f"{root}: no such folder")
    for rel in ("version.txt", "torch/__init__.py", "torch/optim/_muon.py"):
        if not (root / rel).is_file():
            raise WrongTarget(f"{lacks}: it has no {rel}")
    names = ("--show-toplevel", "--absolute-git-dir", "--git-common-dir")
    done = git.git(root, "rev-parse", *names, check=False)
    found = done.stdout.decode().splitlines()
    if done.returncode or Path(found[0]).resolve() != root:
        # git's own words: they may name a setting, such as safe.directory.
        words = done.stderr.decode(errors="replace").strip()
        raise WrongTarget(
            f"{lacks}: it is not the top of a git work tree"
            + (f"\n{words}" * bool(words))
        )
    if git.git(root, "rev-parse", "--verify", "HEAD", check=False).returncode:
        raise WrongTarget(f"{lacks}: it has no commit yet")
    version = (root / "version.txt").read_text().strip()
    # --git-common-dir is relative to the folder that was asked.
    return Checkout(root, version, Path(found[1]), (root / found[2]).resolve())
