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
MATRICES, RANKS = 24, 8


def cells():
    """The notebook's cells: kind and source."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in found)
    return [(cell["cell_type"], "".join(cell["source"])) for cell in found]


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


def test_notebook(tmp_path):
    """All code cells, from the repository's root. Neither they nor their processes have NumPy."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('blocked')")
    source = "\n".join(source for kind, source in cells() if kind == "code")
    # Like a kernel, this __main__ has no file that a spawned process could import.
    code = "\n".join([FORKED, source, WRONG])
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    done = run(sys.executable, "-c", code, cwd=ROOT, env=env, timeout=500)
    out, wrong = done.out.rsplit("\nThe proof:", 1)
    assert "bitwise equal: NO" in wrong
    # The last cell raises what does not hold: bits, bytes and owners.
    assert out.count("bitwise equal: yes") == 2
    assert max(map(len, out.splitlines())) <= 100

    pattern = r"^the \w+ way +(\d+) +(\d+) +(\d+)$"
    rows = re.findall(pattern, out, re.MULTILINE)
    short, long = ([int(figure) for figure in row] for row in rows)
    assert short[:2] == [MATRICES, MATRICES / RANKS]
    assert long[0] > 2 * short[0]
    assert long[2] > 2 * short[2]


def test_notebook_is_up_to_date():
    script = jupytext.reads(SCRIPT.read_text(encoding="utf-8"), fmt="py:percent")
    assert cells() == [(cell.cell_type, cell.source) for cell in script.cells]
