"""`apply`, `status` and `revert` on an installed torch."""

import json
import os
import shlex
import stat
import sys

import pytest
from overlay.conftest import append, commit_all, run
from tools.overlay import files, payload, stock, wheel as wheels
from tools.overlay.errors import Refused, WorkFailed, WrongTarget
from tools.overlay.repo import ROOT
from tools.overlay.wheel import find_wheel, record_hash


MUON, OWN = "torch/optim/_muon.py", "torch/optim/muon.py"
OTHER = "# Muon as another release has it\n"


def write_record(site):
    """RECORD and METADATA as an installer leaves them for the files of torch that are there."""
    (record,) = site.glob("*.dist-info/RECORD")
    names = [line.split(",")[0] for line in record.read_text().splitlines()]
    rows = [f"{n},{record_hash((site / n).read_bytes())},1" for n in names]
    record.write_text("\n".join(rows) + "\n")


def upgrade(site, version, text, *, record=True):
    """As pip leaves it: torch's own files are new, all others stay."""
    (site / MUON).write_text(text)
    (site / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    (info,) = site.glob("*.dist-info")
    info = info.rename(site / f"torch-{version}.dist-info")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    )
    if record:
        write_record(site)


def uninstall(site):
    """As pip does it: the files that RECORD names go."""
    (info,) = site.glob("*.dist-info")
    for line in (info / "RECORD").read_text().splitlines():
        (site / line.split(",")[0]).unlink()
    for path in info.iterdir():
        path.unlink()
    info.rmdir()


def without_record(site):
    """As conda leaves it."""
    next(site.glob("*.dist-info/RECORD")).unlink()


def test_writes_each_torch_file_and_no_test(
    site, installed, face, snapshot, stock_muon
):
    before = snapshot(site.root)
    done = face("apply", "--python", installed, "--dry-run")
    assert (done.code, snapshot(site.root)) == (0, before)
    done = face("apply", "--python", installed)
    assert (done.code, done.err) == (0, "")
    assert "0001-docs-distributed-muon.patch skipped for docs/source" in done.out
    for rel, text in payload.read(ROOT).whole.items():
        assert site.takes(rel) == (site.root / rel).exists()
        if site.takes(rel):
            assert (site.root / rel).read_bytes() == text
    kept = site.torch_dir / ".muon_overlay/original/optim/_muon.py"
    assert kept.read_bytes() == stock_muon
    after = snapshot(site.root)
    again = face("apply", "--python", installed)
    assert ("already" in again.out, "skipped" in again.out, again.err) == (
        True,
        False,
        "",
    )
    assert snapshot(site.root) == after
    found = json.loads(face("status", "--python", installed, "--json").out)
    assert (found["state"], found["originals"]) == ("current", {MUON: str(kept)})
    assert found["overlay"] == payload.name(ROOT)
    assert face("diff", "--python", installed).out == ""
    # Bytecode goes, too; a folder of it survived.
    for rel in (
        "optim/_muon_engine/__pycache__/gone.pyc",
        "optim/__pycache__/_muon.x.pyc",
    ):
        (site.torch_dir / rel).parent.mkdir(exist_ok=True)
        (site.torch_dir / rel).write_bytes(b"old")
    assert face("revert", "--python", installed, "--dry-run").code == 0
    assert site.status(ROOT)["state"] == "current"
    assert face("revert", "--python", installed).code == 0
    assert snapshot(site.root) == before
    assert not (site.torch_dir / "optim/_muon_engine").exists()
    assert "nothing to revert" in face("revert", "--python", installed).out


def test_many_files_are_counted_and_few_are_named(site, installed, face):
    count = sum(map(site.takes, payload.discover(ROOT)))
    assert (
        f"wrote {count} files: {count} in torch/"
        in face("apply", "--python", installed).out
    )
    shown = face("status", "--python", installed).out
    assert f"{count} files as in this repository, 1 original kept" in shown
    assert "muon.py" not in shown
    assert (
        f"  current   {OWN}\n" in face("status", "--python", installed, "--verbose").out
    )
    (site.root / OWN).unlink()
    assert f"  missing   {OWN}\n" in face("status", "--python", installed).out
    assert f"wrote {OWN}\n" in face("apply", "--python", installed).out
    assert f"removed {OWN}\n" in face("revert", "--python", installed, "--verbose").out


