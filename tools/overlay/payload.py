"""This repository's files for PyTorch."""

import hashlib
import os
import re
import shlex
import sys
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from . import git
from .errors import Refused, WrongTarget


ROOT = Path(__file__).resolve().parents[2]  # of this repository
COMMAND = shlex.join([sys.executable, str(ROOT / "setup_overlay.py")])
ROOTS = ("torch", "test/optim", "test/distributed/optim")
TOPS = tuple(f"{top}/" for top in ROOTS)
PATCHES = "patches"
DIRTY = "-dirty"
# A patch has a sign before them.
_MARKERS = re.compile(rb"(?m)^[+ ]?(<{7}|>{7}) ")


class Source(NamedTuple):
    whole: dict[str, bytes]  # path in PyTorch -> text
    patches: dict[str, bytes]  # name in patches/ -> text
    name: str | None  # this repository's commit; None: no git here


def sha256(text: bytes | None) -> str | None:
    return None if text is None else hashlib.sha256(text).hexdigest()


def is_source(rel: str) -> bool:
    path = PurePosixPath(rel)
    is_named = path.suffix == ".py" or path.name == "README.md"
    return is_named and not any(part[0] == "." for part in path.parts)


def is_muons(rel: str) -> bool:
    """Whether a file of that name is, or would be, one that the overlay adds."""
    is_named = "muon" in rel or "newton_schulz" in rel
    return is_named and rel.startswith(TOPS) and is_source(rel)


def has_markers(text: bytes) -> bool:
    """Whether a conflict of `pull` or of git is not resolved there."""
    return _MARKERS.search(text) is not None


def refuse_markers(source: Source) -> None:
    texts = source.whole | {f"{PATCHES}/{n}": t for n, t in source.patches.items()}
    if rels := [rel for rel, text in texts.items() if has_markers(text)]:
        lines = "".join(f"\n  {rel}" for rel in rels)
        raise Refused(f"this repository has conflicts that are not resolved:{lines}")


def discover(root: Path) -> dict[str, Path]:
    """Path in PyTorch -> file here, sorted."""
    paths = [path for top in ROOTS for path in sorted((root / top).rglob("*"))]
    rels = {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}
    if "torch/optim/_muon.py" not in rels:
        raise WrongTarget(f"{root} has no torch/optim/_muon.py: not a whole overlay")
    return {rel: path for rel, path in rels.items() if is_source(rel)}


def read(root: Path) -> Source:
    """The present files."""
    whole = {rel: path.read_bytes() for rel, path in discover(root).items()}
    names = sorted(path for path in (root / PATCHES).glob("*") if path.is_file())
    return Source(whole, {p.name: p.read_bytes() for p in names}, name(root))


def at(root: Path, commit: str) -> Source | None:
    """The files at a commit; None if this repository does not have it."""
    if commit.endswith(DIRTY) or not _has(root, commit):
        return None
    names = ("ls-tree", "-r", "-z", "--name-only", commit, "--", *ROOTS, PATCHES)
    texts = git.texts(root, commit, git.lines(root, *names))
    there = {rel: text for rel, text in texts.items() if text is not None}
    whole = {rel: text for rel, text in there.items() if is_source(rel)}
    names = (rel for rel in there if rel.startswith(f"{PATCHES}/"))
    return Source(whole, {Path(rel).name: there[rel] for rel in names}, commit)


def name(root: Path) -> str | None:
    """The commit of this repository, marked if files for PyTorch differ from it."""
    done = git.git(root, "rev-parse", "--show-toplevel", check=False)
    if b"safe.directory" in done.stderr:
        raise WrongTarget(done.stderr.decode(errors="replace").strip())
    top = os.fsdecode(done.stdout).strip()
    if not top or Path(top).resolve() != root.resolve():
        return None
    commit = git.text(root, "rev-parse", "--verify", "--quiet", "HEAD")
    status = ("status", "--porcelain", "--untracked-files=all")
    changed = git.text(root, *status, "--", *ROOTS, PATCHES)
    return commit + DIRTY * bool(changed) if commit else None


def _has(root: Path, commit: str) -> bool:
    return git.works(root, "cat-file", "-e", f"{commit}^{{commit}}")


def is_newer(root: Path, here: str | None, there: str | None) -> bool:
    """Whether the overlay named ``there`` came after the one named ``here``."""
    if there is None or here is None:
        return False
    old, new = (text.removesuffix(DIRTY) for text in (here, there))
    later = git.works(root, "merge-base", "--is-ancestor", old, new)
    if later or _has(root, new):
        return later and old != new
    # A shallow clone knows neither older commits nor newer ones.
    return not git.is_shallow(root)
