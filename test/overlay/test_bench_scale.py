"""The simulated step: by hand where it is small, and against the engine's own packs; and its page."""

import itertools
import json
import math
import re
from dataclasses import replace

import pytest


pytest.importorskip("torch.optim.muon", reason="the interpreter's torch has no overlay")

import numpy as np
import torch
from tools.bench import cli, page as html
from tools.bench.scale import costs, own, report, timeline
from tools.bench.scale.cases import Case, CASES, layouts_of
from tools.bench.scale.costs import Options
from tools.bench.scale.hardware import Hardware
from tools.bench.scale.plan import make_plan, OUT
from tools.bench.scale.search import Search, WORTH
from tools.bench.scale.timeline import simulate, Step
from tools.overlay.payload import ROOT
from torch.optim._muon_engine.layouts.layout import check_cover
from torch.optim._muon_engine.schedule import buckets, division
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.levels import passed_on
from torch.optim._muon_engine.schedule.order import (
    Action,
    local_order,
    LocalWork,
    step_order,
)
from torch.optim._muon_engine.schedule.owners import assign_owners, newton_schulz_flops
from torch.optim._muon_engine.schedule.packs import slots_for
from torch.optim._muon_split import Split
from tools.bench.models import Model


# A 4 x 4 matrix takes a second, and so does its half on the wire; each message a quarter more.
BY_HAND = Hardware(
    peak_flops=newton_schulz_flops((4, 4)),
    utilization=1.0,
    memory_bandwidth=math.inf,
    inter_bandwidth=16.0,
    inter_latency=0.25,
    gpus_per_node=1,
)


def schedule_of(layouts, **options):
    return make_schedule(layouts, assign_owners(layouts), **options)


def test_buckets_by_hand():
    for matrices, prefetch, seconds in (
        # Gather 1.25 s, Newton-Schulz 1 s, scatter 1.25 s.
        (2, 1, 3.5),
        # Gathers until 1.25 and 2.5; scatter 0 waits for the link until 2.5, and so on to 3.75 and 5.
        (4, 1, 5.0),
        # Gather 1 starts behind scatter 0: 2.25, 3.5, 4.75, then 1 and 1.25.
        (4, 0, 7.0),
    ):
        layouts = layouts_of(Model([(4, 4)] * matrices), "fsdp", 2)
        options = Options(prefetch=prefetch)
        step = simulate(make_plan(schedule_of(layouts), 2, 1), BY_HAND, options)
        assert step.done.tolist() == [seconds] * 2
        assert step.busy.tolist() == [matrices / 2] * 2


def test_passes_by_hand():
    """Two matrices of 16 elements on two ranks, which store half of each, with a byte of memory in a second."""
    layouts = layouts_of(Model([(4, 4)] * 2), "fsdp", 2)
    plan = make_plan(schedule_of(layouts), 2, 1)
    free = replace(BY_HAND, peak_flops=math.inf, inter_bandwidth=math.inf)
    hardware = replace(free, memory_bandwidth=1.0, inter_latency=0.0)
    # The norm, the division, and five times two bases, of a matrix and of its Gram matrix.
    inside = 6 * 16 + 5 * 4 * (16 + 16)
    # 8 elements arrive from the other rank, and 8 go back.
    packed = 4 * 16
    for fused, around in ((False, 16 * (30 + 26)), (True, 16 * (14 + 10))):
        step = simulate(plan, hardware, Options(fused=fused))
        assert step.busy.tolist() == [inside] * 2
        assert step.passes.tolist() == [around + packed] * 2
        assert step.seconds == inside + around + packed


def test_replicas_blend_once():
    """Of two replicas, one sends what is to be orthogonalized. Both accumulate, and both apply."""
    layouts = layouts_of(Model([(4, 4)] * 2), "ddp", 2)
    (bucket,) = make_plan(schedule_of(layouts), 2, 1).buckets
    held, sent, applied, packed = bucket.elements
    assert held.tolist() == applied.tolist() == [32, 32]
    assert sent.sum() == 32
    # Each owner has its own replica: it receives nothing, and sends its update to the other one.
    assert packed.tolist() == [16, 16]