def test_changed_overlay_is_applied_again(site, overlay, snapshot, stock_muon):
    before = snapshot(site.root)
    extra = overlay / "torch/optim/_muon_engine/old/deep.py"
    extra.parent.mkdir(parents=True)
    extra.write_text("old = 1\n")
    site.apply(overlay)
    extra.unlink()
    (overlay / MUON).write_text("# second\n")
    assert site.status(overlay)["state"] == "outdated"
    report = site.apply(overlay)
    rel = "torch/optim/_muon_engine/old/deep.py"
    assert (report.written, report.removed) == ([MUON], [rel])
    assert not (site.root / rel).parent.exists()
    assert site.copy_of(MUON).read_bytes() == stock_muon
    assert site.status(overlay)["state"] == "current"
    site.revert(overlay)
    assert snapshot(site.root) == before


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("rel", [MUON, OWN])
def test_users_work_is_refused_by_name(site, installed, face, snapshot, rel, applied):
    if applied:
        face("apply", "--python", installed)
    (site.root / rel).write_text("# somebody's work\n")
    before = snapshot(site.root)
    for command in ["apply"] + ["revert"] * applied:
        done = face(command, "--python", installed)
        assert (done.code, f"  {rel}\n" in done.err) == (3, True)
        assert snapshot(site.root) == before
    # There is no git to undo them with, and not every torch came from pip's own index.
    assert "pip install" not in done.err
    if rel == OWN:
        assert f"  rm {site.root}/{rel}\n" in done.err
    elif applied:
        (line,) = [ln for ln in done.err.splitlines() if ln.startswith("  cp")]
        run(*shlex.split(line))
        assert face("revert", "--python", installed).code == 0
    else:
        assert (
            "Reinstall torch 2.13.0+cpu, with the program and from the index"
            in done.err
        )


@pytest.mark.parametrize("failing", [1, 2, 4, 9])
def test_failure_half_way_leaves_it_as_it_was(site, snapshot, monkeypatch, failing):
    before = snapshot(site.root)
    folders = sorted(p for p in site.root.rglob("*") if p.is_dir())
    real, calls = os.replace, []

    def replace(source, place):
        calls.append(place)
        if len(calls) == failing:
            raise OSError(28, "No space left on device", str(place))
        return real(source, place)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises((WorkFailed, OSError), match="No space left on device"):
        site.apply(ROOT)
    monkeypatch.undo()
    assert len(calls) >= failing
    assert snapshot(site.root) == before
    assert sorted(p for p in site.root.rglob("*") if p.is_dir()) == folders
    site.apply(ROOT)
    assert site.status(ROOT)["state"] == "current"


def test_texts_are_on_the_disk_before_they_count(site, monkeypatch):
    """A power cut leaves no empty file under a real name."""
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
    site.apply(ROOT)
    assert [path.name for path in renamed[:2]] == ["_muon.py", "manifest.json"]
    assert os.stat(site.torch_dir / "optim").st_ino in flushed


@pytest.mark.skipif(os.name == "nt", reason="modes and owners of files are Unix's")
def test_modes_and_owners_are_those_of_the_siblings(site):
    """`sudo apply` locked the others out, and its files stayed root's."""
    owner = 4711 if os.getuid() == 0 else os.getuid()
    for path in [site.root, *site.root.rglob("*")]:
        path.chmod(0o775 if path.is_dir() else 0o664)
        os.chown(path, owner, -1)
    umask = os.umask(0o077)
    try:
        site.apply(ROOT)
    finally:
        os.umask(umask)
    for path in site.torch_dir.rglob("*"):
        found = path.stat()
        assert stat.S_IMODE(found.st_mode) == (0o775 if path.is_dir() else 0o664), path
        assert found.st_uid == owner, path


