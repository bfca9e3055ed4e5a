"""The tests run on another interpreter's torch, into which nothing is written."""

import os
import signal
import subprocess
import sys

import pytest
from overlay.conftest import OWN, script
from tools.overlay.payload import ROOT


HAS_OVERLAY = f"""
import importlib.util, os, pathlib

def test_overlay_is_there():
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    assert (torch.parent / {OWN!r}).read_text() == pathlib.Path({OWN!r}).read_text()
    assert (torch / ".muon_overlay/original/optim/_muon.py").exists()
    assert (torch / "lib").is_symlink()
    assert os.environ["MUON_TEST_SHARE_GPU"] == "1"
"""
WAITS = """
import pathlib, signal, sys

def test_waits():
    print("begun", file=sys.__stderr__, flush=True)
    signal.pause()
"""


@pytest.fixture
def arguments(tmp_path):
    """Has pytest look for the tests of a file, and for no settings of this repository."""

    def make(python, text):
        folder = tmp_path / "tests"
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "test_it.py").write_text(text)
        chosen = ["-c", folder / "pytest.ini", "-s", "-p", "no:cacheprovider", folder]
        return ["test", "--python", python, *chosen]

    return make


def times(root):
    """Each write into a folder, or into a file, changes one."""
    return {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}


@pytest.fixture
def scrap(tmp_path, monkeypatch):
    """Where temporary folders come, and go."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.parametrize("kind", ["pip", "conda", "PYTHONPATH", "overlaid"])
def test_overlay_is_there_and_nothing_is_written(
    tool, arguments, small_wheel, overlay, tmp_path, kind, monkeypatch, scrap
):
    """The overlay was applied for the run: a read-only torch had no tests."""
    site, python = small_wheel, small_wheel.python
    if kind == "conda":
        next(site.root.glob("*.dist-info/RECORD")).unlink()
    if kind == "PYTHONPATH":
        python = script(tmp_path / "bare", f'exec "{sys.executable}" "$@"\n')
        monkeypatch.setenv("PYTHONPATH", str(site.root))
    if kind == "overlaid":  # at another time
        (overlay / OWN).write_text("# another one\n")
        site.apply(overlay)
    before, args = times(site.root), arguments(python, HAS_OVERLAY)
    done = tool(*args)
    assert (done.code, "1 passed" in done.out) == (0, True), done
    assert tool(*args, "-k", "nothing").code == 5  # as pytest says it
    assert times(site.root) == before
    assert list(scrap.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_by_an_interrupt(arguments, installed, number, scrap):
    command = [sys.executable, ROOT / "setup_overlay.py", *arguments(installed, WAITS)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr.readline() == "begun\n"
        assert list(scrap.iterdir())
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        # Of the first pytest says 2: it has heard it, too.
        assert process.wait(60) == (2 if number == signal.SIGINT else 128 + number)
    assert list(scrap.iterdir()) == []


def test_missing_packages_are_named_first(tool, tmp_path, installed):
    python = script(tmp_path / "bare", f'exec "{installed}" -S "$@"\n')
    done = tool("test", "--python", python)
    named = "-m pip install pytest expecttest numpy" in done.err
    assert (done.code, named) == (2, True)
