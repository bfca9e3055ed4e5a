"""This repository's files for PyTorch: the present ones, or those of a commit."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path, PurePosixPath

from . import git
from .errors import WrongTarget


ROOTS = ("torch", "test/optim", "test/distributed/optim")
PATCHES = "patches"
DIRTY = "-dirty"


@dataclasses.dataclass(frozen=True)
class Source:
    whole: dict[str, bytes]  # path in PyTorch -> text
    patches: dict[str, bytes]  # name in patches/ -> text
    name: str | None  # this repository's commit; None: no git here


def unix(text: bytes) -> bytes:
    """With this repository's line ends: git may change them in a checkout."""
    return text.replace(b"\r\n", b"\n")


def sha256(text: bytes | None) -> str | None:
    return None if text is None else hashlib.sha256(unix(text)).hexdigest()


def is_source(rel: str) -> bool:
    path = PurePosixPath(rel)
    hidden = any(part == "__pycache__" or part.startswith(".") for part in path.parts)
    scrap = path.suffix in {".pyc", ".orig", ".rej", ".swp", ".muon-new"}
    return not (hidden or scrap or rel.endswith("~"))


def discover(root: Path) -> dict[str, Path]:
    """Path in PyTorch -> file here, sorted."""
    found: dict[str, Path] = {}
    for top in ROOTS:
        for path in sorted((root / top).rglob("*")):
            rel = path.relative_to(root).as_posix()
            if is_source(rel) and path.is_file():
                found[rel] = path
    if "torch/optim/_muon.py" not in found:
        raise WrongTarget(f"{root} has no torch/optim/_muon.py: not a whole overlay")
    return found


def read(root: Path) -> Source:
    """The present files."""
    whole = {rel: path.read_bytes() for rel, path in discover(root).items()}
    names = sorted(path for path in (root / PATCHES).glob("*") if path.is_file())
    return Source(whole, {p.name: p.read_bytes() for p in names}, name(root))


def at(root: Path, commit: str) -> Source | None:
    """The files at a commit; None if this repository does not have it."""
    if commit.endswith(DIRTY) or not has(root, commit):
        return None
    rels = git.lines(root, "ls-tree", "-rz", "--name-only", commit, *ROOTS, PATCHES)
    found = texts(root, commit, [rel for rel in rels if is_source(rel)])
    top = PATCHES + "/"
    whole = {rel: t for rel, t in found.items() if t and not rel.startswith(top)}
    patches = {r[len(top) :]: t for r, t in found.items() if t and r.startswith(top)}
    return Source(whole, patches, commit)


def texts(where: Path, commit: str, rels: list[str]) -> dict[str, bytes | None]:
    """The texts of those paths at a commit (empty: in the index; None: no file)."""
    asked = "".join(f"{commit or ':0'}:{rel}\n" for rel in rels).encode()
    out = git.git(where, "cat-file", "--batch", data=asked).stdout
    found: dict[str, bytes | None] = {}
    at = 0
    for rel in rels:
        end = out.index(b"\n", at)
        kind, size = out[at:end].split()[-2:]
        at = end + 1
        if size in (b"missing", b"ambiguous"):
            found[rel] = None
            continue
        end = at + int(size)
        found[rel] = unix(out[at:end]) if kind == b"blob" else None
        at = end + 1
    return found


def name(root: Path) -> str | None:
    """The commit of this repository, marked if files for PyTorch differ from it."""
    top = git.text(root, "rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != root.resolve():
        return None
    commit = git.text(root, "rev-parse", "--verify", "--quiet", "HEAD")
    changed = git.text(root, "status", "--porcelain", "--", *ROOTS, PATCHES)
    return commit + DIRTY * bool(changed) if commit else None


def has(root: Path, commit: str) -> bool:
    return not git.git(
        root, "cat-file", "-e", f"{commit}^{{commit}}", check=False
    ).returncode


def is_newer(root: Path, here: str | None, there: str | None) -> bool:
    """Whether the overlay named ``there`` came after the one named ``here``."""
    if there is None or here is None:
        return False
    commit, here = (text.removesuffix(DIRTY) for text in (there, here))
    if not has(root, commit):
        return True
    ask = ("merge-base", "--is-ancestor", here, commit)
    return here != commit and not git.git(root, *ask, check=False).returncode
