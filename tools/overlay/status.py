"""What a target holds of the overlay."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from . import manifest, parts, payload, transaction
from .payload import sha256
from .target import Checkout, Target


if TYPE_CHECKING:
    from pathlib import Path


@dataclasses.dataclass
class Status:
    target: str
    torch: str
    kind: str
    # none, current, outdated (this repository has newer texts), changed (somebody
    # changed overlay files there), committed (git has it, with no record here) or
    # interrupted (a command was cut off half way)
    state: str
    files: dict[str, str]
    patches: list[dict[str, str]]
    originals: dict[str, str]
    commit: str | None = None
    compiled_parts: int = 0

    def as_json(self) -> dict:
        return dataclasses.asdict(self)


def status(target: Target, root: Path) -> Status:
    out = Status(str(target.root), target.version, target.kind, "none", {}, [], {})
    if transaction.pending(target):
        out.state = "interrupted"
        return out
    found = target.manifest()
    here = {r: t for r, t in payload.read(root).items() if target.takes(r)}
    in_git = isinstance(target, Checkout) and bool(target.commits()[1])
    if isinstance(target, Checkout):
        out.compiled_parts = len((parts.load(target) or {"files": ()})["files"])
    if found is None:
        if in_git:
            out.state = "committed"
            for rel, text in here.items():
                now = target.read(rel)
                word = "missing" if now is None else "outdated"
                out.files[rel] = "current" if now == text else word
        return out
    out.patches = found.patches
    out.commit = found.commit
    for rel, entry in found.files.items():
        data = target.read(rel)
        now = sha256(data)
        if now == entry.sha256:
            word = "current" if data == here.get(rel, data) else "outdated"
        elif now == entry.original_sha256:
            word = "missing" if now is None else "original"
        else:
            word = "missing" if now is None else "changed"
        out.files[rel] = word
        copy = manifest.folder(target.torch_dir) / (entry.original or "none")
        if copy.is_file():
            out.originals[rel] = str(copy)
    if (
        not in_git
        and found.commit
        and not {"current", "outdated"} & set(out.files.values())
    ):
        # Another branch, which has files of its own.
        out.state, out.files, out.patches = "none", {}, []
        return out
    for rel in here:
        out.files.setdefault(rel, "outdated")
    for rel in found.files:
        # Added by an older overlay, and no longer part of this one.
        if rel not in here and found.files[rel].original_sha256 is None:
            out.files[rel] = "outdated"
    kinds = set(out.files.values())
    if kinds & {"changed", "missing", "original"}:
        out.state = "changed"
    elif "outdated" in kinds:
        out.state = "outdated"
    else:
        out.state = "current"
    return out


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


_WORDS = {
    "none": "no overlay",
    "current": "the overlay, as in this repository",
    "outdated": "an older overlay; `apply` (or `env`) brings it up to date",
    "changed": "the overlay, with files changed or missing since",
    "interrupted": "half of something; `apply` and `revert` first undo that half",
    "committed": "the overlay, from git and without a record of `apply`: `git revert` "
    "its commits to undo it",
}


def words(status: Status, *, verbose: bool = False) -> str:
    """Files that are as they should be are counted; ``verbose`` names them too."""
    lines = [
        f"{status.kind} {status.target}",
        f"torch {status.torch}",
        f"holds {_WORDS[status.state]}",
    ]
    if status.commit:
        here = "" if status.state != "none" else ", which this branch does not have"
        lines.append(f"committed as {status.commit[:12]}{here}")
    for rel, word in sorted(status.files.items()):
        kept = "  (original kept)" if rel in status.originals else ""
        if verbose or word != "current":
            lines.append(f"  {word:9} {rel}{kept}")
    current = list(status.files.values()).count("current")
    if status.files and not verbose:
        lines.append(
            f"{count(current, 'file')} as in this repository, "
            f"{count(len(status.originals), 'original')} kept (--verbose names them)"
        )
    for patch in status.patches:
        lines.append(f"  patch {patch['name']}: {patch['state']}")
    if status.compiled_parts:
        lines.append(f"{status.compiled_parts} compiled parts lent by a wheel")
    return "\n".join(lines)
