"""The bench times a step."""

import pytest


pytest.importorskip("torch.optim.muon", reason="the interpreter's torch has no overlay")

from tools.bench import cli


TINY = ("--workloads", "tiny", "--world", "2", "--layouts")


def test_step(capsys):
    layouts = ["shard", "fsdp1", "ddp"]
    options = ("--reps", "2", "--algorithms", "quintic", "gram")
    assert cli.main(["step", *TINY, *layouts, *options]) == 0
    printed = capsys.readouterr().out
    assert printed.count("2 repetitions") == len(layouts)
    assert printed.count("ours-gram  ") == len(layouts)
    assert printed.count("stock") == len(layouts) - 1  # It refuses FSDP1.
