"""Which tree an original came from: what git or RECORD calls unchanged need not be it."""

import json
import pathlib
import shlex

import pytest
from tools.overlay import apply, stock, target
from tools.overlay.errors import Refused
from tools.overlay.repo import ROOT
from tools.overlay.wheel import record_hash


OTHER = "# Muon as another release has it\n"


def upgrade(site, version, text):
    """As pip leaves it: its own files fresh, what it does not know where it was."""
    (site / "torch/optim/_muon.py").write_text(text)
    (site / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    (info,) = site.glob("*.dist-info")
    info = info.rename(site / f"torch-{version}.dist-info")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    )
    if (info / "RECORD").exists():
        names = [
            line.split(",")[0] for line in (info / "RECORD").read_text().splitlines()
        ]
        rows = [f"{n},{record_hash((site / n).read_bytes())},1" for n in names]
        (info / "RECORD").write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize("record", [True, False])
def test_torch_upgraded_under_the_overlay(installed, face, record):
    """B1: the file of the torch before is not written over the new one's."""
    site = installed.parent / "site-packages"
    if not record:  # as conda
        next(site.glob("*.dist-info/RECORD")).unlink()
    assert face("apply", "--python", installed).code == 0
    upgrade(site, "2.14.0", OTHER)
    done = face("revert", "--python", installed)
    assert done.code == 0
    assert (site / "torch/optim/_muon.py").read_text() == OTHER
    assert not (site / "torch/optim/muon.py").exists()
    assert "left as torch 2.14.0 has it: torch/optim/_muon.py" in done.out


def test_upgraded_torch_is_overlaid_with_its_own_original(installed, face):
    site = installed.parent / "site-packages"
    face("apply", "--python", installed)
    upgrade(site, "2.14.0", OTHER)
    assert face("apply", "--python", installed).code == 0
    assert face("revert", "--python", installed).code == 0
    assert (site / "torch/optim/_muon.py").read_text() == OTHER


def test_original_of_another_version_is_not_restored(installed, face, snapshot):
    """The overlay's own file is in place, and what is kept came with another torch."""
    site = installed.parent / "site-packages"
    next(site.glob("*.dist-info/RECORD")).unlink()
    (site / "torch/optim/_muon.py").write_text(OTHER)
    face("apply", "--python", installed)
    upgrade(site, "2.14.0", (site / "torch/optim/_muon.py").read_text())
    before = snapshot(site)
    done = face("revert", "--python", installed)
    assert done.code != 0
    assert "came with torch 2.13.0+cpu" in done.err
    assert snapshot(site) == before


@pytest.fixture
def branches(checkout, shell):
    """main, and release/2.12 with files of its own."""
    shell("git", "checkout", "-q", "-b", "release/2.12", cwd=checkout)
    (checkout / "version.txt").write_text("2.12.0a0\n")
    (checkout / "torch/optim/_muon.py").write_text(OTHER)
    shell("git", "commit", "-qam", "2.12", cwd=checkout)
    shell("git", "checkout", "-q", "main", cwd=checkout)
    return checkout


def test_another_branch_keeps_its_own_files(branches, face, shell, git_status):
    """B2: what main had is not written over a release branch's file."""
    face("apply", "--checkout", branches, "--commit")
    head = shell("git", "rev-parse", "HEAD", cwd=branches).out[:12]
    shell("git", "switch", "-q", "release/2.12", cwd=branches)
    shown = face("status", "--checkout", branches).out
    assert "no overlay" in shown
    assert f"committed as {head}, which this branch does not have" in shown
    assert "missing" not in shown
    done = face("revert", "--checkout", branches)
    assert (done.code, head in done.out) == (0, True)
    assert git_status(branches) == ""
    assert (branches / "torch/optim/_muon.py").read_text() == OTHER
    # Nothing was forgotten of the branch that has it.
    shell("git", "switch", "-q", "main", cwd=branches)
    assert face("revert", "--checkout", branches, "--commit").code == 0
    assert shell("git", "diff", "HEAD~2", cwd=branches).out == ""


def test_version_that_was_merged_over_the_overlay(branches, face, shell, git_status):
    face("apply", "--checkout", branches, "--commit")
    shell("git", "merge", "-q", "-X", "ours", "release/2.12", "-m", "m", cwd=branches)
    done = face("revert", "--checkout", branches)
    assert done.code == 2
    assert f"git -C {branches} revert " in done.err
    assert git_status(branches) == ""


