"""Runs tests, and says whether they execute enough of the optimizer: its lines, its branches, each error path.

``python -m tools.coverage`` by the environment's interpreter, as ``setup_overlay.py test`` does, runs all
tests. With arguments of pytest, it has no limits. The table is coverage's own.
"""

import ast
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coverage import Coverage

from tools.overlay.env import run_in
from tools.overlay.payload import ROOT


# Percent that all files together have to reach, by coverage's names.
LIMITS = {"statements": 90, "branches": 80}
# Two workers, each with whole classes.
WORKERS = ["-n2", "--dist=loadgroup", "--no-loadscope-reorder"]


def measured() -> dict[str, Any]:
    """Prints the table of all processes' data together, and returns coverage's JSON report."""
    coverage = Coverage(config_file=str(ROOT / "pyproject.toml"))
    # Each process left its data by itself; what was put together before stays.
    coverage.load()
    coverage.combine(strict=False)
    coverage.save()
    coverage.report()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        coverage.json_report(outfile=str(report))
        return json.loads(report.read_text())


def problems(report: dict[str, Any]) -> Iterator[str]:
    """Describes each limit that is not reached."""
    for what, limit in LIMITS.items():
        # Not there where nothing at all was measured.
        percent = report["totals"].get(f"percent_{what}_covered", 0.0)
        if percent < limit:
            yield f"{percent:.1f} % of the {what} executed, less than {limit} %"
    for path, of_file in report["files"].items():
        executed_lines = set(of_file["executed_lines"])
        source = Path(path).read_text()
        for number, line in error_lines(source).items():
            if number not in executed_lines:
                yield f"{path}:{number}: {line} is in no test"


def error_lines(source: str) -> dict[int, str]:
    """Each line on which an error is raised or handled, and the source of that line.

    A handler counts by the first line of its body: that of ``except`` itself is executed
    whether or not it matches.
    """
    numbers = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            first_statement = node.body[0]
            numbers.add(first_statement.lineno)
        elif isinstance(node, ast.Raise):
            numbers.add(node.lineno)
    lines = source.splitlines()
    return {number: lines[number - 1].strip() for number in sorted(numbers)}


def check(*, limits: bool) -> int:
    """Prints the table, and what is not reached."""
    report = measured()
    code = 0
    if limits:
        print(f"\nwanted: {LIMITS}, in percent, and all error paths")
        for problem in problems(report):
            print(f"coverage: {problem}")
            code = 1
    return code


def run_measured(words: list[str]) -> int:
    """Runs pytest with these words, or all tests, which must execute enough."""
    # This run's own folder: another run may use the same environment.
    with tempfile.TemporaryDirectory(prefix="coverage") as folder:
        # One place, also for processes that tests start in other folders. The caller may keep it.
        os.environ.setdefault("COVERAGE_FILE", f"{folder}/data")
        # Not the copies that tests of the overlay make.
        os.environ["MUON_MEASURED"] = str(ROOT / "torch" / "optim")
        # All tests execute most of it many times: see test/conftest.py.
        os.environ["MUON_MEASURE"] = "each" if words else "once"
        # Verbose: a run that is stopped has named its failures.
        chosen = words or ["-v", *WORKERS]
        command = ["-m", "coverage", "run", "-m", "pytest", *chosen]
        code = run_in(Path(sys.executable), command, ROOT)
        print("\nCoverage of the optimizer, all processes:", flush=True)
        shown = check(limits=not words and code == 0)
        return code or shown


if __name__ == "__main__":
    sys.exit(run_measured(sys.argv[1:]))
