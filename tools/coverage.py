"""Whether the tests execute enough of the optimizer: of its lines, its branches, and each error path.

``python -m tools.coverage`` by the environment's interpreter, after ``coverage run``; ``setup_overlay.py
test`` does both. The table is coverage's own.
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

from tools.overlay.payload import ROOT


# Percent that all files together have to reach, by coverage's names.
LIMITS = {"statements": 90, "branches": 80}


def measured() -> dict[str, Any]:
    """Prints the table of all processes' data together, and returns coverage's JSON report."""
    cov = Coverage(config_file=str(ROOT / "pyproject.toml"))
    # Each process left its data by itself; what was put together before stays.
    cov.load()
    cov.combine(strict=False)
    cov.save()
    # Named, since coverage by itself does not know of files that no test imports.
    place = Path(os.environ["MUON_MEASURED"])
    patterns = ("_muon*.py", "_newton_schulz.py", "muon.py", "_muon_*/**/*.py")
    files = [str(file) for pattern in patterns for file in place.glob(pattern)]
    cov.report(files)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "report.json")
        cov.json_report(files, outfile=str(out))
        return json.loads(out.read_text())


def problems(report: dict[str, Any]) -> Iterator[str]:
    """Describes each limit that is not reached."""
    for what, limit in LIMITS.items():
        # Not there where nothing at all was measured.
        percent = report["totals"].get(f"percent_{what}_covered", 0.0)
        if percent < limit:
            yield f"{percent:.1f} % of the {what} executed, less than {limit} %"
    for path, found in report["files"].items():
        executed = set(found["executed_lines"])
        for line, source in error_lines(Path(path).read_text()).items():
            if line not in executed:
                yield f"{path}:{line}: {source} is in no test"


def error_lines(source: str) -> dict[int, str]:
    """Each line on which an error is raised or handled, and the source of that line.

    A handler counts by the first line of its body: that of ``except`` itself is executed
    whether or not it matches. ``raise NotImplementedError`` does not count, because subclasses replace it.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            found.add(node.body[0].lineno)
        elif isinstance(node, ast.Raise):
            if getattr(node.exc, "id", "") != "NotImplementedError":
                found.add(node.lineno)
    lines = source.splitlines()
    return {line: lines[line - 1].strip() for line in sorted(found)}


def main(argv: list[str]) -> int:
    report = measured()
    if argv == ["--no-limits"]:
        return 0
    short = list(problems(report))
    print(f"\nwanted: {LIMITS}, in percent, and all error paths")
    for problem in short:
        print(f"coverage: {problem}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
