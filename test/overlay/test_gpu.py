"""The page of `setup_overlay.py gpu`, played on a CPU."""

import json
import time

import pytest


pytest.importorskip("torch.optim.muon", reason="the interpreter's torch has no overlay")

import torch
from tools.bench import scale
from tools.bench.gpu import __main__ as gpu, stages


def sleep(rank, world, job):
    time.sleep(60)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    """Its minutes are for people who ask for them."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **how: None)


def pages(folder):
    found = json.loads((folder / "gpu.json").read_text())
    return (folder / "gpu.md").read_text(), found


def test_every_stage_and_the_constants_of_scale(tmp_path):
    assert gpu.main([str(tmp_path)]) == 0
    page, found = pages(tmp_path)
    assert "without a GPU" in page
    states = {name: stage["state"] for name, stage in found["stages"].items()}
    expected = {stage.__name__: "done" for stage in stages.STAGES}
    assert states == {**expected, "tests": "not run"}, page
    for name, state in states.items():
        assert f"\n## {name}: {state}, " in page
    assert "Need at least 1 CUDA device" in page
    # Momentum in float32 of half of three pairs of matrices.
    half = 32 * 64 + 64 * 64 + 64 * 32
    costs = found["stages"]["costs"]["values"]["tiny"]
    _, _, state, *_ = costs["ours-quintic"]
    assert state == costs["stock"][2] == 4 * half
    # tools.bench scale reads them.
    assert found["hardware"].keys() <= set(scale.GPU._fields)


def test_page_of_performance_has_each_stage():
    page = (stages.ROOT / "docs/performance.md").read_text()
    for stage in stages.STAGES:
        assert f"\n| {stage.__name__} | " in page
    assert sum(stages.STAGES.values()) < 15 * 60
    assert "at most 15 minutes" in page


def test_a_stage_that_fails_or_hangs_stops_no_other(tmp_path, monkeypatch):
    def fails(machine):
        raise RuntimeError("of this stage")

    def hangs(machine):
        machine.run(sleep, None, 1)

    def runs(machine):
        return stages.Found(["ran"])

    plan = {fails: 9, hangs: 1, runs: 9}
    monkeypatch.setattr(gpu, "STAGES", plan)
    assert gpu.main([str(tmp_path)]) == 1
    page, found = pages(tmp_path)
    states = {name: stage["state"] for name, stage in found["stages"].items()}
    assert states == {"fails": "failed", "hangs": "failed", "runs": "done"}
    for text in ("RuntimeError: of this stage", "took more than 1 s", "ran"):
        assert f"{text}\n```" in page
