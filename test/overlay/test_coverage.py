"""The coverage of the optimizer is measured in all processes, and too little of it is found."""

import subprocess
import sys

import pytest


pytest.importorskip("coverage")

from tools.coverage import error_lines, problems
from tools.overlay.repo import ROOT


SOURCE = """\
def f(x):
    if x > 2:
        raise ValueError(
            "too large"
        )
    try:
        return 1 / x
    except ZeroDivisionError:
        x = 1
        raise
    raise NotImplementedError
"""

# Each branch of the optimizer's stand-in runs in a process of its own.
TESTS = """\
import multiprocessing
import os
import subprocess
import sys
sys.path.insert(0, os.path.dirname(os.environ["MUON_MEASURED"]))

def run(x):
    import optim._muon
    try:
        optim._muon.f(x)
    except Exception:
        pass
    os._exit(0) if x == 0 else None

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for x in map(int, sys.argv[1:]):
        process = context.Process(target=run, args=(x,))
        process.start()
        process.join()
    code = "import sys; sys.argv = ['']; import runpy; runpy.run_path('tests.py')['run'](1)"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_error_lines():
    assert error_lines(SOURCE) == {
        3: "raise ValueError(",
        9: "x = 1",
        10: "raise",
    }


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs a stand-in with the given numbers and returns the report's output and exit code."""
    folder = tmp_path / "torch" / "optim"
    folder.mkdir(parents=True)
    (folder / "_muon.py").write_text(SOURCE)
    (folder / "other.py").write_text("x = 1\n")
    (tmp_path / "tests.py").write_text(TESTS)
    monkeypatch.setenv("MUON_MEASURED", str(folder))
    monkeypatch.setenv("COVERAGE_FILE", str(tmp_path / ".coverage"))
    config = ROOT / "pyproject.toml"

    def measure(*numbers, options=()):
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}"]
        command += ["tests.py", *map(str, numbers)]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
        done = subprocess.run(
            [sys.executable, "-m", "tools.coverage", *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not done.stderr
        return done.stdout, done.returncode

    return measure


def test_processes_count_together(measured):
    out, code = measured(0, 3)
    assert code == 0, out
    assert "optim/_muon.py" in out
    assert "other.py" not in out
    assert "coverage: " not in out


def test_an_error_path_that_no_test_takes(measured):
    out, code = measured(0)
    assert code == 1
    assert "optim/_muon.py:3: raise ValueError( is in no test" in out
    out, code = measured(options=["--no-limits"])
    assert (code, "is in no test" in out) == (0, False)


def test_a_file_that_no_test_imports(measured, tmp_path):
    (tmp_path / "torch/optim/muon.py").write_text("def f():\n    raise KeyError\n")
    out, code = measured(0, 3)
    assert code == 1
    assert "optim/muon.py:2: raise KeyError is in no test" in out


def test_nothing_measured(measured, tmp_path):
    (tmp_path / "tests.py").write_text("")
    out, code = measured()
    assert code == 1
    assert "0.0 % of the statements executed" in out


@pytest.mark.parametrize(
    ("lines", "branches", "words"),
    [(90, 80, []), (89.9, 80, ["statements"]), (90, 79.9, ["branches"])],
)
def test_limits(lines, branches, words):
    totals = {"percent_statements_covered": lines, "percent_branches_covered": branches}
    found = list(problems({"totals": totals, "files": {}}))
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found))
