"""Runs tools/bench/gpu, which measures, on the torch of an interpreter."""

from pathlib import Path

from . import env, payload
from .tests import overlaid
from .wheel import find_wheel


def run(python: str | Path, out: Path, args: list[str], root: Path) -> int:
    """Install nothing: a stage that lacks a package says so on the page."""
    target = find_wheel(python)
    name = ["--overlay", payload.name(root) or "(no git)"]
    command = ["-m", "tools.bench.gpu", str(out), *name, *args]
    with overlaid(target, root):
        return env.run_in(target.python, command, root, with_path=True)
