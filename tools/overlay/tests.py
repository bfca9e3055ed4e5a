"""Runs the tests, and finds out how much of the optimizer they execute."""

from __future__ import annotations

import tempfile
from pathlib import Path

from . import env
from .target import find_wheel


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
