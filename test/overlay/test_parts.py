"""`rebuild`: a wheel's compiled parts, and upstream's editable build."""

import os
import sys

import pytest
from overlay.conftest import append, git, git_status, OWN, run, script, snapshot
from tools.overlay import parts
from tools.overlay.checkout import Checkout
from tools.overlay.errors import Refused, WorkFailed, WrongTarget
from tools.overlay.payload import ROOT
from tools.overlay.wheel import find_wheel


@pytest.fixture(scope="module")
def tree(stock_tree, tmp_path_factory, wheel):
    """A checkout of all Python sources."""
    place = tmp_path_factory.mktemp("wheel") / "pytorch"
    return stock_tree(place, wheel.torch_dir.rglob("*.py"))


def sources(files):
    return {rel: text for rel, text in files.items() if "__pycache__" not in rel}


@pytest.mark.slow
def test_contributors_day(tree, tool, overlay, tmp_path):
    before, exclude = sources(snapshot(tree)), tree / ".git/info/exclude"
    hidden = exclude.read_text()

    def day(command, *args):
        done = tool(command, "--checkout", tree, *args, root=overlay)
        assert (done.code, done.err) == (0, ""), done
        return done.out

    assert "committed as" in day("apply", "--commit")
    shown = day("rebuild", "--mode", "wheel", "--python", sys.executable)
    assert f"import torch gives {tree}/torch/__init__.py" in shown
    assert git_status(tree) == ""
    # Not one gigabyte was copied.
    library = next((tree / "torch/lib").glob("libtorch_cpu.*"))
    assert library.is_symlink() or library.stat().st_nlink > 1

    # The line that was printed runs the tests there, with what is edited there.
    module = tree / OWN
    append(module, "print('edited', __file__)\n")
    (line,) = (ln for ln in shown.splitlines() if ln.endswith("test_muon.py"))
    one = "TestDTensorConfig.test_dtensor_config_creation"
    # Under CI, upstream's runner leaves reports in the tree.
    there = {name: text for name, text in os.environ.items() if name != "CI"}
    done = run("sh", "-c", f"{line} {one}", env=there)
    assert f"edited {module}\n" in done.out
    assert "Ran 1 test" in done.err

    assert f"took {OWN}\n" in day("pull")
    edited = (overlay / OWN).read_bytes()
    assert edited == module.read_bytes()
    assert "applied to" in day("apply")  # git has the edit now
    assert "not committed" in day("revert")
    assert sources(snapshot(tree)) == before
    assert "committed as" in day("revert", "--commit")
    assert exclude.read_text() == hidden


def test_libraries_are_linked_and_text_is_copied(there, small_wheel):
    """An editor that writes the checkout's version.py in place changed the installed one."""
    # Neither a file that the overlay added to the wheel comes, nor one deleted here.
    small_wheel.apply(ROOT)
    (there.root / "torch/optim/__init__.py").unlink()
    count = parts.lend(there.tree, small_wheel)
    assert count == 6  # and stock Muon, with which tests compare
    git(there.root, "restore", "torch/optim")
    assert git_status(there.root) == ""
    for rel in ("torch/_C.so", "torch/lib/sub/x", "torch/version.py"):
        linked = (there.root / rel).samefile(small_wheel.root / rel)
        assert linked == rel.endswith(".so")
    # Files of a second run are hidden, too.
    (small_wheel.root / "torch/later.pyi").write_text("later")
    assert parts.lend(there.tree, small_wheel) == count + 1
    assert git_status(there.root) == ""
    installed = (small_wheel.root / "torch/version.py").read_text()
    (there.root / "torch/version.py").write_text("built from source since")
    assert (small_wheel.root / "torch/version.py").read_text() == installed
    assert parts.remove(there.tree) == count
    assert (there.root / "torch/version.py").exists()
    assert not (there.root / "torch/lib").exists()


def raising(number, words):
    """Instead of a function of the file system."""

    def call(*args, **kwargs):
        raise OSError(number, words)

    return call


def test_symbolic_links_across_file_systems(there, small_wheel, monkeypatch):
    monkeypatch.setattr(parts.os, "link", raising(18, "Invalid cross-device link"))
    count = parts.lend(there.tree, small_wheel)
    assert (there.root / "torch/_C.so").is_symlink()
    # The environment is removed, or made again.
    (small_wheel.root / "torch/_C.so").unlink()
    assert parts.remove(there.tree) == count
    assert not os.path.lexists(there.root / "torch/_C.so")


def test_failure_half_way_takes_everything_out(there, small_wheel, monkeypatch):
    before = snapshot(there.root)
    # The libraries are linked by then.
    monkeypatch.setattr(parts.shutil, "copy2", raising(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left on device"):
        parts.lend(there.tree, small_wheel)
    assert snapshot(there.root) == before


def test_refusals_change_nothing(there, small_wheel, make_installed, face):
    """The refusal of `revert` came after the compiled parts were gone."""
    other = find_wheel(make_installed("2.12.0", "older"))
    with pytest.raises(WrongTarget, match="not of the same version"):
        parts.from_wheel(there.tree, other)
    with pytest.raises(WorkFailed, match="import torch does not run"):
        parts.from_wheel(there.tree, small_wheel)
    assert not (there.root / "torch/lib").exists()
    (there.root / "torch/_C.cpython-311.so").write_text("mine")
    with pytest.raises(Refused, match="build of its own"):
        parts.lend(there.tree, small_wheel)
    (there.root / "torch/_C.cpython-311.so").unlink()
    face("apply", "--checkout", there.root)
    parts.lend(there.tree, small_wheel)
    (there.root / "torch/optim/_muon.py").write_text("# edited\n")
    before = snapshot(there.root)
    assert face("revert", "--checkout", there.root).code == 3
    assert snapshot(there.root) == before


def test_linked_work_trees_hide_their_own(there, small_wheel, tmp_path, face):
    """`revert` in one does not uncover what lies in the other."""
    place = tmp_path / "linked"
    git(there.root, "worktree", "add", "-q", "--detach", place)
    other = Checkout(place)
    for tree in (there, other):
        face("apply", "--checkout", tree.root, "--commit")
        parts.lend(tree.tree, small_wheel)
    assert face("revert", "--checkout", there.root, "--commit").code == 0
    git(place, "add", "--all")
    assert git_status(place) == ""
    assert face("revert", "--checkout", place, "--commit").code == 0
    assert "muon" not in (there.root / ".git/info/exclude").read_text()


def test_source_runs_upstreams_command(there, small_wheel, tool, tmp_path):
    parts.lend(there.tree, small_wheel)
    record, command = tmp_path / "called", "-m pip install --no-build-isolation -v -e ."
    body = (
        f'echo "$PWD $USE_CUDA $@" > {record}\necho no compiler >&2\nexit $USE_CUDA\n'
    )
    python = script(tmp_path / "python", body)
    words = ("--checkout", there.root, "--mode", "source", "--python", python)
    failed, done = (
        tool("rebuild", *words, env={**os.environ, "USE_CUDA": code}) for code in "70"
    )
    assert record.read_text() == f"{there.root} 0 {command}\n"
    assert "files that came from a wheel" in failed.out
    assert not (there.root / "torch/_C.so").exists()
    assert git_status(there.root) == ""
    assert (failed.code, "no compiler" in failed.err) == (1, True)
    assert ("exit code 7" in failed.err, done.code) == (True, 0)
