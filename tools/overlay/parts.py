"""Makes a checkout importable: by an installed torch's compiled parts, or a build.

As in upstream's tools/nightly.py, a wheel brings all files that the checkout's ``torch/``
lacks. Lines in ``.git/info/exclude``, which linked work trees share, hide them.
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


def lend(tree: Worktree, wheel: Wheel) -> int:
    """Bring in what the checkout neither has nor tracks; the number of files."""
    remove(tree)
    for path in (tree.root / "torch").glob("_C*.so"):
        raise Refused(f"{tree.root} has a build of its own: {path.name}")
    tracked = git.lines(tree.root, "ls-files", "-z", "torch")
    folders = {parent for rel in tracked for parent in Path(rel).parents}
    sources = {STOCK: tree.git_dir / "muon_overlay_stock.py"}
    sources[STOCK].write_bytes(tree.stock([REPLACED])[REPLACED] or b"")
    tops = {f"/torch/{FOLDER}\n"}
    for path in set(wheel.torch_dir.rglob("*")) - {wheel.root / r for r in tracked}:
        rel = path.relative_to(wheel.root)
        there = path.is_file() and not os.path.lexists(tree.root / rel)
        if there and not {FOLDER, "__pycache__"} & set(rel.parts):
            if rel.as_posix() not in wheel.added():
                sources[rel.as_posix()] = path.resolve()
                top = next(p for p in (*reversed(rel.parents), rel) if p not in folders)
                tops.add(re.sub(r"([*?\[\]\\ !#])", r"\\\1", f"/{top}\n"))
    stats = {rel: source.stat() for rel, source in sources.items()}
    lent = {r: [s.st_size, s.st_mtime_ns, str(sources[r])] for r, s in stats.items()}
    hidden = f"# muon overlay, {tree.git_dir.name}\n" + "".join(sorted(tops))
    # The record comes first: a file is there whole or not at all, also after a kill.
    files.write(
        _record(tree), json.dumps([lent, hidden]).encode(), tree.common / "HEAD"
    )
    try:
        _hide(tree, hidden, "")
        for rel, source in sources.items():
            place = tree.root / rel
            place.parent.mkdir(parents=True, exist_ok=True)
            if not _LINKED.fullmatch(source.name):
                shutil.copy2(source, files.scratch(place))
                os.replace(files.scratch(place), place)
                continue
            try:
                os.link(source, place)
            except OSError:  # another file system
                os.symlink(source, place)
    except BaseException:
        remove(tree)
        raise
    return len(sources)


def _record(tree: Worktree) -> Path:
    return tree.git_dir / "muon_overlay.json"


def _hide(tree: Worktree, new: str, old: str) -> None:
    exclude = tree.common / "info/exclude"
    text = exclude.read_bytes() if exclude.is_file() else b""
    exclude.parent.mkdir(exist_ok=True)
    if old:
        text = text.replace(os.fsencode(f"\n{old}"), b"")
    text += os.fsencode(new and f"\n{new}")
    files.write(exclude, text, tree.common / "HEAD")


def remove(tree: Worktree) -> int:
    """Remove them again; files that were rebuilt since stay."""
    count, record = 0, _record(tree)
    lent, hidden = json.loads(record.read_bytes()) if record.is_file() else ({}, "")
    for rel, (size, mtime_ns, source) in lent.items():
        path = tree.root / rel
        files.scratch(path).unlink(missing_ok=True)
        if path.is_symlink():  # even if the wheel is gone
            ours = os.readlink(path) == source
        else:
            stat = path.lstat() if path.exists() else None
            ours = stat and [stat.st_size, stat.st_mtime_ns] == [size, mtime_ns]
        if ours:
            path.unlink()
            count += 1
    for rel in lent:
        files.remove_empty_folders((tree.root / rel).parent, tree.root / "torch")
    if lent:
        _hide(tree, "", hidden)
        record.unlink()
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
    python = shlex.quote(str(wheel.python))
    test = f" {TEST}" * (tree.root / TEST).is_file()
    print(f"import torch gives {where}\nuse it:")
    print(f"  cd {tree.quoted} && PYTHONPATH={tree.quoted} {python}{test}")


def from_source(tree: Worktree, python: str | None) -> None:
    """Run upstream's own editable build, for the Python that is active in the shell."""
    active = "python" if shutil.which("python") else "python3"
    command = [str(find_interpreter(python or active)), "-m", "pip", "install"]
    if lent := remove(tree):
        print(f"took out {lent} files that came from a wheel")
    command += ["--no-build-isolation", "-v", "-e", "."]
    env.run_long(command, "building PyTorch from source", tree.root)
