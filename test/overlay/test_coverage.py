"""The coverage of the optimizer counts all processes, and too little of it is an error."""

import sys

import pytest
from overlay.conftest import put, run


pytest.importorskip("coverage")

from tools.coverage import check, error_lines
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


def test_processes_count_together_and_error_paths_are_missed(
    tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "torch" / "optim"
    put(folder, {"_muon.py": SOURCE})
    put(tmp_path, {"tests.py": TESTS})
    monkeypatch.setenv("MUON_MEASURED", str(folder))
    monkeypatch.setenv("COVERAGE_FILE", str(tmp_path / ".coverage"))

    def measure(x):
        options = f"--rcfile={ROOT / 'pyproject.toml'}"
        words = ("-m", "coverage", "run", options, "tests.py", x)
        run(sys.executable, *words, cwd=tmp_path)

    measure(0)
    assert check(limits=True) == 1
    out, _ = capsys.readouterr()
    assert "optim/_muon.py:3: raise ValueError( is in no test" in out
    # The data of a second run adds to the first.
    measure(3)
    assert check(limits=True) == 0
    out, _ = capsys.readouterr()
    assert "coverage: " not in out
    assert "optim/_muon.py" in out
    # A file that no test imports counts, too.
    put(folder, {"muon.py": "def f():\n    raise KeyError\n"})
    measure(3)
    assert check(limits=True) == 1
    out, _ = capsys.readouterr()
    assert "optim/muon.py:2: raise KeyError is in no test" in out
    assert check(limits=False) == 0
