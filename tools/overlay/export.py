"""The ``git am`` series: the overlay as mails for a pristine tree of that torch."""

from __future__ import annotations

import dataclasses
import email.utils
import re
from typing import TYPE_CHECKING

from . import git, patches, payload
from .apply import COMMIT_MESSAGE
from .errors import WorkFailed, WrongTarget
from .target import Checkout


if TYPE_CHECKING:
    from pathlib import Path

    from .target import Target


_NOBODY = "Distributed Muon for PyTorch <distributed-muon@example.invalid>"


def _author(root: Path) -> str:
    name = git.git(root, "config", "user.name", check=False).stdout.decode().strip()
    mail = git.git(root, "config", "user.email", check=False).stdout.decode().strip()
    return f"{name} <{mail}>" if name and mail else _NOBODY


def _mail(number: int, count: int, author: str, message: str, diff: bytes) -> bytes:
    subject, _, body = message.strip().partition("\n")
    # The fixed first line is what mail splitters know a patch by.
    head = (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n"
        f"From: {author}\n"
        f"Date: {email.utils.formatdate(localtime=False)}\n"
        f"Subject: [PATCH {number}/{count}] {subject}\n"
        "MIME-Version: 1.0\n"
        "Content-Type: text/plain; charset=UTF-8\n"
        "Content-Transfer-Encoding: 8bit\n"
        "\n"
    )
    text = head + (body.strip() + "\n\n" if body.strip() else "") + "---\n\n"
    return text.encode() + diff + b"-- \noverlay\n"


@dataclasses.dataclass
class Report:
    written: list[Path]
    base: str  # what `git am` takes the series onto, in words
    skipped: list[str]


def export(target: Target, root: Path, out: Path) -> Report:
    """Write the series to ``out``."""
    texts = payload.read(root)
    series = patches.series(root, target.version)
    rels = list(dict.fromkeys([*texts, *(rel for p in series for rel in p.paths)]))
    if isinstance(target, Checkout):
        commit, _ = target.commits()
        if commit is None:
            raise WrongTarget(
                f"{target.words} has the overlay in git, and its history does not reach "
                "back to a commit without it, which the series would be for. Deepen the "
                "clone (git fetch --unshallow), or name another target"
            )
        base = target.at(commit, rels)
        words = f"{target.words} at {commit}"
    else:
        base = target.originals(target.manifest(), rels)
        words = f"a pristine torch {target.version}"
    unknown = [rel for rel in rels if target.takes(rel) and rel not in base]
    if unknown:
        raise WorkFailed(
            f"{target.words} has no stock {', '.join(unknown)} to take the difference from: "
            "it carries the overlay, or edits, with no record of what was replaced"
        )
    whole = {rel: text for rel in texts if (text := base.get(rel)) is not None}
    mails = [(COMMIT_MESSAGE, git.difference(whole, texts, "--binary", "--full-index"))]
    skipped = []
    for patch in series:
        there = {rel: t for rel in patch.paths if (t := base.get(rel)) is not None}
        if len(there) < len(patch.paths) and isinstance(target, Checkout):
            skipped.append(f"{patch.name} skipped: {target.words} lacks its files")
            continue
        if there and patches.patched(patch, there) == there:
            skipped.append(f"{patch.name} skipped: {target.words} has it already")
            continue
        mails.append((patch.message, patch.hunks))
    author = _author(root)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongTarget(f"{out} cannot be a folder: {error.strerror}") from None
    # Numbers may have moved since an earlier export: `git am out/*` takes them all.
    for old in out.glob("[0-9][0-9][0-9][0-9]-*.patch"):
        if old.read_bytes().endswith(b"-- \noverlay\n"):
            old.unlink()
    written = []
    for number, (message, diff) in enumerate(mails, 1):
        slug = re.sub(r"[^A-Za-z0-9]+", "-", message.splitlines()[0]).strip("-")
        path = out / f"{number:04d}-{slug}.patch"
        path.write_bytes(_mail(number, len(mails), author, message, diff))
        written.append(path)
    return Report(written, words, skipped)
