"""The tests run on another interpreter's torch, which is as before afterwards."""

import os
import signal
import subprocess
import sys

import pytest
from overlay.conftest import fails, OWN, script, snapshot
from tools.overlay.payload import ROOT
from tools.overlay.wheel import find_wheel


HAS_OVERLAY = """
import importlib.util, os, pathlib

def test_overlay_is_there():
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    assert (torch / "optim/muon.py").exists()
    assert os.environ["MUON_TEST_SHARE_GPU"] == "1"
"""
WAITS = """
import pathlib, signal, sys

def test_waits():
    print("begun", file=sys.__stderr__, flush=True)
    signal.pause()
"""


@pytest.fixture
def arguments(tmp_path, installed):
    """Has pytest look for the tests of a file, and for no settings of this repository."""

    def make(text):
        folder = tmp_path / "tests"
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "test_it.py").write_text(text)
        chosen = ["-c", folder / "pytest.ini", "-s", "-p", "no:cacheprovider", folder]
        return ["test", "--python", installed, *chosen]

    return make


def state(python):
    return find_wheel(python).status(ROOT)["state"]


def test_overlay_is_there_for_the_run_alone(tool, arguments, installed, overlay):
    """An overlay that was there stays, unless it is another one: that is left alone."""
    site, args = find_wheel(installed), arguments(HAS_OVERLAY)
    before = snapshot(site.root)
    done = tool(*args)
    assert (done.code, "1 passed" in done.out) == (0, True), done.err
    assert snapshot(site.root) == before
    assert tool(*args, "-k", "nothing").code == 5  # as pytest says it
    site.apply(ROOT)
    assert tool(*args).code == 0
    assert state(installed) == "current"
    (overlay / OWN).write_text("# of another time\n")
    site.apply(overlay)
    fails(tool(*args), 3, "an overlay that is outdated")
    assert site.read(OWN) == b"# of another time\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_overlay_is_taken_off_when_interrupted(arguments, installed, number):
    command = [sys.executable, ROOT / "setup_overlay.py", *arguments(WAITS)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr.readline() == "begun\n"
        assert state(installed) == "current"
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        # Of the first pytest says 2: it has heard it, too.
        assert process.wait(60) == (2 if number == signal.SIGINT else 128 + number)
    assert state(installed) == "none"


def test_missing_packages_are_named_first(tool, tmp_path, installed):
    python = script(tmp_path / "bare", f'exec "{installed}" -S "$@"\n')
    done = tool("test", "--python", python)
    named = "-m pip install pytest expecttest numpy" in done.err
    assert (done.code, named) == (2, True)
