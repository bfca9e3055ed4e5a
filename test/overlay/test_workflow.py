"""The workflow calls only what exists, and each cell of its matrix is a test."""

import itertools
import os
import re
import shlex
import sys

import yaml
from overlay.conftest import run
from tools.overlay.cli import _parser
from tools.overlay.payload import ROOT


WORKFLOW = ROOT / ".github" / "workflows" / "test_muon.yml"
JOBS = yaml.safe_load(WORKFLOW.read_text())["jobs"]
SCRIPT = "setup_overlay.py"
# GitHub's own actions, each of one major version.
ACTIONS = r"actions/(checkout|setup-python)@v\d+"


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


def test_commands_and_files_exist():
    (subcommands,) = (a for a in _parser()._actions if a.dest == "command")
    for program, *words in commands():
        if program == "python3":
            program, command, *words = words
            assert (program, command in subcommands.choices) == (SCRIPT, True)
        assert program == SCRIPT or os.access(ROOT / program, os.X_OK), program
        for word in words:
            assert (ROOT / word.split("::")[0]).exists(), word
    for step in (step for job in JOBS.values() for step in job["steps"]):
        assert len({"run", "uses"} & set(step)) == 1
        assert re.fullmatch(ACTIONS, step.get("uses", "actions/checkout@v4"))
        depends = step.get("with", {}).get("cache-dependency-path")
        assert depends is None or (ROOT / depends).exists()


def test_each_cell_is_a_test():
    named = {command[-1] for command in commands() if "::" in command[-1]}
    assert len(named) == 6 * 3 * 3 * 2
    (path,) = {name.split("::")[0] for name in named}
    words = ("-m", "pytest", "--collect-only", "-q", path)
    env = {**os.environ, **JOBS["matrix"]["env"]}
    found = run(sys.executable, *words, cwd=ROOT, env=env).out.splitlines()
    assert named == {line for line in found if "::test_matrix_" in line}
