"""`apply`, `status` and `revert` on an installed torch."""

import json
import os
import shutil
import sys

import pytest
from tools.overlay import (
    apply,
    interpreter,
    manifest,
    payload,
    revert,
    status,
    target,
    transaction,
)
from tools.overlay.errors import Refused, WorkFailed, WrongTarget
from tools.overlay.repo import ROOT
from tools.overlay.wheel import record_hash


def torch_files():
    """What an installed torch gets: no tests."""
    return {r: t for r, t in payload.read(ROOT).items() if r.startswith("torch/")}


@pytest.fixture
def site(installed):
    return target.find_wheel(installed)


def test_writes_every_torch_file_and_no_test(site, installed, face, stock_muon):
    done = face("apply", "--python", installed)
    assert (done.code, done.err) == (0, "")
    expected = torch_files()
    assert "torch/optim/_muon.py" in expected
    for rel, text in expected.items():
        assert (site.root / rel).read_bytes() == text
    assert not (site.root / "test").exists()
    assert not (site.root / "docs").exists()
    assert (
        "0001-docs-distributed-muon.patch skipped for docs/source/optim.md" in done.out
    )
    kept = manifest.original("torch/optim/_muon.py", site.torch_dir)
    assert kept == site.torch_dir / ".muon_overlay/original/optim/_muon.py"
    assert kept.read_bytes() == stock_muon


def test_twice_says_so_and_changes_nothing(site, installed, face, snapshot):
    first = face("apply", "--python", installed)
    before = snapshot(site.root)
    done = face("apply", "--python", installed)
    assert done.code == 0
    assert "has the overlay already" in done.out
    assert snapshot(site.root) == before
    # What was said once is not said again while nothing changes.
    assert "skipped for" in first.out
    assert "skipped for" not in done.out
    assert "skipped for" in face("apply", "--python", installed, "--verbose").out


def test_many_files_are_counted_and_few_are_named(site, installed, face):
    count = len(torch_files())
    assert count > 5
    first = face("apply", "--python", installed).out
    assert f"wrote {count} files: {count} in torch/" in first
    assert "wrote torch/" not in first
    shown = face("status", "--python", installed).out
    assert f"{count} files as in this repository, 1 original kept" in shown
    assert "muon.py" not in shown
    shown = face("status", "--python", installed, "--verbose").out
    assert "  current   torch/optim/muon.py\n" in shown
    (site.root / "torch/optim/muon.py").unlink()
    shown = face("status", "--python", installed).out
    assert "  missing   torch/optim/muon.py\n" in shown
    assert "wrote torch/optim/muon.py\n" in face("apply", "--python", installed).out
    done = face("revert", "--python", installed, "--verbose")
    assert "removed torch/optim/muon.py\n" in done.out
    assert "wrote torch/optim/muon.py\n" in (
        face("apply", "--python", installed, "--verbose").out
    )


def test_revert_gives_back_the_same_tree(site, installed, face, snapshot):
    before = snapshot(site.root)
    face("apply", "--python", installed)
    assert snapshot(site.root) != before
    cache = site.torch_dir / "optim" / "__pycache__"
    cache.mkdir(exist_ok=True)
    stale = cache / f"_muon.{sys.implementation.cache_tag}.pyc"
    stale.write_bytes(b"old bytecode")
    done = face("revert", "--python", installed)
    assert done.code == 0
    assert not stale.exists()
    assert snapshot(site.root) == before
    assert not (site.torch_dir / "optim/_muon_engine").exists()
    assert not (site.torch_dir / ".muon_overlay").exists()
    again = face("revert", "--python", installed)
    assert again.code == 0
    assert "nothing to revert" in again.out
    assert snapshot(site.root) == before


def test_status_in_words_and_json(site, installed, face, overlay):
    assert "no overlay" in face("status", "--python", installed).out
    face("apply", "--python", installed)
    found = json.loads(face("status", "--python", installed, "--json").out)
    assert found["state"] == "current"
    assert set(found["files"].values()) == {"current"}
    assert list(found["originals"]) == ["torch/optim/_muon.py"]
    assert os.path.isfile(found["originals"]["torch/optim/_muon.py"])

    (overlay / "torch/optim/muon.py").write_text("# newer\n")
    assert status.status(site, overlay).state == "outdated"
    (site.root / "torch/optim/muon.py").write_text("# somebody's\n")
    found = status.status(site, ROOT)
    assert found.state == "changed"
    assert found.files["torch/optim/muon.py"] == "changed"


def test_changed_overlay_is_applied_again(site, overlay, stock_muon):
    apply.apply(site, overlay)
    (overlay / "torch/optim/_muon.py").write_text("# second\n")
    report = apply.apply(site, overlay)
    assert report.changed == ["torch/optim/_muon.py"]
    assert site.read("torch/optim/_muon.py") == b"# second\n"
    kept = manifest.original("torch/optim/_muon.py", site.torch_dir)
    assert kept.read_bytes() == stock_muon


