"""Put back what the overlay replaced, and take away what it added."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from typing import TYPE_CHECKING

from . import exclude, manifest, parts, transaction
from .apply import commit_paths, refuse_local_changes, tidy
from .errors import WorkFailed, WrongTarget
from .status import committed
from .target import Checkout, Target


if TYPE_CHECKING:
    from pathlib import Path


COMMIT_MESSAGE = """Revert "optim: distributed Muon"

The files are again what they were before the overlay.
"""


@dataclasses.dataclass
class Report:
    restored: list[str]
    removed: list[str]
    parts: int  # compiled parts taken out of a checkout
    commit: str | None = None
    committed_before: str | None = None


def revert(target: Target, *, commit: bool = False) -> Report | None:
    """None: there was nothing to revert."""
    if transaction.recover(target.torch_dir):
        print("an earlier command was cut off half way: undone")
    unlinked = parts.remove(target) if isinstance(target, Checkout) else 0
    found = target.manifest()
    if found is None:
        _forget(target)
        if isinstance(target, Checkout) and committed(target):
            root = shlex.quote(str(target.root))
            raise WrongTarget(
                f"{target.words} has the overlay in git, without a record of `apply`. "
                "git undoes it; find its commits with\n"
                f"  git -C {root} log --oneline -- torch/optim/muon.py docs/source/optim.md\n"
                "and give them, newest first, to\n"
                f"  git -C {root} revert"
            )
        return Report([], [], unlinked) if unlinked else None
    refuse_local_changes(target, found, found.files, {}, "the overlay wrote")
    keep = manifest.folder(target.torch_dir)
    changes: dict[Path, bytes | None] = {}
    report = Report([], [], unlinked, committed_before=found.commit)
    for rel, entry in found.files.items():
        if entry.original is None:
            changes[target.root / rel] = None
            report.removed.append(rel)
            continue
        old = keep / entry.original
        if not old.is_file():
            raise WorkFailed(f"{old} is gone: the original of {rel} cannot be restored")
        changes[target.root / rel] = old.read_bytes()
        report.restored.append(rel)
    changes[keep / "manifest.json"] = None
    transaction.commit(target.torch_dir, changes)
    tidy(target, found.files)
    _forget(target)
    if commit and isinstance(target, Checkout):
        report.commit = commit_paths(target, list(found.files), COMMIT_MESSAGE)
    return report


def _forget(target: Target) -> None:
    """The kept originals have no further use once everything is back."""
    keep = manifest.folder(target.torch_dir)
    if isinstance(target, Checkout):
        changes = exclude.changed(target.exclude_file(), "kept files", [])
        if changes:
            transaction.commit(target.torch_dir, changes)
    if keep.is_dir():
        shutil.rmtree(keep)
