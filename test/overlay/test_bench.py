"""The bench runs, and its report has what a reader looks for. Its times are nobody's promise."""

import importlib.util
import json
import pathlib
import time

import pytest
from tools.bench import bound, cli, figures, table
from tools.bench.stock import stock_path
from text_table import render


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


TINY = ("--workloads", "tiny", "--world", "2", "--layouts", "shard")


@needs_overlay
def test_step(bench):
    args = [] if has_stock() else ["--no-stock"]
    report, printed = bench("step", *TINY, "--reps", "2", "--profile", *args)
    (case,) = report["cases"]
    names = ["ours-1", *(["stock"] if has_stock() else []), "allgather", "adamw"]
    assert case["names"] == names
    assert case["world"] == len(case["seconds"]) == len(case["profile"]) == 2
    assert sum(case["owned"]) == 6
    for seconds in case["seconds"]:
        assert set(seconds) == {*names, *figures.PARTS}
        assert all(len(times) == 2 for times in seconds.values())
    for one in case["figures"]["implementations"].values():
        assert one["limit"]["q1"] <= one["limit"]["median"] <= one["limit"]["q3"]
        assert one["second"]["median"] < one["limit"]["median"]
    for profile in case["profile"]:
        # Newton-Schulz is products of matrices; what else a step does is there as well.
        assert "aten::mm" in profile or "aten::addmm" in profile
        assert "c10d::alltoall_base_" in profile
    assert "FSDP2: Shard(0), 2 ranks" in printed


@needs_overlay
def test_dtensors_against_process_groups(bench):
    args = ["--workloads", "tiny", "--world", "2", "--layouts", "shard", "fsdp1", "ddp"]
    report, printed = bench("step", *args, "--reps", "2", "--no-stock")
    assert [case["layout"] for case in report["cases"]] == ["shard", "fsdp1", "ddp"]
    for case in report["cases"]:
        assert case["figures"]["implementations"]["ours-1"]["limit"]["median"] > 0
    for words in ("FSDP2: Shard(0)", "FSDP1: FULL_SHARD", "DDP"):
        assert words in printed


@needs_overlay
def test_bytes_are_the_least_and_flags(bench):
    report, _ = bench("bytes", *TINY, "--no-stock")
    found = report["cases"][0]["figures"]
    # Half of each of three pairs of matrices goes to its owner, and half comes back.
    elements = 2 * (32 * 64 + 64 * 64 + 64 * 32)
    assert found["least_bytes"] == 2 * elements
    assert found["ours-1"]["bytes"] == found["least_bytes"] + 2 * found["shards"]
    assert found["allgather"]["calls"] == {"all_gather_into_tensor": 6}
    assert found["adamw"]["bytes"] == 0


@needs_overlay
def test_delays_of_collectives_in_flight_overlap():
    from tools.bench.wire import Late, Link

    class Done:
        def wait(self):
            return True

    began = time.monotonic()
    link = Link(latency=0.3)
    works = [Late(Done(), link) for _ in range(20)]
    assert not works[-1].is_completed()
    for work in works:
        work.wait()
    assert 0.3 <= time.monotonic() - began < 0.3 * len(works)


@needs_overlay
def test_bytes_share_a_link_and_latencies_overlap():
    from tools.bench.wire import Link

    link = Link(latency=100.0, bandwidth=10.0)
    times = [link.carry(50) for _ in range(3)]
    assert [round(seconds) for seconds in times] == [105, 110, 115]


def test_a_delay_compares_prefetch_counts():
    args = cli.parser().parse_args(["step", "--wire-delay-ms", "30"])
    names = cli.names_of(args)
    assert names == ("ours-0", "ours-1", "ours-2")
    ratios = {"ours-0": 1.0, "ours-1": 0.5, "ours-2": 0.4}
    case = {
        "workload": "tiny",
        "layout": "shard",
        "world": 2,
        "names": names,
        "wire_delay_ms": 30.0,
        "figures": {
            "implementations": {n: {"first": {"median": r}} for n, r in ratios.items()}
        },
    }
    last = table.overlap_overview([case]).splitlines()[-1]
    assert last.split()[-3:] == ["1.00", "2.00", "2.50"]


def test_the_limit_of_a_repetition_bounds_that_repetition():
    seconds = {
        "ours-1": [3.0, 8.0],
        "ns_alone": [2.0, 4.0],
        "ns_shares": [1.0, 3.0],
        "exchange": [1.0, 2.0],
        "exchange_fused": [1.0, 1.0],
        "elementwise": [0.5, 1.0],
    }
    idle = {name: [0.0, 0.0] for name in seconds}
    ranks = [
        {"seconds": s, "cpu_seconds": seconds, "others": [0.1, 0.0]}
        for s in (seconds, idle)
    ]
    found = figures.summarize(ranks, ["ours-1"], 2, reps=2)
    ours = found["implementations"]["ours-1"]
    assert ours["limit"]["median"] == 1.75  # of 3 / (2 / 2 + 1) and 8 / (4 / 2 + 2)
    assert ours["second"]["median"] == 1.4
    assert ours["third"]["median"] == (3 / 2.5 + 8 / 6) / 2
    assert ours["cpu"]["median"] == (6 / 7 + 16 / 14) / 2
    assert found["ns_at_once"]["median"] == (1 / 1 + 3 / 2) / 2
    assert figures.summarize(ranks, ["ours-1"], 2, reps=1)["repetitions"] == [1]


def test_replicas_lower_the_bound_of_the_gather_only():
    rank = {"shapes": [[4, 2]], "assignments": {0: [0], 1: []}, "sent": {}}
    halves = [[[0, 2, 0, 2]], [[2, 4, 0, 2]]]
    shards = [{**rank, "held": held} for held in halves]
    assert bound.lower_bound(shards) == ((4 + 4) * 2, 2)
    whole = {**rank, "held": [[0, 4, 0, 2]]}
    assert bound.lower_bound([whole, whole]) == (8 * 2, 2)


def test_table_columns_line_up():
    text = render(["", "ms"], [["ours", "1.5"], ["stock", "12.25"]])
    assert text == "          ms\nours     1.5\nstock  12.25"
