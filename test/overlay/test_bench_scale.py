"""The simulated step: by hand where it is small, and beside the engine's own specs and order."""

import importlib.util
import json
import pathlib
import sys

import pytest


spec = importlib.util.find_spec("torch")
if (
    spec is None
    or not pathlib.Path(spec.origin).with_name("optim").joinpath("muon.py").is_file()
):
    pytest.skip("the interpreter's torch has no overlay", allow_module_level=True)

import numpy as np
import torch
from tools.bench import fleet
from tools.bench.models import Model
from tools.bench.scale import meshes, messages, page, table
from tools.bench.scale.cases import Case, CASES
from tools.bench.scale.hardware import Hardware
from tools.bench.scale.plan import make_plan
from tools.bench.scale.report import report, stretch
from tools.bench.scale.timeline import simulate
from tools.overlay.repo import ROOT
from torch.optim._muon_engine.layouts import check_cover
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners, newton_schulz_flops


# A 4 x 4 matrix takes a second, and so does its half with a flag; each message a quarter more.
BY_HAND = Hardware(
    peak_flops=newton_schulz_flops((4, 4)),
    utilization=1.0,
    inter_bandwidth=18.0,
    inter_latency=0.25,
    gpus_per_node=1,
)
FREE_WIRE = Hardware(
    intra_bandwidth=1e18, inter_bandwidth=1e18, intra_latency=0.0, inter_latency=0.0
)


def schedule_of(layouts, **options):
    return make_schedule(layouts, assign_owners(layouts), torch.bfloat16, **options)


def by_hand(matrices, prefetch):
    layouts = meshes.fsdp(Model([(4, 4)] * matrices), 2)
    plan = make_plan(schedule_of(layouts), 2, BY_HAND.gpus_per_node)
    return simulate(plan, BY_HAND, prefetch)


def test_one_bucket_by_hand():
    # Gather 1.25 s, Newton-Schulz 1 s, scatter 1.25 s.
    step = by_hand(matrices=2, prefetch=1)
    assert step.done.tolist() == [3.5, 3.5]
    assert step.busy.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("prefetch", "seconds"),
    [
        # Gathers until 1.25 and 2.5; scatter 0 waits for the link until 2.5, and so on to 3.75 and 5.
        (1, 5.0),
        # Gather 1 starts behind scatter 0: 2.25, 3.5, 4.75, then 1 and 1.25.
        (0, 7.0),
    ],
)
def test_two_buckets_by_hand(prefetch, seconds):
    assert by_hand(matrices=4, prefetch=prefetch).done.tolist() == [seconds] * 2


def test_relay_by_hand():
    layouts = meshes.hsdp(Model([(4, 4)]), 2, 1)
    schedule = schedule_of(layouts, max_replicas=1)
    step = simulate(make_plan(schedule, 2, 1), BY_HAND)
    # The owner has all: a second of work, then 16 elements and a flag over one hop.
    assert step.done == pytest.approx([1 + 34 / 18 + 0.25] * 2)
    assert step.busy.tolist() == [1.0, 0.0]


def test_relays_hide_behind_the_next_bucket():
    """Two owners of three matrices each, in three buckets; two broadcasts a bucket."""
    layouts = meshes.hsdp(Model([(4, 4)] * 6), 2, 1)
    schedule = schedule_of(layouts, max_replicas=1)
    fast = Hardware(**{**vars(BY_HAND), "inter_bandwidth": 34 / 0.25})
    step = simulate(make_plan(schedule, 2, 1), fast)
    # Bucket 0 is finished at 2; its broadcasts are over at 2.5 and 2.75, before bucket 2 is made at 3.
    # Those of bucket 1 are over at 3.5 and 3.75, and those of bucket 2 follow.
    assert step.done == pytest.approx([4.5, 4.5])


SMALL = Model([(24, 16), (16, 40), (4, 16)] * 4, [(8, 16), (16, 8)], 4)


@pytest.mark.parametrize(
    "layouts",
    [
        meshes.fsdp(SMALL, 16),
        meshes.hsdp(SMALL, 2, 8),
        meshes.hsdp(SMALL, 8, 2),
        meshes.fsdp_tp(SMALL, 16),
        meshes.ep_fsdp(SMALL, 16, 4),
    ],
    ids=["fsdp", "hsdp", "hsdp-relayed", "fsdp-tp", "ep"],
)
def test_vectors_are_the_schedule_s_own_splits(layouts):
    for layout in layouts:
        check_cover(layout)
    schedule = schedule_of(layouts)
    for turn in make_plan(schedule, 16, 4).turns:
        for plan in turn:
            for place, rank in enumerate(plan.ranks):
                spec = schedule.spec(plan.bucket, int(rank), plan.bucket.group)
                assert_as_spec(plan, place, int(rank), spec)


