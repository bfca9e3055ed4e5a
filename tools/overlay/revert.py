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
    elsewhere: str | None = None  # a commit of another branch that has the overlay


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
    if found.commit and not changes and not report.committed_before:
        report.elsewhere = found.commit  # the record stays for that branch
    else:
        copies = manifest.folder(target.torch_dir).rglob("*")
        changes |= {path: None for path in copies if path.is_file()}
        if commit or not report.committed_before:
            changes[target.keep / "manifest.json"] = None
        transaction.commit(target, changes)
    if isinstance(target, Checkout):
        if not report.committed_before:
            # What somebody staged of the overlay goes, too.
            git.git(target.root, "reset", "--quiet", "--", *found.files, check=False)
        elif commit:
            report.commit = commit_paths(target, list(found.files), COMMIT_MESSAGE)
        report.parts = parts.remove(target)
    return report


def _without_record(target: Target, report: Report) -> None:
    if isinstance(target, Checkout) and report.committed_before:
        root = shlex.quote(str(target.root))
        raise WrongTarget(
            f"{target.words} has the overlay in git, without a record of `apply`. "
            "git undoes it; find its commits with\n"
            f"  git -C {root} log --oneline -- torch/optim/muon.py docs/source/optim.md\n"
            "and give them, newest first, to\n"
            f"  git -C {root} revert"
        )
    if isinstance(target, Checkout):
        report.parts = parts.remove(target)


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
