"""What the overlay wrote to a target, and what it replaced there.

``manifest.json`` names every file with the sha256 of what was written. For an
installed torch it lies in ``<torch>/.muon_overlay``, for a checkout in the git
directory of its work tree, where neither ``git clean`` nor ``git add`` finds it.
What stood in torch/ before lies in ``<torch>/.muon_overlay/original``: programs that
run on the target find it from ``torch.__file__``. In a checkout those are copies to
look at; git has the originals.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import TYPE_CHECKING

from .errors import WorkFailed


if TYPE_CHECKING:
    from pathlib import Path


FOLDER = ".muon_overlay"
FORMAT = 1


@dataclasses.dataclass
class Entry:
    sha256: str
    original: str | None  # below the folder; None: no copy is there
    original_sha256: str | None  # None: the target had no such file


@dataclasses.dataclass
class Manifest:
    torch: str
    kind: str
    files: dict[str, Entry] = dataclasses.field(default_factory=dict)
    patches: list[dict[str, str]] = dataclasses.field(default_factory=list)
    commit: str | None = None

    def dump(self) -> bytes:
        data = {"format": FORMAT, **dataclasses.asdict(self)}
        return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


def folder(torch_dir: Path) -> Path:
    return torch_dir / FOLDER


def copy_name(rel: str) -> str | None:
    """Where a copy of the original lies, below the folder."""
    if rel.startswith("torch/"):
        return "original/" + rel.removeprefix("torch/")
    return None


def load(keep: Path) -> Manifest | None:
    path = keep / "manifest.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        files = {rel: Entry(**entry) for rel, entry in data.pop("files").items()}
        return Manifest(files=files, **data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WorkFailed(
            f"{path} cannot be read ({error!r}); it was written by another version of "
            "this overlay or is damaged. Nothing was touched. Keep the folder until the "
            "files of torch are their own again: reinstall torch as it was installed, or "
            "restore them with git. Then\n"
            f"  rm {shlex.quote(str(path))}\n"
            "and apply again."
        ) from None


def original(rel: str, torch_dir: Path) -> Path:
    """The copy of the stock file that stood at ``rel`` before the overlay."""
    kept = folder(torch_dir) / (copy_name(rel) or "none")
    if not kept.is_file():
        raise FileNotFoundError(f"the overlay of {torch_dir} replaced no {rel}")
    return kept