@pytest.fixture
def edited(checkout, face, shell):
    """Somebody edited the overlay in the checkout, and committed that."""
    face("apply", "--checkout", checkout, "--commit")
    path = checkout / "torch/optim/_muon.py"
    path.write_text(path.read_text() + "# an edit\n")
    shell("git", "commit", "-qam", "an edit", cwd=checkout)
    return checkout


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_committed_edits_are_neither_lost_nor_stock(
    edited, face, snapshot, git_status, command
):
    """B3: a commit makes an edit of the overlay no original."""
    before = snapshot(edited)
    done = face(command, "--checkout", edited)
    assert done.code == 3
    assert "  torch/optim/_muon.py\n" in done.err
    assert f"pull --checkout {edited}" in done.err
    assert "Commit" not in done.err
    assert snapshot(edited) == before
    assert git_status(edited) == ""


def test_way_out_of_committed_edits(edited, face, shell):
    """What the refusal prints undoes the edit and the overlay."""
    said = face("revert", "--checkout", edited).err
    (line,) = [line for line in said.splitlines() if line.startswith("  git")]
    shell(*shlex.split(line), "--no-edit", cwd=edited)
    assert shell("git", "diff", "HEAD~4", cwd=edited).out == ""


@pytest.mark.parametrize("fresh", [False, True])
def test_series_fits_the_base_that_it_names(
    edited, face, shell, tmp_path, overlay_copy, fresh, monkeypatch
):
    """B4: the base is the commit without the overlay, not what git has now."""
    where = edited
    if fresh:  # no record, and this repository has moved on
        where = tmp_path / "fresh"
        shell("git", "clone", "-q", edited, where)
    base = shell("git", "rev-parse", "HEAD~2", cwd=edited).out.strip()
    done = face("export", "--checkout", where, "--out", tmp_path / "out")
    assert (done.code, base in done.out) == (0, True)
    shell("git", "checkout", "-q", base, cwd=where)
    shell("git", "am", *sorted((tmp_path / "out").iterdir()), cwd=where)
    text = (ROOT / "torch/optim/_muon.py").read_text()
    assert (where / "torch/optim/_muon.py").read_text() == text


def test_series_for_a_history_that_is_cut_off(edited, face, shell, tmp_path):
    """B4: where nobody can tell the base, there is no series."""
    where = tmp_path / "shallow"
    shell("git", "clone", "-q", "--depth=1", f"file://{edited}", where)
    done = face("export", "--checkout", where, "--out", tmp_path / "out")
    assert done.code == 2
    assert "history does not reach back" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0a0"])
def test_other_versions_need_force(make_installed, face, snapshot, version):
    """B9: no version is shut out, and `status` and `revert` work on any."""
    python = make_installed(version, "other")
    before = snapshot(python.parent)
    done = face("apply", "--python", python)
    assert done.code == 2
    for words in ("2.11 to 2.15", version, "apply --force", "Nothing was touched"):
        assert words in done.err
    assert "  torch/optim/_muon.py: as in 2." in done.err
    assert snapshot(python.parent) == before
    forced = face("apply", "--python", python, "--force")
    assert (forced.code, "warning: " in forced.err) == (0, True)
    assert "as in this repository" in face("status", "--python", python).out
    assert face("revert", "--python", python).code == 0
    assert snapshot(python.parent) == before


def test_torch_that_became_another_version(installed, face):
    """B9: the overlay of a supported torch comes off when it is supported no more."""
    site = installed.parent / "site-packages"
    face("apply", "--python", installed)
    upgrade(site, "2.16.0", OTHER)
    assert face("status", "--python", installed).code == 0
    assert face("revert", "--python", installed).code == 0
    assert not (site / "torch/optim/_muon_engine").exists()


def test_main_of_upstream(checkout, face, shell, git_status):
    """B9: the people of the README, with hunks of ours that do not fit any more."""
    (checkout / "version.txt").write_text("2.16.0a0\n")
    other = checkout / "torch/distributed/distributed_c10d.py"
    other.write_text("# all new\n")
    shell("git", "commit", "-qam", "main", cwd=checkout)
    refused = face("apply", "--checkout", checkout)
    assert refused.code == 2
    assert "distributed_c10d.py: as in no supported version" in refused.err
    done = face("apply", "--checkout", checkout, "--force")
    assert done.code == 0
    assert "0002-local-groups-named-by-ranks.patch skipped: " in done.out
    assert other.read_text() == "# all new\n"
    assert face("revert", "--checkout", checkout).code == 0
    assert git_status(checkout) == ""


def test_source_tree_without_git(tmp_path, make_installed, face):
    """B19: stock is not called an addition that has to go."""
    python = make_installed()
    site = tmp_path / "installed/site-packages"
    # `pip install -e` of a tarball: RECORD has no file of torch.
    next(site.glob("*.dist-info/RECORD")).write_text("__editable__.pth,,\n")
    path = site / "torch/optim/_muon.py"
    path.write_text(OTHER)
    done = face("apply", "--python", python)
    assert done.code == 0, done.err
    path.write_text("# edited\n")
    refused = face("apply", "--python", python)
    assert refused.code == 3
    assert "rm " not in refused.err
    # The way out that is printed gives the file back.
    (line,) = [ln for ln in refused.err.splitlines() if ln.startswith("  cp ")]
    _, source, place = shlex.split(line)
    assert (pathlib.Path(source).read_text(), place) == (OTHER, str(path))


