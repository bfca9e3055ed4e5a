"""The recipes hold, all of them; one that does not is found."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from overlay.example_runs import ENVIRONMENT, run_example
from tools.overlay.repo import ROOT


EXAMPLES = ROOT / "examples"
SECONDS = 500

# Replicas, one of which sees another gradient; a rank that fails while others wait for it.
BROKEN = '''

@recipe(processes=2)
def perturbed() -> OneProcess:
    """Not what it should be."""
    model = Transformer().to(device())
    config = create_auto_config(ddp_process_group=dist.group.WORLD)
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)
    alone = OneProcess(Transformer().to(device()), model, optimizer)
    for inputs, targets in batches():
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        if dist.get_rank() == 1:
            model.layers[0].ffn.w1.weight.grad[-1, -1] += 1e-7
        optimizer.step()
    return alone


@recipe(processes=2)
def failing() -> None:
    """Not what it should be."""
    if dist.get_rank() == 1:
        raise KeyError("the culprit")
    dist.barrier()


@recipe(processes=2)
def ending() -> None:
    """Not what it should be."""
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


@recipe(processes=2)
def later() -> str:
    """As it should be."""
    dist.barrier()
    return "on new processes"
'''


def run_recipes(*names, folder=EXAMPLES, **environ):
    """Exit code and output; no process of it outlives this."""
    with subprocess.Popen(
        [sys.executable, str(folder / "recipes"), *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT, **environ},
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
            assert ends(process.pid), "processes are left"
        finally:
            if not ends(process.pid, seconds=0):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def ends(group, seconds=10.0):
    """Whether no process of ``group`` is there any more, at the latest after ``seconds``."""
    until = time.monotonic() + seconds
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)


def results_of(out):
    """Name of each recipe that was run -> whether it is ok, and the line that says so."""
    lines = [
        re.match(r"(ok|FAIL) +(\S+) +\d+ process", line) for line in out.splitlines()
    ]
    assert all(lines), out
    return {line[2]: (line[1] == "ok", line.string) for line in lines}


def defined():
    """All functions that the files mark as recipes."""
    return {
        f"{path.stem}.{name}"
        for path in (EXAMPLES / "recipes").glob("*.py")
        for name in re.findall(
            r"^@recipe\(.*\)\ndef (\w+)", path.read_text(), re.MULTILINE
        )
    }


def test_all_hold():
    code, out, err = run_recipes()
    results = results_of(out)
    assert [line for is_ok, line in results.values() if not is_ok] == [], err
    assert code == 0
    assert sorted(results) == sorted(defined())
    assert "Traceback" not in err
    # One recipe has whole tensors on every process, which a hint takes for a mistake.
    hint = "none of the parameters of this Muon is shared"
    lines = [line for line in err.splitlines() if "Warning" in line]
    assert [line for line in lines if hint not in line] == []
    assert ": gather " not in err  # what debugging.debug_mode logs


SELECTIONS = {
    "context": {"context.split_sequences"},
    "ddp.unconfigured": {"ddp.unconfigured"},
}


def listed(*names):
    """What `--list` names, run in a process that has imported torch already."""
    script = EXAMPLES / "recipes" / "__main__.py"
    code, out, err = run_example(script, "--list", *names, processes=1)
    assert code == 0, err
    return set(re.findall(r"^(\w+\.\w+), \d+ process", out, re.MULTILINE))


def test_list():
    assert listed() == defined()


@pytest.mark.parametrize(("name", "expected"), SELECTIONS.items())
def test_selection(name, expected):
    assert listed(name) == expected


def test_unknown_name():
    script = EXAMPLES / "recipes" / "__main__.py"
    code, out, _ = run_example(script, "context.none", processes=1)
    # With a text instead of a number Python prints it and exits with 1.
    assert code == "recipes: there is no context.none; see --list"
    assert out == ""


def test_what_does_not_hold_is_found(tmp_path):
    folder = shutil.copytree(EXAMPLES, tmp_path / "examples")
    ddp = folder / "recipes" / "ddp.py"
    ddp.write_text("import os\n" + ddp.read_text() + BROKEN)
    cut = folder / "recipes" / "tensor_parallel.py"
    right = cut.read_text()
    cut.write_text(right.replace("        1: 1,", "        1: 0,"))
    assert cut.read_text() != right

    wrong_dim = "tensor_parallel.by_parameter"
    code, out, err = run_recipes("ddp", wrong_dim, folder=folder)
    assert code == 1
    results = results_of(out)
    assert [name for name, (is_ok, _) in results.items() if is_ok] == [
        "ddp.later",
        "ddp.unconfigured",
        "ddp.shared_out",
        "ddp.by_another_name",
    ]
    assert " differs between ranks" in results["ddp.perturbed"][1] + err
    assert " differs by up to " in results[wrong_dim][1] + err
    assert "rank 1: KeyError" in results["ddp.failing"][1]
    assert "culprit" in results["ddp.failing"][1]
    assert "rank 0: the process ended" in results["ddp.ending"][1]


def test_other_number_of_processes():
    names = ("fsdp.flat", "custom.other_framework")
    script = EXAMPLES / "recipes" / "__main__.py"
    code, out, err = run_example(script, *names, processes=2)
    assert code == 2, err
    assert out.splitlines() == [
        "left out  fsdp.flat: it wants 4 processes",
        "left out  custom.other_framework: it wants 4 processes without torchrun",
    ]
    assert err.count("none was run") == 1


def test_without_the_overlay(tmp_path):
    (tmp_path / "torch" / "optim").mkdir(parents=True)
    for folder in ("torch", "torch/optim"):
        (tmp_path / folder / "__init__.py").touch()
    code, out, err = run_recipes("--list", PYTHONPATH=str(tmp_path))
    assert (code, out) == (2, "")
    assert "`python3 setup_overlay.py env`" in err
    assert "Traceback" not in err
