"""Each cell of the workflow's matrix is a test."""

import itertools
import re
import sys

import yaml
from overlay.conftest import run
from tools.overlay.payload import ROOT


WORKFLOW = ROOT / ".github" / "workflows" / "test_muon.yml"
JOB = yaml.safe_load(WORKFLOW.read_text())["jobs"]["matrix"]
AXES = JOB["strategy"]["matrix"]


def test_matrix_is_that_of_the_document():
    assert AXES == {
        "parallelism": ["fsdp", "ddp", "tp", "fsdp_tp", "hsdp", "ep"],
        "num_gpus": [2, 4, 8],
        "prefetch": [0, 1, 2],
        "async_parallel": ["True", "False"],
    }


def test_each_cell_is_a_test():
    _, _, command = JOB["steps"][-1]["run"].partition(" test ")
    named = set()
    for values in itertools.product(*AXES.values()):
        cell = dict(zip(AXES, map(str, values)))
        pattern = r"\$\{\{ matrix\.(\w+) \}\}"
        named.add(re.sub(pattern, lambda match: cell[match[1]], command))
    (path,) = {name.split("::")[0] for name in named}
    words = ("-m", "pytest", "--collect-only", "-q", path)
    found = run(sys.executable, *words, cwd=ROOT).out
    assert named == {line for line in found.splitlines() if "::test_matrix_" in line}
