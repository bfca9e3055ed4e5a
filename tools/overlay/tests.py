"""Runs the tests, and finds out how much of the optimizer they execute."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

from . import apply, env, revert, status
from .errors import Refused, WrongTarget
from .target import ask_python, find_wheel


# Of another interpreter: those of the optimizer, and why tests were skipped.
ELSEWHERE = ["-rs", "test/optim", "test/distributed/optim"]
MISSING = """
from importlib.util import find_spec
print(*(name for name in ("pytest", "expecttest", "numpy") if find_spec(name) is None))
"""


def run(python: Path, args: list[str], root: Path, *, measure: bool) -> int:
    """Run pytest with ``args``; with ``measure`` the table of coverage follows.

    All tests, that is no ``args``, have to execute enough of the optimizer. A part of
    them need not.

    Returns pytest's exit code, or 1 where only the coverage is too little.
    """
    if not measure:
        return env.run_in(python, ["-m", "pytest", *args], root, timeout=None)
    # Of this run alone: another one may be under way in the same environment.
    with tempfile.TemporaryDirectory(prefix="coverage") as folder:
        return _measured(python, args, root, Path(folder))


def _measured(python: Path, args: list[str], root: Path, folder: Path) -> int:
    variables = {
        # Processes that tests start in other folders leave theirs there too.
        "COVERAGE_FILE": str(folder / "data"),
        # Not the copies that tests of the overlay make.
        "MUON_MEASURED": str(find_wheel(python).root / "torch" / "optim"),
        # All tests execute most of it many times: see test/conftest.py.
        "MUON_MEASURE": "each" if args else "once",
    }
    chosen = args or ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
    command = ["-m", "coverage", "run", "-m", "pytest", *chosen]
    code = env.run_in(python, command, root, timeout=None, variables=variables)
    report = ["-m", "tools.coverage"]
    if args or code:
        report.append("--no-limits")
    print("\nCoverage of the optimizer, all processes:", flush=True)
    shown = env.run_in(python, report, root, timeout=None, variables=variables)
    return code or shown


def run_with(python: str, args: list[str], root: Path) -> int:
    """Run pytest on the torch of ``python``, where the overlay is for as long as that takes.

    An overlay that was there before stays. Nothing is installed, so neither xdist nor coverage is
    asked for. Ranks that find too few GPUs share them, over gloo.

    Returns pytest's exit code.
    """
    target = find_wheel(python)
    missing = ask_python(target.python, MISSING).strip()
    if missing:
        raise WrongTarget(f"first {python} -m pip install {missing}")
    with target.held():
        before = status.status(target, root).state
        if before not in ("none", "current"):
            raise Refused(
                f"{target.words} has an overlay that is {before}; bring it up to date with "
                "`setup_overlay.py apply`, or `revert` it"
            )
        try:
            apply.apply(target, root)
            return env.run_in(
                target.python,
                ["-m", "pytest", *(args or ELSEWHERE)],
                root,
                timeout=None,
                variables={"MUON_TEST_SHARE_GPU": "1"},
            )
        finally:
            if before == "none":
                # Who presses Ctrl-C again would keep the overlay.
                for each in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(each, signal.SIG_IGN)
                revert.revert(target)
                print(f"reverted {target.words}")
