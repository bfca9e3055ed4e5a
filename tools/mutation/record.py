"""Which tests execute a line: what a measured run of the optimizer's tests recorded."""

import ast
import difflib
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from coverage import CoverageData

from tools.coverage import run_measured
from tools.overlay.errors import WrongTarget
from tools.overlay.payload import ROOT

from .faults import copied, Fault


PYTEST = "-n2 --dist=loadgroup --no-loadscope-reorder -ojunit_family=xunit1 test/optim test/distributed/optim"


def record(place: Path) -> int:
    """Runs the tests once, and keeps which lines each test function executes, in ranks, too."""
    shutil.rmtree(place, ignore_errors=True)
    with copied(ROOT / "torch" / "optim") as folder:
        shutil.copytree(folder, place)
    os.environ |= {"COVERAGE_FILE": f"{place}/data", "MUON_CONTEXTS": "test_function"}
    words = [*PYTEST.split(), f"--junitxml={place}/tests.xml"]
    return run_measured(words)


class Test(NamedTuple):
    """A test function; ``owner`` is its class, or empty."""

    file: str
    owner: str
    name: str


class Record:
    def __init__(self, place: Path) -> None:
        junit = place / "tests.xml"
        if not junit.exists():
            raise WrongTarget("first `python -m tools.mutation --record`")
        self._optim = place / "optim"
        self._seconds: dict[Test, float] = {}
        for case in ElementTree.parse(junit).iter("testcase"):
            # Not those that failed or were skipped.
            if len(case) == 0:
                file = case.get("file")
                # The module's name is as long as its path without ".py", and a dot follows.
                owner = case.get("classname")[len(file) - 2 :]
                test = Test(file, owner, case.get("name"))
                self._seconds[test] = float(case.get("time"))
        self._data = CoverageData(str(place / "data"))
        self._data.read()

    def tests(self, fault: Fault, optim: Path) -> list[str]:
        """Those that execute the lines that the fault is about, quick classes first."""
        former = self._optim / fault.file
        if not former.exists():
            raise WrongTarget(f"{fault.file} is newer than the record: --record again")
        source = (optim / fault.file).read_text()
        lines = former_lines(fault, source, former.read_text())
        functions = set()
        if is_in_functions(lines, former.read_text()):
            functions = self._functions(fault.file, lines)
        found = [test for test in self._seconds if _is_among(test, functions)]
        # Any test may need the lines that an import executes: the record
        # credits them to the few tests that import the file first.
        found = found or list(self._seconds)
        seconds_of_class: Counter[tuple[str, str]] = Counter()
        for test in found:
            seconds_of_class[test.file, test.owner] += self._seconds[test]

        def order(test: Test) -> tuple:
            owner = test.file, test.owner
            return "distributed" in test.file, seconds_of_class[owner], owner

        found.sort(key=order)
        return ["::".join(filter(None, test)) for test in found]

    def _functions(self, file: str, lines: set[int]) -> set[tuple[str, str]]:
        """The test functions that execute a line: each word of a function's path, with its name."""
        contexts: dict[int, list[str]] = {}
        for path in self._data.measured_files():
            if path.endswith(f"/torch/optim/{file}"):
                contexts = self._data.contexts_by_lineno(path)
                break
        found = set()
        for line in lines:
            for context in contexts.get(line, ()):
                words = context.split(".")
                for word in words:
                    found.add((word, words[-1]))
        return found


def is_in_functions(lines: set[int], source: str) -> bool:
    """Whether each line is in the body of a function."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside.update(range(node.body[0].lineno, node.end_lineno + 1))
    return lines <= inside


def former_lines(fault: Fault, source: str, former: str) -> set[int]:
    """Where the lines of ``fault`` were; for an edited one, around what it took the place of."""
    lines, formers = source.split("\n"), former.split("\n")
    matcher = difflib.SequenceMatcher(None, lines, formers, autojunk=False)
    found = set()
    for kind, begin, end, former_begin, former_end in matcher.get_opcodes():
        for line in range(begin + 1, end + 1):
            if not fault.first <= line <= fault.last:
                continue
            if kind == "equal":
                found.add(line - begin + former_begin)
            else:
                found.update(range(former_begin, former_end + 2))
    return found


def _is_among(test: Test, functions: set[tuple[str, str]]) -> bool:
    """By file alone: a class may have its tests from another one of the file. A name may end with parameters."""
    module = Path(test.file).stem
    for end in range(1, len(test.name) + 1):
        if (module, test.name[:end]) in functions:
            return True
    return False