def test_way_out_names_no_index_and_no_pip(installed, face):
    """B20: 2.13.0+cpu is not on the default index, and uv's environments have no pip."""
    (installed.parent / "site-packages/torch/optim/_muon.py").write_text("# mine\n")
    done = face("apply", "--python", installed)
    assert done.code == 3
    assert "pip install" not in done.err
    assert "install torch 2.13.0+cpu anew" in done.err


def test_git_clean_does_not_take_the_record(checkout, face, shell, git_status):
    """B22: files that git tracks are still the overlay's after `git clean -fdx`."""
    face("apply", "--checkout", checkout)
    shell("git", "clean", "-qfdx", cwd=checkout)
    found = json.loads(face("status", "--checkout", checkout, "--json").out)
    assert found["state"] == "changed"
    assert found["files"]["torch/optim/_muon.py"] == "current"
    assert found["files"]["torch/optim/muon.py"] == "missing"
    assert face("apply", "--checkout", checkout).code == 0
    shell("git", "clean", "-qfdx", cwd=checkout)
    assert face("revert", "--checkout", checkout).code == 0
    assert git_status(checkout) == ""


@pytest.mark.parametrize("rel", ["torch/optim/_muon.py", "test/optim/test_muon.py"])
def test_unknown_files_are_named(checkout, face, shell, git_status, rel):
    """B23: what no release has is not replaced without a word."""
    path = checkout / rel
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# a fix of upstream\n")
    shell("git", "add", rel, cwd=checkout)
    shell("git", "commit", "-qm", "a fix", cwd=checkout)
    done = face("apply", "--checkout", checkout)
    assert done.code == 0
    assert f"warning: {rel} there is of no release" in done.err
    assert face("revert", "--checkout", checkout).code == 0
    assert git_status(checkout) == ""


def test_stock_is_known(wheel, stock_muon):
    minor = ".".join(wheel.version.split(".")[:2])
    assert minor in stock.known("torch/optim/_muon.py", stock_muon)
    assert stock.known("torch/optim/_muon.py", stock_muon + b"#") is None


def test_staged_overlay_leaves_nothing_staged(checkout, face, shell, git_status):
    face("apply", "--checkout", checkout)
    shell("git", "add", "--all", cwd=checkout)
    assert face("revert", "--checkout", checkout).code == 0
    assert git_status(checkout) == ""


def test_partly_committed_overlay(checkout, face, shell, git_status):
    """`git commit -a` takes the replaced files and none of the added ones."""
    face("apply", "--checkout", checkout)
    shell("git", "commit", "-qam", "half of it", cwd=checkout)
    assert face("revert", "--checkout", checkout, "--commit").code == 0
    assert git_status(checkout) == ""
    assert shell("git", "diff", "HEAD~2", cwd=checkout).out == ""


def test_record_that_is_lost_is_found_again(installed, stock_muon):
    """The kept file is the original because RECORD has its hash."""
    site = target.find_wheel(installed)
    apply.apply(site, ROOT)
    (site.keep / "manifest.json").unlink()
    report = apply.apply(site, ROOT)
    assert report.changed == []
    assert site.manifest().files["torch/optim/_muon.py"].original
    (site.keep / "manifest.json").unlink()
    (site.keep / "original/optim/_muon.py").write_text("# damaged\n")
    with pytest.raises(Refused, match="_muon.py"):
        apply.apply(site, ROOT)


def test_undone_by_git_as_offered(checkout, face, shell, git_status):
    """What `revert` offers works, and the record does not outlive it."""
    face("apply", "--checkout", checkout, "--commit")
    offer = face("revert", "--checkout", checkout).out
    (line,) = [ln for ln in offer.splitlines() if ln.startswith("  git -C")]
    face("apply", "--checkout", checkout)  # a second thought
    assert git_status(checkout) == ""
    shell(*shlex.split(line), "--no-edit", cwd=checkout)
    assert shell("git", "diff", "HEAD~2", cwd=checkout).out == ""
    assert face("revert", "--checkout", checkout).code == 0
    done = face("revert", "--checkout", checkout)
    assert "nothing to revert" in done.out


def test_undoing_that_could_not_be_committed(checkout, face, make_script, git_status):
    """`revert --commit` can be repeated where a hook refused it, or a kill came between."""
    face("apply", "--checkout", checkout, "--commit")
    hook = make_script(checkout / ".git/hooks/pre-commit", "echo no >&2; exit 1\n")
    assert face("revert", "--checkout", checkout, "--commit").code == 1
    hook.unlink()
    done = face("revert", "--checkout", checkout, "--commit")
    assert (done.code, "committed as" in done.out) == (0, True)
    assert git_status(checkout) == ""
