"""The stages of TESTING.md can be chosen."""

import os

import pytest
from overlay.example_runs import Processes
from tools.overlay.repo import ROOT


STAGES = ["stage1", "stage2", "stage3", "stage4", "overlay"]


class Lists:
    """Writes down the markers of what `-m` chose, and what it left out."""

    def __init__(self):
        self.chosen, self.left_out = {}, []

    def pytest_deselected(self, items):
        self.left_out += [item.nodeid for item in items]

    def pytest_collection_finish(self, session):
        for item in session.items:
            self.chosen[item.nodeid] = [mark.name for mark in item.iter_markers()]


def collect(place):
    os.chdir(ROOT)
    lists = Lists()
    chosen = ["-p", "no:cacheprovider", "-p", "no:terminal"]
    chosen += ["-m", " or ".join(STAGES), "test"]
    code = pytest.main(["--collect-only", *chosen], plugins=[lists])
    return int(code), lists.chosen, lists.left_out


@pytest.fixture(scope="module")
def collected():
    """The markers of each test, collected once, in a process that has imported torch."""
    with Processes(1) as one:
        ((code, chosen, left_out),) = one.run(collect, seconds=120)
    assert code == 0
    assert left_out == []
    return chosen


def test_each_test_has_one_stage(collected):
    assert collected
    for test, markers in collected.items():
        assert len(set(markers) & set(STAGES)) == 1, test


@pytest.mark.parametrize(
    ("stage", "test"),
    [
        (
            "stage1",
            "optim/test_muon_config.py::TestMuonErrors::test_incomplete_assignment_raises",
        ),
        ("stage2", "optim/test_muon.py::TestMuonCore::test_backward_compatibility"),
        ("stage3", "optim/test_muon.py::TestMuonFSDP::test_fsdp_vs_single_device"),
        ("stage3", "optim/test_muon.py::TestMuonDTensorOnGPUs::test_dtensor_2d_mesh"),
        ("stage4", "optim/test_muon.py::TestMuonPerformance::test_prefetch_speedup"),
        ("stage4", "optim/test_muon.py::TestMuonMatrixOf8::test_3d_mesh"),
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