def test_forms_by_hand():
    """Symmetric products take a part of the time of others, and read no base. The Gram form has fewer long ones."""
    wide, square = 2 * 3072**2 * 8192, 2 * 3072**3
    elements = 3072 * 8192
    hardware = replace(BY_HAND, peak_flops=1.0, symmetric=0.5)
    by_algorithm = {
        "quintic": 5 * (2 * wide + square),
        "symmetric": 5 * wide + 0.5 * 5 * (wide + square),
        "gram": 2 * wide + 0.5 * (2 * wide + 14 * square),
    }
    kind = costs.MatrixKind((8192, 3072))
    for algorithm, flops in by_algorithm.items():
        for count in (1, 3):
            found = costs.newton_schulz_seconds(kind, count, algorithm, hardware)
            assert found == pytest.approx(count * flops)
    # Small matrices take torch's products, with each algorithm.
    small = costs.MatrixKind((64, 256))
    for algorithm in by_algorithm:
        found = costs.newton_schulz_seconds(small, 1, algorithm, hardware)
        assert found == newton_schulz_flops((64, 256))
    assert costs.matrix_work((8192, 3072), "symmetric").nbytes == 10 * elements
    # Four owners share the products. Each has whole Gram matrices.
    block = costs.block_work(costs.MatrixKind((8192, 3072), 4), "quintic")
    assert block.plain == by_algorithm["quintic"] / 4
    assert block.nbytes == 26 * elements / 4 + 60 * 3072**2


def test_relays_take_turns_with_batches_by_hand():
    """Eight replicas, in four buckets. An owner's batch takes 1 s, and each of the eight relays of a bucket 0.25 s."""
    layouts = layouts_of(Model([(4, 4)] * 32), "ddp", 8)
    plan = make_plan(schedule_of(layouts), 8, 1)
    assert len(plan.buckets) == 4
    hardware = replace(BY_HAND, inter_bandwidth=128.0, inter_latency=0.0)
    # During bucket 2, two relays of bucket 0 are in flight; the other six follow the batch: 1 + 6 x 0.25 s.
    # So it is in bucket 3. The relays of buckets 2 and 3 come at the end.
    seconds = 1 + 1 + 2.5 + 2.5 + 2 + 2
    assert on_cpus(plan, hardware).done.tolist() == [seconds] * 8
    # Relays of 2 s each decide how long buckets 2 and 3 take.
    slow = replace(hardware, inter_bandwidth=16.0)
    assert on_cpus(plan, slow).seconds == 1 + 1 + 4 * 16


def on_cpus(plan, hardware, options=costs.DEFAULT):
    return simulate(plan, hardware, options, has_relay_stream=False)


def relayed_plan(per_rank=4, **options):
    """Eight replicas; each rank owns a matrix of each bucket, and each bucket has eight relays."""
    layouts = layouts_of(Model([(4, 4)] * 8 * per_rank), "ddp", 8)
    return make_plan(schedule_of(layouts, **options), 8, 1)


def test_relays_have_a_stream_by_hand():
    """As above, but the relays of a bucket run during the next one."""
    hardware = replace(BY_HAND, inter_bandwidth=128.0, inter_latency=0.0)
    step = simulate(relayed_plan(), hardware)
    # The relays of bucket 0 run from 1 to 3 s, those of bucket 3 from 7 to 9. Newton-Schulz waits for none.
    assert step.done.tolist() == [1 + 4 * 2] * 8
    orthogonalized = [e.end[0] for e in step.events if e.kind == "orthogonalize"]
    assert orthogonalized == [1, 2, 3, 4]
    # Relays of 0.0625 s each are over before the next bucket. Only those of the last one come on top.
    fast = replace(hardware, inter_bandwidth=512.0)
    assert simulate(relayed_plan(), fast).done.tolist() == [4.5] * 8


