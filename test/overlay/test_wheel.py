"""`apply`, `status` and `revert` on an installed torch."""

import contextlib
import itertools
import json
import os
import stat
import sys

import pytest
from overlay.conftest import append, fails, leads_on, METADATA, MUON, OTHER, OWN, run
from overlay.conftest import script, snapshot, write_record
from tools.overlay import files, payload, wheel as wheels
from tools.overlay.errors import WorkFailed, WrongTarget
from tools.overlay.payload import ROOT
from tools.overlay.wheel import find_wheel


TORCHS = ["torch/__init__.py", "torch/version.py", "torch/optim/__init__.py", MUON]


def without_record(site):
    """As conda leaves it."""
    next(site.glob("*.dist-info/RECORD")).unlink()


def test_apply_and_revert(site, on, stock_muon):
    before = snapshot(site.root)
    on("apply", "--dry-run")
    assert snapshot(site.root) == before
    count = sum(rel.startswith("torch/") for rel in payload.discover(ROOT))
    shown = on("apply")
    assert f"wrote {count} files: {count} in torch/" in shown
    for rel, text in payload.read(ROOT).whole.items():
        assert site.read(rel) == (text if rel.startswith("torch/") else None)
    kept = site.torch_dir / ".muon_overlay/original/optim/_muon.py"
    assert kept.read_bytes() == stock_muon
    after = snapshot(site.root)
    assert "already" in on("apply")
    assert snapshot(site.root) == after
    found = site.status(ROOT)
    assert (found["state"], found["overlay"]) == ("current", payload.name(ROOT))
    assert "muon.py" not in on("status")
    assert on("diff") == ""
    (site.root / OWN).unlink()
    assert f"  missing   {OWN}\n" in on("status")
    assert f"wrote {OWN}\n" in on("apply")
    # Bytecode goes, too; a folder of it survived.
    for rel in ("_muon_engine/__pycache__/gone.pyc", "__pycache__/_muon.x.pyc"):
        (site.torch_dir / "optim" / rel).parent.mkdir(exist_ok=True)
        (site.torch_dir / "optim" / rel).write_bytes(b"old")
    on("revert", "--dry-run")
    assert site.status(ROOT)["state"] == "current"
    on("revert")
    assert snapshot(site.root) == before
    assert not (site.torch_dir / "optim/_muon_engine").exists()
    assert "nothing to do" in on("revert")


HUNK = (
    "--- a/torch/optim/__init__.py\n+++ b/torch/optim/__init__.py\n"
    "@@ -1,3 +1,3 @@\n one\n-two\n+{}\n three\n"
)


def test_changed_overlay_is_applied_again(site, overlay):
    """A hunk, too: against the kept original, not on top of itself."""
    init, old = "torch/optim/__init__.py", "torch/optim/_muon_engine/old/deep.py"
    patch, series = overlay / "patches/new.patch", overlay / "patches/series"
    (site.root / init).write_text("one\ntwo\nthree\n")
    write_record(site.root, TORCHS)
    site, before = find_wheel(site.python), snapshot(site.root)
    patch.write_text(HUNK.format("TWO"))
    series.write_text("# a comment\n\nnew.patch\n")
    (overlay / old).parent.mkdir(parents=True)
    (overlay / old).write_text("old = 1\n")
    site.apply(overlay)
    assert site.read(init) == b"one\nTWO\nthree\n"
    (overlay / old).unlink()
    (overlay / MUON).write_text("# second\n")
    patch.write_text(HUNK.format("TWO again"))
    assert site.status(overlay)["state"] == "outdated"
    report = site.apply(overlay)
    assert ({*report.written}, report.removed) == ({MUON, init}, [old])
    assert site.read(init) == b"one\nTWO again\nthree\n"
    assert not (site.root / old).parent.exists()
    patch.write_text(HUNK.replace(" one", " none"))
    for name, error in ("new", "does not fit"), ("none", "must be the one patch"):
        series.write_text(f"{name}.patch\n")
        with pytest.raises(WrongTarget, match=f"patches/{name}.patch {error}"):
            site.apply(overlay)
    series.write_text("")
    site.revert(overlay)
    assert snapshot(site.root) == before


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("rel", [MUON, OWN])
def test_users_work_is_refused_by_name(site, on, rel, applied):
    if applied:
        on("apply")
    (site.root / rel).write_text("# somebody's work\n")
    for command in ["apply"] + ["revert"] * applied:
        errors = on(command, code=3, words=[f"  {rel}\n"])
    if rel == MUON and not applied:
        assert "Reinstall torch 2.13.0+cpu, with the program and from" in errors
        return
    leads_on(errors)
    on("apply")


