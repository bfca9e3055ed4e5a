"""Lay the overlay over a target."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from . import git, manifest, patches, payload, stock, transaction, versions
from .errors import Refused, WorkFailed, WrongTarget
from .manifest import Entry, Manifest
from .payload import sha256
from .target import Checkout, Target


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from .patches import Patch


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
    warnings: list[str] = dataclasses.field(default_factory=list)
    commit: str | None = None


def wanted(
    target: Target,
    whole: dict[str, bytes],
    series: list[Patch],
    base: Mapping[str, bytes | None],
) -> tuple[dict[str, bytes], dict[str, str], list[str]]:
    """What the target shall hold, the state of each patch, and why some are skipped."""
    hunked: dict[str, bytes] = {}
    states: dict[str, str] = {}
    skipped: list[str] = []
    for patch in series:
        bases = {}
        for rel in patch.paths:
            text = hunked.get(rel) or base.get(rel)
            if text is not None and target.takes(rel):
                bases[rel] = text
            else:
                skipped.append(
                    f"{patch.name} skipped for {rel}: {target.words} has none"
                )
        partly = len(bases) < len(patch.paths)
        try:
            if bases:
                hunked.update(patches.patched(patch, bases))
        except WrongTarget as error:
            if versions.supported(target.version):
                raise WrongTarget(f"{error}. Nothing was touched.") from None
            skipped.append(f"{patch.name} skipped: {error}")
            bases = {}
        states[patch.name] = (
            "skipped" if not bases else "partly" if partly else "applied"
        )
    return whole | hunked, states, skipped


def check_changes(
    target: Target,
    found: Manifest | None,
    rels: Iterable[str],
    originals: Mapping[str, bytes | None],
    texts: Mapping[str, bytes],
    doing: str,
    root: Path | None = None,
) -> None:
    """Raise, with their names, if other people's changes would be lost.

    With this repository's ``root``, its own older texts are none of these.
    """
    lost = []
    for rel in rels:
        text = target.read(rel)
        now = sha256(text)
        entry = found.files.get(rel) if found else None
        ours = entry is not None and now == entry.sha256
        safe = rel in originals and now in (
            sha256(originals[rel]),
            sha256(texts.get(rel, originals[rel])),
        )
        if ours or safe:
            continue
        if not (rel in originals and root and text and git.has_had(root, rel, text)):
            lost.append(rel)
    if lost:
        raise Refused(
            f"{target.words} has other changes in files that {doing}:\n"
            + "".join(f"  {rel}\n" for rel in lost)
            + f"{target.way_out(lost, found)}\nNothing was touched."
        )


def apply(
    target: Target, root: Path, *, commit: bool = False, force: bool = False
) -> Report:
    found = target.manifest()
    before = found.files if found else {}
    whole = {r: t for r, t in payload.read(root).items() if target.takes(r)}
    series = patches.series(root, target.version)
    hunked = [rel for patch in series for rel in patch.paths if target.takes(rel)]
    touched = list(dict.fromkeys([*whole, *hunked, *before]))
    originals = target.originals(found, touched)
    warnings = []
    if not versions.supported(target.version):
        said = stock.untested(target.words, target.version, originals)
        if not force:
            raise WrongTarget(
                f"{said}\n`apply --force` goes on all the same. Nothing was touched."
            )
        warnings.append(said)
    # Ours in place, with no original to take the hunks against: it has them already.
    ours = {r for r, e in before.items() if sha256(target.read(r)) == e.sha256}
    base = {rel: target.read(rel) for rel in ours} | originals
    want, states, skipped = wanted(target, whole, series, base)
    check_changes(target, found, touched, originals, want, "the overlay writes", root)

    new = Manifest(
        target.version,
        target.kind,
        patches=[{"name": name, "state": state} for name, state in states.items()],
    )
    new.commit = found.commit if found else None
    changes: dict[Path, bytes | None] = {}
    report = Report([], [], skipped, warnings)
    copies = manifest.folder(target.torch_dir)
    for rel, text in want.items():
        now = target.read(rel)
        if rel not in originals:
            new.files[rel] = dataclasses.replace(before[rel], sha256=sha256(text))
        else:
            old = originals[rel]
            copy = manifest.copy_name(rel) if old is not None else None
            if copy:
                changes[copies / copy] = old
            new.files[rel] = Entry(sha256(text), copy, sha256(old))
        if sha256(now) == sha256(text):
            continue
        changes[target.root / rel] = text
        report.changed.append(rel)
        if rel in whole and now is not None and now == originals.get(rel):
            if not stock.known(rel, now):
                warnings.append(
                    f"{rel} there is of no release that this overlay knows. It is "
                    "replaced whole; `revert` puts it back"
                )
    for rel in before:
        if rel not in want:
            _take_back(target, rel, before[rel], originals, changes)
            report.removed.append(rel)

    if isinstance(target, Checkout) and not (found or report.changed):
        if target.commits()[1]:
            return report  # the exported series, or a clone of a branch that has it
    changes[target.keep / "manifest.json"] = new.dump()
    if isinstance(target, Checkout):
        changes[copies / ".gitignore"] = b"*\n"
    changes = {p: t for p, t in changes.items() if _differs(p, t)}
    if changes:
        transaction.commit(target, changes)
    if commit and isinstance(target, Checkout):
        report.commit = _commit(target, new, [*want, *report.removed])
    return report


def _take_back(
    target: Target,
    rel: str,
    entry: Entry,
    originals: Mapping[str, bytes | None],
    changes: dict[Path, bytes | None],
) -> None:
    """An older overlay brought it, and this one has it no more."""
    if sha256(target.read(rel)) == entry.sha256:
        if rel not in originals:
            raise Refused(
                f"nobody knows what stood at {rel} in {target.words} before the overlay. "
                "Nothing was touched."
            )
        changes[target.root / rel] = originals[rel]
    if entry.original:
        changes[manifest.folder(target.torch_dir) / entry.original] = None


def _differs(path: Path, text: bytes | None) -> bool:
    return (path.read_bytes() if path.is_file() else None) != text


def _commit(target: Checkout, new: Manifest, rels: list[str]) -> str | None:
    sha = commit_paths(target, rels, COMMIT_MESSAGE)
    if sha:
        new.commit = sha
        transaction.write(target, target.keep / "manifest.json", new.dump())
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
            f"git commit failed: {words}\nThe files are in place and not committed; the "
            "same command tries again."
        )
    return target.head()
