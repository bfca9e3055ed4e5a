"""Put back what the overlay replaced, and take away what it added."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING

from . import git, manifest, parts, transaction
from .apply import check_changes, commit_paths
from .errors import WrongTarget
from .payload import sha256
from .target import Checkout, Target


if TYPE_CHECKING:
    from pathlib import Path


COMMIT_MESSAGE = """Revert "optim: distributed Muon"

The files are again what they were before the overlay.
"""


@dataclasses.dataclass
class Report:
    restored: list[str] = dataclasses.field(default_factory=list)
    removed: list[str] = dataclasses.field(default_factory=list)
    parts: int = 0  # compiled parts taken out of a checkout
    left: list[str] = dataclasses.field(default_factory=list)
    commit: str | None = None
    committed_before: list[str] = dataclasses.field(default_factory=list)
    stays: str | None = None  # what is not undone, in words


def revert(target: Target, *, commit: bool = False) -> Report | None:
    """None: there was nothing to revert."""
    found = target.manifest()
    report = Report()
    if isinstance(target, Checkout):
        report.committed_before = target.commits()[1]
    if found is None:
        _without_record(target, report)
        return report if report.parts else None
    originals = target.originals(found, list(found.files))
    check_changes(target, found, found.files, originals, {}, "the overlay wrote")
    changes: dict[Path, bytes | None] = {}
    for rel, entry in found.files.items():
        now = target.read(rel)
        if sha256(now) != entry.sha256:
            if now is not None:
                report.left.append(rel)
            continue
        if rel not in originals:
            raise WrongTarget(_moved_on(target, found, rel, report))
        if now == originals[rel]:
            continue
        changes[target.root / rel] = originals[rel]
        (report.removed if originals[rel] is None else report.restored).append(rel)
    if _elsewhere(target, found) and not changes:
        # The record stays for that branch.
        report.stays = (
            "nothing else to revert: this branch has no overlay. The commit that has it, "
            f"{(found.commit or '')[:12]}, is on another one"
        )
    else:
        copies = manifest.folder(target.torch_dir).rglob("*")
        changes |= {path: None for path in copies if path.is_file()}
        record: dict[Path, bytes | None] = {target.keep / "manifest.json": None}
        # Until the undoing is committed, too, a later `revert --commit` needs it.
        done = not report.committed_before
        transaction.commit(target, changes | (record if done else {}))
    if isinstance(target, Checkout):
        if not report.committed_before:
            # What somebody staged of the overlay goes, too.
            git.git(target.root, "reset", "--quiet", "--", *found.files, check=False)
        elif commit:
            report.commit = commit_paths(target, list(found.files), COMMIT_MESSAGE)
            transaction.commit(target, record)
        report.parts = parts.remove(target)
    return report


def _elsewhere(target: Target, found: manifest.Manifest) -> bool:
    """Whether the commit that has the overlay is in no history of this branch."""
    if not found.commit or not isinstance(target, Checkout):
        return False
    ask = ("merge-base", "--is-ancestor", found.commit, "HEAD")
    return git.git(target.root, *ask, check=False).returncode != 0


def _without_record(target: Target, report: Report) -> None:
    if not isinstance(target, Checkout):
        return
    report.parts = parts.remove(target)
    if report.committed_before:
        root = shlex.quote(str(target.root))
        report.stays = (
            f"{target.words} has the overlay in git, without a record of `apply`. "
            "git undoes it; find its commits with\n"
            f"  git -C {root} log --oneline -- torch/optim/muon.py docs/source/optim.md\n"
            "and give them, newest first, to\n"
            f"  git -C {root} revert"
        )
        if not report.parts:
            raise WrongTarget(report.stays)


def _moved_on(
    target: Target, found: manifest.Manifest, rel: str, report: Report
) -> str:
    what = (
        f"what stood at {rel} before the overlay came with torch {found.torch}, and "
        f"{target.words} is another, or it cannot be found any more. Nothing was touched."
    )
    if report.committed_before:
        root = shlex.quote(str(target.root))
        return f"{what} git undoes it:\n  git -C {root} revert " + " ".join(
            report.committed_before
        )
    return (
        f"{what} Install torch {target.version} anew, then `revert` takes out the rest."
    )