@pytest.mark.parametrize("failing", [1, 2, 9])
def test_failure_half_way_leaves_it_as_it_was(site, monkeypatch, failing):
    before, calls, real = snapshot(site.root), itertools.count(1), os.replace

    def replace(source, place):
        if next(calls) == failing:
            raise OSError(28, "No space left on device", str(place))
        real(source, place)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(WorkFailed, match="No space left on device"):
        site.apply(ROOT)
    assert snapshot(site.root) == before
    site.apply(ROOT)
    site.revert(ROOT)
    assert snapshot(site.root) == before


def test_texts_are_on_the_disk_before_they_count(site, monkeypatch):
    """A power cut leaves no empty file under a real name."""
    flushed, renamed, replace = set(), [], os.replace

    def rename(source, place):
        assert os.stat(source).st_ino in flushed
        renamed.append(place.name)
        replace(source, place)

    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino))
    monkeypatch.setattr(os, "replace", rename)
    site.apply(ROOT)
    assert renamed[:2] == ["_muon.py", "manifest.json"]
    assert os.stat(site.torch_dir / "optim").st_ino in flushed


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


def test_interpreters_that_cannot_be(face, tmp_path, checkout):
    (tmp_path / "text").touch()
    run_it = f'exec "{sys.executable}"'
    for body, words in (
        ("echo it is broken >&2; exit 3", "it is broken"),
        (f'{run_it} -S -E "$@"', "has no torch"),
        ("exit 0", "not a Python interpreter"),
        (f'PYTHONPATH="{checkout}" {run_it} "$@"', f"--checkout {checkout}"),
        (None, "no such interpreter"),
    ):
        python = script(tmp_path / "python", body) if body else tmp_path / "text"
        fails(face("apply", "--python", python), 2, words)


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


NIGHTLIES = ["2.16.0.dev20260101+cpu", "2.15.0.dev20250101", "2.10.0.post2"]


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0a0", *NIGHTLIES])
def test_other_versions_need_force(make_installed, on, version):
    python = make_installed(version, "other")
    before = snapshot(python.parent)
    words = ("2.11 to 2.15", version, " --force\n", f"  {MUON}: as in 2.")
    (forced,) = leads_on(on("apply", where=python, code=2, words=words))
    assert "warning: " in forced.err
    assert "already" in on("apply", "--force", where=python)
    on("revert", where=python)
    assert snapshot(python.parent) == before


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("version", ["2.14.0", "2.16.0"])
def test_torch_upgraded_under_the_overlay(site, installed, on, record, version):
    """`status` said "changed since"; the old torch's file must not come back."""
    if not record:
        without_record(site.root)
    on("apply")
    # As pip leaves it: torch's own files are new, all others stay.
    (site.root / MUON).write_text(OTHER)
    (info,) = site.root.glob("*.dist-info")
    info = info.rename(site.root / f"torch-{version}.dist-info")
    (info / "METADATA").write_text(METADATA.format("torch", version))
    if record:
        write_record(site.root, TORCHS)
    assert f"applied to 2.13.0+cpu, torch is {version} now" in on("status")
    if version == "2.14.0":
        on("apply")
        assert find_wheel(installed).status(ROOT)["state"] == "current"
    on("revert")
    assert (site.root / MUON).read_text() == OTHER
    for rel in ("optim/_muon_engine", ".muon_overlay"):
        assert not (site.torch_dir / rel).exists()


def test_uninstalled_torch(site, face, tmp_path, monkeypatch):
    """43 files stayed, and `revert` said "has no torch", as of an unreadable folder."""
    # Without the torch of the interpreter that runs the tests.
    alone = f'PYTHONPATH="{site.root}" exec "{sys.executable}" -S "$@"\n'
    python = script(tmp_path / "alone", alone)
    face("apply", "--python", python)
    (record,) = site.root.glob("*.dist-info/RECORD")  # as pip does it
    for line in record.read_text().splitlines():
        (site.root / line.split(",")[0]).unlink()
    record.parent.rename(tmp_path / "gone")
    assert "no torch any more" in face("status", "--python", python).out
    leads_on(fails(face("apply", "--python", python), 2).err)
    assert not site.torch_dir.exists()
    assert "has no torch" in face("status", "--python", python).err
    found = {"origin": None, "folders": [], "closed": ["/closed"]}
    monkeypatch.setattr(wheels, "ask_python", lambda *_, **__: json.dumps(found))
    assert "may not read /closed" in face("status", "--python", python).err


