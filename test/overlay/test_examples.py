"""The examples run, and say what they should."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
from overlay.example_runs import ENVIRONMENT, run_example, SECONDS
from tools.overlay.repo import ROOT


EXAMPLES = ROOT / "examples"
STEPS = 4
TINY = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "16"]
TINY += ["--steps", STEPS]


def losses_of(path):
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What ``train_gpt.py`` writes on one process."""
    place = tmp_path_factory.mktemp("alone")
    script = EXAMPLES / "train_gpt.py"
    code, _, err = run_example(script, *TINY, *files(place), processes=1)
    assert code == 0, err
    return place


def files(place):
    return ["--losses", place / "losses", "--save", place / "model.pt"]


def test_gpt(alone, tmp_path):
    """By FSDP1; FSDP2 is what compare_gpt.py trains with."""
    torch = pytest.importorskip("torch")
    options = ["--parallel", "fsdp1", *TINY, *files(tmp_path)]
    code, out, err = run_example(EXAMPLES / "train_gpt.py", *options, processes=2)
    assert code == 0, err
    assert "Warning" not in err
    assert "loss on held-out text" in out
    one, many = (losses_of(place / "losses") for place in (alone, tmp_path))
    assert len(many) == STEPS
    assert many == pytest.approx(one, abs=0.01)
    expected, found = (torch.load(p / "model.pt") for p in (alone, tmp_path))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-3, rtol=0)


def numbers(out, row):
    """The numbers of a row of the table."""
    (line,) = re.findall(rf"^  {re.escape(row)}  +(.*)$", out, re.MULTILINE)
    return [float(word) for word in re.findall(r"\d[\d.e-]*", line)]


def assert_table(out, matrices, silent):
    first = numbers(out, "loss, first step")
    assert first[0] == pytest.approx(first[1], abs=1e-3)
    assert numbers(out, "largest difference of loss, any step")[0] < 0.05
    assert numbers(out, "Newton-Schulz calls a step") == [matrices, matrices]
    *each, total = numbers(out, "Newton-Schulz calls, a Muon step")
    assert (len(each), total) == (4, matrices)
    assert min(each) > 0
    assert numbers(out, f"KiB sent over {silent}, a Muon step") == [0] * 5
    # Which would say nothing if nobody could see what is sent over such a group.
    assert min(numbers(out, f"KiB sent over {silent}, a batch")) > 0
    assert f"bitwise equal: yes ({matrices} matrices, 3 steps)" in out


# With four tokens in a batch most experts get none, and some processes not one.
FEW_TOKENS = ["--batch", "4", "--context", "1"]


def test_moe():
    code, out, err = run_example(EXAMPLES / "train_moe.py", *TINY, *FEW_TOKENS)
    assert code == 0, err
    assert "Warning" not in err
    assert_table(out, 2 * (5 + 8), "ep")
    assert min(numbers(out, "KiB sent over dp (experts), a Muon step")) > 0


def test_pipeline():
    code, out, err = run_example(EXAMPLES / "train_pipeline.py", *TINY)
    assert code == 0, err
    assert "Warning" not in err
    assert_table(out, 2 * 6, "pp")
    assert min(numbers(out, "KiB sent over dp (replicas of a stage), a Muon step")) > 0


def test_timeline(tmp_path):
    picture = tmp_path / "timeline.png"
    code, out, err = run_example(
        EXAMPLES / "timeline.py", *TINY, "--picture", picture, processes=2
    )
    assert code == 0, err
    assert "2 ranks (0, 1), 12 matrices, 4 buckets" in out
    head, *rows = re.findall(r"^(?:ms on rank|\d +[\d.]).*", out, re.MULTILINE)
    assert "wait for gather  orthogonalize  scatter" in head
    for rank, row in enumerate(rows):
        number, *spent, last = map(float, row.split())
        assert number == rank
        # Phases follow each other.
        assert 0 < sum(spent) <= last + 0.1 * len(spent)
    assert len(rows) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")


COMPARED = ["--steps", 6, "--exact-steps", 2, "--batch", 4, "--context", 32]
COMPARED += ["--layers", 1, "--width", 32, "--heads", 2]


def test_comparison(tmp_path):
    """Started by itself, as `verify` does; its own processes are those of `Processes`."""
    command = [sys.executable, EXAMPLES / "compare_gpt.py", "--processes", 2]
    command += [*COMPARED, "--out", tmp_path / "out"]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "2 processes: step    5  loss" in done.stdout
    assert "bitwise equal: yes (6 matrices, 2 steps)" in done.stdout
    assert numbers(done.stdout, "Newton-Schulz calls a step") == [6, 6]
    *each, total = numbers(done.stdout, "KiB that cannot be less")
    assert min(each) > 0
    assert sum(each) == pytest.approx(total)
    figures = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert figures["problems"] == []
    assert [len(rank["losses"]) for rank in figures["many"]] == [6, 6]
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_difference_is_found(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from measure import exact_steps

    def trained(lr):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4, bias=False)
        return model, torch.optim.Muon(model.parameters(), lr=lr)

    found = [exact_steps(trained(0.1), trained(lr), 2) for lr in (0.1, 0.2)]
    assert found[0] == {"exact": 2, "checked": ["weight"], "differing": ""}
    assert found[1]["differing"].startswith("weight: parameter differs by up to")


FIGURES = {
    "losses": [5.5, 5.0],
    "sent": {"all ranks": 100.0},
    "needed": 100,
}


@pytest.mark.parametrize(
    ("one", "second", "words"),
    [
        ({}, {"sent": {"all ranks": 107.0}}, "rank 1 sends 107 bytes a step"),
        ({}, {"sent": {"all ranks": 0.0}}, "rank 1 sends 0 bytes"),
        ({"losses": [5.5, 6.0]}, {}, "one process: the loss did not fall"),
        ({"losses": [5.5, math.nan]}, {}, "one process: the loss did not fall"),
        ({"losses": [5.6, 5.0]}, {}, "do not start alike"),
    ],
)
def test_wrong_figures_are_named(compare_gpt, one, second, words):
    assert compare_gpt.problems(FIGURES, [FIGURES, FIGURES]) == []
    (problem,) = compare_gpt.problems(FIGURES | one, [FIGURES, FIGURES | second])
    assert words in problem


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "6"], "--batch 6 does not divide among 4 processes"),
        (["--width", "7"], "--width 7 does not divide among 6 heads"),
        (["--exact-steps", "0"], "--exact-steps has to be at least 1"),
        (["--processes", "1"], "at least 2"),
        (["--stpes", "3"], "unrecognized arguments: --stpes 3"),
        (["--out", __file__], "is no folder"),
    ],
)
def test_options_that_do_not_fit(compare_gpt, monkeypatch, capsys, options, words):
    monkeypatch.setattr(sys, "argv", ["compare_gpt.py", *options])
    with pytest.raises(SystemExit) as ended:
        compare_gpt.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def compare_gpt(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import compare_gpt

    return compare_gpt
