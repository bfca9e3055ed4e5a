"""The simulated step: by hand where it is small, and against the engine's own packs; and its tables."""

import json
import math
import re

import pytest


pytest.importorskip("torch.optim.muon", reason="the interpreter's torch has no overlay")

from tools.bench import cli
from tools.bench.models import Model
from tools.bench.scale.cases import CASES, layouts_of
from tools.bench.scale.costs import newton_schulz_seconds, Options
from tools.bench.scale.hardware import Hardware
from tools.bench.scale.plan import IN, make_plan, OUT
from tools.bench.scale.timeline import simulate
from tools.overlay.payload import ROOT
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners, newton_schulz_flops


# A 4 x 4 matrix takes a second, and so does its half on the wire; each message a quarter more.
BY_HAND = {
    "peak_flops": newton_schulz_flops((4, 4)),
    "utilization": 1.0,
    "memory_bandwidth": math.inf,
    "inter_bandwidth": 16.0,
    "inter_latency": 0.25,
    "gpus_per_node": 1,
}


def plan_of(model, kind, outer, inner=1, gpus_per_node=1):
    layouts = layouts_of(model, kind, outer, inner)
    schedule = make_schedule(layouts, assign_owners(layouts))
    return schedule, make_plan(schedule, gpus_per_node)


def test_buckets_by_hand():
    for matrices, prefetch, seconds in (
        # Gather 1.25 s, Newton-Schulz 1 s, scatter 1.25 s.
        (2, 1, 3.5),
        # Gathers until 1.25 and 2.5; scatter 0 waits for the link until 2.5, and so on to 3.75 and 5.
        (4, 1, 5.0),
        # Gather 1 starts behind scatter 0: 2.25, 3.5, 4.75, then 1 and 1.25.
        (4, 0, 7.0),
    ):
        _, plan = plan_of(Model([(4, 4)] * matrices), "fsdp", 2)
        options = Options(prefetch=prefetch)
        step = simulate(plan, 2, Hardware(**BY_HAND), options)
        assert step.done.tolist() == [seconds] * 2
        assert step.busy.tolist() == [matrices / 2] * 2


def test_passes_by_hand():
    """Two matrices of 16 elements on two ranks, which store half of each, with a byte of memory in a second."""
    _, plan = plan_of(Model([(4, 4)] * 2), "fsdp", 2)
    free = {"peak_flops": math.inf, "inter_bandwidth": math.inf, "inter_latency": 0.0}
    hardware = Hardware(**{**BY_HAND, **free, "memory_bandwidth": 1.0})
    # The norm, the division, and five times two bases, of a matrix and of its Gram matrix.
    inside = 6 * 16 + 5 * 4 * (16 + 16)
    # 8 elements arrive from the other rank, and 8 go back.
    packed = 4 * 16
    for fused, around in ((False, 16 * (30 + 26)), (True, 16 * (14 + 10))):
        step = simulate(plan, 2, hardware, Options(fused=fused))
        assert step.passes.tolist() == [around + packed] * 2
        assert step.seconds == inside + around + packed


def test_relays_by_hand():
    """Eight replicas in four buckets, each with a matrix of each rank."""
    _, plan = plan_of(Model([(4, 4)] * 32), "ddp", 8)
    assert len(plan) == 4
    # A rank receives the seven other matrices of a bucket, of 32 bytes each.
    assert plan[0].relays.nbytes[IN].sum(0).tolist() == [7 * 32] * 8
    wire = {"inter_bandwidth": 7 * 32 / 2.5, "inter_latency": 0.0}
    step = simulate(plan, 8, Hardware(**{**BY_HAND, **wire}))
    # The relays of buckets 0 and 1, 2.5 s each, run during Newton-Schulz of buckets 2 and 3. The others come at the end.
    assert step.seconds == 1 + 1 + 2.5 + 2.5 + 2.5 + 2.5


def test_forms_by_hand():
    """Symmetric products take a part of the time of others, and read no base. The Gram form has fewer long ones."""
    wide, square = 2 * 3072**2 * 8192, 2 * 3072**3
    hardware = Hardware(**{**BY_HAND, "peak_flops": 1.0}, symmetric=0.5)
    by_algorithm = {
        "quintic": 5 * (2 * wide + square),
        "symmetric": 5 * wide + 0.5 * 5 * (wide + square),
        "gram": 2 * wide + 0.5 * (2 * wide + 14 * square),
    }
    for algorithm, flops in by_algorithm.items():
        for count in (1, 3):
            found = newton_schulz_seconds((8192, 3072), count, algorithm, hardware)
            assert found == pytest.approx(count * flops)
        # Small matrices take torch's products, with each algorithm.
        found = newton_schulz_seconds((64, 256), 1, algorithm, hardware)
        assert found == newton_schulz_flops((64, 256))


SMALL = Model([(24, 16), (16, 40), (4, 16)] * 4, [(8, 16), (16, 8)], 4)