def test_passes_beside_newton_schulz_by_hand():
    """Each rank applies 8 x 16 elements of a bucket, 112 of them from relays, while the next one is orthogonalized."""
    endless = replace(BY_HAND, inter_bandwidth=math.inf, inter_latency=0.0)
    options = Options(fused=True)
    passes = costs.passes_of(options)
    (alone,) = relayed_plan(1).buckets
    assert alone.elements.applied.tolist() == [16] * 8
    # The rate of memory, at which a bucket is applied in half a second.
    rate = 2 * passes.apply * 8 * 16
    # The inside of Newton-Schulz goes through memory as well.
    kind = costs.MatrixKind((4, 4))
    hardware = replace(endless, memory_bandwidth=rate)
    (inside,) = costs.batch_seconds(kind, 1, "quintic", hardware)
    before = (passes.accumulate * 8 * 16 + passes.blend * 16) / rate
    plan = relayed_plan()
    step = simulate(plan, hardware, options)
    # Two gathers come before the scatter of bucket 0, and the third one is prepared while its updates are applied.
    beside = [event for event in step.events if event.kind == timeline.PASSES_BESIDE]
    assert beside[0].begin == pytest.approx(2 * before + inside)
    # No pass after a scatter is on the stream of Newton-Schulz.
    compute = 4 * (before + inside)
    assert step.seconds == pytest.approx(compute + 0.5)
    assert step.passes == pytest.approx(4 * (before + 0.5))
    # Only the last bucket is applied while nothing else runs.
    assert step.exposed_passes() == pytest.approx(4 * before + 0.5)
    # Without the stream, all of it is on one.
    assert on_cpus(plan, hardware, options).seconds == pytest.approx(compute + 2)


@pytest.mark.parametrize(
    ("prefetch", "begins"), [(1, [0, 1, 5, 6]), (0, [0, 1, 5, 37])]
)
def test_gathers_wait_for_memory_by_hand(prefetch, begins, slow_updates):
    """With prefetch_count 1, a gather waits for the second bucket before it; with 0, for the one before. Updates of a rank's own matrix
    take 4 s, from 1 s on, and those of seven relays 28 s.
    """
    plan = relayed_plan(slots=slots_for(prefetch))
    step = simulate(plan, slow_updates, Options(prefetch=prefetch))
    found = [e.begin[0] for e in step.events if e.kind == "orthogonalize"]
    assert found == pytest.approx(begins)
    # The updates of all four buckets follow each other.
    assert step.seconds == pytest.approx(1 + 4 * 32)


def test_one_owner_at_a_time_has_no_stream_of_relays(slow_updates):
    """Each owner's updates take 4 s, and those of the others 4 s after its relay. Newton-Schulz takes 1 s."""
    layouts = layouts_of(Model([(4, 4)] * 8), "ddp", 8)
    plan = make_plan(schedule_of(layouts, one_owner_at_a_time=True), 8, 1)
    assert plan.one_owner_at_a_time and len(plan.buckets) == 8
    options = Options(prefetch=0)
    # An owner orthogonalizes when it has the updates of the owners before it, on accelerators, too.
    assert on_cpus(plan, slow_updates, options).seconds == pytest.approx(8 * 9)
    assert simulate(plan, slow_updates, options).seconds == pytest.approx(8 * 9)


@pytest.fixture
def slow_updates(monkeypatch):
    """Only updates go through memory, 16 elements in 4 s. Nothing waits for a link."""
    passes = costs.Passes(accumulate=0, blend=0, apply=10**12)
    monkeypatch.setattr(timeline, "passes_of", lambda _: passes)
    rate = 16 * passes.apply / 4
    return replace(
        BY_HAND, inter_bandwidth=math.inf, inter_latency=0.0, memory_bandwidth=rate
    )


SMALL = Model([(24, 16), (16, 40), (4, 16)] * 4, [(8, 16), (16, 8)], 4)
PLACES = {
    "fsdp": ("fsdp", 16),
    "hsdp": ("hsdp", 2, 8),
    "hsdp-relayed": ("hsdp", 8, 2),
    "fsdp-tp": ("tp", 2, 8),
    "ep": ("ep", 4, 4),
    "ddp": ("ddp", 16),
    "fsdp, stacks": ("fsdp", 16),
    "hsdp, stacks": ("hsdp", 8, 2),
}


@pytest.mark.parametrize("max_peers", [512, 1], ids=["one level", "two levels"])
@pytest.mark.parametrize("name", PLACES)
def test_plans_are_the_schedule_s_own_packs(name, max_peers, monkeypatch):
    layouts = layouts_of(SMALL._replace(stacked="stacks" in name), *PLACES[name])
    for layout in layouts:
        check_cover(layout)
    monkeypatch.setattr(buckets, "MAX_PEERS", max_peers)
    schedule = schedule_of(layouts, ranks_per_node=4)
    for plan in make_plan(schedule, 16, 4).buckets:
        for place, rank in enumerate(plan.ranks.tolist()):
            assert_as_packs(schedule, plan, place, rank)


