"""The bench runs, and its report has what a reader looks for. Its times are nobody's promise."""

import importlib.util
import json
import pathlib
import types

import pytest
from tools.bench import bound, cli, figures, gram, promises
from tools.bench.stock import stock_path


def overlaid():
    spec = importlib.util.find_spec("torch")
    return (
        spec is not None and pathlib.Path(spec.origin).with_name("optim") / "muon.py"
    ).is_file()


needs_overlay = pytest.mark.skipif(
    not overlaid(), reason="the interpreter's torch has no overlay"
)


@pytest.fixture
def bench(capsys, tmp_path):
    """`bench("step", ...)`: its report, and what it printed."""

    def call(*args):
        out = tmp_path / "report.json"
        assert cli.main([*args, "--out", str(out)]) == 0, capsys.readouterr().err
        return json.loads(out.read_text()), capsys.readouterr().out

    return call


def has_stock():
    try:
        stock_path()
    except FileNotFoundError:
        return False
    return True


TINY = ("--workloads", "tiny", "--world", "2", "--layouts")


@needs_overlay
def test_step(bench):
    layouts = ["shard", "fsdp1", "ddp"]
    args = [] if has_stock() else ["--no-stock"]
    report, printed = bench("step", *TINY, *layouts, "--reps", "2", "--profile", *args)
    assert [case["layout"] for case in report["cases"]] == layouts
    case = report["cases"][0]
    names = ["ours-1", *(["stock"] if has_stock() else []), "allgather", "adamw"]
    assert case["names"] == names
    assert case["world"] == len(case["seconds"]) == len(case["profile"]) == 2
    assert sum(case["owned"]) == 6
    for seconds in case["seconds"]:
        assert set(seconds) == {*names, *figures.PARTS}
        assert all(len(times) == 2 for times in seconds.values())
    for profile in case["profile"]:
        # Newton-Schulz is products of matrices; what else a step does is there as well.
        assert "aten::mm" in profile or "aten::addmm" in profile
        assert "c10d::alltoall_base_" in profile
    for words in ("FSDP2: Shard(0), 2 ranks", "FSDP1: FULL_SHARD", "DDP"):
        assert words in printed


@needs_overlay
def test_bytes_are_the_least(bench):
    report, printed = bench("bytes", *TINY, "shard", "--no-stock")
    found = report["cases"][0]["figures"]
    # Half of each of three pairs of matrices goes to its owner, and half comes back.
    elements = 2 * (32 * 64 + 64 * 64 + 64 * 32)
    assert found["least_bytes"] == found["ours-1"]["bytes"] == 2 * elements
    assert found["ours-1"]["calls"]["all-reduce of statuses"] == 1
    assert found["ours-1"]["status_bytes"] > 0
    assert found["allgather"]["calls"] == {"all_gather_into_tensor": 6}
    assert found["adamw"]["bytes"] == 0
    assert "ours sends 0 bytes more" in printed


@needs_overlay
def test_promises(bench):
    report, printed = bench("promises", "--reps", "1")
    (case,) = report["cases"]
    seconds = [dict(zip(promises.SETTINGS, times)) for times in case["seconds"]]
    # Four sleeps of 20 ms on a rank; sixteen where one owner works at a time.
    assert min(seconds[0].values()) > 0.08
    assert seconds[0][False, 0] > 0.32
    # Without prefetch, four gathers and the last scatter of 20 ms each are not hidden.
    assert seconds[2][True, 0] > 0.18
    assert "at once, 2" in printed


@needs_overlay
def test_gram():
    found = gram.measure((64, 256), reps=1)
    assert found["flops"]["gram"] * 3 == found["flops"]["quintic"] * 2
    assert set(found["seconds"]) == set(gram.ALGORITHMS)
    assert all(0 < far < 0.1 for far in found["distance"].values())


def test_the_limit_of_a_repetition_bounds_that_repetition():
    seconds = {
        "ours-1": [3.0, 8.0],
        "ns_alone": [2.0, 4.0],
        "exchange": [1.0, 2.0],
        "elementwise": [0.5, 1.0],
    }
    idle = {name: [0.0, 0.0] for name in seconds}
    ranks = [{"seconds": s, "others": [0.1, 0.0]} for s in (seconds, idle)]
    found = figures.summarize(ranks, ["ours-1"], 2, reps=2)
    ours = found["implementations"]["ours-1"]
    # Of 3 / (2 / 2 + 1 + 0.5) and 8 / (4 / 2 + 2 + 1).
    assert ours["limit"]["median"] == (1.2 + 1.6) / 2
    assert figures.summarize(ranks, ["ours-1"], 2, reps=1)["repetitions"] == [1]


def test_replicas_lower_the_bound_of_the_gather_only():
    rank = {"shapes": [[4, 2]], "assignments": {0: [0], 1: []}, "sent": {}}
    halves = [[[0, 2, 0, 2]], [[2, 4, 0, 2]]]
    shards = [{**rank, "held": held} for held in halves]
    assert bound.lower_bound(shards) == (4 + 4) * 2
    whole = {**rank, "held": [[0, 4, 0, 2]]}
    assert bound.lower_bound([whole, whole]) == 8 * 2


def test_peer_that_is_not_installed_is_left_out_with_a_word(monkeypatch):
    args = cli.parser().parse_args(["step", "--no-stock"])
    for there in (None, types.SimpleNamespace()):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: there)
        names = cli.names_of(args)
        assert ("muon_fsdp2" in names) is (there is not None)
        assert ("is not installed" in cli.legend(args, names)) is (there is None)
