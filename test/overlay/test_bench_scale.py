"""The cost of a step on many ranks: by hand where it is small, and the command's output."""

import json
import math
import re

import pytest


pytest.importorskip("torch.optim.muon", reason="the interpreter's torch has no overlay")

from tools.bench import cli
from tools.bench.models import Model
from tools.bench.scale import Case, GPU, matrices_of, Step
from tools.overlay.payload import ROOT
from torch.optim._muon_engine import plan
from torch.optim._muon_engine.regions import newton_schulz_flops


# A 4 x 4 matrix takes a second, and so do its 32 bytes on the wire. Each message takes a quarter more.
BY_HAND = GPU(
    peak_flops=newton_schulz_flops((4, 4)),
    utilization=1.0,
    memory_bandwidth=math.inf,
    inter_bandwidth=32.0,
    inter_latency=0.25,
    gpus_per_node=1,
)


def step_of(case, gpu, prefetch=1):
    """The step of rank 0."""
    owners = plan.assign_owners(matrices_of(case))
    return Step(plan.make_plan(owners, 0, prefetch), 0, gpu)


@pytest.mark.parametrize(
    ("matrices", "prefetch", "seconds"),
    [
        # Half a matrix comes in 0.75 s. Newton-Schulz takes 1 s, and the update comes in 0.75 s.
        (2, 1, 2.5),
        # Gathers until 0.75 and 1.5. Scatter 0 hides behind the second Newton-Schulz, from 1.75 to 2.75.
        (4, 1, 3.5),
        # Scatter 0 goes before gather 1: 1.75, 2.5, 3.25, then 1 and 0.75.
        (4, 0, 5.0),
    ],
)
def test_shards_by_hand(matrices, prefetch, seconds):
    case = Case(Model([(4, 4)] * matrices), "fsdp", 2)
    step = step_of(case, BY_HAND, prefetch)
    assert step.now == seconds
    # The rank lacks half of each matrix, which is 16 bytes: before Newton-Schulz of its own, after that of the others.
    assert step.received == matrices * 16


def test_replicas_by_hand(monkeypatch):
    """Two replicas of two shards. An update comes in half along the row, and one of the other row along the column."""
    case = Case(Model([(4, 4)] * 4), "hsdp", 2, 2)
    step = step_of(case, BY_HAND)
    # In the row as above, and then two halves of the other row.
    assert step.now == 2.5 + 1.25
    assert step.received == 2 * 16 + 2 * 16
    ddp = step_of(Case(Model([(4, 4)] * 4), "ddp", 4), BY_HAND)
    # Newton-Schulz, and three whole updates.
    assert ddp.now == 1 + 3 * 1.25
    assert ddp.received == 3 * 32
    # A row of each in a round, so that there are four.
    monkeypatch.setattr(plan, "ROUND_BYTES", 3 * 8)
    ddp = step_of(Case(Model([(4, 4)] * 4), "ddp", 4), BY_HAND)
    assert ddp.now == 1 + 4 * 3 * 0.5
    assert ddp.received == 3 * 32


def test_passes_by_hand():
    """Two matrices of 16 elements on two ranks, which store half of each, with a byte of memory in a second."""
    gpu = GPU(peak_flops=math.inf, memory_bandwidth=1.0, intra_bandwidth=math.inf)
    step = step_of(
        Case(Model([(4, 4)] * 2), "fsdp", 2), gpu._replace(intra_latency=0.0)
    )
    # Momentum, what is orthogonalized, and the update of 16 elements; and 16 of a matrix that it puts together, and back.
    assert step.now == 16 * (12 + 18 + 26) + 16 * (4 + 4)


@pytest.mark.parametrize(
    ("layout", "shard_dim", "grids"),
    [
        ("fsdp", 0, {8: 1, 1: 4}),
        ("fsdp", 1, {8: 5}),
        ("fsdp-tp", 1, {8: 5}),
        ("fsdp-ep", 0, {8: 1, 4: 4}),
    ],
)
def test_experts(layout, shard_dim, grids):
    """How many ranks share a dense matrix and four experts."""
    case = Case(Model([(16, 16), (4, 16, 8)], 1), layout, 4, 2, shard_dim)
    sizes = [len(matrix.layout.ranks) for matrix in matrices_of(case)]
    assert {size: sizes.count(size) for size in sizes} == grids


def test_the_page_about_your_model_says_what_the_command_prints(
    tmp_path, monkeypatch, capsys
):
    page = (ROOT / "docs" / "performance.md").read_text().partition("## Your model")[2]
    code, command, printed = re.findall(
        r"```(?:python|bash|text)\n(.*?)```", page, re.DOTALL
    )
    (tmp_path / "my_model.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(command.partition("tools.bench ")[2].split()) == 0
    assert capsys.readouterr().out.strip() == printed.strip()


def test_gpus_and_wrong_arguments(tmp_path, capsys):
    measured = tmp_path / "gpu.json"
    measured.write_text(json.dumps({"hardware": {"peak_flops": 312e12}}))
    words = ["scale", "--model", "GPT-2 124M", "--layouts", "fsdp", "--ranks", "8"]
    steps = set()
    same = ["memory_bandwidth=1e12", "intra_bandwidth=2e11"]
    for names in ["a100"], ["h100", "peak_flops=312e12"], [str(measured)]:
        assert cli.main([*words, "--gpu", *names, *same]) == 0
        steps.add(capsys.readouterr().out)
    assert len(steps) == 1
    for more, said in (
        (["--model", "GPT-7"], "GPT-7"),
        (["--inner", "3"], "does not divide"),
        (["--gpu", "gpus=4"], "gpus"),
        (["--gpu", "lost.json"], "lost.json"),
    ):
        assert cli.main([*words, *more]) == 1
        assert said in capsys.readouterr().err
