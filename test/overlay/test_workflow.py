"""Each cell of the workflow's matrix is a test."""

import itertools
import os
import re
import shlex
import sys

import yaml
from overlay.conftest import run
from tools.overlay.payload import ROOT


WORKFLOW = ROOT / ".github" / "workflows" / "test_muon.yml"
JOBS = yaml.safe_load(WORKFLOW.read_text())["jobs"]


def commands():
    """Each command of a job, in words, with its cell's values if the job has a matrix."""
    for job in JOBS.values():
        axes = job.get("strategy", {}).get("matrix", {})
        for values in itertools.product(*axes.values()):
            cell = dict(zip(axes, map(str, values)))
            for line in (step["run"] for step in job["steps"] if "run" in step):
                pattern = r"\$\{\{ matrix\.(\w+) \}\}"
                yield shlex.split(re.sub(pattern, lambda m: cell[m[1]], line))


def test_matrix_is_that_of_the_document():
    assert JOBS["matrix"]["strategy"]["matrix"] == {
        "parallelism": ["fsdp", "ddp", "tp", "fsdp_tp", "hsdp", "ep"],
        "num_gpus": [2, 4, 8],
        "prefetch": [0, 1, 2],
        "async_parallel": ["True", "False"],
    }


def test_each_cell_is_a_test():
    named = {command[-1] for command in commands() if "::" in command[-1]}
    assert len(named) == 6 * 3 * 3 * 2
    (path,) = {name.split("::")[0] for name in named}
    words = ("-m", "pytest", "--collect-only", "-q", path)
    env = {**os.environ, **JOBS["matrix"]["env"]}
    found = run(sys.executable, *words, cwd=ROOT, env=env).out.splitlines()
    assert named == {line for line in found if "::test_matrix_" in line}