def assert_as_packs(schedule, plan, place, rank):
    packs = schedule.packs(plan.bucket, rank)
    phases = (plan.gather, packs.gather_send), (plan.scatter, packs.scatter_send)
    for at, (hops, sent) in enumerate(phases):
        first = hops[0].nbytes[OUT, :, place].sum()
        assert first == sent.nbytes if len(hops) == 1 else first <= sent.nbytes
        if len(hops) == 2:
            passed = sum(map(sum, passed_on(schedule, plan.bucket, rank)[at]))
            # The rank copies what stays on it in one of the two hops.
            nbytes = hops[1].nbytes[OUT, :, place].sum()
            assert nbytes <= passed * sent.dtype.itemsize
    found = [
        (tuple(ranks), nbytes)
        for wave in plan.relays
        for ranks, nbytes in zip(wave.ranks.tolist(), wave.nbytes)
        if rank in ranks
    ]
    expected = [(relay.replicas, relay.pack.nbytes) for relay in packs.relays]
    assert sorted(found) == sorted(expected)


def reported(case):
    schedule = report.schedule_of(case, Hardware())
    of_case = report.report(case, schedule, Hardware())
    return report.comparisons(of_case, Hardware())


@pytest.mark.parametrize(
    ("has_relay_stream", "orders"),
    [
        (False, [(Action.COMPUTE, Action.RELAY)]),
        (
            True,
            [
                (Action.RELAY,),
                (Action.GATHER, Action.COMPUTE, Action.SCATTER),
            ],
        ),
    ],
    ids=["CPU", "accelerator"],
)
def test_batches_and_relays_have_the_engine_s_order(has_relay_stream, orders):
    """On each rank; batches that follow each other count as one. On an accelerator, each
    stream has its order.
    """
    model = Model([(24, 16), (16, 40), (4, 16)] * 64)
    schedule = schedule_of(layouts_of(model, *PLACES["hsdp-relayed"]))
    plan = make_plan(schedule, 16, 1)
    groups = [bucket.ranks for bucket in schedule.buckets]
    step = simulate(plan, BY_HAND, has_relay_stream=has_relay_stream)
    early = []
    if has_relay_stream:
        early = [i for i, bucket in enumerate(schedule.buckets) if bucket.relayed]
        assert early
    engine_order = step_order(groups, 1, early=early)
    for rank in range(16):
        work = {}
        for index, (bucket, of_all) in enumerate(zip(schedule.buckets, plan.buckets)):
            if rank not in bucket.ranks:
                continue
            owned = schedule.owned(bucket).get(rank, ())
            shapes = {schedule.layouts[matrix].full_shape for matrix in owned}
            relays = schedule.relays(bucket, rank)
            work[index] = LocalWork(of_all, batches=[*shapes], relays=relays)
        operations = local_order(engine_order, groups, work)
        for actions in orders:
            expected = [one.action.value for one in operations if one.action in actions]
            found = []
            for event in step.events:
                if event.kind in expected and rank in event.ranks:
                    found.append(event.kind)
            assert joined(found) == joined(expected)
        # At least one relay begins between two batches.
        launched = [one.action.value for one in operations]
        batches_and_relays = [k for k in launched if k in ("orthogonalize", "relay")]
        assert "orthogonalize relay orthogonalize" in " ".join(batches_and_relays)


def joined(kinds):
    """``kinds`` with one batch for several that follow each other."""
    result = []
    for kind, following in itertools.pairwise([*kinds, None]):
        if kind != following or kind == "relay":
            result.append(kind)
    return result


