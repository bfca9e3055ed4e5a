"""The stages of TESTING.md can be chosen."""

import json
import os
import subprocess
import sys

import pytest
from tools.overlay.repo import ROOT


STAGES = ["stage1", "stage2", "stage3", "stage4", "overlay"]


# Writes down the markers of what `-m` chose, and what it left out.
LISTS = """
import json, os

report = {"chosen": {}, "left out": []}

def pytest_deselected(items):
    report["left out"] += [item.nodeid for item in items]

def pytest_collection_finish(session):
    for item in session.items:
        report["chosen"][item.nodeid] = [m.name for m in item.iter_markers()]
    with open(os.environ["STAGES_REPORT"], "w") as file:
        json.dump(report, file)
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """The markers of each test, collected once: that imports torch and all test files."""
    folder = tmp_path_factory.mktemp("stages")
    (folder / "lists_stages.py").write_text(LISTS)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    command += ["-p", "no:cacheprovider", "-p", "lists_stages"]
    command += ["-m", " or ".join(STAGES), "test"]
    env = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "STAGES_REPORT": str(folder / "report.json"),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert report["left out"] == []
    return report["chosen"]


def test_each_test_has_one_stage(collected):
    assert collected
    for test, markers in collected.items():
        assert len(set(markers) & set(STAGES)) == 1, test


@pytest.mark.parametrize(
    ("stage", "test"),
    [
        ("stage1", "optim/test_muon_config.py::TestMuonErrors::test_unknown_rank"),
        ("stage2", "optim/test_muon.py::TestMuonCore::test_backward_compatibility"),
        ("stage3", "optim/test_muon.py::TestMuonFSDP::test_fsdp_vs_single_device"),
        ("stage3", "optim/test_muon.py::TestMuonDTensorOnGPUs::test_dtensor_2d_mesh"),
        ("stage4", "optim/test_muon.py::TestMuonPerformance::test_prefetch_speedup"),
        ("stage4", "optim/test_muon_parallel.py::TestMuonEightRanks::test_3d_mesh"),
        ("stage4", "optim/test_muon_stress.py::TestMuonStress::test_many_sizes"),
        ("overlay", "overlay/test_stages.py::test_each_test_has_one_stage"),
    ],
)
def test_stages(collected, stage, test):
    (markers,) = (m for name, m in collected.items() if name.endswith(test))
    assert stage in markers


def test_files_have_names_of_their_own():
    # Worker processes import a test file by its bare name, from whichever folder comes first.
    names = [p.name for p in (ROOT / "test").rglob("*.py") if p.name != "conftest.py"]
    twice = {name for name in names if names.count(name) > 1}
    # Upstream has the one, and the other is what the documents ask for.
    assert twice == {"test_muon.py"}
