"""The stages of TESTING.md: each test has the marker of one of them."""

from tools.overlay.payload import ROOT


STAGES = {"stage1", "stage2", "stage3", "stage4", "overlay"}


def test_each_test_has_one_stage(request):
    for item in request.session.items:
        assert len({mark.name for mark in item.iter_markers()} & STAGES) == 1


def test_files_have_names_of_their_own():
    # Worker processes import a test file by its bare name, from the first folder that has it.
    names = [p.name for p in (ROOT / "test").rglob("*.py") if p.name != "conftest.py"]
    twice = {name for name in names if names.count(name) > 1}
    # Upstream has the one, and the documents ask for the other.
    assert twice == {"test_muon.py"}
