"""The compiled parts of an installed torch, lent to a checkout of that version.

As upstream's tools/nightly.py: everything that the checkout's ``torch/`` lacks
(extension modules, libraries, headers, generated Python) comes from a wheel, so
that ``import torch`` runs the checkout's own Python files without a compiler.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from . import exclude, manifest, transaction
from .errors import Refused, WorkFailed


if TYPE_CHECKING:
    from collections.abc import Iterable

    from .target import Checkout, Target, Wheel


PTH = "muon_overlay_checkout.pth"


def _record(target: Target) -> Path:
    return target.keep / "parts.json"


def load(target: Target) -> dict | None:
    path = _record(target)
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        for was in record["files"].values():
            _ = was["size"], was["mtime_ns"], was["source"]
        _ = record["pth"], [record["files"][rel] for rel in record["unsure"]]
        return record
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        root = shlex.quote(str(target.root))
        raise WorkFailed(
            f"{path} is damaged ({error!r}): which files of torch/ came from a wheel is "
            "not known. Nothing was touched. Look at what this lists:\n"
            f"  git -C {root} clean -ndX -- torch\n"
            "If nothing of it is yours, remove it by -fdX in the place of -ndX, then\n"
            f"  rm {shlex.quote(str(path))}"
        ) from None


def _save(target: Checkout, record: dict) -> None:
    """With ``unsure``: what may be there half, until a later record says that it is."""
    transaction.write(target, _record(target), json.dumps(record).encode())


def recover(target: Target) -> bool:
    """Take out what a command that was cut off had begun to bring or to take out."""
    record = load(target)
    if record is None or not record["unsure"]:
        return False
    _remove(target, record, record["unsure"])
    return True


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


def _ignored(target: Checkout, rels: Iterable[str]) -> list[str]:
    """Patterns that hide those paths: the topmost folder that git has nothing of, or the file."""
    folders = set()
    for path in target.tracked(["torch"]):
        pieces = path.split("/")
        folders |= {"/".join(pieces[:depth]) for depth in range(1, len(pieces))}
    lines: dict[str, None] = {}
    for rel in rels:
        pieces = rel.split("/")
        above = ("/".join(pieces[:depth]) for depth in range(1, len(pieces)))
        top = next((folder for folder in above if folder not in folders), None)
        lines[exclude.escaped(rel) if top is None else exclude.escaped(top) + "/"] = (
            None
        )
    return list(lines)


def _hide(target: Checkout, rels: Iterable[str]) -> None:
    name = f"compiled parts, {target.git_dir.name}"
    exclude.update(target.exclude, name, _ignored(target, rels))


def lend(target: Checkout, wheel: Wheel, *, copy: bool = False) -> int:
    """Bring them in; the number of files."""
    own = own_build(target)
    if own:
        raise Refused(
            f"{target.words} has a build of its own ({', '.join(own[:3])}). Use it, or "
            "remove it with `git clean` first. Nothing was touched."
        )
    rels = lacking(target, wheel)
    record = load(target) or {"files": {}, "pth": None}
    record["unsure"] = rels
    for rel in rels:
        stat = (wheel.root / rel).stat()
        record["files"][rel] = {
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "source": str((wheel.root / rel).resolve()),
        }
    # The record first: a kill half way leaves nothing that the next command does not know.
    _save(target, record)
    try:
        _hide(target, record["files"])
        for rel in rels:
            _lend_one(wheel.root / rel, target.root / rel, copy)
    except BaseException as error:
        _remove(target, record, rels)
        if isinstance(error, OSError):
            raise WorkFailed(
                f"cannot bring {error.filename}: {error.strerror}. "
                "The checkout is as it was."
            ) from None
        raise
    _save(target, record | {"unsure": []})
    return len(rels)


def _lend_one(source: Path, place: Path, copy: bool) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if not copy:
        try:
            os.link(source, place, follow_symlinks=True)
        except OSError:
            # Another file system: a symbolic link still costs no gigabyte.
            os.symlink(source.resolve(), place)
        return
    half = transaction.beside(place)
    shutil.copy2(source, half)
    os.replace(half, place)


def remove(target: Checkout) -> int:
    """Take them out again; files that were rebuilt since stay."""
    record = load(target)
    if record is None:
        return 0
    record["unsure"] = list(record["files"])
    _save(target, record)
    return _remove(target, record, record["unsure"])


def _is_ours(path: Path, was: dict) -> bool:
    if path.is_symlink():  # whatever has become of the wheel
        return os.readlink(path) == was["source"]
    stat = path.lstat()
    return (stat.st_size, stat.st_mtime_ns) == (was["size"], was["mtime_ns"])


def _remove(target: Checkout, record: dict, rels: list[str]) -> int:
    count = 0
    folders = set()
    for rel in rels:
        path = target.root / rel
        transaction.beside(path).unlink(missing_ok=True)
        if os.path.lexists(path) and _is_ours(path, record["files"][rel]):
            path.unlink()
            count += 1
        folders.add(path.parent)
    for folder in sorted(folders, key=lambda p: len(p.parts), reverse=True):
        _remove_empty(folder, target.torch_dir)
    gone = set(rels)
    left = {rel: was for rel, was in record["files"].items() if rel not in gone}
    _hide(target, left)
    if left:
        _save(target, record | {"files": left, "unsure": []})
        return count
    path, line = record["pth"] or (None, None)
    if path:
        transaction.beside(Path(path)).unlink(missing_ok=True)
    # One of another checkout may stand there by now.
    if path and os.path.isfile(path) and Path(path).read_text() == line:
        os.unlink(path)
    _record(target).unlink()
    transaction.remove_if_empty(target.keep)
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
    path = wheel.root / PTH
    # A plain path line would come after site-packages, where the wheel's torch is.
    line = f"import sys; sys.path.insert(0, {str(target.root)!r})\n"
    record = load(target) or {"files": {}, "unsure": []}
    _save(target, record | {"pth": [str(path), line]})
    transaction.write(wheel, path, line.encode())
    return path
