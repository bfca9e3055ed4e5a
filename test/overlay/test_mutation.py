"""A fault meets the tests that execute its line, in a copy."""

import pytest
from overlay.conftest import put


pytest.importorskip("cosmic_ray")

from coverage import CoverageData
from tools.mutation import __main__ as command, record


SOURCE = """def f(x):
    if x < 3:
        raise ValueError(f"{x + 1} is less")
    return x


def g(x, size=2):
    return x * size
"""
TESTS = """import os
import runpy

names = runpy.run_path(os.environ.get("PYTHONPATH", "torch") + "/optim/a.py")


def test_f():
    assert names["f"](4) == 4


def test_g():
    assert names["g"](3) == 6


def test_that_fails():
    assert False
"""
CASE = '<testcase file="test/test_a.py" classname="test.test_a" name="{}" time="1" />'


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A file of the copy, whose tests were recorded."""
    place = tmp_path / "build"
    for name, value in (("ROOT", tmp_path), ("PLACE", place), ("COPY", place / "copy")):
        monkeypatch.setattr(command, name, value)
    put(tmp_path, {"torch/optim/a.py": SOURCE, "test/test_a.py": TESTS})
    command.copy_optimizer()
    command.shutil.copytree(command.COPY, place / "recorded")
    names = ("test_f", "test_g", "test_that_fails")
    cases = "".join(map(CASE.format, names))
    (place / "tests.xml").write_text(f"<testsuite>{cases}</testsuite>")
    data = CoverageData(str(place / "data"))
    for name, lines in (("test_f", [2, 4]), ("test_g", [8]), ("test_that_fails", [8])):
        data.set_context(f"test_a.{name}")
        data.add_lines({"/elsewhere/torch/optim/a.py": lines})
    data.write()
    monkeypatch.setenv("PYTHONPATH", str(command.COPY))
    monkeypatch.setattr(command, "WORKERS", [])
    return command.COPY / "optim" / "a.py"


@pytest.mark.parametrize(
    ("old", "new", "noticed"),
    [
        ("x * size", "x + size", 1),
        # No test executes the line, so all tests run. One fails without the fault, too.
        ("x + 1", "x - 1", 0),
    ],
)
def test_what_notices_a_fault(path, old, new, noticed):
    path.write_text(SOURCE.replace(old, new))
    assert command.test_fault() == noticed
    # Nothing but the copy has changed.
    original = command.ROOT / "torch" / "optim" / "a.py"
    assert original.read_text() == SOURCE


def test_lines_choose_tests(path):
    path.write_text(SOURCE.replace("return x\n", "return -x\n"))
    tests = record.tests_of(command.PLACE, command.COPY, path)
    assert tests == ["test/test_a.py::test_f"]
    # Any test may need a line that an import executes.
    path.write_text(SOURCE.replace("size=2", "size=3"))
    assert len(record.tests_of(command.PLACE, command.COPY, path)) == 3
