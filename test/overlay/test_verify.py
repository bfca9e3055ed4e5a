"""``verify`` says yes only to what is right, and leaves no process behind."""

import copy
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest
from tools.overlay import verify
from tools.overlay.errors import WrongTarget


PYTHON = pathlib.Path(sys.executable)
SMALL = ["--processes", "2", "--steps", "6", "--exact-steps", "2"]
SMALL += ["--layers", "1", "--width", "32", "--heads", "2", "--batch", "4"]
SMALL += ["--context", "32"]

# Takes the real worker and changes one element of a gradient that rank 1 alone sees;
# without matplotlib, since nobody looks at the picture.
PERTURBED = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("worker", {str(verify.WORKER)!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
right = worker.seeded_gradient

def wrong(shape, index, step, rank):
    gradient = right(shape, index, step, rank)
    if rank == 1 and index == 2:
        gradient[-1, -1] += 1e-3
    return gradient

worker.seeded_gradient = wrong
sys.modules["matplotlib"] = None  # as if it were not installed
worker.main()
"""

# Rank 1 does ACTION at once; the others would stay for a minute.
STAND_IN = """
import os, pathlib, signal, sys, time
rank, size = (int(sys.argv[sys.argv.index(name) + 1]) for name in ("--rank", "--processes"))
folder = pathlib.Path(sys.argv[sys.argv.index("--folder") + 1])
if size == 1:
    sys.exit()
pathlib.Path(os.environ["PIDS"], str(os.getpid())).touch()
print("here is the reason", flush=True)
if rank == 1:
    ACTION
time.sleep(60)
"""


def run_verify(out, extra):
    known, rest = verify.options().parse_known_args(
        ["--plain", "--out", str(out), *extra]
    )
    return verify.run(PYTHON, known, rest)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Exit code and figures of a whole run, and what its one process left."""
    place = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        real = verify.train

        def keep_one(python, fleet, *args):
            real(python, fleet, *args)
            if fleet.size == 1:
                shutil.copytree(fleet.folder, place / "one")

        patch.setattr(verify, "train", keep_one)
        return run_verify(place, SMALL), place


def figures_of(out):
    return json.loads((out / "verify.json").read_text())


def test_right_results_hold(good):
    code, out = good
    figures = figures_of(out)
    assert figures["problems"] == []
    assert code == 0
    assert figures["differing"] is None
    assert [len(rank["training"]["losses"]) for rank in figures["many"]] == [6, 6]
    calls = [rank["training"]["newton_schulz_calls"] for rank in figures["many"]]
    assert sum(calls) == 6 * 6
    assert min(calls) > 0
    assert all(rank["training"]["bytes_sent_per_step"] > 0 for rank in figures["many"])


def test_picture_and_table(good):
    _, out = good
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    table = verify.report(figures_of(out))
    assert "bitwise equal: yes (6 matrices, 2 steps)" in table
    assert "Newton-Schulz calls" in table


def set_calls(figures):
    figures["many"][1]["training"]["newton_schulz_calls"] += 6


def set_calls_exact(figures):
    figures["many"][0]["exact"]["newton_schulz_calls"] -= 1


def set_rising_loss(figures):
    figures["many"][0]["training"]["losses"][-1] = 9.0


def set_nan_loss(figures):
    figures["one"]["training"]["losses"][-1] = math.nan


def set_other_start(figures):
    figures["many"][0]["training"]["losses"][0] += 0.01


def set_more_bytes(figures):
    figures["many"][1]["training"]["bytes_sent_per_step"] *= 1.1


def set_no_bytes(figures):
    figures["many"][1]["training"]["bytes_sent_per_step"] = 0


def set_collective(figures):
    figures["many"][0]["training"]["collectives_per_step"]["broadcast_"] = 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_calls, "2 processes, training: 42 Newton-Schulz calls"),
        (set_calls_exact, "2 processes, identical gradients: 11 Newton-Schulz calls"),
        (set_rising_loss, "2 processes: the loss did not fall"),
        (set_nan_loss, "one process: the loss did not fall"),
        (set_other_start, "do not start alike"),
        (set_more_bytes, "rank 1 sends"),
        (set_no_bytes, "rank 1 sends 0 bytes"),
        (set_collective, "broadcast_"),
    ],
)
def test_wrong_figures_are_named(good, change, words):
    figures = copy.deepcopy(figures_of(good[1]))
    change(figures)
    (problem,) = verify.problems(figures)
    assert words in problem


