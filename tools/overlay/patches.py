"""The overlay as a list of layers: the whole files, then each patch of the series."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from . import files, git, versions
from .errors import WrongTarget
from .payload import unix


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .payload import Source


MESSAGE = """optim: distributed Muon

torch.optim.Muon takes a distributed_config. Each matrix then has exactly one
owner rank. Ranks send their pieces of the matrix to the owner, the owner
orthogonalizes the matrix once, and sends the pieces of the result back.
Without a config nothing changes. torch.optim.muon makes the configs.
"""


@dataclasses.dataclass(frozen=True)
class Layer:
    """One commit of the overlay."""

    message: str
    texts: dict[str, bytes]


@dataclasses.dataclass(frozen=True)
class Patch:
    name: str
    text: bytes

    @property
    def paths(self) -> list[str]:
        found = re.findall(rb"^\+\+\+ b/([^\t\n]+)", self.text, re.MULTILINE)
        return [path.decode() for path in found]

    @property
    def message(self) -> str:
        """The text above the first hunk: a subject line and an explanation."""
        return self._parts()[0].decode().strip() or self.name

    @property
    def hunks(self) -> bytes:
        return self._parts()[1]

    def _parts(self) -> tuple[bytes, bytes]:
        start = re.search(rb"^(?:diff --git |--- a/)", self.text, re.MULTILINE)
        at = start.start() if start else len(self.text)
        return self.text[:at], self.text[at:]


def series(files: Mapping[str, bytes], version: str) -> list[Patch]:
    """The patches for this version of torch, in order."""
    chosen = []
    for number, line in enumerate(files.get("series", b"").decode().splitlines(), 1):
        words = line.split("#")[0].split(maxsplit=1)
        if not words:
            continue
        if words[0] not in files:
            raise WrongTarget(f"patches/series:{number} names {words[0]}: no such file")
        patch = Patch(words[0], files[words[0]])
        if not patch.paths:
            raise WrongTarget(f"patches/{patch.name} changes no file")
        if versions.matches(version, "".join(words[1:])):
            chosen.append(patch)
    return chosen


def patched(patch: Patch, texts: Mapping[str, bytes]) -> dict[str, bytes]:
    """The texts with the hunks; hunks of files that are not in ``texts`` are left out.

    A scratch folder takes the hunks, so that a hunk that does not fit leaves the target
    alone, and an installed torch, which is no work tree, takes the same way.
    """
    with files.scratch_folder() as scratch:
        # git would skip every path if the folder were inside somebody's work tree.
        alone = {"GIT_CEILING_DIRECTORIES": str(scratch.parent)}
        for rel, text in texts.items():
            path = scratch / rel
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(unix(text))
        command = ["apply", "--whitespace=nowarn", *(f"--include={r}" for r in texts)]

        def run(*more: str) -> str | None:
            done = git.git(
                scratch, *command, *more, data=patch.hunks, check=False, env=alone
            )
            return (
                done.stderr.decode(errors="replace").strip()
                if done.returncode
                else None
            )

        # A tree that took the exported series has the hunks already.
        if run("--reverse", "--check") is not None:
            words = run()
            if words is not None:
                raise WrongTarget(
                    f"patches/{patch.name} does not fit this torch: {words}"
                )
        return {rel: (scratch / rel).read_bytes() for rel in texts}


def layers(
    source: Source,
    version: str,
    base: Mapping[str, bytes | None],
    takes: Callable[[str], bool],
) -> tuple[list[Layer], list[str], list[str]]:
    """The layers over ``base``, the files that it lacks, and the patches that do not fit."""
    whole = {rel: unix(t) for rel, t in source.whole.items() if takes(rel)}
    found, lacking, misfits = [Layer(MESSAGE, whole)], [], []
    now = dict(base)
    for patch in series(source.patches, version):
        texts = {
            r: t for r in patch.paths if takes(r) and (t := now.get(r)) is not None
        }
        lacking += [
            f"{patch.name} skipped for {rel}" for rel in patch.paths if rel not in texts
        ]
        try:
            new = patched(patch, texts) if texts else {}
        except WrongTarget as error:
            misfits.append(str(error))
            continue
        new = {rel: text for rel, text in new.items() if text != now[rel]}
        now |= new
        if new:
            found.append(Layer(patch.message, new))
    return found, lacking, misfits
