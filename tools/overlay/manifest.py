"""What the overlay wrote to a target, and what it replaced there.

``<torch>/.muon_overlay/manifest.json`` names every file with the sha256 of what
was written; what stood there before lies beside it under ``original/`` (files of
the torch package) and ``original-tree/`` (the others, in a checkout). A program
that runs on the target finds both from ``torch.__file__``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

from .errors import WorkFailed


FOLDER = ".muon_overlay"
FORMAT = 1


@dataclasses.dataclass
class Entry:
    sha256: str
    original: str | None  # below the folder; None: the target had no such file
    original_sha256: str | None


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


def kept_name(rel: str) -> str:
    """Where the original of a file is kept, below the folder."""
    if rel.startswith("torch/"):
        return "original/" + rel.removeprefix("torch/")
    return "original-tree/" + rel


def load(torch_dir: Path) -> Manifest | None:
    path = folder(torch_dir) / "manifest.json"
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
            f"{path} cannot be read ({error}); it was written by another version of "
            "this overlay or is damaged. Reinstall torch (or restore the checkout), "
            f"remove {path.parent} and apply again."
        ) from None


def original(path: str | Path, torch_dir: Path | None = None) -> Path:
    """The kept stock file that stood at ``path`` before the overlay.

    ``path`` is as in PyTorch (``torch/optim/_muon.py``) or absolute; ``torch_dir``
    defaults to the package that ``import torch`` would find in this interpreter.
    """
    if torch_dir is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise FileNotFoundError("this interpreter has no torch")
        torch_dir = Path(spec.origin).parent
    path = Path(path)
    if path.is_absolute():
        path = path.relative_to(torch_dir.parent)
    found = load(torch_dir)
    entry = found.files.get(path.as_posix()) if found else None
    if entry is None or entry.original is None:
        raise FileNotFoundError(f"the overlay of {torch_dir} replaced no {path}")
    return folder(torch_dir) / entry.original
