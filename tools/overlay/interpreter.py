"""Interpreters: which one is meant, and what it says of its torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from .errors import WorkFailed, WrongTarget


# A file of this name in site-packages puts a checkout before the installed torch.
PTH = "muon_overlay_checkout.pth"

# The interpreter itself runs this. It never imports torch: that takes seconds, and
# fails on exactly those targets that need help.
_WHERE = """
import importlib.metadata, importlib.util, json, os, sys
spec = importlib.util.find_spec("torch")
found = {"origin": spec.origin if spec else None}
found |= {"version": None, "record": None, "site": None}
folders = list(spec.submodule_search_locations or []) if spec else []
closed = [p for p in sys.path + folders if os.path.isdir(p) and not os.access(p, os.R_OK | os.X_OK)]
found |= {"folders": folders, "closed": closed}
try:
    dist = importlib.metadata.distribution("torch")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    found["version"] = dist.version
    found["record"] = dist.read_text("RECORD")
    found["site"] = str(dist.locate_file(""))
print(json.dumps(found))
"""


# The first entry is the current folder, where anybody's torch/ or json.py may be.
_ALONE = "import sys; sys.path[:] = [p for p in sys.path if p]\n"


def ask_python(python: str | Path, code: str, *, timeout: float = 120) -> str:
    """Run ``code`` in that interpreter, away from the caller's own paths."""
    # PYTHONPATH could name a checkout, and the current folder has a torch/ of its own.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [str(python), "-c", _ALONE + code],
            capture_output=True,
            text=True,
            env=env,
            cwd=Path(python).parent,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )
    except OSError as error:
        raise WrongTarget(f"cannot run {python}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise WorkFailed(f"{python} gave no answer in {timeout:.0f} s") from None
    if done.returncode:
        tail = (done.stderr.strip().splitlines() or ["no message"])[-1].strip()
        # Programs that are no Python tend to repeat the whole probe.
        if len(tail) > 200 or any(
            len(line) > 20 and line in tail for line in code.splitlines()
        ):
            tail = f"exit code {done.returncode}"
        raise WrongTarget(f"{python} is not a working Python: {tail}")
    return done.stdout


def ask_where(python: str | Path) -> dict[str, Any]:
    # The last line: a sitecustomize may have said something before it.
    lines = ask_python(python, _WHERE).splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        raise WrongTarget(f"{python} is not a Python interpreter") from None


def origin(python: str | Path) -> Path | None:
    """The file that ``import torch`` would begin with in that interpreter."""
    found = ask_where(python)["origin"]
    return Path(found) if found else None


def find_interpreter(python: str | Path) -> Path:
    """The interpreter that is meant: a path, a name on PATH, or an environment's folder."""
    # Not a Path yet: it would make a name on PATH of "./python".
    python = os.path.expanduser(python)
    where = shutil.which(python)
    if where is None and os.path.isdir(python):
        inside = ("bin/python", "bin/python3", "Scripts/python.exe", "python.exe")
        found = (shutil.which(os.path.join(python, rel)) for rel in inside)
        where = next(filter(None, found), None)
        if where is None:
            raise WrongTarget(f"{python} is a folder without bin/python")
    if where is None:
        lack = "not executable" if os.path.isfile(python) else "no such interpreter"
        raise WrongTarget(f"{python}: {lack}")
    # Not resolved: an environment's python is a link that must not be followed. But
    # absolute, because it is not run in the present folder.
    return Path(os.path.abspath(where))
