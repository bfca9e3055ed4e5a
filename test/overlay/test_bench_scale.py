"""The simulated step: by hand where it is small, and beside the engine's own specs and order."""

import importlib.util
import itertools
import json
import pathlib
import sys
from collections import Counter
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
from tools.bench import fleet
from torch.testing._internal.distributed._muon.model_shapes import Model, MODELS
from tools.bench.scale import meshes, messages, page, report, table
from tools.bench.scale.alternatives import BF16_BYTES
from tools.bench.scale.cases import Case, CASES
from tools.bench.scale.hardware import Hardware
from tools.bench.scale.plan import make_plan
from tools.bench.scale.timeline import Links, simulate
from tools.overlay.repo import ROOT
from torch.optim._muon_engine.layouts import check_cover
from torch.optim._muon_engine.runtime.buffers import _RelayMemory, Buffers
from torch.optim._muon_engine.schedule import buckets
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


def in_two_levels(schedule, node_size):
    found = tuple(replace(bucket, node_size=node_size) for bucket in schedule.buckets)
    return replace(schedule, buckets=found)


def test_two_levels_by_hand():
    """Four ranks hold a row each, which takes a second with its flag; nodes of two, which are two nodes."""
    layouts = meshes.fsdp(Model([(4, 4)]), 4)
    direct = make_schedule(layouts, [0], torch.bfloat16)
    slow = replace(BY_HAND, inter_bandwidth=10.0)
    one, two = (
        simulate(make_plan(schedule, 4, 1), slow).done.tolist()
        for schedule in (direct, in_two_levels(direct, 2))
    )
    # The owner gets three messages, and sends as many.
    assert one == [3.75 + 1 + 3.75] * 4
    # It gets one of its node while another arrives at its rail, which then sends two rows at once.
    assert two == [1.25 + 2.25 + 1 + 2.25 + 1.25] * 4


def test_a_second_hop_begins_where_the_first_is_over():
    """Rank 1 sends rank 0 its row late; ranks 2 and 3, of another node, do not wait for that."""
    layouts = meshes.fsdp(Model([(4, 4)]), 4)
    schedule = in_two_levels(make_schedule(layouts, [0], torch.bfloat16), 2)
    (plan,) = make_plan(schedule, 4, 1).turns[0]
    links = Links(4, replace(BY_HAND, inter_bandwidth=10.0))
    over = links.exchange(plan, plan.gather, np.array([0.0, 5.0, 0.0, 0.0]))
    assert over.tolist() == [8.5, 6.25, 3.5, 1.25]


def test_nodes_and_rails_have_communicators_of_their_own():
    """Rank 0 waits for its rail, and meanwhile sends rank 1 of its node what comes next."""
    layouts = meshes.fsdp(Model([(4, 4)]), 4)
    links = Links(4, replace(BY_HAND, inter_bandwidth=10.0))
    over = []
    for owner, launch in ((0, [0.0, 0.0, 0.0, 5.0]), (1, [0.0] * 4)):
        direct = make_schedule(layouts, [owner], torch.bfloat16)
        (plan,) = make_plan(in_two_levels(direct, 2), 4, 1).turns[0]
        over.append(links.exchange(plan, plan.gather, np.array(launch)).tolist())
    # Rank 0's second hop ends when the first exchange's did, not a message later.
    assert over == [[8.5, 1.25, 8.5, 6.25], [8.5, 12.0, 9.75, 12.0]]


SMALL = Model([(24, 16), (16, 40), (4, 16)] * 4, [(8, 16), (16, 8)], 4)
PLACES = {
    "fsdp": lambda model: meshes.fsdp(model, 16),
    "hsdp": lambda model: meshes.hsdp(model, 2, 8),
    "hsdp-relayed": lambda model: meshes.hsdp(model, 8, 2),
    "fsdp-tp": lambda model: meshes.fsdp_tp(model, 16),
    "ep": lambda model: meshes.ep_fsdp(model, 16, 4),
}
on_all_meshes = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


@on_all_meshes
@pytest.mark.parametrize(
    ("max_peers", "gpus_per_node", "node_size"),
    [(512, 4, 1), (1, 4, 4), (1, 2, 4)],
    ids=["one level", "a node", "two nodes"],
)
def test_vectors_are_the_schedule_s_own_splits(
    place, max_peers, gpus_per_node, node_size, monkeypatch
):
    layouts = place(SMALL)
    for layout in layouts:
        check_cover(layout)
    monkeypatch.setattr(buckets, "MAX_PEERS", max_peers)
    schedule = schedule_of(layouts, ranks_per_node=gpus_per_node)
    plans = itertools.chain(*make_plan(schedule, 16, gpus_per_node).turns)
    for plan in plans:
        if len(plan.ranks) == 16:
            assert plan.bucket.node_size == node_size
        for place, rank in enumerate(plan.ranks):
            spec = schedule.spec(plan.bucket, int(rank), plan.bucket.group)
            assert_as_spec(plan, place, int(rank), spec, gpus_per_node)


def hops_of(spec, group, phase):
    """What a rank sends and receives by each hop of ``phase``, as (ranks, sends, receives)."""
    hops = getattr(spec, f"{phase}_hops")
    if hops is not None:
        return [hops.first, hops.second]
    sides = (getattr(spec, f"{phase}_{side}").splits for side in ("send", "recv"))
    return [(group, *sides)]


