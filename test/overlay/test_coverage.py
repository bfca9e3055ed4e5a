"""The coverage of the optimizer counts all processes, and too little of it is an error."""

import os
import sys

import pytest
from overlay.conftest import run


pytest.importorskip("coverage")

from tools.coverage import error_lines
from tools.overlay.payload import ROOT


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
# Runs each branch of this optimizer in a process of its own: spawned, or started by its command line.
TESTS = """\
import multiprocessing, os, subprocess, sys
sys.path.insert(0, os.path.dirname(os.environ["MUON_MEASURED"]))

def run(x):
    import optim._muon
    try:
        optim._muon.f(x)
    except Exception:
        pass
    os._exit(0) if x == 0 else None

if __name__ == "__main__":
    for x in map(int, sys.argv[1:]):
        process = multiprocessing.get_context("spawn").Process(target=run, args=(x,))
        process.start()
        process.join()
    code = "import sys; sys.argv = ['']; import runpy; runpy.run_path('tests.py')['run'](1)"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_error_lines():
    assert error_lines(SOURCE) == {3: "raise ValueError(", 9: "x = 1", 10: "raise"}


def test_processes_count_together_and_error_paths_are_missed(tmp_path):
    folder = tmp_path / "torch" / "optim"
    folder.mkdir(parents=True)
    (folder / "_muon.py").write_text(SOURCE)
    (folder / "other.py").write_text("x = 1\n")
    (tmp_path / "tests.py").write_text(TESTS)
    place = {"MUON_MEASURED": str(folder), "COVERAGE_FILE": str(tmp_path / ".coverage")}

    def python(*arguments, cwd=ROOT):
        words, env = (sys.executable, *arguments), os.environ | place
        code, out, errors = run(*words, cwd=cwd, env=env, check=False)
        assert cwd != ROOT or not errors
        return out, code

    def check(limits):
        code = (
            f"import tools.coverage as it; raise SystemExit(it.check(limits={limits}))"
        )
        return python("-c", code)

    measure = (
        "-m",
        "coverage",
        "run",
        f"--rcfile={ROOT / 'pyproject.toml'}",
        "tests.py",
    )
    python(*measure, "0", cwd=tmp_path)
    out, code = check(True)
    assert code == 1
    assert "optim/_muon.py:3: raise ValueError( is in no test" in out
    # The data of a second run adds to the first.
    python(*measure, "3", cwd=tmp_path)
    out, code = check(True)
    assert (code, "coverage: " in out) == (0, False), out
    assert "optim/_muon.py" in out
    assert "other.py" not in out
    # A file that no test imports counts, too.
    (folder / "muon.py").write_text("def f():\n    raise KeyError\n")
    out, code = check(True)
    assert (code, "optim/muon.py:2: raise KeyError is in no test" in out) == (1, True)
    assert check(False)[1] == 0
