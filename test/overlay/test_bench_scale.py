"""The simulated step: by hand where it is small, and against the engine's own packs; and its page."""

import itertools
import json
import re

import pytest


pytest.importorskip("torch.optim.muon", reason="the interpreter's torch has no overlay")

import torch
from tools.bench import cli
from tools.bench.scale import own, report
from tools.bench.scale.cases import Case, CASES, layouts_of
from tools.bench.scale.hardware import Hardware
from tools.bench.scale.plan import make_plan, OUT
from tools.bench.scale.timeline import simulate
from tools.overlay.payload import ROOT
from torch.optim._muon_engine.layouts.layout import check_cover
from torch.optim._muon_engine.schedule import buckets
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.levels import passed_on
from torch.optim._muon_engine.schedule.owners import assign_owners, newton_schulz_flops
from tools.bench.models import Model


# A 4 x 4 matrix takes a second, and so does its half on the wire; each message a quarter more.
BY_HAND = Hardware(
    peak_flops=newton_schulz_flops((4, 4)),
    utilization=1.0,
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
        step = simulate(make_plan(schedule_of(layouts), 2, 1), BY_HAND, prefetch)
        assert step.done.tolist() == [seconds] * 2
        assert step.busy.tolist() == [matrices / 2] * 2


def test_relays_travel_with_the_group_s_next_but_one_bucket():
    """Those of the last two buckets have no later one: they come at the end."""
    layouts = layouts_of(Model([(4, 4)] * 32), "ddp", 8)
    plan = make_plan(schedule_of(layouts), 8, 1)
    assert len(plan.buckets) == 4
    step = simulate(plan, BY_HAND)
    kinds = [e.kind for e in step.events if e.kind in ("orthogonalize", "relay")]
    runs = [(kind, len([*run])) for kind, run in itertools.groupby(kinds)]
    relays = ("relay", 8)
    assert runs[:2] == [("orthogonalize", 2), relays]
    assert runs[2:4] == [("orthogonalize", 1), relays]
    assert runs[4:] == [("orthogonalize", 1), ("relay", 16)]


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


def test_report():
    fsdp, hsdp, wide = (
        report.report(case, report.schedule_of(case, Hardware()), Hardware(), 1)
        for case in (*CASES[:2], Case("GPT-2 124M", "fsdp", 1024))
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
    page = (ROOT / "docs" / "data" / "scale.md").read_text()
    assert all(f"\n{case.title}  " in page for case in CASES)
    older = Hardware().with_values(["a100", "utilization=0.25", "gpus_per_node=4"])
    assert (older.flops, older.gpus_per_node) == (312e12 / 4, 4)


def test_the_page_about_your_model_says_what_the_command_prints(
    tmp_path, monkeypatch, capsys
):
    page = (ROOT / "docs" / "your_model.md").read_text().partition("## An example")[2]
    code, command, printed = re.findall(
        r"```(?:python|bash|text)\n(.*?)```", page, re.DOTALL
    )
    (tmp_path / "my_model.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    words = [*command.partition("tools.bench ")[2].split(), "--html", "x.html"]
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 0
    assert '<rect class="gather"' in (tmp_path / "x.html").read_text()
    assert capsys.readouterr().out.strip() == printed.strip()
    assert len(printed.splitlines()) <= 25


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
        {"gate": torch.nn.Linear(8, 4), "mlp": stack, "a": fused}
    )
    monkeypatch.setattr(own, "make", lambda: parts, raising=False)
    made, _ = own.read("tools.bench.scale.own:make", 1)
    stacked = [f"mlp.up[{expert}]" for expert in range(4)]
    assert made.names == ["a.in_proj_weight", "a.out_proj.weight", *stacked]
    layouts = own.case_of(made._replace(is_split=True), "", "fsdp", 2).layouts()
    assert [layout.shape for layout in layouts] == [(8, 8)] * 4 + [(6, 8)] * 4
    case = own.case_of(model, "mine", "hsdp:2x4", 8, tokens=7)
    assert (case.title, case.model.tokens) == ("mine, HSDP 2 x 4, 8 ranks", 7)
    assert [layout.key.name for layout in case.layouts()] == model.names
    for words, said in (
        ([], "--active-experts K"),
        (["--layout", "hsdp:8x9", "--active-experts", "1"], "A x B = 64"),
        (["--model", "json:lost"], "json:lost is not .* AttributeError"),
        (["--model", "json"], "json is not .*no function is named after a colon"),
        (["--model", str(ROOT / "README.md")], "README.md is not a JSON of names"),
        (["--hardware", "gpus=4"], "has no 'gpus'; it has peak_flops, .*, gpus_per"),
    ):
        assert cli.main(["scale", "--model", str(path), *words]) == 1
        assert re.match(f"error: .*{said}", capsys.readouterr().err)
