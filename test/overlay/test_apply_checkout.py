"""`apply`, `revert` and `export` on a PyTorch git checkout."""

import shutil
import subprocess
import sys

import pytest
from tools.overlay import apply, patches, payload, revert, status, target
from tools.overlay.errors import Refused, WorkFailed
from tools.overlay.repo import ROOT


PUBLIC = (
    "DistributedConfig",
    "create_auto_config",
    "create_dtensor_config",
    "detect_tp_dims_from_model",
    "partition_parameters",
)


def test_whole_files_and_hunks(checkout, face, git_status, stock_muon):
    done = face("apply", "--checkout", checkout)
    assert (done.code, done.err) == (0, "")
    for rel, text in payload.read(ROOT).items():
        assert (checkout / rel).read_bytes() == text
    doc = (checkout / "docs/source/optim.md").read_text()
    section = doc.split("## Distributed Muon\n")[1].split("## How to adjust")[0]
    summary = section.split(".. autosummary::")[1]
    for name in PUBLIC:
        assert f"\n    {name}\n" in summary
    # Only what the overlay is: nothing it keeps shows up for `git add .`.
    shown = git_status(checkout)
    assert " M torch/optim/_muon.py\n" in shown
    assert " M docs/source/optim.md\n" in shown
    assert ".muon_overlay" not in shown
    kept = checkout / "torch/.muon_overlay/original/optim/_muon.py"
    assert kept.read_bytes() == stock_muon


def test_commit_holds_the_overlay_and_nothing_else(checkout, face, shell, git_status):
    (checkout / "torch/optim/sgd.py").write_text("# somebody's other work\n")
    shell("git", "add", "torch/optim/sgd.py", cwd=checkout)
    done = face("apply", "--checkout", checkout, "--commit")
    assert done.code == 0
    names = shell("git", "show", "--format=%s", "--name-only", cwd=checkout).out
    subject, *changed = names.split()[0:3], *names.splitlines()[2:]
    assert names.startswith("optim: distributed Muon\n")
    patched = {
        "docs/source/optim.md",
        "torch/distributed/distributed_c10d.py",
        "torch/testing/_internal/common_optimizers.py",
    }
    assert set(changed) == {*payload.discover(ROOT), *patched}
    assert subject
    assert git_status(checkout) == "M  torch/optim/sgd.py\n"
    count = shell("git", "rev-list", "--count", "HEAD", cwd=checkout).out
    again = face("apply", "--checkout", checkout, "--commit")
    assert (again.code, "already" in again.out) == (0, True)
    assert shell("git", "rev-list", "--count", "HEAD", cwd=checkout).out == count


def test_commit_after_apply(checkout, face, git_status):
    face("apply", "--checkout", checkout)
    done = face("apply", "--checkout", checkout, "--commit")
    assert "committed as" in done.out
    assert git_status(checkout) == ""


def test_revert(checkout, face, git_status, snapshot):
    before = snapshot(checkout)
    exclude = (checkout / ".git/info/exclude").read_text()
    face("apply", "--checkout", checkout)
    done = face("revert", "--checkout", checkout)
    assert done.code == 0
    assert git_status(checkout) == ""
    assert snapshot(checkout) == before
    assert (checkout / ".git/info/exclude").read_text() == exclude
    again = face("revert", "--checkout", checkout)
    assert (again.code, "nothing to revert" in again.out) == (0, True)


def test_revert_of_a_commit(checkout, face, shell, git_status):
    tree = shell("git", "rev-parse", "HEAD^{tree}", cwd=checkout).out
    face("apply", "--checkout", checkout, "--commit")
    assert shell("git", "rev-parse", "HEAD^{tree}", cwd=checkout).out != tree
    done = face("revert", "--checkout", checkout, "--commit")
    assert done.code == 0
    assert git_status(checkout) == ""
    assert shell("git", "rev-parse", "HEAD^{tree}", cwd=checkout).out == tree
    assert shell("git", "rev-list", "--count", "HEAD", cwd=checkout).out == "3\n"