def test_perturbed_gradient_is_found(good, tmp_path, monkeypatch, capsys):
    worker = tmp_path / "perturbed.py"
    worker.write_text(PERTURBED)
    monkeypatch.setattr(verify, "WORKER", worker)
    real = verify.train

    def reuse_one(python, fleet, *args):
        # One process has no rank 1: its results would be the same again.
        if fleet.size == 1:
            shutil.copytree(good[1] / "one", fleet.folder)
        else:
            real(python, fleet, *args)

    monkeypatch.setattr(verify, "train", reuse_one)
    assert run_verify(tmp_path / "out", SMALL) == 1
    printed = capsys.readouterr()
    assert "no picture: there is no matplotlib" in printed.out
    assert "bitwise equal: NO, blocks.0.attention.value.weight" in printed.out
    assert "not bitwise equal with identical gradients" in printed.err


@pytest.mark.parametrize(
    ("action", "timeout", "words"),
    [
        ("sys.exit(3)", "60", "process 1 of 2 failed with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "60", "process 1 of 2 was ended"),
        ("pass", "2", "took more than 2 s"),
    ],
)
def test_no_process_is_left(tmp_path, monkeypatch, capsys, action, timeout, words):
    run_stand_in = stand_in(tmp_path, monkeypatch, action)
    assert run_stand_in(["--timeout", timeout]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert ("here is the reason" in error) == (action != "pass")
    assert_gone(tmp_path)


def test_interrupted(tmp_path, monkeypatch):
    run_stand_in = stand_in(
        tmp_path, monkeypatch, "os.kill(os.getppid(), signal.SIGINT)"
    )
    with pytest.raises(KeyboardInterrupt):
        run_stand_in([])
    assert_gone(tmp_path)


def stand_in(tmp_path, monkeypatch, action):
    worker = tmp_path / "stand_in.py"
    worker.write_text(STAND_IN.replace("ACTION", action))
    monkeypatch.setattr(verify, "WORKER", worker)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    (tmp_path / "pids").mkdir()
    return lambda extra: run_verify(tmp_path / "out", ["--processes", "2", *extra])


def assert_gone(tmp_path):
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def worker_code(code):
    """A command that imports the worker and runs ``code``."""
    start = f"import sys; sys.path.insert(0, {str(verify.WORKER.parent)!r}); "
    return [sys.executable, "-c", f"{start}import verify_worker as worker\n{code}"]


def test_worker_leaves_with_its_parent():
    code = (
        "worker.die_with_parent(); print('up', flush=True)\nimport time; time.sleep(60)"
    )
    with subprocess.Popen(
        worker_code(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            began = time.monotonic()
            process.stdin.close()
            assert process.wait(20) == 1
            assert time.monotonic() - began < 10
        finally:
            process.kill()


def test_bitwise_is_bitwise():
    code = """
import torch
def run(value):
    return {"w": {"momentum": torch.tensor([[0.0, value]])}}
for one, many in ((0.0, 0.0), (float("nan"), float("nan")), (0.0, -0.0), (1.0, 1.0000001)):
    print(worker.differing(run(one), run(many)) is None)
print(worker.differing(run(1.0), {}) is None)
"""
    done = subprocess.run(
        worker_code(code), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "True", "False", "False", "False"]


@pytest.mark.parametrize("extra", [["--processes", "1"], ["--steps", "0"]])
def test_bad_options(tmp_path, extra, capsys):
    with pytest.raises(SystemExit) as ended:
        run_verify(tmp_path, extra)
    assert ended.value.code == 2
    assert extra[0] in capsys.readouterr().err


def test_option_that_nobody_knows(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import sys\n"
        "print('unrecognized arguments:', *sys.argv[2:4])\n"
        f"sys.exit({verify.USAGE})\n"
    )
    monkeypatch.setattr(verify, "WORKER", worker)
    words = "^unrecognized arguments: --stpes 3; see .* --help"
    with pytest.raises(WrongTarget, match=words) as caught:
        run_verify(tmp_path / "out", ["--stpes", "3"])
    assert caught.value.code == 2


def test_worker_names_what_does_not_fit():
    code = """
import contextlib
given = ["train", "--folder", "x", "--rank", "0", "--processes", "1", "--slices", "4"]
given += ["--exact-steps", "1", "--steps", "1"]
for extra in (["--batch", "6"], ["--width", "7"], ["--heads", "0"], ["--step", "9"]):
    sys.argv[1:] = given + extra
    with contextlib.redirect_stderr(sys.stdout):
        try:
            worker.main()
        except SystemExit as ended:
            print(ended.code)
"""
    done = subprocess.run(
        worker_code(code), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [
        "--batch 6 does not divide among 4 processes",
        str(verify.USAGE),
        "--width 7 does not divide among 6 heads",
        str(verify.USAGE),
        "--heads 0 is not at least 1",
        str(verify.USAGE),
        "unrecognized arguments: --step 9",
        str(verify.USAGE),
    ]


def test_out_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WrongTarget, match="cannot be a folder"):
        run_verify(tmp_path / "file", [])