def test_stale_files_go(site, overlay, snapshot):
    before = snapshot(site.root)
    extra = overlay / "torch/optim/_muon_engine/old/deep.py"
    extra.parent.mkdir(parents=True)
    extra.write_text("old = 1\n")
    apply.apply(site, overlay)
    assert site.read("torch/optim/_muon_engine/old/deep.py") == b"old = 1\n"
    shutil.rmtree(extra.parent)
    report = apply.apply(site, overlay)
    assert report.removed == ["torch/optim/_muon_engine/old/deep.py"]
    assert not (site.torch_dir / "optim/_muon_engine/old").exists()
    revert.revert(site)
    assert snapshot(site.root) == before


@pytest.mark.parametrize("rel", ["torch/optim/_muon.py", "torch/optim/muon.py"])
def test_local_changes_are_refused_by_name(site, installed, face, snapshot, rel):
    (site.root / rel).write_text("# somebody's work\n")
    before = snapshot(site.root)
    done = face("apply", "--python", installed)
    assert done.code == 3
    assert f"  {rel}\n" in done.err
    assert snapshot(site.root) == before
    # There is no git to undo them with, and not each torch came from pip's own index.
    again = "install torch 2.13.0+cpu anew, with the program and from the index"
    assert (again in done.err) == rel.endswith("_muon.py")
    assert "pip install" not in done.err
    assert (f"rm {site.root}/{rel}\n" in done.err) == rel.endswith("/muon.py")


def test_changes_made_after_apply_are_refused(site, installed, face, snapshot):
    face("apply", "--python", installed)
    (site.root / "torch/optim/_muon.py").write_text("# edited in place\n")
    before = snapshot(site.root)
    for command in ("apply", "revert"):
        done = face(command, "--python", installed)
        assert done.code == 3
        assert "torch/optim/_muon.py" in done.err
        assert "muon.py\n  " not in done.err  # one name only
        assert snapshot(site.root) == before


def test_reinstalled_torch_is_overlaid_again(site, stock_muon):
    apply.apply(site, ROOT)
    # What pip leaves: its own files fresh, ours where they were.
    (site.root / "torch/optim/_muon.py").write_bytes(stock_muon)
    assert status.status(site, ROOT).state == "changed"
    report = apply.apply(site, ROOT)
    assert report.changed == ["torch/optim/_muon.py"]
    assert status.status(site, ROOT).state == "current"


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_failure_half_way_leaves_it_as_it_was(site, snapshot, monkeypatch, failing):
    before = snapshot(site.root)
    folders = sorted(p for p in site.root.rglob("*") if p.is_dir())
    real, calls = os.replace, []

    def replace(source, place):
        calls.append(place)
        # The first rename is the journal's, and putting back must work.
        if len(calls) == failing + 1:
            raise OSError(28, "No space left on device", str(place))
        return real(source, place)

    monkeypatch.setattr(transaction.os, "replace", replace)
    with pytest.raises(WorkFailed, match="No space left on device.*as it was"):
        apply.apply(site, ROOT)
    monkeypatch.undo()
    assert len(calls) > failing
    assert snapshot(site.root) == before
    assert sorted(p for p in site.root.rglob("*") if p.is_dir()) == folders
    apply.apply(site, ROOT)
    assert status.status(site, ROOT).state == "current"