def test_revert_of_a_commit_without_committing_says_so(
    checkout, face, shell, git_status
):
    face("apply", "--checkout", checkout, "--commit")
    head = shell("git", "rev-parse", "HEAD", cwd=checkout).out
    done = face("revert", "--checkout", checkout)
    assert "not committed" in done.out
    assert " M torch/optim/_muon.py\n" in git_status(checkout)
    assert f"  git -C {checkout} revert {head}" in done.out
    # A second thought: the undoing that is there already is committed.
    assert face("revert", "--checkout", checkout, "--commit").code == 0
    assert git_status(checkout) == ""
    assert shell("git", "diff", "HEAD~2", cwd=checkout).out == ""


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("rel", ["torch/optim/_muon.py", "docs/source/optim.md"])
def test_local_changes_are_refused_by_name(
    checkout, face, shell, snapshot, git_status, rel, staged
):
    path = checkout / rel
    path.write_text(path.read_text() + "\n# somebody's work\n")
    if staged:
        shell("git", "add", rel, cwd=checkout)
    before, shown = snapshot(checkout), git_status(checkout)
    done = face("apply", "--checkout", checkout)
    assert done.code == 3
    assert f"  {rel}\n" in done.err
    assert snapshot(checkout) == before
    assert git_status(checkout) == shown


def test_untracked_and_ignored_files_are_refused(checkout, snapshot):
    work = checkout / "torch/optim/muon.py"
    work.write_text("# somebody's\n")
    before = snapshot(checkout)
    with pytest.raises(Refused, match="torch/optim/muon.py"):
        apply.apply(target.find_checkout(checkout), ROOT)
    (checkout / ".git/info/exclude").write_text("/torch/optim/muon.py\n")
    with pytest.raises(Refused, match="torch/optim/muon.py"):
        apply.apply(target.find_checkout(checkout), ROOT)
    assert snapshot(checkout) == before


def test_folder_that_is_ignored_as_a_whole_is_refused(checkout):
    rel = "torch/optim/_muon_engine/__init__.py"
    (checkout / rel).parent.mkdir()
    (checkout / rel).write_text("# somebody's\n")
    (checkout / ".git/info/exclude").write_text("_muon_engine/\n")
    with pytest.raises(Refused, match=rel):
        apply.apply(target.find_checkout(checkout), ROOT)


def test_other_changes_are_left_alone(checkout, face):
    other = checkout / "torch/optim/sgd.py"
    other.write_text("# somebody's\n")
    assert face("apply", "--checkout", checkout).code == 0
    assert face("revert", "--checkout", checkout).code == 0
    assert other.read_text() == "# somebody's\n"


def test_edits_after_apply_are_refused(checkout, face):
    face("apply", "--checkout", checkout)
    path = checkout / "torch/optim/_muon.py"
    path.write_text("# edited\n")
    for command in ("apply", "revert"):
        done = face(command, "--checkout", checkout)
        assert (done.code, "torch/optim/_muon.py" in done.err) == (3, True)
    assert path.read_text() == "# edited\n"


def test_failing_commit_loses_nothing(checkout, make_script, git_status):
    make_script(
        checkout / ".git/hooks/pre-commit", "echo the hook says no >&2; exit 1\n"
    )
    clean = git_status(checkout)
    there = target.find_checkout(checkout)
    with pytest.raises(WorkFailed, match="the hook says no"):
        apply.apply(there, ROOT, commit=True)
    assert status.status(there, ROOT).state == "current"
    assert "A " not in git_status(checkout)  # nothing left staged
    revert.revert(there)
    assert git_status(checkout) == clean