def assert_as_spec(plan, place, rank, spec, gpus_per_node):
    peers = set()
    for phase in ("gather", "scatter"):
        size = getattr(spec, f"{phase}_send").dtype.itemsize
        hops = hops_of(spec, plan.bucket.group, phase)
        loads = getattr(plan, phase).hops
        for load, (ranks, *sides) in zip(loads, hops, strict=True):
            node = np.array(ranks) // gpus_per_node
            links = [node == rank // gpus_per_node, node != rank // gpus_per_node]
            for direction, side in zip((messages.OUT, messages.IN), sides):
                # What stays on the rank is copied.
                side = np.where(np.array(ranks) == rank, 0, side)
                for link, on_it in zip((messages.INTRA, messages.INTER), links):
                    at = direction, link, place
                    assert load.nbytes[at] == side[on_it].sum() * size
                    assert load.messages[at] == np.count_nonzero(side[on_it])
                peers.update(np.array(ranks)[side > 0].tolist())
    assert plan.peers[place] == len(peers)
    assert tuple(plan.slot[:, place]) == spec.nbytes
    found = [
        (tuple(sorted(ranks)), ranks[wave.source], nbytes)
        for wave in plan.relays
        for ranks, nbytes in zip(wave.ranks.tolist(), wave.nbytes)
        if rank in ranks
    ]
    assert sorted(found) == sorted(
        (relay.replicas, relay.source, relay.packed.nbytes) for relay in spec.relays
    )


@on_all_meshes
@pytest.mark.parametrize("max_peers", [512, 1], ids=["one level", "two levels"])
def test_memory_is_that_of_the_engine_s_slots(place, max_peers, monkeypatch):
    """Several buckets have one slot, and are not of one size."""
    monkeypatch.setattr(buckets, "MAX_PEERS", max_peers)
    many = Model([(24, 16), (16, 40), (4, 16)] * 32, [(8, 16), (16, 8)] * 4, 4)
    schedule = schedule_of(place(many), ranks_per_node=4)
    by_group = {}
    for bucket in schedule.buckets:
        by_group.setdefault(bucket.group, []).append(bucket)
    assert max(map(len, by_group.values())) > 3
    plan = make_plan(schedule, 16, 4)
    for rank, simulated in enumerate(report.memory(plan, prefetch=1)):
        specs = [
            [schedule.spec(bucket, rank, group) for bucket in of_group]
            for group, of_group in by_group.items()
            if rank in group
        ]
        assert simulated == allocated(specs, rank, prefetch=1)


def allocated(specs, rank, prefetch):
    """Bytes that the engine allocates for ``specs``, a list for each group."""
    engine = Buffers.__new__(Buffers)
    engine.prefetch_count = prefetch
    device = torch.device("cpu")
    found = itertools.chain(*(engine._slots(of_group, device) for of_group in specs))
    relays = _RelayMemory([one.relays for one in itertools.chain(*specs)], rank, device)
    tensors = [*itertools.chain(*found), relays._sent, *relays._ring]
    return sum(tensor.nbytes for tensor in tensors)


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
    promised = report.stretch(schedule)
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
    case = report.report(Case("GPT-2 124M", "hsdp", 8, 8), Hardware(), prefetch=1)
    assert case["ratio"] > table.AIM
    text = page.body([case])
    assert "Fewer matrices than ranks: the largest, 3072 x 768, takes" in " ".join(
        text.split()
    )
    assert "a rank would have more" not in text


def test_more_peers_than_many_are_two_levels():
    """A thousand ranks and few matrices: the page has the step both ways."""
    case = report.report(Case("GPT-2 124M", "fsdp", 1024), Hardware(), prefetch=1)
    assert table.MANY_PEERS < case["one_level_peers"] <= 1023
    # Those of a node of 8 and of a rail.
    assert case["peers_max"] <= 7 + 127
    assert case["one_level"] != case["step"]
    text = " ".join(page.body([case]).split())
    assert "In 1 of 1 cases a rank would have more than 512 peers" in text
    assert f"{case['one_level'] / case['step']:.2f} times as long" in text


def test_the_table_knows_the_engine_s_bounds():
    assert table.MANY_PEERS == buckets.MAX_PEERS
    assert table.MAX_STRETCH == buckets.MAX_STRETCH


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_buckets_of_one_slot_are_wider(prefetch, monkeypatch):
    """Half of the owners have a matrix that takes as long as 33 small ones, and 13 fit beside it."""
    many = Model([(18432, 7168)] * 4 + [(2048, 7168)] * (4 * 33 + 8 * 40))
    monkeypatch.setitem(MODELS, "some large", many)
    case = Case("some large", "fsdp", 8)
    schedule = report.schedule_of(case, Hardware(), prefetch)
    assert report.stretch(schedule) <= 1.1
    wide = []
    for bucket in schedule.buckets:
        gathered = Counter()
        for m in bucket.matrices:
            gathered[schedule.owners[m]] += schedule.layouts[m].numel * BF16_BYTES
        if max(gathered.values()) > buckets.BUCKET_BYTES:
            wide.append(bucket.index)
    assert len(wide) > 1 or len(schedule.buckets) <= prefetch + 2
    # All in the slot of the last bucket but one.
    slot = max(0, len(schedule.buckets) - 2) % (prefetch + 2)
    assert {index % (prefetch + 2) for index in wide} == {slot}


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