def test_report():
    fsdp, hsdp, wide = (
        reported(case) for case in (*CASES[:2], Case("GPT-2 124M", "fsdp", 1024))
    )
    for case in (fsdp, hsdp):
        assert case["ideal"] <= case["step"] < case["all_gather"]
    # One update per replica is broadcast, and fewer matrices than ranks leave ranks idle.
    assert fsdp["relays"] == 0 < hsdp["relays"]
    assert hsdp["idle"] > 0.5 > fsdp["idle"]
    assert fsdp["one_level"] is None
    assert wide["one_level"] not in (None, wide["step"])
    rate = 8 * Hardware().peak_flops * 0.4
    rest = 6 * 12 * 12 * 768 * 768 * 512 * 1024 / rate
    assert fsdp["of_training"] == pytest.approx(fsdp["step"] / (fsdp["step"] + rest))
    # AdamW keeps two moments, and goes through memory once.
    elements = 12 * 12 * 768 * 768 / 8
    assert fsdp["elements"].max() == elements
    assert fsdp["adamw"] == pytest.approx(28 * elements / 3e12)
    # A step has more passes with torch's functions, and each algorithm is there.
    assert fsdp["by_options"]["default"] == fsdp["step"]
    assert fsdp["by_options"]["fused"] < fsdp["step"]
    page = (ROOT / "docs" / "data" / "scale.md").read_text()
    assert all(f"\n{case.title}  " in page for case in CASES)
    older = Hardware().with_values(["a100", "utilization=0.25", "gpus_per_node=4"])
    assert (older.flops, older.gpus_per_node) == (312e12 / 4, 4)


