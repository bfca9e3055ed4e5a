"""The workflow calls only what exists, and each cell of its matrix is a test."""

import itertools
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from tools.overlay.cli import _parser
from tools.overlay.repo import ROOT


WORKFLOW = ROOT / ".github" / "workflows" / "test_muon.yml"
# Of GitHub itself, each of one major version.
ACTIONS = r"actions/(checkout|setup-python)@v\d+"


@pytest.fixture(scope="module")
def jobs():
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]


def commands(jobs):
    """Each command of a job, in words, with its cell's values where the job has a matrix."""
    for job in jobs.values():
        axes = job.get("strategy", {}).get("matrix", {})
        for values in itertools.product(*axes.values()):
            cell = dict(zip(axes, values))
            for step in job["steps"]:
                if "run" in step:
                    yield shlex.split(
                        re.sub(
                            r"\$\{\{ matrix\.(\w+) \}\}",
                            lambda found: str(cell[found[1]]),
                            step["run"],
                        )
                    )


def test_matrix_is_that_of_the_document(jobs):
    assert jobs["matrix"]["strategy"]["matrix"] == {
        "parallelism": ["fsdp", "ddp", "tp", "fsdp_tp", "hsdp", "ep"],
        "num_gpus": [2, 4, 8],
        "prefetch": [0, 1, 2],
        "async_parallel": ["True", "False"],
    }


def test_commands_and_files_exist(jobs):
    (subcommands,) = (a for a in _parser()._actions if a.dest == "command")
    found = list(commands(jobs))
    assert len(found) == 1 + 6 * 3 * 3 * 2
    for program, *arguments in found:
        if program == "python3":
            script, command, *arguments = arguments
            assert script == "setup_overlay.py"
            assert command in subcommands.choices
        else:
            assert os.access(ROOT / program, os.X_OK), program
        for word in arguments:
            assert (ROOT / word.split("::")[0]).exists(), word
    for job in jobs.values():
        for step in job["steps"]:
            assert len({"run", "uses"} & set(step)) == 1
            assert re.fullmatch(ACTIONS, step.get("uses", "actions/checkout@v4"))
            depends = step.get("with", {}).get("cache-dependency-path")
            assert depends is None or (ROOT / depends).exists()


def test_each_cell_is_a_test(jobs):
    named = {command[-1] for command in commands(jobs) if "::" in command[-1]}
    (path,) = {name.split("::")[0] for name in named}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q"]
        + ["-p", "no:cacheprovider", path],
        cwd=ROOT,
        env={**os.environ, **jobs["matrix"]["env"]},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    there = {line for line in done.stdout.splitlines() if "::test_matrix_" in line}
    assert named == there