def test_newer_overlay_over_an_older_one(checkout, overlay, git_status):
    there = target.find_checkout(checkout)
    extra = overlay / "test/optim/test_muon_old.py"
    extra.parent.mkdir(parents=True, exist_ok=True)
    extra.write_text("")
    apply.apply(there, overlay)
    assert (checkout / "test/optim/test_muon_old.py").is_file()
    extra.unlink()
    (overlay / "torch/optim/muon.py").write_text("# newer\n")
    report = apply.apply(there, overlay)
    assert report.changed == ["torch/optim/muon.py"]
    assert report.removed == ["test/optim/test_muon_old.py"]
    revert.revert(there)
    assert git_status(checkout) == ""


def test_what_is_no_checkout(checkout, face, tmp_path, snapshot):
    assert "no such folder" in face("apply", "--checkout", tmp_path / "none").err
    # Every one of the things that make a checkout, taken away in turn.
    assert "version.txt" in face("apply", "--checkout", ROOT).err
    inside = face("apply", "--checkout", checkout / "torch")
    assert (inside.code, "not a PyTorch checkout" in inside.err) == (2, True)
    bare = tmp_path / "bare"
    shutil.copytree(checkout, bare, ignore=shutil.ignore_patterns(".git"))
    before = snapshot(bare)
    done = face("apply", "--checkout", bare)
    assert done.code == 2
    assert "not the top of a git work tree" in done.err
    assert snapshot(bare) == before


def test_target_without_docs_is_said(checkout, face, shell):
    shell("git", "rm", "-rq", "docs", cwd=checkout)
    shell("git", "commit", "-qm", "no docs", cwd=checkout)
    done = face("apply", "--checkout", checkout)
    assert done.code == 0
    assert "skipped for docs/source/optim.md" in done.out
    assert not (checkout / "docs").exists()


def test_linked_work_tree(checkout, face, shell, git_status, tmp_path):
    place = tmp_path / "linked"
    shell("git", "worktree", "add", "-q", "--detach", place, cwd=checkout)
    assert face("apply", "--checkout", place).code == 0
    assert ".muon_overlay" not in git_status(place)
    assert git_status(checkout) == ""
    assert face("revert", "--checkout", place).code == 0
    assert git_status(place) == ""


def test_every_patch_of_the_series_changes_something():
    named = patches.series(ROOT, "2.13.0")
    assert named
    for patch in named:
        assert patch.hunks.startswith(b"--- a/") or patch.hunks.startswith(
            b"diff --git"
        )
        assert "\n" not in patch.message.splitlines()[0]


def test_export_and_git_am_give_the_same_tree(checkout, small, face, shell, tmp_path):
    face("apply", "--checkout", checkout, "--commit")
    expected = shell("git", "rev-parse", "HEAD^{tree}", cwd=checkout).out
    # From the overlaid checkout: what it replaced is the base of the difference.
    out = tmp_path / "series"
    done = face("export", "--checkout", checkout, "--out", out)
    assert done.code == 0
    mails = sorted(out.iterdir())
    assert len(mails) == 1 + len(patches.series(ROOT, "2.13.0"))
    second = tmp_path / "second"
    shell("git", "clone", "-q", small, second)
    shell("git", "am", *mails, cwd=second)
    assert shell("git", "rev-parse", "HEAD^{tree}", cwd=second).out == expected
    subjects = shell("git", "log", "--format=%s", "--reverse", cwd=second).out
    assert subjects.splitlines()[1:] == [
        "optim: distributed Muon",
        "optim: document distributed Muon",
        "distributed: name a locally synchronized group by its own ranks",
        "testing: Muon's options `foreach` and `ns_algorithm` came later",
    ]
    # The same from a tree without the overlay, and from an installed torch.
    third = tmp_path / "third"
    shell("git", "clone", "-q", small, third)
    other = tmp_path / "other"
    assert face("export", "--checkout", third, "--out", other).code == 0
    shell("git", "am", *sorted(other.iterdir()), cwd=third)
    assert shell("git", "rev-parse", "HEAD^{tree}", cwd=third).out == expected
    # What came by `git am` is recognized, and not laid over itself.
    again = face("apply", "--checkout", second)
    assert (again.code, "already" in again.out) == (0, True)
    assert "from git" in face("status", "--checkout", second).out
    assert_git_has_to_revert(face, second)
    # Also when this repository has moved on since.
    (second / "torch/optim/muon.py").write_text("# older\n")
    shell("git", "commit", "-qam", "older", cwd=second)
    shown = face("status", "--checkout", second).out
    assert "from git" in shown
    assert "  outdated  torch/optim/muon.py\n" in shown
    assert_git_has_to_revert(face, second)
    shell("git", "revert", "--no-edit", "HEAD", cwd=second)
    # What git has is not taken for the original: the base is in the history.
    assert face("export", "--checkout", second, "--out", out).code == 0
    fourth = tmp_path / "fourth"
    shell("git", "clone", "-q", small, fourth)
    shell("git", "am", *sorted(out.iterdir()), cwd=fourth)
    assert shell("git", "rev-parse", "HEAD^{tree}", cwd=fourth).out == expected


