"""Hunks for files that upstream owns: ``patches/`` in the order of its ``series``."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path

from . import git, versions
from .errors import WrongTarget


@dataclasses.dataclass(frozen=True)
class Patch:
    name: str
    spec: str  # the versions it is for; empty: all
    text: bytes

    @property
    def paths(self) -> list[str]:
        found = re.findall(rb"^\+\+\+ b/([^\t\n]+)", self.text, re.MULTILINE)
        return [path.decode() for path in found]

    @property
    def message(self) -> str:
        """What stands above the first hunk: a subject line and an explanation."""
        head = re.split(rb"^(?:diff --git |--- a/)", self.text, flags=re.MULTILINE)[0]
        return head.decode().strip() or self.name

    @property
    def hunks(self) -> bytes:
        start = re.search(rb"^(?:diff --git |--- a/)", self.text, re.MULTILINE)
        return self.text[start.start() :] if start else b""


def series(root: Path, version: str) -> list[Patch]:
    """The patches for this version of torch, in order."""
    listing = root / "patches" / "series"
    if not listing.is_file():
        return []
    chosen = []
    for number, line in enumerate(listing.read_text().splitlines(), 1):
        words = line.split("#")[0].split(maxsplit=1)
        if not words:
            continue
        spec = words[1].strip() if len(words) == 2 else ""
        path = root / "patches" / words[0]
        if not path.is_file():
            raise WrongTarget(f"patches/series:{number} names {words[0]}: no such file")
        patch = Patch(words[0], spec, path.read_bytes())
        if not patch.paths:
            raise WrongTarget(f"patches/{patch.name} changes no file")
        if versions.matches(version, spec):
            chosen.append(patch)
    return chosen


def patched(patch: Patch, texts: dict[str, bytes]) -> dict[str, bytes]:
    """The texts with the hunks in them; files not in ``texts`` are left out.

    In a scratch folder, so that a hunk that does not fit leaves the target alone,
    and so that a wheel, which is no work tree, takes the same way.
    """
    with tempfile.TemporaryDirectory(prefix="muon-patch-") as name:
        scratch = Path(name)
        # A repository of its own: git would skip every path if the scratch folder
        # happened to lie inside another work tree.
        git.git(scratch, "init", "--quiet")
        for rel, text in texts.items():
            path = scratch / rel
            path.parent.mkdir(parents=True, exist_ok=True)
            # The hunks have the line ends of this repository, whatever git wrote there.
            path.write_bytes(text.replace(b"\r\n", b"\n"))
        only = [f"--include={rel}" for rel in texts]
        command = ["apply", "--whitespace=nowarn", *only]
        # A tree that took the exported series by `git am` has the hunks already.
        back = git.git(
            scratch, *command, "--reverse", "--check", data=patch.hunks, check=False
        )
        if back.returncode:
            done = git.git(scratch, *command, data=patch.hunks, check=False)
            if done.returncode:
                words = done.stderr.decode(errors="replace").strip()
                raise WrongTarget(
                    f"patches/{patch.name} does not fit this torch: {words}"
                )
        out = {rel: (scratch / rel).read_bytes() for rel in texts}
        return {
            rel: new.replace(b"\n", b"\r\n") if b"\r\n" in texts[rel] else new
            for rel, new in out.items()
        }
