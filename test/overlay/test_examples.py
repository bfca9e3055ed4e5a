"""The examples run on several processes and train."""

import importlib
import math
import re
import shutil
import sys

import pytest
from overlay.example_runs import run_example
from tools.overlay.payload import ROOT


EXAMPLES = ROOT / "examples"
TINY = ["--layers", 1, "--width", 32, "--heads", 2, "--context", 32, "--batch", 4]


def losses_in(run):
    assert run.code == 0, run.err
    assert "Warning" not in run.err
    found = re.findall(r"loss.* ([\d.]+)$", run.out, re.MULTILINE)
    return [float(loss) for loss in found]


@pytest.mark.parametrize(
    ("script", "processes"),
    [
        ("train_ddp.py", 2),
        ("train_fsdp1.py", 2),
        ("train_moe.py", 4),
        ("train_pipeline.py", 4),
        ("custom_functions.py", 2),
    ],
)
def test_loss_falls(script, processes):
    first, *_, last = losses_in(run_example(EXAMPLES / script, processes=processes))
    # A fresh GPT guesses each of 256 bytes.
    assert last < min(first, math.log(256) - 1)


def test_script_to_copy(tmp_path):
    """Started again, it has the loss of a run that was not interrupted, and nearly so on another mesh."""

    def losses(name, processes, *mesh):
        options = [*TINY, "--folder", tmp_path / name, "--steps", 20, *mesh]
        script = EXAMPLES / "train_fsdp2.py"
        return losses_in(run_example(script, *options, processes=processes))

    hsdp = (4, "--replicate", 2)
    first, *last = losses("whole", *hsdp)
    assert last[0] < first < math.log(256)
    for name in ("broken", "moved"):
        shutil.copytree(tmp_path / "whole" / "10", tmp_path / name / "10")
    assert losses("broken", *hsdp) == last
    assert losses("moved", 2, "--tp", 2) == pytest.approx(last, abs=0.01)


def test_comparison(monkeypatch, capfd, tmp_path):
    """torchrun itself starts the run on one process; its processes each import torch."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    compare_gpt = importlib.import_module("compare_gpt")
    torchrun = compare_gpt.torchrun

    def start(count):
        if count == 1:
            return torchrun(count)
        run = run_example(EXAMPLES / "compare_gpt.py", *words, processes=count)
        assert run.code == 0, run.err

    monkeypatch.setattr(compare_gpt, "torchrun", start)
    words = ["--processes", 2, *TINY, "--steps", 10, "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", list(map(str, ["compare_gpt.py", *words])))
    assert compare_gpt.main() == 0
    out = capfd.readouterr().out
    assert "FSDP2 on 1 process\n" in out
    assert "bitwise equal: yes (6 matrices, 5 steps)" in out
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")
