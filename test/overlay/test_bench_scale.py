"""The simulated step: by hand where it is small, and beside the engine's own packs."""

import importlib.util
import json
import pathlib
import sys
from dataclasses import replace

import pytest


spec = importlib.util.find_spec("torch")
if (
    spec is None
    or not pathlib.Path(spec.origin).with_name("optim").joinpath("muon.py").is_file()
):
    pytest.skip("the interpreter's torch has no overlay", allow_module_level=True)

import numpy as np
import torch
from tools.bench.scale import meshes, report
from tools.bench.scale.cases import Case, CASES
from tools.bench.scale.hardware import Hardware
from tools.bench.scale.plan import make_plan, OUT
from tools.bench.scale.timeline import Links, simulate
from tools.overlay.repo import ROOT
from torch.optim._muon_engine.layouts import check_cover
from torch.optim._muon_engine.schedule import buckets
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners, newton_schulz_flops
from torch.testing._internal.distributed._muon.model_shapes import Model


# A 4 x 4 matrix takes a second, and so does its half on the wire; each message a quarter more.
BY_HAND = Hardware(
    peak_flops=newton_schulz_flops((4, 4)),
    utilization=1.0,
    inter_bandwidth=16.0,
    inter_latency=0.25,
    gpus_per_node=1,
)


def schedule_of(layouts, **options):
    return make_schedule(layouts, assign_owners(layouts), torch.bfloat16, **options)


@pytest.mark.parametrize(
    ("matrices", "prefetch", "seconds"),
    [
        # Gather 1.25 s, Newton-Schulz 1 s, scatter 1.25 s.
        (2, 1, 3.5),
        # Gathers until 1.25 and 2.5; scatter 0 waits for the link until 2.5, and so on to 3.75 and 5.
        (4, 1, 5.0),
        # Gather 1 starts behind scatter 0: 2.25, 3.5, 4.75, then 1 and 1.25.
        (4, 0, 7.0),
    ],
)
def test_buckets_by_hand(matrices, prefetch, seconds):
    layouts = meshes.fsdp(Model([(4, 4)] * matrices), 2)
    plan = make_plan(schedule_of(layouts), 2, BY_HAND.gpus_per_node)
    step = simulate(plan, BY_HAND, prefetch)
    assert step.done.tolist() == [seconds] * 2
    assert step.busy.tolist() == [matrices / 2] * 2


def test_relays_hide_behind_the_next_bucket():
    """Two owners of three matrices each, in three buckets; two broadcasts a bucket."""
    layouts = meshes.hsdp(Model([(4, 4)] * 6), 2, 1)
    schedule = schedule_of(layouts, max_replicas=1)
    fast = replace(BY_HAND, inter_bandwidth=32 / 0.25)
    step = simulate(make_plan(schedule, 2, 1), fast)
    # Bucket 0 is finished at 2; its broadcasts are over at 2.5 and 2.75, before bucket 2 is made at 3.
    # Those of bucket 1 are over at 3.5 and 3.75, and those of bucket 2 follow.
    assert step.done == pytest.approx([4.5, 4.5])


def in_two_levels(schedule, node_size):
    found = tuple(replace(bucket, node_size=node_size) for bucket in schedule.buckets)
    return replace(schedule, buckets=found)


def test_two_levels_by_hand():
    """Four ranks hold a row each, which takes a second; nodes of two, which are two nodes."""
    layouts = meshes.fsdp(Model([(4, 4)]), 4)
    direct = make_schedule(layouts, [0], torch.bfloat16)
    slow = replace(BY_HAND, inter_bandwidth=8.0)
    one, two = (
        simulate(make_plan(schedule, 4, 1), slow).done.tolist()
        for schedule in (direct, in_two_levels(direct, 2))
    )
    # The owner gets three messages, and sends as many.
    assert one == [3.75 + 1 + 3.75] * 4
    # It gets one of its node while another arrives at its rail, which then sends two rows at once. It
    # sends two rows to its node, and one along its rail.
    assert two[:2] == [1.25 + 2.25 + 1 + 2.25 + 1.25] * 2


def test_a_second_hop_begins_where_the_first_is_over():
    """Rank 1 sends rank 0 its row late; ranks 2 and 3, of another node, do not wait for that."""
    layouts = meshes.fsdp(Model([(4, 4)]), 4)
    schedule = in_two_levels(make_schedule(layouts, [0], torch.bfloat16), 2)
    (plan,) = make_plan(schedule, 4, 1).turns[0]
    links = Links(4, replace(BY_HAND, inter_bandwidth=8.0))
    over = links.exchange(plan, plan.gather, np.array([0.0, 5.0, 0.0, 0.0]))
    assert over.tolist() == [8.5, 6.25, 3.5, 1.25]


