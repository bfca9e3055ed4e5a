"""The stages of TESTING.md: each test has the marker of one of them."""

import importlib.util

import pytest
from tools.overlay.payload import ROOT


STAGES = {"stage1", "stage2", "stage3", "stage4", "overlay"}
spec = importlib.util.spec_from_file_location("stages", ROOT / "test" / "conftest.py")
conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conftest)


def case(name, **attributes):
    return type(name, (), attributes)


@pytest.mark.parametrize(
    ("folder", "case", "stage"),
    [
        ("optim", case("TestMuonErrors"), "stage1"),
        ("optim", None, "stage1"),
        ("optim", case("TestMuonCore"), "stage2"),
        ("distributed", case("TestMuonFSDP", world_size=2), "stage3"),
        ("distributed", case("TestMuon", world_size=property(lambda _: 4)), "stage3"),
        ("distributed", case("TestMuonDTensorOnGPUs"), "stage3"),
        ("distributed", case("TestMuonMatrixOf8", world_size=8), "stage4"),
        ("distributed", case("TestMuonPerformance", world_size=2), "stage4"),
        ("overlay", None, "overlay"),
        ("frameworks", None, "overlay"),
    ],
)
def test_stage(folder, case, stage):
    assert conftest.stage_of(folder, case) == stage


def test_each_test_has_one_stage(request):
    for item in request.session.items:
        assert len({mark.name for mark in item.iter_markers()} & STAGES) == 1


def test_files_have_names_of_their_own():
    # Worker processes import a test file by its bare name, from the first folder that has it.
    names = [p.name for p in (ROOT / "test").rglob("*.py") if p.name != "conftest.py"]
    twice = {name for name in names if names.count(name) > 1}
    # Upstream has the one, and the documents ask for the other.
    assert twice == {"test_muon.py"}
