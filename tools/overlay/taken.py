"""The record of `pull`, by file: it takes no edit twice."""

import contextlib
import json
from typing import NamedTuple

from . import files
from .worktree import Worktree


RECORD = "muon_overlay_pulled.json"  # in the git directory of the work tree


class Taken(NamedTuple):
    """The texts of one file that the last `pull` found and wrote."""

    was: bytes  # the overlay's, which both sides edited
    theirs: bytes  # the checkout's
    here: bytes  # this repository's before
    written: bytes  # this repository's after: of the file, or of its patch
    is_conflict: bool  # that has markers


def read(tree: Worktree) -> dict[str, Taken]:
    """Empty also if it is damaged: then `pull` takes an edit twice at worst."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        by_path = json.loads((tree.git_dir / RECORD).read_bytes())
        return {rel: Taken(*map(_decoded, values)) for rel, values in by_path.items()}
    return {}


def write(tree: Worktree, by_path: dict[str, Taken]) -> None:
    texts = {rel: [*map(_encoded, taken)] for rel, taken in by_path.items()}
    record = json.dumps(texts).encode()
    files.write({tree.git_dir / RECORD: record}, tree.common / "HEAD", tree.git_dir)


def _encoded(value: bytes | bool) -> str | bool:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _decoded(value: str | bool) -> bytes | bool:
    return value.encode("latin-1") if isinstance(value, str) else value