@pytest.mark.parametrize(
    ("stacked", "place"),
    [
        (False, ("fsdp", 16)),
        (False, ("hsdp", 2, 8)),
        (False, ("hsdp", 8, 2)),
        (False, ("tp", 2, 8)),
        (False, ("ep", 4, 4)),
        (False, ("ddp", 16)),
        (True, ("fsdp", 16)),
        (True, ("hsdp", 8, 2)),
    ],
)
def test_plans_are_the_schedule_s_own_packs(stacked, place):
    model = SMALL._replace(stacked=stacked)
    schedule, plan = plan_of(model, *place, gpus_per_node=4)
    for bucket in plan:
        for position, rank in enumerate(bucket.ranks.tolist()):
            packs = schedule.packs(bucket.bucket, rank)
            relayed = [r.pack.nbytes for r in packs.relays if r.source != rank]
            for loads, side, expected in (
                (bucket.gather, OUT, packs.gather_send.nbytes),
                (bucket.gather, IN, packs.gather_recv.nbytes),
                (bucket.scatter, OUT, packs.scatter_send.nbytes),
                (bucket.scatter, IN, packs.scatter_recv.nbytes),
                (bucket.relays, IN, sum(relayed)),
            ):
                assert loads.nbytes[side, :, position].sum() == expected


def cells(printed, title):
    """Those of the rows ``title`` in both tables."""
    rows = re.findall(rf"^{re.escape(title)}  (.*)$", printed, re.MULTILINE)
    return [row.split() for row in rows]


def test_table(capsys):
    assert cli.main(["scale", "--only", "GPT-2 124M"]) == 0
    printed = capsys.readouterr().out
    times, by_options = cells(printed, "GPT-2 124M, FSDP, 8 ranks")
    step, share, ideal, all_gather = (times[at] for at in (1, 3, 6, 7))
    assert float(ideal) <= float(step) < float(all_gather)
    flops = 6 * 12 * 12 * 768 * 768 * 512 * 1024
    rest = flops / (8 * Hardware().peak_flops * 0.4)
    expected = 100 * float(step) / (float(step) + 1e3 * rest)
    assert float(share.rstrip("%")) == pytest.approx(expected, rel=0.02)
    # A step has more passes with torch's functions. AdamW keeps two moments, and goes through memory once.
    default, fused, *_, adamw, _, saved = by_options
    assert default == step
    assert float(fused) < float(default)
    elements = 12 * 12 * 768 * 768 / 8
    assert adamw == f"{1e3 * 28 * elements / 3e12:.2f}"
    assert saved == f"{4 * elements / 1e9:.2f}"
    # The page has these and all other rows.
    page = (ROOT / "docs" / "data" / "scale.md").read_text()
    assert cells(page, "GPT-2 124M, FSDP, 8 ranks") == [times, by_options]
    assert all(f"\n{case.title}  " in page for case in CASES)


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


def test_a_model_of_names_and_shapes(tmp_path, capsys):
    path = tmp_path / "shapes.json"
    layer = {"q": [4, 4], "experts.0.up": [8, 4], "experts.1.up": [8, 4]}
    shapes = {f"h.{at}.{name}": shape for at in (0, 1) for name, shape in layer.items()}
    path.write_text(json.dumps({**shapes, "h.1.down": [3, 4, 4], "norm": [4]}))
    words = ["scale", "--model", str(path), "--ranks", "8"]
    assert cli.main([*words, "--active-experts", "1"]) == 1
    assert "different numbers of experts" in capsys.readouterr().err
    path.write_text(json.dumps(shapes))
    words += ["--active-experts", "1", "--layout", "fsdp", "hsdp:2x4", "fsdp-ep:4x2"]
    words += ["--tokens-per-rank", "500000", "--hardware", "gpus_per_node=4"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "6 matrices with 1.6e-07 billion parameters; 1 of 2 experts" in printed
    for mesh in ("FSDP", "HSDP 2 x 4", "FSDP x EP 4 x 2"):
        times, _ = cells(printed, f"shapes, {mesh}, 8 ranks")
        assert times[2] == "4.0"


def test_wrong_arguments(tmp_path, capsys):
    path = tmp_path / "shapes.json"
    path.write_text('{"q": [4, 4], "experts.0.up": [4, 4]}')
    for words, said in (
        ([], "--active-experts K"),
        (["--layout", "hsdp:8x9", "--active-experts", "1"], "A x B = 64"),
        (["--shard-dim", "1", "--active-experts", "1"], "has no stacks of experts"),
        (["--split", "--active-experts", "1"], "split_of knows no fused weight"),
        (["--model", "json:lost"], "json:lost is not .* AttributeError"),
        (["--model", "json"], "json is not .*no function is named after a colon"),
        (["--model", str(ROOT / "README.md")], "README.md is not a JSON of names"),
        (["--hardware", "gpus=4"], "has no 'gpus'; it has peak_flops, .*, gpus_per"),
    ):
        assert cli.main(["scale", "--model", str(path), *words]) == 1
        assert re.match(f"error: .*{said}", capsys.readouterr().err)
    assert cli.main(["scale", "--only", "GPT-7"]) == 1


def test_hardware_by_name_and_value():
    older = Hardware().with_values(["a100", "utilization=0.25", "gpus_per_node=4"])
    assert (older.flops, older.gpus_per_node) == (312e12 / 4, 4)
