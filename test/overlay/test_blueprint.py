"""The blueprint tutorial runs, proves its claims, and its notebook is its script."""

import json
import os
import re
import sys

import jupytext
from overlay.conftest import run
from overlay.example_runs import ENVIRONMENT
from tools.overlay.payload import ROOT


EXAMPLES = ROOT / "examples"
SCRIPT, NOTEBOOK = EXAMPLES / "blueprint.py", EXAMPLES / "blueprint.ipynb"
MATRICES, RANKS = 24, range(8)
WAYS = ("the short way", "the long way")


def cells():
    """The notebook's cells: kind and source."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in found)
    return [(cell["cell_type"], "".join(cell["source"])) for cell in found]


def execute(code, cwd, path):
    """Exit code and output. A process that the code left behind would hold its output open."""
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(path)}
    return run(sys.executable, "-c", code, cwd=cwd, env=env, check=False, timeout=500)


# The eight processes do not import torch one by one.
FORKED = """
import functools, multiprocessing, torch.multiprocessing as mp
multiprocessing.set_forkserver_preload(["torch.distributed.tensor"])
mp.spawn = functools.partial(mp.start_processes, start_method="forkserver")
"""
# The proof notices reports with mistakes.
WRONG = """
reports[3]["differing"]["the long way"] = ["0.qkv"]
reports[5]["sent"] += 2
reports[6]["owned"] = reports[7]["owned"]
first, second, third = prove(reports)
assert first == "the long way: 0.qkv differs"
assert second.startswith("rank 5: sends ")
assert third.startswith("these matrices have an owner: ")
"""


def rows_of(out, pattern):
    return re.findall(rf"^ *{pattern}$", out, re.MULTILINE)


def test_notebook(tmp_path):
    """All code cells, from the repository's root. Neither they nor their processes have NumPy."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('blocked')")
    source = "\n".join(source for kind, source in cells() if kind == "code")
    # Like a kernel, this __main__ has no file that a spawned process could import.
    code = "\n".join([FORKED, source, WRONG])
    code, out, err = execute(code, ROOT, tmp_path)
    assert code == 0, err
    out, wrong = out.rsplit("\nThe proof:", 1)
    assert "bitwise equal: NO" in wrong
    for way in WAYS:
        assert re.search(rf"^  {way} +bitwise equal: yes$", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 100

    owned = rows_of(out, r"(\d) +(\d+) +(\d+) ((?: \d\.\w+)+)")
    assert len(owned) == len(RANKS)
    assert all(sent == least for _, sent, least, _ in owned)
    names = " ".join(names for *_, names in owned).split()
    assert len(names) == len(set(names)) == MATRICES
    costs = rows_of(out, r"(the \w+ way) +(\d+) +(\d+) +(\d+)")
    costs = {way: list(map(int, figures)) for way, *figures in costs}
    total = sum(int(sent) for _, sent, *_ in owned)
    assert costs["the short way"] == [MATRICES, 3, total]
    assert costs["the long way"][0] > 2 * MATRICES
    assert costs["the long way"][2] > 2 * total


def test_notebook_is_up_to_date():
    script = jupytext.reads(SCRIPT.read_text(encoding="utf-8"), fmt="py:percent")
    assert cells() == [(cell.cell_type, cell.source) for cell in script.cells]