def test_interpreters_that_cannot_be(face, tmp_path, make_script):
    assert "no such interpreter" in face("apply", "--python", tmp_path / "none").err
    broken = make_script(tmp_path / "broken", "echo it is broken >&2; exit 3\n")
    bare = make_script(tmp_path / "bare", f'exec "{sys.executable}" -S -E "$@"\n')
    (tmp_path / "text").touch()
    for python, words in (
        (broken, "it is broken"),
        (bare, "has no torch"),
        (tmp_path, "folder without bin/python"),
        (tmp_path / "text", "text: not executable"),
    ):
        done = face("apply", "--python", python)
        assert (done.code, words in done.err) == (2, True)


@pytest.mark.parametrize(
    "body", ["exit 0", 'echo "$2"', 'echo "cannot open $2" >&2; exit 2']
)
def test_other_programs_do_not_show_the_probe(face, tmp_path, make_script, body):
    done = face("status", "--python", make_script(tmp_path / "other", body + "\n"))
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "importlib" not in done.err


def test_unreadable_folder_is_named(site, make_script, face, monkeypatch):
    """It was "has no torch"."""
    found = {"origin": None, "folders": [], "closed": ["/closed"]}
    monkeypatch.setattr(wheels, "ask_where", lambda python: found)
    done = face("status", "--python", site.python)
    assert (done.code, "may not read /closed" in done.err) == (2, True)
    assert "has no torch" not in done.err


def test_relative_python_and_folder(
    face, tmp_path, installed, make_script, monkeypatch
):
    make_script(tmp_path / "venv/bin/python", f'exec "{installed}" "$@"\n')
    (tmp_path / "link").symlink_to(installed)
    monkeypatch.chdir(tmp_path)
    for name in ("venv/bin/python", "venv", "./venv/", tmp_path / "venv", "./link"):
        done = face("status", "--python", name)
        assert (done.code, done.err) == (0, "")
        assert f"wheel {installed.parent}/site-packages\n" in done.out
    # A link is not followed: an environment's python is one.
    assert find_wheel("./link").python == tmp_path / "link"
    monkeypatch.setenv("PATH", f"venv/bin:{os.environ['PATH']}")
    assert find_wheel("python").python == tmp_path / "venv/bin/python"


def test_probe_imports_nothing_from_where_it_runs(
    installed, tmp_path, monkeypatch, capfd
):
    """A torch/ or json.py in the temporary or the current folder may be anybody's."""
    trap = tmp_path / "trap"
    (trap / "torch").mkdir(parents=True)
    (trap / "torch/__init__.py").write_text("")
    (trap / "json.py").write_text("import sys; sys.stderr.write('executed')\n")
    monkeypatch.setenv("TMPDIR", str(trap))
    monkeypatch.setenv("PYTHONPATH", str(trap))
    monkeypatch.chdir(trap)
    found = find_wheel(installed)
    assert found.root == installed.parent / "site-packages"
    (trap / "torch").rename(installed.parent / "torch")
    assert find_wheel(installed).root == found.root
    assert "executed" not in capfd.readouterr().err


def test_checkout_given_as_an_installed_torch(face, tmp_path, checkout, make_script):
    python = make_script(
        tmp_path / "python", f'PYTHONPATH="{checkout}" exec "{sys.executable}" "$@"\n'
    )
    done = face("apply", "--python", python)
    assert (done.code, f"--checkout {checkout}" in done.err) == (2, True)


