"""The recipes hold, all of them; one that does not is found."""

import os
import re
import subprocess
import sys

import pytest
from overlay.example_runs import ENVIRONMENT, run_example
from tools.overlay.repo import ROOT


EXAMPLES = ROOT / "examples"
SECONDS = 500


def run_recipes(*names, **environ):
    """Exit code and output. A process that the recipes left behind would hold their output open."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "recipes"), *names],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **ENVIRONMENT, **environ},
    )
    return done.returncode, done.stdout, done.stderr


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


def listed(*names):
    """What `--list` names, run in a process that has imported torch already."""
    script = EXAMPLES / "recipes" / "__main__.py"
    code, out, err = run_example(script, "--list", *names, processes=1)
    assert code == 0, err
    return set(re.findall(r"^(\w+\.\w+), \d+ process", out, re.MULTILINE))


def test_list():
    assert listed() == defined()


def test_selection():
    assert listed("context") == {"context.split_sequences"}
    assert listed("ddp.unconfigured") == {"ddp.unconfigured"}


def test_unknown_name():
    script = EXAMPLES / "recipes" / "__main__.py"
    code, out, _ = run_example(script, "context.none", processes=1)
    # With a text instead of a number Python prints it and exits with 1.
    assert code == "recipes: there is no context.none; see --list"
    assert out == ""


def test_what_does_not_hold_is_found(monkeypatch, capsys):
    pytest.importorskip("torch")
    for folder in (EXAMPLES, EXAMPLES / "recipes"):
        monkeypatch.syspath_prepend(str(folder))
    from runner import Recipe, report

    def reported(*verdicts):
        holds = report(Recipe(test_selection, 2, True), list(verdicts))
        return holds, "".join(capsys.readouterr())

    def verdict(digest, calls=3, problems=()):
        proof = {"names": ["a", "b"], "steps": 3, "calls": calls, "once": True}
        proof["digests"] = {"a": digest}
        return {"proofs": [proof], "words": [], "problems": list(problems)}

    def failed(error, order):
        trace = f"Traceback\n{error}"
        return {"trace": trace, "problems": [error], "answered": order}

    holds, printed = reported(verdict(1), verdict(1))
    assert holds and "2 matrices bitwise equal, 3 steps" in printed
    for verdicts, words in (
        ((verdict(1), verdict(2)), "a differs between ranks"),
        ((verdict(1), verdict(1, calls=6)), "9 Newton-Schulz calls instead of 6"),
        ((verdict(1), verdict(1, problems=["a differs"])), "rank 1: a differs"),
        # Rank 1 answered first, and knows why.
        ((failed("lost", 2), failed("KeyError", 1)), ", rank 1: KeyError\n"),
    ):
        holds, printed = reported(*verdicts)
        assert not holds and printed.startswith("FAIL") and words in printed


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
