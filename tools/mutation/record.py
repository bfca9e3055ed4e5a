"""Which tests execute a line: what a measured run of the optimizer's tests recorded."""

import ast
import os
import shutil
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from coverage import CoverageData

from tools.coverage import run_measured, WORKERS


TESTS = ["-ojunit_family=xunit1", "test/optim", "test/distributed/optim"]


def record(place: Path, copy: Path) -> int:
    """Runs the tests once, and keeps which lines each test function executes, in ranks, too."""
    shutil.rmtree(place / "recorded", ignore_errors=True)
    (place / "data").unlink(missing_ok=True)
    os.environ |= {"COVERAGE_FILE": f"{place}/data", "MUON_CONTEXTS": "test_function"}
    code = run_measured([*WORKERS, *TESTS, f"--junitxml={place}/tests.xml"])
    # Last, because it says that there is a record.
    shutil.copytree(copy, place / "recorded")
    return code


def sources(folder: Path) -> dict[Path, bytes]:
    """The files of a copy. A record holds only for the files that it was made with."""
    files = folder.rglob("*.py")
    return {path.relative_to(folder): path.read_bytes() for path in files}


def tests_of(place: Path, faulty: Path, lines: set[int]) -> list[str]:
    """The tests that execute ``lines`` of a recorded file, quick classes first."""
    # Any test may need the lines that an import executes: the record credits them to few tests.
    functions = None
    if lines <= lines_in_functions((place / "recorded" / faulty).read_text()):
        functions = functions_that_execute(place, faulty, lines)
    found = []
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(place / "tests.xml").iter("testcase"):
        file, name = case.get("file"), case.get("name")
        # Not those that failed or were skipped.
        if len(case) or not is_among(Path(file).stem, name, functions):
            continue
        # The module's name is as long as its path without ".py", and a dot follows.
        owner = case.get("classname")[len(file) - 2 :]
        group = "::".join(filter(None, (file, owner)))
        seconds[group] += float(case.get("time"))
        found.append((group, f"{group}::{name}"))
    found.sort(key=lambda test: ("distributed" in test[0], seconds[test[0]], test[0]))
    return [test for _, test in found]


def lines_in_functions(source: str) -> set[int]:
    inside: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside.update(range(node.body[0].lineno, node.end_lineno + 1))
    return inside


def functions_that_execute(place: Path, file: Path, lines: set[int]) -> set[str]:
    """The paths of test functions, such as ``optim.test_muon.TestMuon.test_step``."""
    data = CoverageData(str(place / "data"))
    data.read()
    found: set[str] = set()
    for measured in data.measured_files():
        if measured.endswith(f"/torch/{file}"):
            contexts = data.contexts_by_lineno(measured)
            for line in lines:
                found.update(contexts.get(line, ()))
    return found - {""}


def is_among(module: str, name: str, functions: set[str] | None) -> bool:
    """By module alone: a class may have its tests from another one. A name may end with parameters."""
    if not functions:
        return True
    for function in functions:
        words = function.split(".")
        if module in words and name.startswith(words[-1]):
            return True
    return False
