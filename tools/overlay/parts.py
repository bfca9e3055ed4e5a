"""The compiled parts of an installed torch, lent to a checkout of that version.

As upstream's tools/nightly.py does, a wheel brings all files that the checkout's
``torch/`` lacks (extension modules, libraries, headers, generated Python), so that
``import torch`` runs the checkout's own Python files without a compiler. A block in
``.git/info/exclude`` hides them: upstream's .gitignore is not ours to change. Linked
work trees share that file, so each has a block of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from . import files, git
from .errors import Refused, WorkFailed
from .interpreter import PTH
from .target import FOLDER


if TYPE_CHECKING:
    from collections.abc import Iterable

    from .wheel import Wheel
    from .worktree import Worktree


# A linker replaces them. An editor writes in place, and would change the installed
# torch through a link, so everything else is copied.
_LINKED = re.compile(r".*\.(so|a)(\.\d+)*")


def _record(tree: Worktree) -> Path:
    return tree.keep / "parts.json"


def load(tree: Worktree) -> dict | None:
    path = _record(tree)
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        for was in record["files"].values():
            _ = was["size"], was["mtime_ns"], was["source"]
        _ = record["pth"], [record["files"][rel] for rel in record["unsure"]]
        return record
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        root = shlex.quote(str(tree.root))
        raise WorkFailed(
            f"{path} is damaged ({error!r}): which files of torch/ came from a wheel is "
            "not known. Nothing was touched. Look at this list:\n"
            f"  git -C {root} clean -ndX -- torch\n"
            "If none of these files is yours, remove them by -fdX instead of -ndX, then\n"
            f"  rm {shlex.quote(str(path))}"
        ) from None


def _save(tree: Worktree, record: dict) -> None:
    """Write the record; ``unsure`` names the files that may be there half."""
    files.write(_record(tree), json.dumps(record).encode(), tree.git_dir / "HEAD")


def recover(tree: Worktree) -> bool:
    """Remove the files that a killed command had begun to bring or to remove."""
    files.scratch(_record(tree)).unlink(missing_ok=True)
    files.scratch(tree.exclude).unlink(missing_ok=True)
    record = load(tree)
    if record is None or not record["unsure"]:
        return False
    _remove(tree, record, record["unsure"])
    return True


def own_build(tree: Worktree) -> list[str]:
    """Compiled parts of the checkout that no wheel lent."""
    lent = (load(tree) or {"files": {}})["files"]
    found = []
    for pattern in ("torch/_C*.so", "torch/_C*.pyd", "torch/lib/libtorch*"):
        for path in tree.root.glob(pattern):
            rel = path.relative_to(tree.root).as_posix()
            if rel not in lent:
                found.append(rel)
    return sorted(found)


def _tracked(tree: Worktree) -> set[str]:
    return set(git.lines(tree.root, "ls-files", "-z", "--", "torch"))


def lacking(tree: Worktree, wheel: Wheel) -> list[str]:
    """The files that the wheel has and the checkout lacks, as paths from the root."""
    # A tracked file that the work tree lacks was deleted on purpose.
    tracked = _tracked(tree)
    found = []
    for top, folders, names in os.walk(wheel.torch_dir):
        folders[:] = sorted(f for f in folders if f not in ("__pycache__", FOLDER))
        base = os.path.relpath(top, wheel.root)
        for name in sorted(names):
            rel = f"{base}/{name}"
            if rel in tracked or name.endswith(".pyc"):
                continue
            if not os.path.lexists(tree.root / rel):
                found.append(rel)
    added = wheel.overlaid(found)
    return [rel for rel in found if rel not in added]


def _hide(tree: Worktree, rels: Iterable[str]) -> None:
    """Have git ignore these paths, by their topmost folder without tracked files."""
    folders = {str(parent) for path in _tracked(tree) for parent in Path(path).parents}
    patterns: dict[str, None] = {}
    for rel in rels:
        above = [str(parent) for parent in Path(rel).parents][::-1]
        top = next((folder for folder in above if folder not in folders), None)
        path = "".join("\\" + c if c in "*?[]\\ !#" else c for c in top or rel)
        patterns["/" + path + "/" * (top is not None)] = None
    begin, end = (
        f"# {sign} distributed muon overlay (compiled parts, {tree.git_dir.name})"
        for sign in (">>>", "<<<")
    )
    path = tree.exclude
    text = path.read_text() if path.is_file() else ""
    kept = re.sub(rf"(?ms)^{re.escape(begin)}\n.*?^{re.escape(end)}\n", "", text)
    if kept and not kept.endswith("\n"):
        kept += "\n"
    block = [begin, *patterns, end] if patterns else []
    new = kept + "".join(line + "\n" for line in block)
    if new != text:
        files.write(path, new.encode(), tree.git_dir / "HEAD")


def lend(tree: Worktree, wheel: Wheel, *, copy: bool = False) -> int:
    """Bring them in; the number of files."""
    own = own_build(tree)
    if own:
        raise Refused(
            f"{tree.root} has a build of its own ({', '.join(own[:3])}). Use it, or "
            "remove it with `git clean` first. Nothing was touched."
        )
    rels = lacking(tree, wheel)
    record = load(tree) or {"files": {}, "pth": None}
    record["unsure"] = rels
    for rel in rels:
        stat = (wheel.root / rel).stat()
        source = str((wheel.root / rel).resolve())
        was = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "source": source}
        record["files"][rel] = was
    # The record comes first, so that the next command knows what a kill left.
    _save(tree, record)
    try:
        _hide(tree, record["files"])
        for rel in rels:
            _lend_one(wheel.root / rel, tree.root / rel, copy)
    except BaseException as error:
        _remove(tree, record, rels)
        if isinstance(error, OSError):
            raise WorkFailed(
                f"cannot bring {error.filename}: {error.strerror}. "
                "The checkout is as it was."
            ) from None
        raise
    _save(tree, record | {"unsure": []})
    return len(rels)


def _lend_one(source: Path, place: Path, copy: bool) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if not copy and _LINKED.fullmatch(source.name):
        try:
            os.link(source, place, follow_symlinks=True)
        except OSError:
            # Another file system: a symbolic link still costs no gigabyte.
            os.symlink(source.resolve(), place)
        return
    half = files.scratch(place)
    shutil.copy2(source, half)
    os.replace(half, place)


def remove(tree: Worktree) -> int:
    """Remove them again; files that were rebuilt since stay."""
    record = load(tree)
    if record is None:
        return 0
    record["unsure"] = list(record["files"])
    _save(tree, record)
    return _remove(tree, record, record["unsure"])


def _is_ours(path: Path, was: dict) -> bool:
    if path.is_symlink():  # even if the wheel is gone
        return os.readlink(path) == was["source"]
    stat = path.lstat()
    return (stat.st_size, stat.st_mtime_ns) == (was["size"], was["mtime_ns"])


def _remove(tree: Worktree, record: dict, rels: list[str]) -> int:
    count = 0
    folders = set()
    for rel in rels:
        path = tree.root / rel
        files.scratch(path).unlink(missing_ok=True)
        if os.path.lexists(path) and _is_ours(path, record["files"][rel]):
            path.unlink()
            count += 1
        folders.add(path.parent)
    for folder in sorted(folders, key=lambda p: len(p.parts), reverse=True):
        files.remove_empty_folders(folder, tree.torch_dir)
    gone = set(rels)
    kept = {rel: was for rel, was in record["files"].items() if rel not in gone}
    _hide(tree, kept)
    if kept:
        _save(tree, record | {"files": kept, "unsure": []})
        return count
    path, line = record["pth"] or (None, None)
    if path:
        files.scratch(Path(path)).unlink(missing_ok=True)
    # The file may be another checkout's by now.
    if path and os.path.isfile(path) and Path(path).read_text() == line:
        os.unlink(path)
    _record(tree).unlink()
    files.remove_if_empty(tree.keep)
    return count


def install_pth(tree: Worktree, wheel: Wheel) -> Path:
    """Have that interpreter import the checkout without PYTHONPATH."""
    path = wheel.root / PTH
    # A plain path line would come after site-packages, where the wheel's torch is.
    line = f"import sys; sys.path.insert(0, {str(tree.root)!r})\n"
    record = load(tree) or {"files": {}, "unsure": []}
    _save(tree, record | {"pth": [str(path), line]})
    files.write(path, line.encode(), wheel.sibling)
    return path