def test_package_that_was_built_again(site, installed, on):
    """The printed `cp` put a file of the old build into the new one."""
    without_record(site.root)
    on("apply")
    for rel in TORCHS:
        (site.root / rel).write_text(f"{OTHER}# {rel}\n")
    on("apply")
    on("revert")
    for rel in TORCHS:
        assert (site.root / rel).read_text() == f"{OTHER}# {rel}\n"


def test_torch_of_pythonpath(site, make_installed, face, tmp_path, monkeypatch):
    """As a cluster's modules bring it: another torch was patched than the one imported."""
    own = find_wheel(make_installed("2.12.0", "own"))
    bare = script(tmp_path / "bare", f'exec "{sys.executable}" -S "$@"\n')
    monkeypatch.setenv("PYTHONPATH", str(site.root))
    words = (f"torch 2.13.0+cpu in {site.root}", "is not in the environment")
    fails(face("apply", "--python", bare), 0, *words)
    assert site.status(ROOT)["state"] == "current"
    assert own.status(ROOT)["state"] == "none"


def test_shim_that_goes_by_the_folder(make_installed, tmp_path, monkeypatch):
    """The overlay went into another torch than that of the interpreter."""
    here, other = make_installed(), make_installed(name="other")
    body = f'[ -e mark ] && exec "{here}" "$@"\nexec "{other}" "$@"\n'
    shim = script(tmp_path / "shims" / "python", body)
    (tmp_path / "mark").touch()
    monkeypatch.chdir(tmp_path)
    assert find_wheel(shim).root == find_wheel(here).root


def test_read_only_torch(site, on, monkeypatch):
    access, closed = os.access, site.torch_dir / "optim"

    def may(path, mode):
        return access(path, mode) and not (mode == os.W_OK and path == closed)

    monkeypatch.setattr(os, "access", may)
    on("apply", code=2, words=[f"may not write {closed}"])


STALE = """
import sys
import torch.optim._muon, torch.optim._muon_engine
exec(open(sys.argv[1]).read(), vars(torch.optim._muon))
import torch.optim.muon
"""


def test_what_is_left_after_an_upgrade_says_so(wheel):
    """Muon said "unexpected keyword argument" of a config that it had just made."""
    python, stock = wheel.python, wheel.copy_of(MUON)
    done = run(python, "-c", STALE, stock, check=False)
    assert (done.code, "apply it again" in done.err.splitlines()[-1]) == (1, True)


@pytest.mark.parametrize("record", [True, False])
def test_edited_copy_is_not_restored(site, on, record):
    """RECORD has its hash, and the manifest, too."""
    if not record:
        without_record(site.root)
    on("apply")
    append(site.copy_of(MUON), "# edited on the disk\n")
    on("revert", code=2, words=[f"  {MUON}\n"])


@pytest.mark.parametrize("text", [None, "", '{"files": {"a": 1}}', '{"format": 1}'])
def test_manifest_that_is_lost_or_damaged(site, on, text):
    """RECORD, the copies and this repository say enough."""
    before = snapshot(site.root)
    for command in ("apply", "revert"):
        on("apply")
        path = site.torch_dir / ".muon_overlay/manifest.json"
        path.unlink() if text is None else path.write_text(text)
        on(command)
    assert snapshot(site.root) == before


@pytest.mark.parametrize("network", [False, True])
def test_commands_exclude_each_other(site, there, tmp_path, monkeypatch, network):
    """Sessions have temporary folders of their own; linked work trees share info/exclude."""
    flock = files.fcntl.flock

    def on_files_alone(handle, kind):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(9, "Bad file descriptor")
        flock(handle, kind)

    if network:
        monkeypatch.setattr(files.fcntl, "flock", on_files_alone)
    for one, other in {site: find_wheel(site.python), there: there}.items():
        for held in (True, False):
            with one.held() if held else contextlib.nullcontext():
                monkeypatch.setenv("TMPDIR", str(tmp_path))
                handle = files._open(other.lock)
                assert files._locked(handle) != held
                os.close(handle)
