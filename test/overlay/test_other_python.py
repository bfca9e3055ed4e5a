"""The tests run on another interpreter's torch, and write no file of it."""

import sys

import pytest
from overlay.conftest import fails, OWN, script


HAS_OVERLAY = f"""
import importlib.util, pathlib

def test_overlay_is_there():
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    assert (torch.parent / {OWN!r}).read_text() == pathlib.Path({OWN!r}).read_text()
    assert (torch / ".muon_overlay/original/optim/_muon.py").exists()
    assert (torch / "lib").is_symlink()
"""


def times(root):
    """Each write into a folder, or into a file, changes one."""
    return {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}


@pytest.mark.parametrize("kind", ["pip", "conda", "PYTHONPATH", "overlaid"])
def test_overlay_is_there_and_nothing_is_written(
    tool, small_wheel, overlay, tmp_path, kind, monkeypatch
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
    # No settings of this repository.
    folder, scrap = tmp_path / "tests", tmp_path / "tmp"
    for each in (folder, scrap):
        each.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(HAS_OVERLAY)
    monkeypatch.setenv("TMPDIR", str(scrap))
    args = ["test", "--python", python, "-c", folder / "pytest.ini", folder]
    before = times(site.root)
    done = tool(*args)
    assert (done.code, "1 passed" in done.out) == (0, True), done
    assert tool(*args, "-k", "nothing").code == 5  # as pytest says it
    assert times(site.root) == before
    assert list(scrap.iterdir()) == []
    if kind == "overlaid":
        (site.root / OWN).write_text("# an edit\n")
        fails(tool(*args), 3, f"  rm {site.root / OWN}\n")


def test_options_do_not_replace_the_folders(tool, installed):
    """`-m stage1` collected the overlay's tests too, whose packages that torch lacks."""
    shown = tool("test", "--python", installed, "--dry-run", "-m", "stage1").out
    assert shown.endswith("-rs test/optim test/distributed/optim -m stage1\n")


def test_missing_packages_are_named_first(tool, tmp_path, installed):
    python = script(tmp_path / "bare", f'exec "{installed}" -S "$@"\n')
    done = tool("test", "--python", python)
    named = "-m pip install pytest expecttest numpy" in done.err
    assert (done.code, named) == (2, True)
