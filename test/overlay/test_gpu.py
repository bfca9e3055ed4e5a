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
    summary, skipped, reason = found["stages"]["tests"]["texts"]
    assert summary.endswith(" skipped")
    assert "skipped (Need at least 1 CUDA device)" in skipped
    assert reason == "No test ran."

    values = {name: stage["values"] for name, stage in found["stages"].items()}
    # Half of three pairs of matrices: momentum in float32; in bfloat16, a rank sends half of that half to
    # the owner, and half of what it owns back.
    half = 32 * 64 + 64 * 64 + 64 * 32
    of_step = values["costs"]
    assert of_step["ours-1-quintic"][3] == of_step["stock"][3] == 4 * half
    assert values["exchange"]["those of a step"][0] == 2 * half
    assert list(values["host"]["tiny"]["FSDP2"]) == list(of_step)

    what = ["scale", "--only", "GPT-2 124M, FSDP, 8 ranks"]
    capsys.readouterr()
    assert cli.main([*what, "--hardware", str(tmp_path / "gpu.json")]) == 0
    here = capsys.readouterr().out
    named = [f"{name}={value}" for name, value in found["hardware"].items()]
    assert cli.main([*what, "--hardware", *named]) == 0
    assert capsys.readouterr().out == here
    assert cli.main(what) == 0
    assert capsys.readouterr().out != here


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

    def hangs_outside(machine):
        stages.output(["sh", "-c", "echo begun; sleep 60 & sleep 60"], machine.seconds)

    def runs(machine):
        return stages.Found(["ran"], {})

    def tells_first(machine):
        machine.tell(stages.Found(["known"], {"a": 1}, {"peak_flops": 2.0}))
        raise RuntimeError("later")

    plan = {tells_first: 9, fails: 9, hangs: 1, hangs_outside: 0.5, runs: 9}
    monkeypatch.setattr(gpu, "STAGES", plan)
    assert gpu.main([str(tmp_path)]) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert [s["state"] for s in found.values()] == ["failed"] * 4 + ["done"]
    told = found.pop("tells_first")
    assert (told["texts"][0], told["values"]) == ("known", {"a": 1})
    assert told["texts"][1].endswith("RuntimeError: later")
    ends = "RuntimeError: of this stage", "took more than 1 s", "none after 0 s\nbegun"
    for stage, end in zip(found.values(), ends):
        assert stage["texts"][0].endswith(end)


def test_a_command_that_is_ended_has_written_what_it_knew(tmp_path, monkeypatch):
    def is_ended(machine):
        machine.tell(stages.Found(["known"], {}))
        # A kill that cannot be handled would leave this.
        page = json.loads((tmp_path / "gpu.json").read_text())["stages"]["is_ended"]
        assert (page["state"], page["texts"]) == ("running", ["known"])
        raise SystemExit(143)

    monkeypatch.setattr(gpu, "STAGES", {is_ended: 9})
    with pytest.raises(SystemExit):
        gpu.main([str(tmp_path)])
    page = (tmp_path / "gpu.md").read_text()
    assert "## is_ended: cut off, " in page
    assert "```\nknown\n```" in page


TESTS = """
import time

def test_passes():
    pass

def test_fails():
    print("printed")
    raise RuntimeError("of this test")

def test_takes_long():
    time.sleep(600)

def test_comes_after():
    pass
"""


def test_tests_that_are_cut_off_leave_their_outcomes(tmp_path, monkeypatch, capsys):
    """pytest printed the texts of three failures at its end, which never came."""
    file = tmp_path / "test_it.py"
    file.write_text(TESTS)

    def cut(machine):
        return stages.run_tests(machine, [str(file)])

    def whole(machine):
        return stages.run_tests(machine, [str(file)], limit=2)

    monkeypatch.setattr(gpu, "STAGES", {cut: 20, whole: 60})
    assert gpu.main([str(tmp_path)]) == 1
    printed, _, _ = capsys.readouterr().out.partition("cut: cut off")
    assert "RuntimeError: of this test" in printed
    found = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert [stage["state"] for stage in found.values()] == ["cut off", "failed"]
    words, table, failure, reason = found["cut"]["texts"]
    assert words == "1 failed, 1 passed, 1 running"
    assert ("test_takes_long" in table, "test_comes_after" in table) == (True, False)
    assert "RuntimeError: of this test" in failure
    assert "printed" in failure
    assert reason.startswith("The time is over.")
    words, _, failure, too_long, reason = found["whole"]["texts"]
    assert words == "2 failed, 2 passed"
    assert "RuntimeError: of this test" in failure
    assert "test_takes_long took more than 2 s" in too_long
    assert reason.endswith("pytest ended with exit code 1")