def test_the_page_about_your_model_says_what_the_command_prints(
    tmp_path, monkeypatch, capsys
):
    page = (ROOT / "docs" / "your_model.md").read_text().partition("## An example")[2]
    code, one, one_printed, several, several_printed = re.findall(
        r"```(?:python|bash|text)\n(.*?)```", page, re.DOTALL
    )
    (tmp_path / "my_model.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for command, printed in ((one, one_printed), (several, several_printed)):
        words = command.partition("tools.bench ")[2].split()
        if command == one:
            words += ["--html", "x.html"]
        assert cli.main(words) == 0
        assert capsys.readouterr().out.strip() == printed.strip()
        assert len(printed.splitlines()) <= 40
    assert '<rect class="gather"' in (tmp_path / "x.html").read_text()


def test_a_model_of_names_and_shapes(tmp_path, capsys, monkeypatch):
    path = tmp_path / "shapes.json"
    layer = {"norm.weight": [8], "experts.0.up": [8, 4], "experts.1.up": [8, 4]}
    shapes = {f"h.{at}.{name}": shape for at in (0, 1) for name, shape in layer.items()}
    path.write_text(json.dumps(shapes | {"h.0.q.weight": [4, 4], "wte.weight": [9, 4]}))
    model, notes = own.read(str(path), 1)
    assert model.names[2:] == [f"h.{i}.experts.{e}.up" for e in (0, 1) for i in (0, 1)]
    assert (model.dense, model.expert) == ([(4, 4), (9, 4)], [(8, 4)] * 2)
    assert (model.n_experts, model.active_numel) == (2, 16 + 36 + 2 * 32)
    assert "6 matrices" in notes and notes.endswith("look like AdamW's: wte")
    stack = torch.nn.ParameterDict({"up": torch.empty(4, 6, 8)})
    fused = torch.nn.MultiheadAttention(8, 2)
    parts = torch.nn.ModuleDict(
        {"gate": torch.nn.Linear(8, 4), "experts": stack, "a": fused}
    )
    monkeypatch.setattr(own, "make", lambda: parts, raising=False)
    made, _ = own.read("tools.bench.scale.own:make", 1)
    stacked = [f"experts.up[{expert}]" for expert in range(4)]
    assert made.names == ["a.in_proj_weight", *stacked]
    layouts = own.case_of(made._replace(is_split=True), "", "fsdp", 2).layouts()
    assert [layout.shape for layout in layouts] == [(8, 8)] * 3 + [(6, 8)] * 4
    case = own.case_of(model, "mine", "hsdp:2x4", 8, tokens=7)
    assert (case.title, case.model.tokens) == ("mine, HSDP 2 x 4, 8 ranks", 7)
    assert [layout.key.name for layout in case.layouts()] == model.names
    for words, said in (
        ([], "--active-experts K"),
        (["--layout", "hsdp:8x9", "--active-experts", "1"], "A x B = 64"),
        (["--layout", "any", "--html", "x", "--active-experts", "1"], "one layout"),
        (["--tokens", "1", "--tokens-per-rank", "1"], "give one of them"),
        (["--shard-dim", "1", "--active-experts", "1"], "has no stacks of experts"),
        (["--split", "--active-experts", "1"], "split_of knows no fused weight"),
        (["--model", "json:lost"], "json:lost is not .* AttributeError"),
        (["--model", "json"], "json is not .*no function is named after a colon"),
        (["--model", str(ROOT / "README.md")], "README.md is not a JSON of names"),
        (["--hardware", "gpus=4"], "has no 'gpus'; it has peak_flops, .*, gpus_per"),
    ):
        assert cli.main(["scale", "--model", str(path), *words]) == 1
        assert re.match(f"error: .*{said}", capsys.readouterr().err)


# Experts in stacks, and a fused weight of three parts in each of four layers.
SEARCHED = Model(
    [(96, 64), (64, 64)] * 4,
    [(64, 32), (32, 64)],
    8,
    active=2,
    stacked=True,
    names=[f"{layer}.{name}" for layer in range(4) for name in ("qkv", "out")]
    + [f"{name}[{expert}]" for expert in range(8) for name in ("up", "down")],
    fused={f"{layer}.qkv": Split((32, 32, 32)) for layer in range(4)},
)
# Slow enough that each change matters.
SLOW = Hardware(
    peak_flops=1e9,
    memory_bandwidth=1e7,
    intra_bandwidth=1e6,
    inter_bandwidth=5e5,
    gpus_per_node=4,
)


def all_combinations(case):
    """Each product of options, simulated from its beginning: seconds, how many changes, whether it keeps bits."""
    kinds = [("fsdp", case.world, 1), (case.kind, case.outer, case.inner)]
    for (kind, outer, inner), stacked, split in itertools.product(
        kinds, (False, True), (False, True)
    ):
        model = case.model._replace(stacked=stacked, is_split=split)
        placed = Case("small", kind, outer, inner, model)
        of_place = (kind != case.kind) + (not stacked) + split
        for owners, prefetch, algorithm, fused in itertools.product(
            (1, 2, 4, 8, "auto"), (1, 2), ("quintic", "gram"), (False, True)
        ):
            options = Options(algorithm, fused, prefetch, owners)
            seconds = report.simulated(placed, SLOW, options).seconds
            changes = (owners != 1) + (prefetch != 1) + (algorithm == "gram") + fused
            keeps_bits = owners == 1 and algorithm == "quintic"
            yield seconds, of_place + changes, keeps_bits


def fastest_by_changes(combinations):
    """As a user reads it: with one more change each time, as long as that saves enough."""
    found = []
    last = min(seconds for seconds, changes, _ in combinations if changes == 0)
    for count in range(1, 8):
        fastest = min((s for s, n, _ in combinations if n == count), default=math.inf)
        if fastest < (1 - WORTH) * last:
            found.append(fastest)
            last = fastest
    return found


def test_search_finds_what_trying_everything_finds(monkeypatch):
    monkeypatch.setattr(division, "MIN_DIVIDED", 32)
    case = Case("small", "hsdp", 2, 8, SEARCHED)
    combinations = list(all_combinations(case))
    of_all = fastest_by_changes(combinations)
    with_same_bits = fastest_by_changes([c for c in combinations if c[2]])
    # Several changes together are better than each alone.
    assert len(of_all) > 1
    search = Search(case, Options(), SLOW)
    found = search.run(math.inf)
    assert (found.tried, found.left_out) == (len(combinations), 0)
    expected = {*of_all, *with_same_bits[-1:]}
    assert [step.seconds for step in found.steps] == sorted(expected, reverse=True)
    assert found.fastest.seconds == of_all[-1]
    # Without time, only the case's own schedule is simulated, with each algorithm. The search goes on later.
    late = Search(case, Options(), SLOW)
    found = late.run(-math.inf)
    assert (found.tried, found.left_out) == (4, len(combinations) - 4)
    assert late.run(math.inf).steps == search.found.steps


def test_what_users_have_already():
    """The step is the one that the search finds with these changes, and so is the memory."""
    case = Case("small", "fsdp", 8, own=SEARCHED)
    both, notes = own.as_users_have_it(SEARCHED, "matrices", 1, True)
    assert (both.stacked, both.is_split) == (False, True)
    assert notes.endswith(
        "stacks of experts are Shard(1) and 4 fused weights are split"
    )
    assert own.as_users_have_it(SEARCHED, "matrices", 0, False) == (
        SEARCHED,
        "matrices",
    )
    search = Search(case, Options(), SLOW)
    for place in search.places:
        expected = reported_on(place.case)["elements"].max()
        assert search._fullest(place) == expected
    last = search.places[-1]
    assert (len(search.places), len(last.changes), last.case.model) == (4, 2, both)
    assert len(Search(last.case, Options(), SLOW).places) == 1


def reported_on(case):
    return report.report(case, report.schedule_of(case, SLOW), SLOW)


def test_usual_numbers_of_ranks_with_different_experts():
    for experts, ranks, expected in (
        (48, 64, [8, 16]),
        (256, 2048, [8, 16, 32, 64, 128, 256]),
        (384, 96, [8, 16, 32]),
        # Within a node.
        (60, 64, [4]),
        (8, 4, [4]),
        (7, 64, []),
        (0, 64, []),
    ):
        assert own._expert_sizes(experts, ranks, 8) == expected


def test_layouts_side_by_side(tmp_path, capsys):
    path = tmp_path / "shapes.json"
    layer = {"q": [512, 256], "experts.0.up": [256, 128], "experts.1.up": [256, 128]}
    path.write_text(
        json.dumps({f"h.{at}.{n}": s for at in (0, 1) for n, s in layer.items()})
    )
    model, _ = own.read(str(path), 1)
    small = Hardware(gpus_per_node=2)
    expected = ["fsdp", "hsdp:4x2", "ddp", "fsdp-ep:4x2"]
    assert own.sensible_layouts(model, 8, small) == expected
    # Only shards of FSDP fit.
    tiny = replace(small, memory=1.0)
    assert own.sensible_layouts(model, 8, tiny) == ["fsdp", "fsdp-ep:4x2"]
    words = ["scale", "--model", str(path), "--active-experts", "1", "--ranks", "8"]
    hardware = ["--hardware", "gpus_per_node=2", "--tokens-per-rank", "1000"]
    assert cli.main([*words, *hardware, "--layout", "any"]) == 0
    printed = capsys.readouterr().out
    for mesh in ("FSDP", "HSDP 4 x 2", "DDP", "FSDP x EP 4 x 2"):
        assert f"\n{mesh}  " in printed
    assert cli.main([*words, *hardware, "--layout", "hsdp:2x4", "fsdp"]) == 0
    assert "\nHSDP 2 x 4  " in capsys.readouterr().out
    assert cli.main([*words, *hardware]) == 0
    assert "1,000 for each rank" in capsys.readouterr().out


def test_measured_page_is_what_the_command_prints(capsys):
    data = ROOT / "docs" / "data"
    assert cli.main(["measured", str(data / "h100-gpu.json")]) == 0
    tables = capsys.readouterr().out.split("\n\n")
    page = (data / "measured.md").read_text()
    assert len(tables) > 3
    assert all(table.strip() in page for table in tables)
    assert cli.main(["measured", str(data / "scale.md")]) == 1


def test_marks_of_a_page_are_round_and_begin_at_0():
    for milliseconds in (0.043, 0.62, 7.9, 92.3, 578):
        marks = html._marks(milliseconds)
        assert marks[0] == 0
        assert marks[-1] <= milliseconds < marks[-1] + marks[1]
        assert 3 <= len(marks) <= html.MARKS + 1
        digits = f"{marks[1]:e}".partition("e")[0]
        assert float(digits) in (1, 2, 5)


def test_a_page_shows_busy_and_idle_ranks():
    busiest = np.arange(100)[::-1]
    assert [*html._shown(busiest, 32)] == [0, 1, 2, 3, *range(72, 100)]
    assert [*html._shown(busiest[:20], 32)] == [*range(80, 100)]
    busy = np.array([0.0, 0, 3, 4, 0, 1, 2, 5])
    step = Step(np.ones(8), busy, busy, [])
    assert html._idle(step) == "3 of 8 ranks (38%) own no matrix."
    assert html._idle(step._replace(busy=np.ones(8))) == "Each rank owns a matrix."
