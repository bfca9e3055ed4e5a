"""The compiled parts of an installed torch, lent to a checkout of that version.

As upstream's tools/nightly.py: everything that the checkout's ``torch/`` lacks
(extension modules, libraries, headers, generated Python) comes from a wheel, so
that ``import torch`` runs the checkout's own Python files without a compiler.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

from . import exclude, manifest, transaction
from .errors import Refused, WorkFailed


if TYPE_CHECKING:
    from pathlib import Path

    from .target import Checkout, Wheel


def _record(target: Checkout) -> Path:
    return manifest.folder(target.torch_dir) / "parts.json"


def load(target: Checkout) -> dict | None:
    path = _record(target)
    return json.loads(path.read_text()) if path.is_file() else None


def own_build(target: Checkout) -> list[str]:
    """Compiled parts that the checkout has and that we did not bring."""
    lent = (load(target) or {"files": {}})["files"]
    found = []
    for pattern in ("torch/_C*.so", "torch/_C*.pyd", "torch/lib/libtorch*"):
        for path in target.root.glob(pattern):
            rel = path.relative_to(target.root).as_posix()
            if rel not in lent:
                found.append(rel)
    return sorted(found)


def lacking(target: Checkout, wheel: Wheel) -> list[str]:
    """What the wheel has and the checkout lacks, as paths from the root."""
    # A file that git tracks and the work tree lacks was deleted on purpose, and
    # what an overlay added to the wheel is no part of it.
    tracked = target.tracked(["torch"])
    laid = wheel.manifest()
    ours = set(laid.files) if laid else set()
    found = []
    for top, folders, names in os.walk(wheel.torch_dir):
        folders[:] = sorted(
            f for f in folders if f not in ("__pycache__", manifest.FOLDER)
        )
        base = os.path.relpath(top, wheel.root)
        for name in sorted(names):
            rel = f"{base}/{name}"
            if rel in tracked or rel in ours or name.endswith(".pyc"):
                continue
            if not os.path.lexists(target.root / rel):
                found.append(rel)
    return found


def _ignored(target: Checkout, rels: list[str]) -> list[str]:
    """Patterns that hide those paths: the topmost folder that is all ours, or the file."""
    lines: dict[str, None] = {}
    known: dict[str, bool] = {}
    for rel in rels:
        pieces = rel.split("/")
        for depth in range(1, len(pieces)):
            folder = "/".join(pieces[:depth])
            if folder not in known:
                known[folder] = (target.root / folder).is_dir()
            if not known[folder]:
                lines[exclude.escaped(folder) + "/"] = None
                break
        else:
            lines[exclude.escaped(rel)] = None
    return list(lines)


def lend(target: Checkout, wheel: Wheel, *, copy: bool = False) -> int:
    """Bring them in; the number of files."""
    own = own_build(target)
    if own:
        raise Refused(
            f"{target.words} has a build of its own ({', '.join(own[:3])}). Use it, or "
            "remove it with `git clean` first. Nothing was touched."
        )
    rels = lacking(target, wheel)
    before = load(target)
    files: dict[str, dict] = dict(before["files"]) if before else {}
    record = {"python": str(wheel.python), "torch": wheel.version, "files": files}
    for rel in rels:
        stat = (wheel.root / rel).stat()
        files[rel] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    changes: dict[Path, bytes | None] = {_record(target): json.dumps(record).encode()}
    lines = _ignored(target, list(files)) if before is None else None
    if lines is not None:
        changes |= exclude.changed(
            target.exclude_file(),
            "compiled parts",
            [*lines, f"/torch/{manifest.FOLDER}/"],
        )
    # The record first: a kill half way leaves nothing that `revert` does not know.
    transaction.commit(target.torch_dir, changes)
    try:
        for rel in rels:
            _lend_one(wheel.root / rel, target.root / rel, copy)
    except BaseException as error:
        remove(target)
        if isinstance(error, OSError):
            raise WorkFailed(
                f"cannot bring {error.filename}: {error.strerror}. "
                "The checkout is as it was."
            ) from None
        raise
    return len(rels)


def _lend_one(source: Path, place: Path, copy: bool) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if copy:
        shutil.copy2(source, place)
        return
    try:
        os.link(source, place, follow_symlinks=True)
    except OSError:
        # Another file system: a symbolic link still costs no gigabyte.
        os.symlink(source.resolve(), place)


def remove(target: Checkout) -> int:
    """Take them out again; files that were rebuilt since stay."""
    record = load(target)
    if record is None:
        return 0
    count = 0
    folders = set()
    for rel, was in record["files"].items():
        path = target.root / rel
        if not os.path.lexists(path):
            continue
        try:
            stat = path.stat()
            ours = (stat.st_size, stat.st_mtime_ns) == (was["size"], was["mtime_ns"])
        except FileNotFoundError:
            ours = True  # a symbolic link whose wheel is gone
        if ours:
            path.unlink()
            count += 1
            folders.add(path.parent)
    for folder in sorted(folders, key=lambda p: len(p.parts), reverse=True):
        _remove_empty(folder, target.torch_dir)
    pth = record.get("pth")
    if pth and os.path.exists(pth):
        os.unlink(pth)
    changes: dict[Path, bytes | None] = {_record(target): None}
    changes |= exclude.changed(target.exclude_file(), "compiled parts", [])
    transaction.commit(target.torch_dir, changes)
    return count


def _remove_empty(folder: Path, stop: Path) -> None:
    """Remove the folder and its parents below ``stop`` as far as nothing is in them."""
    while folder != stop:
        if folder.is_dir():
            cache = folder / "__pycache__"
            if any(path != cache for path in folder.iterdir()):
                return
            shutil.rmtree(folder)
        folder = folder.parent


def install_pth(target: Checkout, wheel: Wheel) -> Path:
    """Make that interpreter import the checkout even without PYTHONPATH."""
    path = wheel.root / "muon_overlay_checkout.pth"
    # A plain path line would come after site-packages, where the wheel's torch is.
    line = f"import sys; sys.path.insert(0, {str(target.root)!r})\n"
    record = load(target) or {}
    record["pth"] = str(path)
    transaction.commit(
        target.torch_dir,
        {path: line.encode(), _record(target): json.dumps(record).encode()},
    )
    return path
