"""The examples run on several processes and train."""

import importlib
import io
import json
import math
import re
import shutil
import sys

import pytest
from overlay.example_runs import run_example
from tools.overlay.payload import ROOT


EXAMPLES = ROOT / "examples"
TINY = ["--layers", 1, "--width", 32, "--heads", 2, "--context", 32, "--batch", 4]


@pytest.mark.parametrize(
    ("script", "processes", "options"),
    [
        ("train_ddp.py", 2, ["--steps", 10, "--batch", 2, "--accumulate", 2]),
        ("train_fsdp1.py", 2, ["--steps", 10, "--strategy", "SHARD_GRAD_OP"]),
        ("train_moe.py", 4, ["--steps", 10]),
        ("train_pipeline.py", 4, ["--steps", 10]),
        ("custom_functions.py", 2, []),
        ("fused_weights.py", 2, []),
    ],
)
def test_loss_falls(script, processes, options):
    run = run_example(EXAMPLES / script, *options, processes=processes)
    assert run.code == 0, run.err
    assert "Warning" not in run.err
    losses = re.findall(r"loss ([\d.]+)$", run.out, re.MULTILINE)
    losses = [float(loss) for loss in losses]
    # A fresh GPT guesses each of 256 bytes.
    assert losses and losses[-1] < min([*losses[:-1], math.log(256) - 1])


def test_checkpoint_resumes_on_another_mesh(tmp_path):
    """Saved by four ranks of HSDP, resumed by two of tensor parallelism in bfloat16."""
    script, folder = EXAMPLES / "train_fsdp2.py", tmp_path / "checkpoint"
    found = []
    for processes, options in (
        (4, ["--replicate", 2, "--steps", 6, "--save", folder]),
        (2, ["--tp", 2, "--bf16", "--steps", 9, "--resume", folder]),
    ):
        options += [*TINY, "--losses", tmp_path / "losses"]
        run = run_example(script, *options, processes=processes)
        assert run.code == 0, run.err
        found.append(json.loads((tmp_path / "losses").read_text()))
    saved, resumed = ([step["loss"] for step in each["steps"]] for each in found)
    assert (len(saved), len(resumed)) == (6, 3)
    assert saved[0] == pytest.approx(math.log(256), abs=1e-3)
    assert resumed[0] < saved[-1] + 0.05
    assert found[1]["held_out"] < found[0]["held_out"] < saved[0]


def test_script_to_copy(tmp_path):
    """Started again, it has the loss of a run that was not interrupted."""
    script = EXAMPLES / "train.py"
    assert len(script.read_text().splitlines()) <= 70
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    runs = []
    for folder in (whole, broken):
        runs.append(run_example(script, folder, 20, processes=2))
        assert runs[-1].code == 0, runs[-1].err
        assert "Warning" not in runs[-1].err
        shutil.copytree(whole / "10", broken / "10", dirs_exist_ok=True)
    first, last = runs[0].out.splitlines()
    assert runs[1].out.splitlines() == [last]
    assert float(last.split()[-1]) < float(first.split()[-1]) < math.log(256) - 1


def test_timeline(tmp_path):
    picture = tmp_path / "timeline.png"
    options = ["--width", 32, "--steps", 2, "--picture", picture]
    script = EXAMPLES / "timeline.py"
    run = run_example(script, *options, processes=2)
    assert run.code == 0, run.err
    assert "2 ranks (0, 1), 24 matrices" in run.out
    rows = re.findall(r"^ +([01])((?: +\d+\.\d){9})$", run.out, re.MULTILINE)
    assert [rank for rank, _ in rows] == ["0", "1"]
    for _, spent in rows:
        gather, _, orthogonalize, scatter, *_ = map(float, spent.split())
        assert min(gather, orthogonalize, scatter) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_timeline_has_a_colour_for_each_action(monkeypatch):
    """A step with relays ended in a KeyError: its profiler ranges had new names."""
    pytest.importorskip("torch.optim.muon")
    from torch.optim._muon_engine.schedule.order import Action

    monkeypatch.syspath_prepend(str(EXAMPLES))
    timeline = importlib.import_module("timeline")
    assert list(timeline.COLOURS) == [action.value for action in Action]


@pytest.mark.parametrize("terminal", [True, False])
def test_bar_is_for_terminals(monkeypatch, terminal):
    """A log had one line of eight kilobytes."""
    pytest.importorskip("torch.optim.muon")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    train = importlib.import_module("train_fsdp2")
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    for step in range(1, 26):
        train.show(step, 25, 1 / step)
    text = out.getvalue()
    lines = text.splitlines()  # which also ends a line at a carriage return
    assert text.count("\r") == (24 if terminal else 0)
    assert text.endswith("step 25, loss 0.0400\n")
    assert len(lines) == (25 if terminal else 10)
    assert lines[0] == (
        f"{'#':.<30} step 1, loss 1.0000" if terminal else "step 3, loss 0.3333"
    )


@pytest.fixture
def compare_gpt(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("compare_gpt")


def test_comparison(compare_gpt, monkeypatch, capfd, tmp_path):
    """torchrun itself starts the run on one process; its processes each import torch."""
    torchrun = compare_gpt.torchrun

    def start(count, script, *arguments):
        if count == 1:
            return torchrun(count, script, *arguments)
        run = run_example(EXAMPLES / script, *arguments, processes=count)
        assert run.code == 0, run.err

    monkeypatch.setattr(compare_gpt, "torchrun", start)
    words = ["--processes", 2, *TINY, "--steps", 6, "--exact-steps", 2]
    words = ["compare_gpt.py", *words, "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    assert compare_gpt.main() == 0
    out = capfd.readouterr().out
    assert "train_fsdp2.py on 1 process" in out
    assert "bitwise equal: yes (6 matrices, 2 steps)" in out
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")