def assert_as_spec(plan, place, rank, spec):
    for cost, sent, received in (
        (plan.gather, spec.gather_send, spec.gather_recv),
        (plan.scatter, spec.scatter_send, spec.scatter_recv),
    ):
        assert cost.nbytes[messages.OUT, :, place].sum() == sent.nbytes
        assert cost.nbytes[messages.IN, :, place].sum() == received.nbytes
        assert cost.messages[messages.OUT, :, place].sum() == np.count_nonzero(
            sent.splits
        )
        near = [
            split for split, at in zip(sent.splits, plan.ranks) if at // 4 == rank // 4
        ]
        of_node = cost.nbytes[messages.OUT, messages.INTRA, place]
        assert of_node == sum(near) * sent.dtype.itemsize
    assert tuple(plan.slot[:, place]) == spec.nbytes
    peers = np.add(spec.gather_send.splits, spec.gather_recv.splits)
    assert plan.peers[place] == np.count_nonzero(peers)
    found = [
        (tuple(sorted(ranks)), ranks[wave.source], nbytes)
        for wave in plan.relays
        for ranks, nbytes in zip(wave.ranks.tolist(), wave.nbytes)
        if rank in ranks
    ]
    assert sorted(found) == sorted(
        (relay.replicas, relay.source, relay.packed.nbytes) for relay in spec.relays
    )


def test_two_levels_carry_what_one_does():
    """Between nodes the same bytes in fewer messages; inside them what is passed on comes on top."""
    schedule = schedule_of(meshes.fsdp(SMALL, 16))
    plans = [
        make_plan(schedule, 16, 4, exchange)
        for exchange in (messages.direct, messages.two_level)
    ]
    for one, two in zip(*(plan.turns[0] for plan in plans), strict=True):
        inter = slice(None), messages.INTER
        assert two.gather.second.nbytes[inter].sum() == one.gather.nbytes[inter].sum()
        assert two.gather.second.messages.max() <= 3
        assert two.gather.first.messages.max() <= 3
        sent, received = two.gather.first.nbytes[:, messages.INTRA].sum(1)
        assert sent == received > one.gather.nbytes[0, messages.INTRA].sum()


@pytest.mark.parametrize(
    "case",
    [
        Case("GPT-2 124M", "fsdp", 8),
        Case("Llama 3 8B", "tp", 4, 8),
        Case("Llama 3 70B", "fsdp", 64),
        Case("Llama 3 405B", "fsdp", 128),
    ],
    ids=lambda case: f"{case.model} {case.mesh} {case.world}",
)
def test_with_free_wires_a_step_takes_what_the_schedule_promises(case):
    schedule = schedule_of(case.layouts())
    step = simulate(make_plan(schedule, case.world, 8), FREE_WIRE)
    total = sum(newton_schulz_flops(layout.shape) for layout in schedule.layouts)
    assert step.busy.sum() * FREE_WIRE.flops == pytest.approx(total)
    busiest = step.busy.max()
    promised = stretch(schedule)
    assert 1 <= promised <= 1.1
    assert busiest <= step.seconds <= promised * busiest * (1 + 1e-6)


def test_order_is_the_engine_s():
    from tools.bench.scale.check import Check

    job = Check("shard", prefetch=(0, 1, 2), reps=1, delay_ms=1.0)
    results = fleet.run("scale.check", job, world=4, timeout=120)
    for of_rank in results:
        for found in of_rank.values():
            assert found["order"] == found["simulated_order"]
            phases = [phase for phase, _ in found["order"]]
            assert phases.count("gather") == phases.count("scatter") > 1


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


def test_page_says_what_is_beyond_the_aim():
    case = report(Case("GPT-2 124M", "hsdp", 8, 8), Hardware(), prefetch=1)
    assert case["ratio"] > table.AIM
    text = page.body([case])
    assert "Fewer matrices than ranks: the largest, 3072 x 768, takes" in " ".join(
        text.split()
    )
    assert "peers; there" not in text


def test_page_without_a_place_is_an_error(tmp_path):
    (tmp_path / "bench.md").write_text("no place\n")
    with pytest.raises(ValueError, match="has no lines"):
        page.write(tmp_path, [], Hardware(), prefetch=1)
    assert (tmp_path / "bench.md").read_text() == "no place\n"


def test_the_page_has_all_cases():
    text = (ROOT / "docs" / "bench.md").read_text()
    part = text.partition(f"<!-- {page.NAME} -->\n")[2].partition("<!-- end of ")[0]
    for case in CASES:
        words = f"{case.model}, {case.mesh}, {case.world} ranks"
        assert part.count(words) >= 2, words
