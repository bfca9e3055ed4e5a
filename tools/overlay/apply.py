"""Lay the overlay over a target."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from . import exclude, git, manifest, patches, payload, transaction
from .errors import Refused, WorkFailed
from .manifest import Entry, Manifest
from .target import Checkout, Target


if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


COMMIT_MESSAGE = """optim: distributed Muon

torch.optim.Muon takes a distributed_config. Each matrix then has exactly one
owner rank: its pieces travel to the owner, the owner orthogonalizes the matrix
once, and the pieces of the result travel back to the ranks that hold them.
Without a config nothing changes. The configs are made in torch.optim.muon.
"""


@dataclasses.dataclass
class Report:
    changed: list[str]
    removed: list[str]
    skipped: list[str]  # in words, one line each
    commit: str | None = None


@dataclasses.dataclass
class Wanted:
    """What the target shall hold, and how it gets there."""

    texts: dict[str, bytes]
    patches: list[dict[str, str]]
    skipped: list[str]


def kept_original(target: Target, found: Manifest | None, rel: str) -> bytes | None:
    """The text before the overlay: kept, or still in place."""
    entry = found.files.get(rel) if found else None
    if entry is None or _sha(target.read(rel)) != entry.sha256:
        return target.read(rel)
    if entry.original is None:
        return None
    kept = manifest.folder(target.torch_dir) / entry.original
    if not kept.is_file():
        raise WorkFailed(f"{kept} is gone: the original of {rel} cannot be restored")
    return kept.read_bytes()


def wanted(target: Target, root: Path, found: Manifest | None) -> Wanted:
    only_torch = target.kind == "wheel"
    texts = payload.read(root, only_torch=only_torch)
    out = Wanted(dict(texts), [], [])
    hunked: dict[str, bytes] = {}
    for patch in patches.series(root, target.version):
        bases = {}
        for rel in patch.paths:
            base = hunked.get(rel) or kept_original(target, found, rel)
            if base is not None and not (only_torch and not rel.startswith("torch/")):
                bases[rel] = base
        lacking = [rel for rel in patch.paths if rel not in bases]
        for rel in lacking:
            out.skipped.append(
                f"{patch.name} skipped for {rel}: {target.words} has none"
            )
        if bases:
            hunked.update(patches.patched(patch, bases))
        state = "skipped" if not bases else "partly" if lacking else "applied"
        out.patches.append({"name": patch.name, "state": state})
    out.texts.update(hunked)
    return out


def _touches(target: Target, root: Path) -> list[str]:
    """Every path that the overlay would write on this target."""
    only_torch = target.kind == "wheel"
    hunked = (rel for p in patches.series(root, target.version) for rel in p.paths)
    rels = [*payload.discover(root), *(r for r in hunked if target.read(r) is not None)]
    return [rel for rel in rels if rel.startswith("torch/") or not only_torch]


def _sha(data: bytes | None) -> str | None:
    return None if data is None else payload.sha256(data)


def refuse_local_changes(
    target: Target,
    found: Manifest | None,
    rels: Iterable[str],
    texts: dict[str, bytes],
    doing: str,
) -> set[str]:
    """Raise, with their names, if other people's changes would be lost.

    Returns those paths that hold the target's own content.
    """
    rels = list(rels)
    stock = target.stock(rels)
    lost = []
    for rel in rels:
        now = _sha(target.read(rel))
        entry = found.files.get(rel) if found else None
        known = {entry.sha256, entry.original_sha256} if entry else set()
        # Put there by hand, with nothing under it that could be lost.
        same = (
            now is not None
            and now == _sha(texts.get(rel))
            and not _replaces(target, rel)
        )
        if rel not in stock and now not in known and not same:
            lost.append(rel)
    if lost:
        raise Refused(
            f"{target.words} has other changes in files that {doing}:\n"
            + "".join(f"  {rel}\n" for rel in lost)
            + f"{target.way_out(lost, found)}\nNothing was touched."
        )
    return stock


def _replaces(target: Target, rel: str) -> bool:
    """Whether stock torch has a file of its own at this path."""
    if isinstance(target, Checkout):
        return bool(target.tracked([rel]))
    return rel == "torch/optim/_muon.py"


def apply(target: Target, root: Path, *, commit: bool = False) -> Report:
    if transaction.recover(target.torch_dir):
        print("an earlier command was cut off half way: undone")
    found = target.manifest()
    before = found.files if found else {}
    touched = dict.fromkeys([*_touches(target, root), *before])
    whole = payload.read(root, only_torch=target.kind == "wheel")
    stock = refuse_local_changes(target, found, touched, whole, "the overlay writes")
    want = wanted(target, root, found)
    stale = [rel for rel in before if rel not in want.texts]

    new = Manifest(target.version, target.kind, patches=want.patches)
    new.commit = found.commit if found else None
    changes: dict[Path, bytes | None] = {}
    report = Report([], [], want.skipped)
    keep = manifest.folder(target.torch_dir)
    for rel, text in want.texts.items():
        now = target.read(rel)
        entry = before.get(rel)
        if entry is not None and (rel not in stock or _sha(now) == entry.sha256):
            base, base_sha = entry.original, entry.original_sha256
        else:
            old = now if rel in stock or _replaces(target, rel) else None
            base = None if old is None else manifest.kept_name(rel)
            base_sha = _sha(old)
            if old is not None:
                changes[keep / manifest.kept_name(rel)] = old
        new.files[rel] = Entry(payload.sha256(text), base, base_sha)
        if now != text:
            changes[target.root / rel] = text
            report.changed.append(rel)
    for rel in stale:
        entry = before[rel]
        old = keep / entry.original if entry.original else None
        if target.read(rel) is not None or old is not None:
            changes[target.root / rel] = old.read_bytes() if old else None
        if old is not None:
            changes[old] = None
        report.removed.append(rel)

    if found is None and not report.changed and isinstance(target, Checkout):
        # The exported series, or a branch that has it: git keeps the originals.
        return report
    changes[keep / "manifest.json"] = new.dump()
    changes = {p: t for p, t in changes.items() if _differs(p, t)}
    if isinstance(target, Checkout):
        lines = [f"/torch/{manifest.FOLDER}/"]
        changes |= exclude.changed(target.exclude_file(), "kept files", lines)
    if changes:
        transaction.commit(target.torch_dir, changes)
        tidy(target, [*report.changed, *report.removed])
    if commit and isinstance(target, Checkout):
        report.commit = _commit(target, new, [*want.texts, *stale])
    return report


def _differs(path: Path, text: bytes | None) -> bool:
    return (path.read_bytes() if path.is_file() else None) != text


def tidy(target: Target, rels: Iterable[str]) -> None:
    """Drop the bytecode of replaced files and the folders that are now empty."""
    for rel in rels:
        path = target.root / rel
        cache = path.parent / "__pycache__"
        for compiled in cache.glob(f"{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
        for parent in (cache, *path.parents):
            if parent in (target.root, target.torch_dir):
                break
            try:
                parent.rmdir()
            except OSError:
                if parent.exists():
                    break


def _commit(target: Checkout, new: Manifest, rels: list[str]) -> str | None:
    sha = commit_paths(target, rels, COMMIT_MESSAGE)
    if sha:
        new.commit = sha
        path = manifest.folder(target.torch_dir) / "manifest.json"
        transaction.commit(target.torch_dir, {path: new.dump()})
    return sha


def commit_paths(target: Checkout, rels: list[str], message: str) -> str | None:
    """Commit these paths and no others; None if nothing in them changed."""
    dirty = sorted(target.dirty(rels))
    if not dirty:
        return None
    # --force: somebody's ignore rule must not leave half of it out of the commit.
    git.git(target.root, "add", "--force", "--", *dirty)
    done = git.git(
        target.root, "commit", "--quiet", "-F", "-", "--", *dirty,
        data=message.encode(), check=False,
    )  # fmt: skip
    if done.returncode:
        git.git(target.root, "reset", "--quiet", "--", *dirty, check=False)
        words = done.stderr.decode(errors="replace").strip() or "no message"
        raise WorkFailed(
            f"git commit failed: {words}\nThe files are in place, not committed; "
            "`revert` undoes them."
        )
    return target.head()