def assert_git_has_to_revert(face, place):
    done = face("revert", "--checkout", place)
    assert done.code == 2
    assert "in git, without a record of `apply`" in done.err
    assert f"git -C {place} revert\n" in done.err


@pytest.mark.parametrize("name", ["file", "file/inside"])
def test_export_to_what_is_no_folder(checkout, face, tmp_path, name):
    (tmp_path / "file").touch()
    done = face("export", "--checkout", checkout, "--out", tmp_path / name)
    assert done.code == 2
    assert f"error: {tmp_path / name} cannot be a folder" in done.err
    assert "Traceback" not in done.err


def test_export_that_cannot_write(checkout, face, tmp_path):
    # Any other error of the operating system is told in words, too.
    (tmp_path / "0001-optim-distributed-Muon.patch").mkdir()
    done = face("export", "--checkout", checkout, "--out", tmp_path)
    assert done.code == 1
    assert done.err == (
        f"error: {tmp_path}/0001-optim-distributed-Muon.patch: Is a directory\n"
    )


def test_the_documented_example_leaves_the_ends_to_adamw():
    (patch,) = (p for p in patches.series(ROOT, "2.13.0") if "docs" in p.name)
    added = [ln[1:] for ln in patch.hunks.decode().splitlines() if ln.startswith("+")]
    example = "\n".join(added).split("```python\n")[1].split("\n```")[0]
    # Without processes there is nothing to shard.
    example = example.replace("import fully_shard", "import fully_shard as _")
    code = f"""
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 4)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.head = torch.nn.Linear(4, 4)
model, fully_shard = Model(), lambda module: module
{example}
names = {{id(p): name for name, p in model.named_parameters()}}
for optimizer in (muon, adamw):
    print(*sorted(names[id(p)] for g in optimizer.param_groups for p in g["params"]))
"""
    done = run_python(code)
    assert done.splitlines() == [
        "blocks.0.weight",
        "blocks.0.bias embedding.weight head.bias head.weight",
    ]


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


def test_export_from_an_installed_torch(installed, small, face, shell, tmp_path):
    face("apply", "--python", installed)
    out = tmp_path / "series"
    out.mkdir()
    (out / "0009-mine.patch").write_text("not ours\n")
    assert face("export", "--python", installed, "--out", out).code == 0
    assert face("export", "--python", installed, "--out", out).code == 0
    assert (out / "0009-mine.patch").read_text() == "not ours\n"
    (out / "0009-mine.patch").unlink()
    place = tmp_path / "pytorch"
    shell("git", "clone", "-q", small, place)
    shell("git", "am", *sorted(out.iterdir()), cwd=place)
    for rel, text in payload.read(ROOT).items():
        assert (place / rel).read_bytes() == text