def test_no_write_permission(site, snapshot, monkeypatch):
    # A stand-in, because root may write whatever the permission bits say.
    before = snapshot(site.root)

    def denied(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(transaction, "_write_beside", denied)
    with pytest.raises(WorkFailed, match="cannot write .*Permission denied") as caught:
        apply.apply(site, ROOT)
    assert "as it was" in str(caught.value)
    assert snapshot(site.root) == before


@pytest.mark.skipif(
    os.name == "nt" or os.getuid() == 0, reason="root may write anywhere"
)
def test_no_write_permission_for_real(site, installed, face, snapshot):
    before = snapshot(site.root)
    site.torch_dir.chmod(0o555)
    try:
        done = face("apply", "--python", installed)
    finally:
        site.torch_dir.chmod(0o755)
    assert done.code == 1
    assert "Permission denied" in done.err
    assert snapshot(site.root) == before


def test_torch_is_never_imported(site, installed, face):
    # Its __init__ raises: only finding it without importing can have worked.
    assert face("apply", "--python", installed).code == 0
    assert status.status(site, ROOT).state == "current"


def test_interpreters_that_cannot_be(face, tmp_path, make_script):
    assert "no such interpreter" in face("apply", "--python", tmp_path / "none").err
    broken = make_script(tmp_path / "broken", "echo it is broken >&2; exit 3\n")
    done = face("apply", "--python", broken)
    assert (done.code, "it is broken" in done.err) == (2, True)
    bare = make_script(tmp_path / "bare", f'exec "{sys.executable}" -S -E "$@"\n')
    done = face("apply", "--python", bare)
    assert done.code == 2
    assert "has no torch" in done.err
    folder = face("apply", "--python", tmp_path)
    assert (folder.code, "folder without bin/python" in folder.err) == (2, True)
    (tmp_path / "text").touch()
    assert "text: not executable" in face("apply", "--python", tmp_path / "text").err


@pytest.mark.parametrize(
    "body", ["exit 0", 'echo "$2"', 'echo "cannot open $2" >&2; exit 2']
)
def test_other_programs_do_not_show_the_probe(face, tmp_path, make_script, body):
    done = face("status", "--python", make_script(tmp_path / "other", body + "\n"))
    assert done.code == 2
    assert done.err.startswith(f"error: {tmp_path}/other is not a")
    assert len(done.err.splitlines()) == 1
    assert "importlib" not in done.err


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
    assert interpreter.find_interpreter("./link") == tmp_path / "link"
    monkeypatch.setenv("PATH", "venv/bin")
    assert interpreter.find_interpreter("python") == tmp_path / "venv/bin/python"


def test_checkout_given_as_an_installed_torch(face, tmp_path, checkout, make_script):
    python = make_script(
        tmp_path / "python", f'PYTHONPATH="{checkout}" exec "{sys.executable}" "$@"\n'
    )
    done = face("apply", "--python", python)
    assert done.code == 2
    assert f"--checkout {checkout}" in done.err


def test_commit_needs_a_checkout(face, installed):
    assert face("apply", "--python", installed, "--commit").code == 2


def test_manifest_of_another_format(site):
    apply.apply(site, ROOT)
    path = site.torch_dir / ".muon_overlay/manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(WorkFailed, match="another version of this overlay"):
        apply.apply(site, ROOT)


def test_original_says_what_it_lacks(site):
    with pytest.raises(FileNotFoundError):
        manifest.original("torch/optim/_muon.py", site.torch_dir)
    apply.apply(site, ROOT)
    with pytest.raises(FileNotFoundError, match="torch/optim/muon.py"):
        manifest.original("torch/optim/muon.py", site.torch_dir)


def test_patches_reach_a_wheel(site, overlay, stock_muon):
    """A hunk for a file under torch/ is applied, kept and reverted on a wheel too."""
    path = site.torch_dir / "optim/__init__.py"
    record = next(site.root.glob("*.dist-info/RECORD"))
    path.write_text("one\ntwo\nthree\n")
    lines = [ln for ln in record.read_text().splitlines() if "optim/__init__" not in ln]
    digest = record_hash(path.read_bytes())
    lines.append(f"torch/optim/__init__.py,{digest},14")
    record.write_text("\n".join(lines) + "\n")
    text = (
        "A subject\n\n--- a/torch/optim/__init__.py\n+++ b/torch/optim/__init__.py\n"
        "@@ -1,3 +1,3 @@\n one\n-two\n+{}\n three\n"
    )
    (overlay / "patches/new.patch").write_text(text.format("TWO"))
    (overlay / "patches/old.patch").write_text(text.format("no, not here"))
    (overlay / "patches/series").write_text(
        "# a comment\nold.patch <2.13  # for the old\nnew.patch >=2.13,<2.15\n"
    )
    fresh = target.find_wheel(site.python)
    apply.apply(fresh, overlay)
    assert path.read_text() == "one\nTWO\nthree\n"
    assert [p["name"] for p in fresh.manifest().patches] == ["new.patch"]
    assert apply.apply(fresh, overlay).changed == []
    # A changed hunk is taken against the kept original, not on top of itself.
    (overlay / "patches/new.patch").write_text(text.format("TWO again"))
    assert apply.apply(fresh, overlay).changed == ["torch/optim/__init__.py"]
    assert path.read_text() == "one\nTWO again\nthree\n"
    revert.revert(fresh)
    assert path.read_text() == "one\ntwo\nthree\n"


def test_a_hunk_that_does_not_fit_touches_nothing(site, overlay, snapshot):
    (overlay / "patches/bad.patch").write_text(
        "--- a/torch/optim/_muon.py\n+++ b/torch/optim/_muon.py\n"
        "@@ -1,2 +1,2 @@\n no such line\n-at all\n+there\n"
    )
    (overlay / "patches/series").write_text("bad.patch\n")
    before = snapshot(site.root)
    with pytest.raises(WrongTarget, match="bad.patch does not fit"):
        apply.apply(site, overlay)
    assert snapshot(site.root) == before


def test_series_that_names_no_file(site, overlay):
    (overlay / "patches/series").write_text("none.patch\n")
    with pytest.raises(WrongTarget, match="patches/series:1 names none.patch"):
        apply.apply(site, overlay)


def test_file_deleted_by_somebody_is_a_local_change(site):
    (site.root / "torch/optim/_muon.py").unlink()
    with pytest.raises((Refused, WrongTarget), match="torch/optim/_muon.py"):
        apply.apply(site, ROOT)


def test_pythonpath_does_not_lead_to_another_torch(wheel, checkout, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    assert target.find_wheel(sys.executable).root == wheel.root
