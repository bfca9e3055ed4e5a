"""How a target is found and asked, and who may work on it."""

import os
import tempfile

import pytest
from tools.overlay import apply, interpreter, lock, target
from tools.overlay.errors import WorkFailed
from tools.overlay.repo import ROOT


def test_probe_imports_nothing_from_where_it_runs(
    installed, tmp_path, monkeypatch, capfd
):
    """B16: a torch/ or a json.py in the temporary or the current folder is anybody's."""
    trap = tmp_path / "trap"
    (trap / "torch").mkdir(parents=True)
    (trap / "torch/__init__.py").write_text("")
    (trap / "json.py").write_text("import sys; sys.stderr.write('executed')\n")
    monkeypatch.setenv("TMPDIR", str(trap))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(trap)
    found = target.find_wheel(installed)
    assert found.root == installed.parent / "site-packages"
    # Not from the interpreter's own folder either.
    (trap / "torch").rename(installed.parent / "torch")
    assert target.find_wheel(installed).root == found.root
    assert "executed" not in interpreter.ask_python(
        installed, "import json; print(json.__file__)"
    )
    assert "executed" not in capfd.readouterr().err


def excluded(one, other):
    with one.held():
        with pytest.raises(WorkFailed, match="another command holds"):
            with lock.held(other.lock, wait_s=0.1):
                raise AssertionError("both had it")


def test_other_temporary_folders_do_not_matter(
    installed, checkout, tmp_path, monkeypatch
):
    """B18: macOS, Slurm and PrivateTmp give each session one of its own."""
    for find, where in (
        (target.find_wheel, installed),
        (target.find_checkout, checkout),
    ):
        with find(where).held():
            monkeypatch.setenv("TMPDIR", str(tmp_path))
            monkeypatch.setattr(tempfile, "tempdir", None)
            monkeypatch.setattr(os, "getuid", lambda: 4711)
            with pytest.raises(WorkFailed, match="another command holds"):
                with lock.held(find(where).lock, wait_s=0.1):
                    raise AssertionError("both had it")
        monkeypatch.undo()


def test_work_trees_of_one_repository_exclude_each_other(checkout, shell, tmp_path):
    """B18: they share .git/info/exclude."""
    place = tmp_path / "linked"
    shell("git", "worktree", "add", "-q", "--detach", place, cwd=checkout)
    excluded(target.find_checkout(checkout), target.find_checkout(place))


def test_lock_leaves_no_file(installed, snapshot):
    site = target.find_wheel(installed)
    before = snapshot(site.root)
    with site.held():
        assert snapshot(site.root) == before


def test_lock_where_folders_cannot_be_locked(tmp_path, monkeypatch):
    flock = lock.fcntl.flock

    def network(handle, kind):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(9, "Bad file descriptor")
        flock(handle, kind)

    monkeypatch.setattr(lock.fcntl, "flock", network)
    with lock.held(tmp_path):
        with pytest.raises(WorkFailed, match="another command holds"):
            with lock.held(tmp_path, wait_s=0.1):
                raise AssertionError("both had it")


def test_gits_own_words(checkout, face, monkeypatch):
    """B21: a checkout that is mounted into a container belongs to somebody else."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    done = face("apply", "--checkout", checkout)
    assert done.code == 2
    assert "safe.directory" in done.err


def test_home_and_quotes(checkout, face, shell, tmp_path, monkeypatch):
    """B24: the shell expands neither --checkout=~/x nor what is printed with a space."""
    monkeypatch.setenv("HOME", str(checkout.parent))
    assert face("apply", "--checkout=~/pytorch").code == 0
    monkeypatch.chdir(tmp_path)
    done = face("export", "--checkout=~/pytorch", "--out=~/a series")
    assert done.code == 0
    line = done.out.splitlines()[-1].split("git am ")[1]
    shell("git", "stash", "-qu", cwd=checkout)
    assert "~" not in line
    shell("sh", "-c", f"git am -q {line}", cwd=checkout)
    assert shell("git", "rev-list", "--count", "HEAD", cwd=checkout).out == "5\n"


def test_line_ends_that_git_changes(checkout, shell, git_status, face):
    """core.autocrlf: a file that git wrote anew is still the overlay's."""
    shell("git", "config", "core.autocrlf", "true", cwd=checkout)
    there = target.find_checkout(checkout)
    apply.apply(there, ROOT, commit=True)
    shell("git", "rm", "-q", "--cached", "-r", ".", cwd=checkout)
    shell("git", "reset", "-q", "--hard", cwd=checkout)
    assert b"\r\n" in there.read("torch/optim/muon.py")
    assert apply.apply(there, ROOT).changed == []
    assert face("revert", "--checkout", checkout, "--commit").code == 0
    assert git_status(checkout) == ""
