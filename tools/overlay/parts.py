"""Lends a checkout the compiled parts of an installed torch of its version.

As in upstream's tools/nightly.py, that torch brings all files that the checkout's ``torch/``
lacks. Upstream's .gitignore hides them, as it hides those of a build.
"""

import contextlib
import json
import os
import re
import shutil

from . import files, git
from .errors import Refused
from .target import FOLDER
from .wheel import ask_python, Wheel
from .worktree import Worktree


# A linker replaces them. An editor writes in place, and would change the installed
# torch through a link, so everything else is copied.
_LINKED = re.compile(r".*\.(so|a)(\.\d+)*")
RECORD = "muon_overlay.json"


def lend(tree: Worktree, wheel: Wheel) -> str:
    """Bring in what the checkout neither has nor tracks; what ``import torch`` gives then."""
    remove(tree)
    if own := [*(tree.root / "torch").glob("_C*.so")]:
        raise Refused(f"{tree.root} has a build of its own: {own[0].name}")
    skipped = wheel.added().union(git.lines(tree.root, "ls-files", "-z", "torch"))
    lent, code = {}, f"sys.path.insert(0, {str(tree.root)!r})\nimport torch.optim\n"
    for path in wheel.torch_dir.rglob("*"):
        rel = path.relative_to(wheel.root)
        if path.is_file() and not {FOLDER, "__pycache__"} & {*rel.parts}:
            if rel.as_posix() not in skipped and not os.path.lexists(tree.root / rel):
                stat = path.stat()
                lent[rel.as_posix()] = [stat.st_size, stat.st_mtime_ns]
    # The record comes first: a file is there whole or not at all, also after a kill.
    text = json.dumps(lent).encode()
    files.write({tree.git_dir / RECORD: text}, tree.common / "HEAD", tree.git_dir)
    try:
        for rel in lent:
            source, place = (wheel.root / rel).resolve(), tree.root / rel
            place.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # another file system
                if _LINKED.fullmatch(source.name):
                    os.link(source, place)
                    continue
            shutil.copy2(source, files.scratch(place))
            os.replace(files.scratch(place), place)
        return ask_python(wheel.python, f"{code}print(torch.__file__)").strip()
    except BaseException:
        remove(tree)
        raise


def are_lent(tree: Worktree) -> bool:
    return (tree.git_dir / RECORD).is_file()


def remove(tree: Worktree) -> int:
    """Remove them again; files that were rebuilt since stay."""
    count, record = 0, tree.git_dir / RECORD
    lent = json.loads(record.read_bytes()) if are_lent(tree) else {}
    for rel, stat in lent.items():
        path = tree.root / rel
        files.scratch(path).unlink(missing_ok=True)
        now = path.lstat() if os.path.lexists(path) else None
        if now and [now.st_size, now.st_mtime_ns] == stat:
            path.unlink()
            count += 1
    for folder in {(tree.root / rel).parent for rel in lent}:
        files.remove_empty_folders(folder, tree.root / "torch")
    record.unlink(missing_ok=True)
    return count
