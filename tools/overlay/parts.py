"""Makes a checkout importable: by an installed torch's compiled parts, or a build.

As in upstream's tools/nightly.py, a wheel brings all files that the checkout's ``torch/``
lacks. A block in ``.git/info/exclude`` hides them, one for each work tree.
"""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

from . import env, files, git, versions
from .errors import OverlayError, Refused, WorkFailed, WrongTarget
from .target import FOLDER
from .wheel import ask_python, find_interpreter, Wheel
from .worktree import REPLACED, Worktree


# A linker replaces them. An editor writes in place, and would change the installed
# torch through a link, so everything else is copied.
_LINKED = re.compile(r".*\.(so|a)(\.\d+)*")
# Tests compare with stock Muon, which they find from torch.__file__.
STOCK = f"torch/{FOLDER}/original/{REPLACED.removeprefix('torch/')}"
TEST = "test/distributed/optim/test_muon.py"


def _record(tree: Worktree) -> Path:
    return tree.git_dir / "muon_overlay.json"


def load(tree: Worktree) -> dict[str, list]:
    """The size, mtime_ns and link of each file that was lent, or was about to be."""
    record = _record(tree)
    return json.loads(record.read_bytes()) if record.is_file() else {}


def _save(tree: Worktree, lent: dict[str, list]) -> None:
    """Record them, and have git ignore them: whole folders without tracked files."""
    tracked = git.lines(tree.root, "ls-files", "-z", "torch")
    folders = {str(parent) for path in tracked for parent in Path(path).parents}
    paths = {rel: [str(p) for p in Path(rel).parents][::-1] + [rel] for rel in lent}
    tops = {next(p for p in above if p not in folders) for above in paths.values()}
    lines = [re.sub(r"([*?\[\]\\ !#])", r"\\\1", f"/{top}\n") for top in sorted(tops)]
    begin, end = (
        os.fsencode(f"# {sign} distributed muon overlay ({tree.git_dir.name})\n")
        for sign in (">>>", "<<<")
    )
    exclude = tree.common / "info/exclude"
    text = exclude.read_bytes() if exclude.is_file() else b""
    new = re.sub(rb"(?ms)^%b.*?^%b" % (re.escape(begin), re.escape(end)), b"", text)
    if lines:
        new += b"\n" * (new[-1:] not in (b"", b"\n"))
        new += begin + "".join(lines).encode() + end
    files.write(_record(tree), json.dumps(lent).encode(), tree.git_dir / "HEAD")
    if new != text:
        files.write(exclude, new, tree.git_dir / "HEAD")


def lend(tree: Worktree, wheel: Wheel) -> int:
    """Bring in what the checkout neither has nor tracks; the number of files."""
    lent = load(tree)
    for path in (tree.root / "torch").glob("_C*.so"):
        if path.relative_to(tree.root).as_posix() not in lent:
            raise Refused(f"{tree.root} has a build of its own: {path.name}")
    known = {*git.lines(tree.root, "ls-files", "-z", "torch"), *wheel.added()}
    sources = {}
    for path in sorted(wheel.torch_dir.rglob("*")):
        rel = path.relative_to(wheel.root).as_posix()
        skipped = {FOLDER, "__pycache__"} & set(path.parts) or rel in known
        if path.is_file() and not skipped and not os.path.lexists(tree.root / rel):
            sources[rel] = path.resolve()
    if STOCK not in lent:
        sources[STOCK] = tree.git_dir / "muon_overlay_stock.py"
        sources[STOCK].write_bytes(tree.stock([REPLACED])[REPLACED] or b"")
    for rel, source in sources.items():
        stat = source.stat()
        lent[rel] = [stat.st_size, stat.st_mtime_ns, str(source)]
    # The record comes first: a file is there whole or not at all, also after a kill.
    _save(tree, lent)
    try:
        for rel, source in sources.items():
            place = tree.root / rel
            place.parent.mkdir(parents=True, exist_ok=True)
            if _LINKED.fullmatch(source.name):
                try:
                    os.link(source, place)
                except OSError:  # another file system
                    os.symlink(source, place)
            else:
                shutil.copy2(source, files.scratch(place))
                os.replace(files.scratch(place), place)
    except BaseException:
        remove(tree)
        raise
    return len(sources)


def remove(tree: Worktree) -> int:
    """Remove them again; files that were rebuilt since stay."""
    lent, count = load(tree), 0
    for rel, (size, mtime_ns, source) in lent.items():
        path = tree.root / rel
        files.scratch(path).unlink(missing_ok=True)
        if path.is_symlink():  # even if the wheel is gone
            ours = os.readlink(path) == source
        else:
            stat = path.lstat() if path.exists() else None
            ours = stat and (stat.st_size, stat.st_mtime_ns) == (size, mtime_ns)
        if ours:
            path.unlink()
            count += 1
    for rel in lent:
        files.remove_empty_folders((tree.root / rel).parent, tree.root / "torch")
    if lent:
        _save(tree, {})
        _record(tree).unlink()
    return count


def from_wheel(tree: Worktree, wheel: Wheel) -> None:
    """Make the checkout importable without a compiler."""
    version = (tree.root / "version.txt").read_text(errors="replace")
    if versions.release(wheel.version or "") != versions.release(version):
        raise WrongTarget(f"{wheel.words} is not of the same version: {version}")
    print(f"{lend(tree, wheel)} files brought from {wheel.torch_dir}")
    code = f"sys.path.insert(0, {str(tree.root)!r})\nimport torch, torch.optim\n"
    try:
        where = ask_python(wheel.python, f"{code}print(torch.__file__)").strip()
    except OverlayError as error:
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
