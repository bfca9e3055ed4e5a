"""Makes a checkout importable: by an installed torch's compiled parts, or a build.

As in upstream's tools/nightly.py, a wheel brings all files that the checkout's ``torch/``
lacks. A block in ``.git/info/exclude`` hides them. Linked work trees share that file, so
each has a block of its own.
"""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

from . import env, files, git, versions
from .errors import OverlayError, Refused, WorkFailed, WrongTarget
from .payload import is_source
from .target import FOLDER
from .wheel import ask_python, find_interpreter
from .wheel import Wheel
from .worktree import Worktree


# A linker replaces them. An editor writes in place, and would change the installed
# torch through a link, so everything else is copied.
_LINKED = re.compile(r".*\.(so|a)(\.\d+)*")
TEST = "test/distributed/optim/test_muon.py"


def load(tree: Worktree) -> dict[str, list]:
    """The size, mtime_ns and source of each file that was lent, or was about to be."""
    record = tree.keep / "parts.json"
    return json.loads(record.read_bytes()) if record.is_file() else {}


def _save(tree: Worktree, lent: dict[str, list]) -> None:
    record = tree.keep / "parts.json"
    if lent:
        files.write(record, json.dumps(lent).encode(), tree.git_dir / "HEAD")
    else:
        shutil.rmtree(tree.keep, ignore_errors=True)


def _tracked(tree: Worktree) -> set[str]:
    return set(git.lines(tree.root, "ls-files", "-z", "torch"))


def lacking(tree: Worktree, wheel: Wheel) -> list[str]:
    """Files of the wheel that the checkout neither has nor tracks, and no overlay added."""
    known, found = _tracked(tree) | wheel.added(), []
    for path in sorted(wheel.torch_dir.rglob("*")):
        rel = path.relative_to(wheel.root).as_posix()
        inside = FOLDER not in path.parts and is_source(rel) and path.is_file()
        if inside and rel not in known and not os.path.lexists(tree.root / rel):
            found.append(rel)
    return found


def _hide(tree: Worktree, rels: dict[str, list]) -> None:
    """Have git ignore these paths, by their topmost folder without tracked files."""
    folders = {str(parent) for path in _tracked(tree) for parent in Path(path).parents}
    patterns: dict[str, None] = {}
    for rel in rels:
        above = [str(parent) for parent in Path(rel).parents][::-1]
        top = next((folder for folder in above if folder not in folders), None)
        path = "".join("\\" + c if c in "*?[]\\ !#" else c for c in top or rel)
        patterns["/" + path + "/" * (top is not None)] = None
    begin, end = (
        f"# {sign} distributed muon overlay (compiled parts, {tree.git_dir.name})\n"
        for sign in (">>>", "<<<")
    )
    exclude = tree.common / "info/exclude"
    text = exclude.read_text() if exclude.is_file() else ""
    new = re.sub(rf"(?ms)^{re.escape(begin)}.*?^{re.escape(end)}", "", text)
    if patterns:
        new += "\n" * (new[-1:] not in ("", "\n"))
        new += begin + "".join(f"{line}\n" for line in patterns) + end
    if new != text:
        files.write(exclude, new.encode(), tree.git_dir / "HEAD")


def lend(tree: Worktree, wheel: Wheel) -> int:
    """Bring them in; the number of files."""
    lent = load(tree)
    for path in (tree.root / "torch").glob("_C*.so"):
        if path.relative_to(tree.root).as_posix() not in lent:
            raise Refused(f"{tree.root} has a build of its own: {path.name}")
    rels = lacking(tree, wheel)
    for rel in rels:
        source = (wheel.root / rel).resolve()
        stat = source.stat()
        lent[rel] = [stat.st_size, stat.st_mtime_ns, str(source)]
    # The record comes first: a file is there whole or not at all, also after a kill.
    _save(tree, lent)
    try:
        _hide(tree, lent)
        for rel in rels:
            _lend_one(wheel.root / rel, tree.root / rel)
    except BaseException:
        remove(tree, rels)
        raise
    return len(rels)


def _lend_one(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if _LINKED.fullmatch(source.name):
        try:
            os.link(source, place, follow_symlinks=True)
        except OSError:
            # Another file system: a symbolic link still costs no gigabyte.
            os.symlink(source.resolve(), place)
        return
    half = files.scratch(place)
    shutil.copy2(source, half)
    os.replace(half, place)


def _is_ours(path: Path, size: int, mtime_ns: int, source: str) -> bool:
    if path.is_symlink():  # even if the wheel is gone
        return os.readlink(path) == source
    stat = path.lstat()
    return (stat.st_size, stat.st_mtime_ns) == (size, mtime_ns)


def remove(tree: Worktree, rels: list[str] | None = None) -> int:
    """Remove them again (None: all); files that were rebuilt since stay."""
    lent, count, folders = load(tree), 0, set()
    for rel in list(lent) if rels is None else rels:
        path, was = tree.root / rel, lent.pop(rel)
        files.scratch(path).unlink(missing_ok=True)
        if os.path.lexists(path) and _is_ours(path, *was):
            path.unlink()
            count += 1
        folders.add(path.parent)
    for folder in folders:
        files.remove_empty_folders(folder, tree.root / "torch")
    _hide(tree, lent)
    _save(tree, lent)
    return count


def from_wheel(tree: Worktree, wheel: Wheel) -> None:
    """Make the checkout importable without a compiler."""
    version = (tree.root / "version.txt").read_text()
    if versions.release(wheel.version or "") != versions.release(version):
        raise WrongTarget(f"{wheel.words} is not of the same version: {version}")
    had = load(tree)
    count = lend(tree, wheel)
    print(f"{count} files brought from {wheel.torch_dir}")
    code = f"sys.path.insert(0, {str(tree.root)!r})\nimport torch, torch.optim\n"
    try:
        where = ask_python(wheel.python, f"{code}print(torch.__file__)").strip()
    except OverlayError as error:
        if not had:
            remove(tree)
        words = f"import torch does not run out of the checkout: {error}"
        raise WorkFailed(words) from None
    print(f"import torch gives {where}")
    line = f"PYTHONPATH={tree.quoted} {shlex.quote(str(wheel.python))}"
    if (tree.root / TEST).is_file():
        line = f"cd {tree.quoted} && {line} {TEST}"
    print(f"use it:\n  {line}")


def from_source(tree: Worktree, python: str | None) -> None:
    """Run upstream's own editable build, as upstream documents it."""
    # It documents the command for the Python that is active in the shell.
    active = "python" if shutil.which("python") else "python3"
    command = [str(find_interpreter(python or active)), "-m", "pip", "install"]
    if lent := remove(tree):
        print(f"took out {lent} files that came from a wheel")
    command += ["--no-build-isolation", "-v", "-e", "."]
    env.run_long(command, "building PyTorch from source", tree.root)
