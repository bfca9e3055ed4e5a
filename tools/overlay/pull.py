"""Take edits that somebody made in a checkout back into this repository."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING

from . import git, patches, payload
from .errors import Refused, WorkFailed
from .payload import sha256


if TYPE_CHECKING:
    from pathlib import Path

    from .target import Checkout


@dataclasses.dataclass
class Report:
    taken: list[str]
    missing: list[str]  # here and not there


def pull(target: Checkout, root: Path) -> Report:
    base, _ = target.commits()
    if base is None:
        raise WorkFailed(
            f"the history of {target.words} does not reach back to a commit without the "
            "overlay, so its edits cannot be told from upstream's files. Deepen the clone "
            "(git fetch --unshallow). Nothing was touched."
        )
    found = target.manifest()
    laid = {rel: entry.sha256 for rel, entry in found.files.items()} if found else {}
    here = payload.read(root)
    series = patches.series(root, target.version)
    hunked = {rel for patch in series for rel in patch.paths}
    rels = [*here, *(rel for rel in _new(target, root) if rel not in hunked)]
    at_base = target.at(base, [*rels, *hunked])
    changes: dict[str, bytes] = {}
    both, missing = [], []
    for rel in rels:
        there = target.read(rel)
        now, mine = sha256(there), sha256(here.get(rel))
        if there is None:
            # Without a record, a file that came here later looks the same.
            missing.extend([rel] if rel in laid else [])
        elif now in (mine, laid.get(rel), sha256(at_base[rel])):
            continue  # the same, only edited here, or not of the overlay there
        elif found is None and git.has_had(root, rel, there):
            continue  # of an older overlay
        elif mine in (None, laid.get(rel)) or (found is None and _in_git(root, rel)):
            changes[rel] = there.replace(b"\r\n", b"\n")
        else:
            both.append(rel)
    for rel in sorted(hunked):
        base_text, there = at_base[rel], target.read(rel)
        if base_text is None or there in (None, base_text):
            continue
        (*others, patch) = [p for p in series if rel in p.paths]
        gives = sha256(patches.patched(patch, {rel: base_text})[rel])
        was = laid.get(rel, gives)
        if sha256(there) in (gives, was):
            continue
        if others or len(patch.paths) > 1:
            raise WorkFailed(
                f"{rel} was edited in {target.words}, and more than one patch or file goes "
                "with it: edit patches/ by hand. Nothing was touched."
            )
        if was != gives:
            both.append(rel)
            continue
        head = patch.text[: len(patch.text) - len(patch.hunks)]
        changes[f"patches/{patch.name}"] = head + _hunks(rel, base_text, there)
    if both:
        raise Refused(
            "edited both here and there since `apply`, or there with a commit of this "
            "repository that is not here:\n"
            + "".join(f"  {rel}\n" for rel in both)
            + f"Compare each, for instance\n  git diff --no-index {root / both[0]} "
            f"{target.root / both[0]}\nand make one of them as the other. "
            "Nothing was touched."
        )
    for rel, text in changes.items():
        path = root / rel
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.new")
        half.write_bytes(text)
        os.replace(half, path)
    return Report(sorted(changes), missing)


def _new(target: Checkout, root: Path) -> list[str]:
    """Files of Muon that the checkout has and this repository has not."""
    known = payload.discover(root)
    kinds = ("--cached", "--others", "--exclude-standard")
    found = git.lines(target.root, "ls-files", "-z", *kinds, "--", *payload.ROOTS)
    return [
        rel
        for rel in dict.fromkeys(found)
        if rel not in known
        and "muon" in rel.removeprefix("torch/")
        and rel.startswith(("torch/optim/", *payload.ROOTS[1:]))
        and not rel.endswith((".muon-new", ".pyc"))
    ]


def _in_git(root: Path, rel: str) -> bool:
    """Whether the file here is as this repository's git has it: nothing is lost."""
    done = git.git(root, "status", "--porcelain", "--", rel, check=False)
    tracked = git.git(root, "ls-files", "--error-unmatch", "--", rel, check=False)
    return not (done.returncode or done.stdout or tracked.returncode)


def _hunks(rel: str, base: bytes, now: bytes) -> bytes:
    """With as little context as leads to one place: later versions differ around it."""
    base, now = (text.replace(b"\r\n", b"\n") for text in (base, now))
    for context in (1, 2, 3):
        found = git.difference({rel: base}, {rel: now}, "--text", f"-U{context}")
        hunks = re.sub(
            rb"(?m)^(@@ [^@]*@@).*$", rb"\1", found[found.index(b"--- a/") :]
        )
        if all(base.count(old) == 1 for old in _before(hunks)):
            break
    return hunks


def _before(hunks: bytes) -> list[bytes]:
    parts = re.split(rb"^@@ .*\n", hunks, flags=re.MULTILINE)[1:]
    return [
        b"".join(ln[1:] for ln in p.splitlines(keepends=True) if ln[:1] in b" -")
        for p in parts
    ]
