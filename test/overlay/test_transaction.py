"""A target is as it was, or finished, whatever ends a command."""

import itertools
import os
import shutil
import signal
import stat

import pytest
from tools.overlay import apply, parts, revert, status, target, transaction
from tools.overlay.errors import Refused, WorkFailed
from tools.overlay.repo import ROOT


@pytest.fixture
def tiny(tmp_path):
    """An overlay of three files, so that each place can be tried at which it can end."""
    root = tmp_path / "tiny"
    for rel in ("_muon.py", "muon.py", "_muon_engine/step.py"):
        (root / "torch/optim" / rel).parent.mkdir(parents=True, exist_ok=True)
        (root / "torch/optim" / rel).write_text("import _muon_engine  # ours\n")
    return root


def killed(at, work):
    """Whether `work` comes to its `at`-th change of a file: it is killed before that one."""
    pid = os.fork()
    if pid == 0:
        number = itertools.count(1)

        def dying(real):
            def call(*args, **kwargs):
                if next(number) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in ("replace", "unlink", "link", "mkdir", "rmdir"):
            setattr(os, name, dying(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.fixture(params=["wheel", "checkout"])
def there(request):
    if request.param == "wheel":
        return target.find_wheel(request.getfixturevalue("installed"))
    return target.find_checkout(request.getfixturevalue("checkout"))


def tree(snapshot, there):
    # What lies there beside the files themselves is seen where it matters: in git's status.
    return {
        rel: text
        for rel, text in snapshot(there.root).items()
        if ".muon_overlay/" not in rel and "__pycache__" not in rel
    }


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a fork of this process")
@pytest.mark.parametrize(
    ("there", "command"),
    [
        ("wheel", "apply"),
        ("wheel", "update"),
        ("wheel", "revert"),
        ("checkout", "apply"),
        ("checkout", "revert"),
    ],
    indirect=["there"],
)
def test_killed_at_every_file(there, tiny, snapshot, command):
    """B5: the next command first puts back what a killed one left."""
    newer = shutil.copytree(tiny, tiny.with_name("newer"))
    (newer / "torch/optim/muon.py").write_text("# newer\n")
    (newer / "torch/optim/_muon_engine/step.py").rename(
        newer / "torch/optim/_muon_engine/other.py"
    )

    def old():
        revert.revert(there) if command == "apply" else apply.apply(there, tiny)

    def new():
        if command == "revert":
            revert.revert(there)
        else:
            apply.apply(there, tiny if command == "apply" else newer)

    new()
    after = tree(snapshot, there)
    old()
    before = tree(snapshot, there)
    assert before != after
    undone = 0
    for at in itertools.count(1):
        if not killed(at, new):
            break
        with there.held():
            found = tree(snapshot, there)
        assert found in (before, after)
        undone += found == before
        assert not list(there.root.rglob("*.muon-new"))
        if found == after:
            old()
    assert undone > 8
    assert tree(snapshot, there) == after


@pytest.fixture
def half(checkout, tiny):
    """A checkout in which `apply` was killed in the middle."""
    there = target.find_checkout(checkout)
    assert killed(12, lambda: apply.apply(there, tiny))
    assert transaction.pending(there)
    assert list(checkout.rglob("*.muon-new"))
    return there


@pytest.mark.parametrize("command", ["apply", "revert", "rebuild", "export", "pull"])
def test_each_command_undoes_what_a_killed_one_left(
    half, installed, face, git_status, tmp_path, command
):
    """B5: `rebuild` overwrote the journal, and the half stayed for ever."""
    assert "half of something" in face("status", "--checkout", half.root).out
    more = {
        "rebuild": ["--mode", "wheel", "--python", installed],
        "export": ["--out", tmp_path / "out"],
    }
    done = face(command, "--checkout", half.root, *more.get(command, []))
    assert "cut off half way: undone" in done.out
    if command == "apply":
        assert face("revert", "--checkout", half.root).code == 0
    assert git_status(half.root) == ""
    assert not list(half.root.rglob("*.muon-new"))


def test_tree_that_was_moved_meanwhile(half, face, git_status):
    """B6: the journal does not lead back to where the tree was."""
    moved = half.root.rename(half.root.with_name("moved"))
    assert face("revert", "--checkout", moved).code == 0
    assert git_status(moved) == ""
    assert not half.root.exists()


def test_edits_after_the_kill_are_kept(half, face):
    """What is neither the old nor the new text is somebody's."""
    path = half.root / "torch/optim/muon.py"
    path.write_text("# somebody's\n")
    face("revert", "--checkout", half.root)
    assert path.read_text() == "# somebody's\n"
    assert not transaction.pending(half)


@pytest.mark.parametrize("rel", ["torch/optim/muon.py", "torch/optim/_muon_engine"])
def test_folder_where_a_file_goes(there, snapshot, rel):
    """B13: what the overlay cannot replace is refused before it begins."""
    before = tree(snapshot, there)
    if rel.endswith(".py"):
        (there.root / rel).mkdir()
    else:
        (there.root / rel).write_text("a file\n")
    with pytest.raises(Refused, match=rel):
        apply.apply(there, ROOT)
    if rel.endswith(".py"):
        (there.root / rel).rmdir()
    else:
        (there.root / rel).unlink()
    assert tree(snapshot, there) == before
    apply.apply(there, ROOT)
    assert status.status(there, ROOT).state == "current"


@pytest.mark.parametrize("text", ["", "[]", '{"files": {"a": 1}}'])
@pytest.mark.parametrize("name", ["journal.json", "manifest.json", "parts.json"])
def test_damaged_records_are_errors_with_a_way_out(checkout, face, tiny, name, text):
    """B14: after a power cut, such as the empty file that a rename outlived."""
    there = target.find_checkout(checkout)
    apply.apply(there, tiny)
    path = there.keep / name
    path.write_text(text)
    for command in ("apply", "revert"):
        done = face(command, "--checkout", checkout)
        assert done.code == 1
        assert f"  rm {path}" in done.err
        assert "Nothing was touched." in done.err
    assert face("status", "--checkout", checkout).code in (0, 1)
    path.unlink()
    apply.apply(there, tiny)
    assert revert.revert(there).restored == ["torch/optim/_muon.py"]


def test_way_out_of_a_damaged_journal(there, tiny, snapshot):
    """B14: half of the files are there, and what they were cannot be read."""
    before = tree(snapshot, there)
    assert killed(12, lambda: apply.apply(there, tiny))
    assert tree(snapshot, there) != before
    (there.keep / "journal.json").unlink()
    apply.apply(there, tiny)
    assert status.status(there, tiny).state == "current"
    revert.revert(there)
    assert tree(snapshot, there) == before


def test_journal_is_on_the_disk_before_it_counts(there, tiny, monkeypatch):
    """B14: each text is flushed before its rename, so that a power cut leaves no empty file."""
    flushed, renamed = set(), []
    fsync, replace = os.fsync, os.replace

    def flush(handle):
        flushed.add(os.fstat(handle).st_ino)
        fsync(handle)

    def rename(source, place):
        assert os.stat(source).st_ino in flushed
        renamed.append(place)
        replace(source, place)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    apply.apply(there, tiny)
    assert len(renamed) >= 6
    # The names, too.
    assert os.stat(there.torch_dir / "optim").st_ino in flushed


@pytest.mark.skipif(os.name == "nt", reason="modes of files are Unix's")
def test_modes_are_those_of_the_siblings(installed, shell):
    """B17: `sudo apply` under umask 077 must not lock all others out."""
    site = target.find_wheel(installed)
    for path in [site.root, *site.root.rglob("*")]:
        path.chmod(0o775 if path.is_dir() else 0o664)
    umask = os.umask(0o077)
    try:
        apply.apply(site, ROOT)
    finally:
        os.umask(umask)
    for path in site.torch_dir.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o775 if path.is_dir() else 0o664), path


def test_a_pending_journal_is_not_overwritten(half):
    """B5: whoever forgets to recover is stopped."""
    path = half.root / "torch/optim/muon.py"
    with pytest.raises(WorkFailed, match="was cut off"):
        transaction.commit(half, {path: b""})
    assert transaction.pending(half)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("command", ["lend", "remove"])
def test_parts_killed_at_every_file(checkout, small_wheel, git_status, command, copy):
    """B8: a part is there whole, or the next command takes it out."""
    there = target.find_checkout(checkout)

    def work():
        if command == "lend":
            parts.lend(there, small_wheel, copy=copy)
        else:
            parts.remove(there)

    stopped = 0
    for at in itertools.count(1):
        if command == "remove":
            parts.lend(there, small_wheel, copy=copy)
        if not killed(at, work):
            break
        with there.held():
            record = parts.load(there)
        for path in there.torch_dir.rglob("*"):
            assert not path.name.endswith(".muon-new")
        if record is None:
            stopped += 1
            assert not (there.torch_dir / "lib").exists()
            assert "compiled parts" not in there.exclude.read_text()
        else:
            for rel in record["files"]:
                assert (there.root / rel).read_bytes()
            parts.remove(there)
        assert git_status(there.root) == ""
    assert stopped > 3
