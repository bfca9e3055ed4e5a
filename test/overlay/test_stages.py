"""The stages of TESTING.md can be chosen."""

import re
import subprocess
import sys

import pytest
from tools.overlay.repo import ROOT


STAGES = ["stage1", "stage2", "stage3", "stage4", "overlay"]


@pytest.fixture(scope="module")
def collected():
    """The tests of each stage."""
    found = {}
    for stage in STAGES:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
        command += ["-p", "no:cacheprovider", "-m", stage, "test"]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found[stage] = {line for line in done.stdout.splitlines() if "::" in line}
        total = int(re.search(r"/(\d+) tests collected", done.stdout)[1])
    assert sum(map(len, found.values())) == total
    return found


def test_each_test_has_one_stage(collected):
    # Shows: testing/stages
    every = set().union(*collected.values())
    assert len(every) == sum(map(len, collected.values()))


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
    # Shows: testing/stages
    assert any(name.endswith(test) for name in collected[stage])


def test_files_have_names_of_their_own():
    # Worker processes import a test file by its bare name, from whichever folder comes first.
    names = [p.name for p in (ROOT / "test").rglob("*.py") if p.name != "conftest.py"]
    twice = {name for name in names if names.count(name) > 1}
    # Upstream has the one, and the other is what the documents ask for.
    assert twice == {"test_muon.py"}