def test_patches_reach_a_wheel(site, overlay):
    """A hunk for a file below torch/ is applied, kept and reverted on a wheel, too."""
    path = site.torch_dir / "optim/__init__.py"
    path.write_text("one\ntwo\nthree\n")
    write_record(site.root)
    text = (
        "A subject\n\n--- a/torch/optim/__init__.py\n+++ b/torch/optim/__init__.py\n"
        "@@ -1,3 +1,3 @@\n one\n-two\n+{}\n three\n"
    )
    (overlay / "patches/new.patch").write_text(text.format("TWO"))
    (overlay / "patches/old.patch").write_text(text.format("no, not here"))
    series = overlay / "patches/series"
    series.write_text(
        "# a comment\nold.patch <2.13  # for the old\nnew.patch >=2.13,<2.15\n"
    )
    fresh = find_wheel(site.python)
    fresh.apply(overlay)
    assert path.read_text() == "one\nTWO\nthree\n"
    assert fresh.apply(overlay).written == []
    # A changed hunk is taken against the kept original, not on top of itself.
    (overlay / "patches/new.patch").write_text(text.format("TWO again"))
    assert fresh.apply(overlay).written == ["torch/optim/__init__.py"]
    assert path.read_text() == "one\nTWO again\nthree\n"
    (overlay / "patches/new.patch").write_text(
        text.format("x").replace(" one", " none")
    )
    with pytest.raises(WrongTarget, match="new.patch does not fit"):
        fresh.apply(overlay)
    series.write_text("none.patch\n")
    with pytest.raises(WrongTarget, match="patches/series:1 names none.patch"):
        fresh.apply(overlay)
    series.write_text("")
    fresh.revert(overlay)
    assert path.read_text() == "one\ntwo\nthree\n"


def test_deleted_stock_file_is_a_change(site):
    (site.root / MUON).unlink()
    with pytest.raises((Refused, WrongTarget), match=MUON):
        site.apply(ROOT)


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0a0"])
def test_other_versions_need_force(make_installed, face, snapshot, version):
    python = make_installed(version, "other")
    before = snapshot(python.parent)
    done = face("apply", "--python", python)
    assert done.code == 2
    for words in ("2.11 to 2.15", version, "apply --force", f"  {MUON}: as in 2."):
        assert words in done.err
    assert snapshot(python.parent) == before
    assert "warning: " in face("apply", "--python", python, "--force").err
    assert face("apply", "--python", python, "--force").err == ""
    assert "as in this repository" in face("status", "--python", python).out
    assert face("revert", "--python", python).code == 0
    assert snapshot(python.parent) == before


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("version", ["2.14.0", "2.16.0"])
def test_torch_upgraded_under_the_overlay(site, installed, face, record, version):
    """`status` said "changed since"; the old torch's file must not come back."""
    if not record:
        without_record(site.root)
    face("apply", "--python", installed)
    upgrade(site.root, version, OTHER, record=record)
    shown = face("status", "--python", installed).out
    assert f"applied to 2.13.0+cpu, torch is {version} now" in shown
    if version == "2.14.0":
        assert face("apply", "--python", installed).code == 0
        assert find_wheel(installed).status(ROOT)["state"] == "current"
    assert face("revert", "--python", installed).code == 0
    assert (site.root / MUON).read_text() == OTHER
    assert not (site.torch_dir / "optim/_muon_engine").exists()
    assert not (site.torch_dir / ".muon_overlay").exists()


def test_original_of_another_version_is_not_restored(site, installed, face, snapshot):
    """The overlay's own file is in place, and the copy came with another torch."""
    without_record(site.root)
    (site.root / MUON).write_text(OTHER)
    face("apply", "--python", installed)
    upgrade(site.root, "2.14.0", (site.root / MUON).read_text(), record=False)
    before = snapshot(site.root)
    done = face("revert", "--python", installed)
    assert (done.code, "came with torch 2.13.0+cpu" in done.err) == (2, True)
    assert snapshot(site.root) == before


def test_uninstalled_torch(site, face, tmp_path, make_script):
    """43 files stayed, and `revert` said "has no torch"."""
    # Without the torch of the interpreter that runs the tests.
    alone = f'PYTHONPATH="{site.root}" exec "{sys.executable}" -S "$@"\n'
    python = make_script(tmp_path / "alone", alone)
    face("apply", "--python", python)
    uninstall(site.root)
    assert find_wheel(python).root == site.root
    assert "no torch any more" in face("status", "--python", python).out
    assert face("apply", "--python", python).code == 2
    assert face("revert", "--python", python).code == 0
    assert not site.torch_dir.exists()
    assert "has no torch" in face("status", "--python", python).err


