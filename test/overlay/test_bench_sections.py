"""What ``tools.bench gram`` and ``promises`` measure is what their tables say. Times are nobody's promise."""

import importlib.util
import pathlib
import types

import pytest
from tools.bench import cli, section
from tools.bench.gram import table as gram_table
from tools.bench.promises import cli as promises_cli, table as promises_table
from tools.overlay.repo import ROOT


def overlaid():
    spec = importlib.util.find_spec("torch")
    return (
        spec is not None and pathlib.Path(spec.origin).with_name("optim") / "muon.py"
    ).is_file()


needs_overlay = pytest.mark.skipif(
    not overlaid(), reason="the interpreter's torch has no overlay"
)


@needs_overlay
def test_gram_saves_flops_from_a_quotient_of_two():
    from tools.bench.gram.speed import flops

    assert flops((512, 2048), "quintic") == 5 * (4 * 512**2 * 2048 + 2 * 512**3)
    assert flops((2048, 512), "gram") * 3 == flops((512, 2048), "quintic") * 2
    assert flops((512, 640), "gram") == flops((512, 640), "quintic")


@needs_overlay
def test_times_are_of_both_algorithms(monkeypatch):
    from tools.bench.gram import speed

    called = []
    monkeypatch.setattr(speed, "orthogonalize", lambda x, name: called.append(name))
    monkeypatch.setattr(speed, "flops", lambda shape, name: 1)
    found = speed.time_shape((16, 32), 1, reps=3, limit=9, cores=2)
    assert {name: len(times) for name, times in found["seconds"].items()} == {
        "quintic": 3,
        "gram": 3,
    }
    # A warm-up each; then now the one first and now the other.
    order = "quintic gram gram quintic quintic gram gram quintic"
    assert called == order.split()
    printed = gram_table.speed({"cpu": "a CPU", "times": [found]})
    assert "16x32" in printed and "On a CPU; medians of 3 to 3" in printed


@needs_overlay
def test_distances_from_the_polynomial_and_from_the_orthogonal_factor():
    from tools.bench.gram import accuracy

    for kind in accuracy.SPECTRA:
        found = accuracy.distances((16, 64), kind)
        for name, of_name in found.items():
            for exact, orthogonal in of_name.values():
                assert exact < 0.1, (kind, name)
                assert exact < orthogonal, (kind, name)
    # The Polar Express is there to come nearer to the orthogonal factor.
    nearer, default = (
        found[name]["quintic"][1] for name in ("Polar Express", "default")
    )
    assert nearer < default / 2
    case = {"shape": [16, 64], "spectrum": "flat", "distances": found}
    assert "16x64, flat" in gram_table.accuracy([case])


@needs_overlay
def test_training_differs_in_the_algorithm_alone(monkeypatch):
    from tools.bench.gram.training import train

    monkeypatch.syspath_prepend(ROOT / "examples")
    import train_gpt

    options, small = train_gpt.options, {"width": 32, "layers": 1, "heads": 2}
    small |= {"batch": 2, "context": 16}

    def small_options():
        parser = options()
        parser.set_defaults(**small)
        return parser

    monkeypatch.setattr(train_gpt, "options", small_options)
    runs = [train(name, 0, 3, 1)["losses"] for name in ("quintic", "gram", "gram")]
    assert runs[1] == runs[2]
    # Out projections start at zero, so the first step moves nothing that the second loss sees but them.
    assert runs[0][0] == runs[1][0]
    assert runs[0][2] != runs[1][2]


def test_curves_are_compared_seed_by_seed():
    def run(algorithm, losses, world=1):
        return {
            "world": world,
            "seed": 0,
            "algorithm": algorithm,
            "losses": losses,
            "held_out": 2.0,
        }

    found = [run("quintic", [3.0, 2.0]), run("gram", [3.0, 2.25])]
    found += [run("quintic", [3.0, 2.5], 4), run("gram", [3.0, 2.25], 4)]
    printed = gram_table.training(found)
    assert "seed 0, 1 process" in printed and "seed 0, 4 processes" in printed
    assert "one process and of 4, quintic: at most 0.5000 apart" in printed
    assert "one process and of 4, gram: at most 0.0000 apart" in printed


def test_what_prefetch_can_give_at_most():
    most = promises_table.most
    # Latency: 4 x (1/2 + 1) + 1/2 over 4 + 2 x 1/2, and with many buckets the whole of a gather.
    assert most(4, "latency", 0.5) == 1.3
    assert most(10**8, "latency", 1.0) == pytest.approx(2.0)
    # Bytes that take as long as Newton-Schulz hide behind it, and those that take twice as long do not.
    assert most(10**8, "bandwidth", 0.5) == pytest.approx(2.0)
    assert most(10**8, "bandwidth", 1.0) == pytest.approx(1.5)


@needs_overlay
def test_promises_over_a_wire():
    from tools.bench import fleet
    from tools.bench.promises.work import Promises, Wire

    wires = (Wire("latency", 0.0), Wire("latency", 1.0), Wire("bandwidth", 1.0))
    settings = promises_cli.SETTINGS
    job = Promises(True, wires, settings, reps=1, cores=2)
    ranks = fleet.run("promises.work", job, 2, 120)
    times = promises_cli.slowest([one["times"] for one in ranks])
    # Eight sleeps of 20 ms on a rank, in four buckets of 40 ms each; or sixteen, one owner at a time.
    together, alone = settings.index((True, 0)), settings.index((False, 0))
    assert all(seconds > 0.16 for of_wire in times for (seconds,) in of_wire)
    assert times[0][alone][0] > 0.32
    # Four gathers and the last scatter of 40 ms are not hidden.
    assert all(of_wire[together][0] > 0.36 for of_wire in times[1:])
    case = {**ranks[0], "newton_schulz": "asleep", "times": times}
    case |= {"wires": wires, "settings": settings}
    printed = promises_table.page(case, "a CPU")
    assert printed.count("bandwidth, 1 of Newton-Schulz each way") == 2


def test_section_is_replaced_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- end of x -->\nb\n")
    section.put(page, "x", "new\n")
    assert page.read_text() == "a\n<!-- x -->\nnew\n<!-- end of x -->\nb\n"
    with pytest.raises(ValueError, match="has no lines"):
        section.put(page, "y", "")


def test_the_page_has_all_sections():
    text = (ROOT / "docs" / "bench.md").read_text()
    for name in (
        "gram speed",
        "gram accuracy",
        "gram training",
        "promises asleep",
        "promises real",
    ):
        _, _, rest = text.partition(f"<!-- tools.bench {name} -->\n")
        part, end, _ = rest.partition(f"<!-- end of tools.bench {name} -->")
        assert end and part.strip(), name


def test_peer_that_is_not_installed_is_left_out_with_a_word(monkeypatch):
    args = cli.parser().parse_args(["step", "--no-stock"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    names = cli.names_of(args)
    assert "muon_fsdp2" not in names
    assert "muon_fsdp2: is not installed" in cli.legend(args, names)
    there = types.SimpleNamespace()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there)
    names = cli.names_of(args)
    assert "muon_fsdp2" in names
    assert "is not installed" not in cli.legend(args, names)
