"""The bench runs, and its figures are those of the arithmetic."""

import re

import pytest


pytest.importorskip("torch.optim.muon", reason="the interpreter's torch has no overlay")

from tools.bench import cli


TINY = ("--workloads", "tiny", "--world", "2", "--layouts")


def table_of(text, name):
    """The cells of the row ``name``."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}  ")]
    return re.split(r"  +", line)[1:]


def test_step(capsys, tmp_path):
    layouts = ["shard", "fsdp1", "ddp"]
    options = ("--reps", "2", "--algorithms", "quintic", "gram", "--write", tmp_path)
    assert cli.main(["step", *TINY, *layouts, *map(str, options)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("2 repetitions") == len(layouts)
    (overview,) = [t for t in printed.split("\n\n") if t.startswith("x limit")]
    assert overview.count("refuses") == 1  # stock Muon on FSDP1
    assert "ours-1-gram" in overview
    page = (tmp_path / "step.md").read_text()
    assert "python -m tools.bench step --workloads tiny" in page
    assert overview.strip() in page


def test_bytes_are_the_least(capsys):
    assert cli.main(["bytes", *TINY, "shard", "--against", "allgather", "adamw"]) == 0
    printed = capsys.readouterr().out
    # Half of each of three pairs of matrices goes to its owner, and half comes back, in bfloat16.
    least = 2 * 2 * (32 * 64 + 64 * 64 + 64 * 32) / 1e6
    assert f"at least {least:.3f} MB" in printed
    total, _, times, calls = table_of(printed, "ours-1-quintic")
    assert (total, times) == (f"{least:.3f}", "1.0000")
    assert "1 allreduce" in calls
    assert table_of(printed, "allgather")[-1] == "6 all_gather_into_tensor"
    assert table_of(printed, "adamw")[0] == "0.000"