@pytest.mark.parametrize("record", [True, False])
def test_edited_copy_is_not_restored(site, installed, face, snapshot, record):
    """RECORD has its hash, and the manifest, too."""
    if not record:
        without_record(site.root)
    face("apply", "--python", installed)
    append(site.copy_of(MUON), "# edited on the disk\n")
    before = snapshot(site.root)
    done = face("revert", "--python", installed)
    assert (done.code, f"  {MUON}\n" in done.err) == (2, True)
    assert snapshot(site.root) == before


@pytest.mark.parametrize(
    "text", [None, "", "[]", '{"files": {"a": 1}}', '{"format": 1}']
)
def test_manifest_that_is_lost_or_damaged(site, installed, face, snapshot, text):
    """RECORD, the copies and this repository say enough."""
    before = snapshot(site.root)
    for command in ("apply", "revert"):
        face("apply", "--python", installed)
        path = site.torch_dir / ".muon_overlay/manifest.json"
        path.unlink() if text is None else path.write_text(text)
        assert face(command, "--python", installed).code == 0
    assert snapshot(site.root) == before


def test_source_tree_without_git(site, installed, face):
    """`pip install -e` of a tarball: RECORD has no file of torch."""
    next(site.root.glob("*.dist-info/RECORD")).write_text("__editable__.pth,,\n")
    (site.root / MUON).write_text(OTHER)
    assert face("apply", "--python", installed).code == 0
    assert face("revert", "--python", installed).code == 0
    assert (site.root / MUON).read_text() == OTHER


def test_older_clone_does_not_downgrade(site, ours, tool, tmp_path, snapshot):
    older = tmp_path / "older"
    run("git", "clone", "-q", ours, older)
    append(ours / OWN, "# newer\n")
    commit_all(ours)
    assert tool("apply", "--python", site.python, root=ours).code == 0
    before = snapshot(site.root)
    done = tool("apply", "--python", site.python, root=older)
    assert (done.code, "which is older" in done.err) == (3, True)
    assert "came after" in tool("status", "--python", site.python, root=older).out
    assert snapshot(site.root) == before
    assert tool("revert", "--python", site.python, root=older).code == 0


def test_status_during_another_command(site, installed, face):
    """It said "half of something"."""
    with site.held():
        (site.torch_dir / "optim/muon.py.muon-new").write_text("")
        shown = face("status", "--python", installed).out
    assert "another command works on it" in shown
    assert "cut off" not in shown


def test_stock_is_known(wheel, stock_muon):
    assert ".".join(wheel.version.split(".")[:2]) in stock.known(MUON, stock_muon)
    assert stock.known(MUON, stock_muon + b"#") is None


def test_commands_exclude_each_other(
    site, installed, there, shell, tmp_path, monkeypatch
):
    """Sessions have temporary folders of their own; linked work trees share info/exclude."""
    place = tmp_path / "linked"
    shell("git", "worktree", "add", "-q", "--detach", place, cwd=there.root)
    others = {site: find_wheel(installed), there: type(there)(there.tree)}
    for one, other in others.items():
        before = sorted(one.root.rglob("*"))
        with one.held():
            monkeypatch.setenv("TMPDIR", str(tmp_path))
            with pytest.raises(WorkFailed, match="another command holds"):
                with files.held(other.lock, wait_s=0.1):
                    raise AssertionError("both had it")
            assert sorted(one.root.rglob("*")) == before


def test_lock_where_folders_cannot_be_locked(tmp_path, monkeypatch):
    flock = files.fcntl.flock

    def network(handle, kind):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(9, "Bad file descriptor")
        flock(handle, kind)

    monkeypatch.setattr(files.fcntl, "flock", network)
    with files.held(tmp_path):
        with pytest.raises(WorkFailed, match="another command holds"):
            with files.held(tmp_path, wait_s=0.1):
                raise AssertionError("both had it")
