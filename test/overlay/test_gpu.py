"""The page of `setup_overlay.py gpu`, played on a CPU."""

import json
import time

import pytest


pytest.importorskip("torch.optim.muon", reason="the interpreter's torch has no overlay")

import torch
from tools.bench import cli
from tools.bench.gpu import __main__ as gpu, stages


def sleep(rank, world, job):
    time.sleep(60)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    """Its minutes are for people who ask for them."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **how: None)


def test_every_stage_and_the_constants_of_the_simulator(tmp_path, capsys):
    assert gpu.main([str(tmp_path)]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "without a GPU" in page
    found = json.loads((tmp_path / "gpu.json").read_text())
    states = {name: stage["state"] for name, stage in found["stages"].items()}
    expected = {stage.__name__: "done" for stage in stages.STAGES}
    assert states == {**expected, "tests": "not run"}, page
    for name, state in states.items():
        assert f"\n## {name}: {state}, " in page
    assert " skipped, " in found["stages"]["tests"]["texts"][0]

    values = {name: stage["values"] for name, stage in found["stages"].items()}
    # Half of three pairs of matrices: momentum in float32; in bfloat16, a rank sends half of that half to
    # the owner, and half of what it owns back.
    half = 32 * 64 + 64 * 64 + 64 * 32
    of_step = values["costs"]
    assert of_step["ours-1-quintic"][3] == of_step["stock"][3] == 4 * half
    assert values["exchange"]["those of a step"][0] == 2 * half
    assert values["trace"]["cpu_op"] > 0
    assert (tmp_path / "trace.json.gz").exists()

    what = ["scale", "--only", "GPT-2 124M, FSDP, 8 ranks"]
    capsys.readouterr()
    assert cli.main([*what, "--hardware", str(tmp_path / "gpu.json")]) == 0
    here = capsys.readouterr().out
    named = [f"{name}={value}" for name, value in found["hardware"].items()]
    assert cli.main([*what, "--hardware", *named]) == 0
    assert capsys.readouterr().out == here
    assert cli.main(what) == 0
    assert capsys.readouterr().out != here


def test_a_stage_that_fails_or_hangs_stops_no_other(tmp_path, monkeypatch):
    def fails(machine):
        raise RuntimeError("of this stage")

    def hangs(machine):
        machine.run(sleep, None, 1)

    def hangs_outside(machine):
        stages.output(["sh", "-c", "echo begun; sleep 60 & sleep 60"], machine.seconds)

    def runs(machine):
        return stages.Found(["ran"], {})

    plan = {fails: 9, hangs: 1, hangs_outside: 0.5, runs: 9}
    monkeypatch.setattr(gpu, "STAGES", plan)
    assert gpu.main([str(tmp_path)]) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert [s["state"] for s in found.values()] == ["failed"] * 3 + ["done"]
    ends = "RuntimeError: of this stage", "took more than 1 s", "none after 0 s\nbegun"
    for stage, end in zip(found.values(), ends):
        assert stage["texts"][0].endswith(end)
