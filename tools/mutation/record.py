"""Which tests execute a line: what a measured run of the optimizer's tests recorded."""

import difflib
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from coverage import CoverageData

from tools.overlay import tests
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
    return tests.run_measured(Path(sys.executable), words, ROOT)


class Record:
    def __init__(self, place: Path) -> None:
        if not (place / "tests.xml").exists():
            raise WrongTarget("first `python -m tools.mutation --record`")
        self._optim, self._seconds = place / "optim", {}
        for case in ElementTree.parse(place / "tests.xml").iter("testcase"):
            file, name = case.get("file"), case.get("name")
            # Not those that failed or were skipped.
            if len(case) == 0:
                owner = case.get("classname")[len(file) - 2 :]
                self._seconds[file, owner, name] = float(case.get("time"))
        self._data = CoverageData(str(place / "data"))
        self._data.read()

    def tests(self, fault: Fault, optim: Path) -> list[str]:
        """Those that execute the lines that the fault is about, quick classes first."""
        if not (self._optim / fault.file).exists():
            raise WrongTarget(f"{fault.file} is newer than the record: --record again")
        files, end = self._data.measured_files(), f"/torch/optim/{fault.file}"
        known = self._data.contexts_by_lineno(
            next((f for f in files if f.endswith(end)), "")
        )
        new, old = (
            (at / fault.file).read_text().split("\n") for at in (optim, self._optim)
        )
        # For each line where it was; for an edited one, around what it took the place of.
        was = {}
        for same, i, j, k, m in difflib.SequenceMatcher(
            None, new, old, False
        ).get_opcodes():
            for at in range(i, j):
                was[at + 1] = [at - i + k + 1] if same == "equal" else range(k, m + 2)
        before = {n for line in range(fault.first, fault.last + 1) for n in was[line]}
        words = [c.split(".") for line in before for c in known.get(line, ())]
        # A class may have its tests from another one of the file, and with parameters.
        runs = {(word, each[-1]) for each in words for word in each}
        found = [
            test
            for test in self._seconds
            if any((Path(test[0]).stem, test[2][:n]) in runs for n in range(1, 200))
        ]
        # Any test may need the lines that only an import executes.
        found = found or list(self._seconds)
        cost = Counter()
        for test in found:
            cost[test[:2]] += self._seconds[test]
        found.sort(
            key=lambda test: ("distributed" in test[0], cost[test[:2]], test[:2])
        )
        return ["::".join(filter(None, test)) for test in found]