SMALL = Model([(24, 16), (16, 40), (4, 16)] * 4, [(8, 16), (16, 8)], 4)
PLACES = {
    "fsdp": lambda model: meshes.fsdp(model, 16),
    "hsdp": lambda model: meshes.hsdp(model, 2, 8),
    "hsdp-relayed": lambda model: meshes.hsdp(model, 8, 2),
    "fsdp-tp": lambda model: meshes.fsdp_tp(model, 16),
    "ep": lambda model: meshes.ep_fsdp(model, 16, 4),
}


@pytest.mark.parametrize("max_peers", [512, 1], ids=["one level", "two levels"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_plans_are_the_schedule_s_own_packs(place, max_peers, monkeypatch):
    layouts = place(SMALL)
    for layout in layouts:
        check_cover(layout)
    monkeypatch.setattr(buckets, "MAX_PEERS", max_peers)
    schedule = schedule_of(layouts, ranks_per_node=4)
    for turn in make_plan(schedule, 16, 4).turns:
        for plan in turn:
            for place, rank in enumerate(plan.ranks.tolist()):
                assert_as_packs(schedule, plan, place, rank)


def assert_as_packs(schedule, plan, place, rank):
    packs = schedule.packs(plan.bucket, rank)
    assert tuple(plan.slot[:, place]) == packs.nbytes
    phases = (plan.gather, packs.gather_send), (plan.scatter, packs.scatter_send)
    for at, (hops, sent) in enumerate(phases):
        passed = 0
        if len(hops) == 2:
            elements = sum(map(sum, schedule.passed_on(plan.bucket, rank)[at]))
            passed = elements * sent.dtype.itemsize
            ends = hops[1].nbytes[OUT, :, place].sum()
            # What stays on the rank in one of the two hops is copied.
            assert ends <= passed
        first = hops[0].nbytes[OUT, :, place].sum()
        assert first == sent.nbytes if len(hops) == 1 else first <= sent.nbytes
    found = [
        (tuple(ranks), nbytes)
        for wave in plan.relays
        for ranks, nbytes in zip(wave.ranks.tolist(), wave.nbytes)
        if rank in ranks
    ]
    expected = [(relay.replicas, relay.pack.nbytes) for relay in packs.relays]
    assert sorted(found) == sorted(expected)


def test_command(shell, tmp_path):
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "tools.bench", "scale", "--models", "GPT-2 124M"]
    printed = shell(*command, "--utilization", "0.25", "--out", out, cwd=ROOT).out
    fsdp, hsdp = json.loads(out.read_text())["cases"]
    assert (fsdp["ranks"], hsdp["ranks"]) == (8, 64)
    assert fsdp["share"] == pytest.approx(2 * 3.847e-4, rel=1e-3)
    for case in (fsdp, hsdp):
        assert case["ideal"] <= case["step"] < case["one_at_a_time"]
    # One update a replica is broadcast, and fewer matrices than ranks leave ranks idle.
    assert fsdp["relays"] == 0 < hsdp["relays"]
    assert hsdp["idle"] > 0.5 > fsdp["idle"]
    assert "GPT-2 124M, HSDP 8 x 8, 64 ranks" in printed


def test_empty_shards_relay_nothing():
    """Eight rows over 16 ranks: half of them are replicas of nothing."""
    layouts = meshes.fsdp(Model([(8, 16)]), 16)
    (plan,) = make_plan(schedule_of(layouts), 16, 8).turns[0]
    assert plan.relays == []


def test_more_peers_than_many_are_two_levels():
    """A thousand ranks and few matrices: the report has the step both ways."""
    case = report.report(Case("GPT-2 124M", "fsdp", 1024), Hardware(), prefetch=1)
    assert buckets.MAX_PEERS < case["one_level_peers"] <= 1023
    # Those of a node of 8 and of a rail.
    assert case["peers_max"] <= 7 + 127
    assert case["one_level"] != case["step"]


def test_the_page_has_all_cases():
    text = (ROOT / "docs" / "bench.md").read_text()
    for case in CASES:
        words = f"{case.model}, {case.mesh}, {case.world} ranks"
        assert text.count(words) >= 2, words
