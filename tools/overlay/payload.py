"""The whole files that land in PyTorch, at the paths that they have here."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from .errors import WrongTarget


if TYPE_CHECKING:
    from pathlib import Path


ROOTS = ("torch", "test/optim", "test/distributed/optim")


def sha256(data: bytes | None) -> str | None:
    """Of the text, with the line ends that it has here: git may change them there."""
    if data is None:
        return None
    return hashlib.sha256(data.replace(b"\r\n", b"\n")).hexdigest()


def _is_source(path: Path) -> bool:
    if path.suffix in {".pyc", ".orig", ".rej", ".swp"} or path.name.endswith("~"):
        return False
    return not path.name.startswith(".")


def discover(root: Path) -> dict[str, Path]:
    """Path in PyTorch -> file here, sorted."""
    found: dict[str, Path] = {}
    for top in ROOTS:
        for path in sorted((root / top).rglob("*")):
            rel = path.relative_to(root)
            hidden = any(p == "__pycache__" or p.startswith(".") for p in rel.parts)
            if path.is_file() and not hidden and _is_source(path):
                found[rel.as_posix()] = path
    if "torch/optim/_muon.py" not in found:
        raise WrongTarget(f"{root} has no torch/optim/_muon.py: not a whole overlay")
    return found


def read(root: Path) -> dict[str, bytes]:
    """The texts themselves."""
    return {rel: path.read_bytes() for rel, path in discover(root).items()}
