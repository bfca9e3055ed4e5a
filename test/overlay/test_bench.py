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


def test_step(capsys):
    layouts = ["shard", "fsdp1", "ddp"]
    options = ("--reps", "2", "--algorithms", "quintic", "gram")
    assert cli.main(["step", *TINY, *layouts, *options]) == 0
    printed = capsys.readouterr().out
    assert printed.count("2 repetitions") == len(layouts)
    assert printed.count("ours-gram  ") == len(layouts)
    assert printed.count("stock") == len(layouts) - 1  # It refuses FSDP1.


def test_bytes_are_the_least(capsys):
    assert cli.main(["bytes", *TINY, "shard", "ddp"]) == 0
    sharded, replicated = capsys.readouterr().out.strip().split("\n\n")
    # Half of each of three pairs of matrices goes to its owner, and half comes back, in bfloat16.
    least = 2 * 2 * (32 * 64 + 64 * 64 + 64 * 32) / 1e6
    for printed, calls_of_step in (
        # Three buckets.
        (sharded, "1 allreduce, 6 alltoall_base"),
        # Both ranks send whole updates.
        (replicated, "1 allreduce, 6 broadcast"),
    ):
        assert f"at least {least:.3f} MB" in printed
        total, times, calls = table_of(printed, "ours-quintic")
        assert (total, times) == (f"{least:.3f}", "1.0000")
        assert calls == calls_of_step
        assert table_of(printed, "adamw")[0] == "0.000"
    assert float(table_of(sharded, "stock")[1]) > 4
