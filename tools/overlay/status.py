"""What a target holds of the overlay."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from . import manifest, parts, payload, transaction
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


def committed(target: Checkout) -> bool:
    """Whether git has the overlay's own modules, which upstream does not have."""
    return bool(target.tracked(["torch/optim/muon.py", "torch/optim/_muon_engine"]))


def status(target: Target, root: Path) -> Status:
    if transaction.pending(target.torch_dir):
        return Status(
            str(target.root), target.version, target.kind, "interrupted", {}, [], {}
        )
    found = target.manifest()
    here = payload.read(root, only_torch=target.kind == "wheel")
    lent = parts.load(target) if isinstance(target, Checkout) else None
    out = Status(
        target=str(target.root),
        torch=target.version,
        kind=target.kind,
        state="none",
        files={},
        patches=[],
        originals={},
        compiled_parts=len(lent["files"]) if lent else 0,
    )
    if found is None:
        if isinstance(target, Checkout) and committed(target):
            out.state = "committed"
            for rel, text in here.items():
                now = target.read(rel)
                word = "missing" if now is None else "outdated"
                out.files[rel] = "current" if now == text else word
        return out
    out.patches = found.patches
    out.commit = found.commit
    keep = manifest.folder(target.torch_dir)
    for rel, entry in found.files.items():
        data = target.read(rel)
        now = None if data is None else payload.sha256(data)
        if now is None:
            word = "missing"
        elif now == entry.original_sha256 and now != entry.sha256:
            word = "original"
        elif now != entry.sha256:
            word = "changed"
        elif rel in here and data != here[rel]:
            word = "outdated"
        else:
            word = "current"
        out.files[rel] = word
        if entry.original:
            out.originals[rel] = str(keep / entry.original)
    for rel in here:
        out.files.setdefault(rel, "outdated")
    for rel, entry in found.files.items():
        # Added by an older overlay, and no longer part of this one.
        if rel not in here and entry.original is None:
            out.files[rel] = "outdated"
    for word in ("changed", "missing", "original", "outdated"):
        if word in out.files.values():
            out.state = "outdated" if word == "outdated" else "changed"
            return out
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
        lines.append(f"committed as {status.commit[:12]}")
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
