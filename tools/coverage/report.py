"""The table of what was executed, and whether it is enough."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import coverage

from tools.overlay.repo import ROOT

from .errors import error_lines


# Percent that all files together have to reach.
LINES, BRANCHES, ERRORS = 90, 80, 100


class Covered(NamedTuple):
    """How many of something were executed, out of how many."""

    done: int
    out_of: int

    @property
    def percent(self) -> float:
        return 100 * self.done / self.out_of if self.out_of else 100.0

    def __add__(self, other: Any) -> Covered:
        return Covered(self.done + other.done, self.out_of + other.out_of)


class FileReport(NamedTuple):
    name: str
    lines: Covered
    branches: Covered
    errors: Covered
    # "line: source" of each error path that no test took
    untaken: list[str]


def read_data(config: str) -> dict[str, Any]:
    """Coverage's own JSON report of all processes' data together."""
    cov = coverage.Coverage(config_file=config)
    # Each process left its data by itself; what was put together before stays.
    cov.load()
    cov.combine(strict=False)
    cov.save()
    place = os.environ.get("MUON_MEASURED")
    # Named, since coverage by itself does not know of files that no test imports.
    patterns = ("_muon.py", "muon.py", "_muon_engine/**/*.py")
    files = place and [str(f) for p in patterns for f in Path(place).glob(p)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        cov.json_report(files, outfile=str(path))
        return json.loads(path.read_text())


def report_of(path: str, found: dict[str, Any]) -> FileReport:
    """What coverage ``found`` of the file at ``path``."""
    summary, executed = found["summary"], set(found["executed_lines"])
    paths = error_lines(Path(path).read_text())
    untaken = [
        f"{line}: {source}" for line, source in paths.items() if line not in executed
    ]
    return FileReport(
        path.partition("/torch/")[2],
        Covered(summary["covered_lines"], summary["num_statements"]),
        # Not there where nothing at all was measured.
        Covered(summary.get("covered_branches", 0), summary.get("num_branches", 0)),
        Covered(len(paths) - len(untaken), len(paths)),
        untaken,
    )


def table(reports: list[FileReport]) -> str:
    """One line a file and one of all."""
    rows = [("", "lines", "branches", "error paths")]
    for name, *kinds in [
        *((r.name, r.lines, r.branches, r.errors) for r in reports),
        ("all", *totals(reports)),
    ]:
        rows.append((name, *(f"{k.done}/{k.out_of} {k.percent:5.1f} %" for k in kinds)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        )
        for row in rows
    )


def totals(reports: list[FileReport]) -> tuple[Covered, Covered, Covered]:
    """Lines, branches and error paths of all files together."""
    nothing = Covered(0, 0)
    return (
        sum((r.lines for r in reports), nothing),
        sum((r.branches for r in reports), nothing),
        sum((r.errors for r in reports), nothing),
    )


def problems(reports: list[FileReport]) -> list[str]:
    """What is not enough, in words."""
    if not reports:
        return ["nothing of the optimizer was executed"]
    found = [
        f"{kind.percent:.1f} % of the {what} executed, less than {limit} %"
        for what, kind, limit in zip(
            ("lines", "branches", "error paths"),
            totals(reports),
            (LINES, BRANCHES, ERRORS),
        )
        if kind.percent < limit
    ]
    for report in reports:
        found += [f"{report.name}:{line} is in no test" for line in report.untaken]
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.coverage")
    parser.add_argument(
        "--config", default=str(ROOT / "pyproject.toml"), help="of coverage"
    )
    parser.add_argument(
        "--no-limits", action="store_true", help="print the table, demand nothing"
    )
    args = parser.parse_args(argv)
    try:
        data = read_data(args.config)
    except coverage.exceptions.NoDataError:
        data = {"files": {}}
    reports = [report_of(path, found) for path, found in data["files"].items()]
    reports.sort(key=lambda report: report.name)
    print(table(reports))
    if args.no_limits:
        return 0
    print(
        f"\nwanted: {LINES} % of the lines, {BRANCHES} % of the branches, every error path"
    )
    short = problems(reports)
    for problem in short:
        print(f"coverage: {problem}")
    return 1 if short else 0
