"""test/conftest.py: each test has the marker of one of TESTING.md's stages."""

ON_ONE_GPU = {
    "TestMuonOnGPU",
    "TestMuonOnOneGPU",
    "TestMuonFusedOnGPU",
}
STAGES = {"stage1", "stage2", "stage3", "stage4", "overlay"}


def test_each_test_has_one_stage(request):
    for item in request.session.items:
        (stage,) = {mark.name for mark in item.iter_markers()} & STAGES
        case = getattr(item.cls, "__name__", "")
        assert (stage == "stage2") == (case in ON_ONE_GPU)
