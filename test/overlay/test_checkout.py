"""`apply`, `revert`, `status`, `diff` and `export` on a PyTorch git checkout."""

import json
import os
import shlex
import shutil
import sys

import pytest
from overlay.conftest import append, commit_all, run
from tools.overlay import patches, payload
from tools.overlay.checkout import find_checkout
from tools.overlay.errors import Refused
from tools.overlay.repo import ROOT


MUON, OWN = "torch/optim/_muon.py", "torch/optim/muon.py"
OTHER = "# Muon as another release has it\n"
SUBJECTS = [
    "optim: distributed Muon",
    "optim: document distributed Muon",
    "distributed: name a locally synchronized group by its own ranks",
    "testing: Muon's options `foreach` and `ns_algorithm` came later",
]


def git(where, *words):
    return run("git", *words, cwd=where).out.strip()


def state(where):
    return find_checkout(where).status(ROOT)["state"]


def reverts(face, where, *more):
    done = face("revert", "--checkout", where, *more)
    assert done.code == 0, done.err
    return done.out


def test_whole_files_and_hunks(checkout, face, git_status, snapshot, stock_muon):
    before, index = snapshot(checkout), (checkout / ".git/index").read_bytes()
    done = face("apply", "--checkout", checkout)
    assert (done.code, done.err) == (0, "")
    for rel, text in payload.read(ROOT).whole.items():
        assert (checkout / rel).read_bytes() == text
    assert "## Distributed Muon" in (checkout / "docs/source/optim.md").read_text()
    shown = git_status(checkout)
    assert f" M {MUON}\n" in shown
    assert ".muon_overlay" not in shown
    kept = checkout / "torch/.muon_overlay/original/optim/_muon.py"
    assert kept.read_bytes() == stock_muon
    assert (checkout / ".git/index").read_bytes() == index
    assert "nothing to do" in face("apply", "--checkout", checkout).out
    found = json.loads(face("status", "--checkout", checkout, "--json").out)
    assert (found["state"], found["kind"]) == ("current", "checkout")
    assert found["overlay"] == payload.name(ROOT)
    assert set(found["files"].values()) == {"current"}
    reverts(face, checkout)
    assert (snapshot(checkout), git_status(checkout)) == (before, "")
    assert "nothing to revert" in reverts(face, checkout)


def test_commits(checkout, face, git_status):
    """The commits are the layers, without the user's other work."""
    tree = git(checkout, "rev-parse", "HEAD^{tree}")
    (checkout / "torch/optim/sgd.py").write_text("# somebody's other work\n")
    git(checkout, "add", "torch/optim/sgd.py")
    face("apply", "--checkout", checkout)
    done = face("apply", "--checkout", checkout, "--commit")
    assert "committed as" in done.out
    assert git(checkout, "log", "--reverse", "--format=%s").splitlines()[1:] == SUBJECTS
    assert f"Muon-Overlay: {payload.name(ROOT)}" in git(checkout, "log", "-1")
    assert git_status(checkout) == "M  torch/optim/sgd.py\n"
    head = git(checkout, "rev-parse", "HEAD")
    assert "already" in face("apply", "--checkout", checkout, "--commit").out
    assert git(checkout, "rev-parse", "HEAD") == head
    reverts(face, checkout, "--commit")
    assert git_status(checkout) == "M  torch/optim/sgd.py\n"
    assert git(checkout, "rev-parse", "HEAD^{tree}") == tree


def test_revert_of_commits_that_is_not_committed(checkout, face, git_status):
    """`status` listed each file as missing."""
    tree = git(checkout, "rev-parse", "HEAD^{tree}")
    face("apply", "--checkout", checkout, "--commit")
    assert f"revert --checkout {checkout} --commit" in reverts(face, checkout)
    assert f" M {MUON}\n" in git_status(checkout)
    shown = face("status", "--checkout", checkout).out
    assert "reverted, not committed" in shown
    assert "missing" not in shown
    assert face("apply", "--checkout", checkout).code == 0  # a second thought
    assert git_status(checkout) == ""
    reverts(face, checkout)
    assert "committed as" in reverts(face, checkout, "--commit")
    assert git_status(checkout) == ""
    assert git(checkout, "rev-parse", "HEAD^{tree}") == tree


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("rel", [MUON, OWN, "docs/source/optim.md"])
def test_users_work_is_refused_by_name(
    checkout, face, snapshot, git_status, rel, staged
):
    (checkout / rel).write_text("# somebody's work\n")
    if staged:  # and gone from the work tree
        git(checkout, "add", rel)
        if rel != OWN:
            git(checkout, "restore", "--source=HEAD", rel)
    before, shown = snapshot(checkout), git_status(checkout)
    done = face("apply", "--checkout", checkout)
    assert (done.code, f"  {rel}\n" in done.err) == (3, True)
    assert (snapshot(checkout), git_status(checkout)) == (before, shown)


@pytest.mark.parametrize("committed", [False, True])
def test_edits_of_the_overlay_are_refused(checkout, face, snapshot, committed):
    face("apply", "--checkout", checkout, *["--commit"] * committed)
    append(checkout / MUON, "# an edit\n")
    if committed:
        commit_all(checkout)
    before = snapshot(checkout)
    for command in ("apply", "revert"):
        done = face(command, "--checkout", checkout)
        assert (done.code, f"  {MUON}\n" in done.err) == (3, True)
        assert f"pull --checkout {checkout}" in done.err
    assert snapshot(checkout) == before
    assert state(checkout) == "changed"


def test_ignored_files_are_refused(checkout, there):
    rel = "torch/optim/_muon_engine/__init__.py"
    (checkout / rel).parent.mkdir()
    (checkout / rel).write_text("# somebody's\n")
    (checkout / ".git/info/exclude").write_text("_muon_engine/\n")
    with pytest.raises(Refused, match=rel):
        there.apply(ROOT)


def test_newer_overlay_over_an_older_one(there, overlay, face, git_status):
    extra = overlay / "test/optim/test_muon_old.py"
    extra.parent.mkdir(parents=True, exist_ok=True)
    extra.write_text("old = 1\n")
    there.apply(overlay)
    extra.unlink()
    (overlay / OWN).write_text("# newer\n")
    assert there.status(overlay)["state"] == "outdated"
    report = there.apply(overlay)
    assert (report.written, report.removed) == ([OWN], ["test/optim/test_muon_old.py"])
    there.revert(overlay)
    assert git_status(there.root) == ""


def test_dry_runs_and_diff_write_nothing(checkout, face, snapshot, tmp_path):
    def everything():
        return (
            snapshot(checkout),
            git(checkout, "for-each-ref"),
            len(list((checkout / ".git").rglob("*"))),
        )

    before = everything()
    done = face("apply", "--checkout", checkout, "--commit", "--dry-run")
    assert (done.code, "would write " in done.out) == (0, True)
    out = tmp_path / "out"
    assert face("export", "--checkout", checkout, "--out", out, "--dry-run").code == 0
    assert everything() == before
    assert not out.exists()
    face("apply", "--checkout", checkout)
    assert face("diff", "--checkout", checkout).out == ""
    append(checkout / OWN, "# an edit\n")
    before = everything()
    for command in ("revert", "pull"):
        face(command, "--checkout", checkout, "--dry-run")
    assert everything() == before


def test_diff_is_what_apply_changes(checkout, tool):
    patch = tool("diff", "--checkout", checkout).out
    (checkout / "a.patch").write_text(patch)
    git(checkout, "apply", "-p1", "a.patch")
    (checkout / "a.patch").unlink()
    assert state(checkout) == "current"


def test_current_folder_is_the_checkout(checkout, face, tmp_path, monkeypatch):
    monkeypatch.chdir(checkout)
    for command in ("apply", "status", "revert", "pull"):
        assert face(command).code == 0
    monkeypatch.chdir(tmp_path)
    for command in ("apply", "revert", "pull"):
        done = face(command)
        assert (done.code, "--checkout DIR" in done.err) == (2, True)


def test_not_a_checkout(checkout, face, tmp_path, snapshot):
    assert "no such folder" in face("apply", "--checkout", tmp_path / "none").err
    assert "version.txt" in face("apply", "--checkout", ROOT).err
    inside = face("apply", "--checkout", checkout / "torch")
    assert (inside.code, "not a PyTorch checkout" in inside.err) == (2, True)
    bare = tmp_path / "bare"
    shutil.copytree(checkout, bare, ignore=shutil.ignore_patterns(".git"))
    before = snapshot(bare)
    done = face("apply", "--checkout", bare)
    assert (done.code, "not the top of a git work tree" in done.err) == (2, True)
    assert snapshot(bare) == before


def test_gits_own_words(checkout, face, monkeypatch):
    """A checkout that is mounted into a container has another owner."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    done = face("apply", "--checkout", checkout)
    assert (done.code, "safe.directory" in done.err) == (2, True)


def test_target_without_docs(checkout, face):
    git(checkout, "rm", "-rq", "docs")
    commit_all(checkout)
    done = face("apply", "--checkout", checkout)
    assert (done.code, "skipped for docs/source/optim.md" in done.out) == (0, True)
    assert not (checkout / "docs").exists()


def test_linked_work_tree(checkout, face, git_status, tmp_path):
    place = tmp_path / "linked"
    git(checkout, "worktree", "add", "-q", "--detach", place)
    assert face("apply", "--checkout", place, "--commit").code == 0
    assert (git_status(place), git_status(checkout)) == ("", "")
    assert state(checkout) == "none"
    reverts(face, place, "--commit")
    assert git_status(place) == ""


def test_staged_and_partly_committed_overlay(checkout, face, git_status):
    """`git add` and `git commit -a` of the overlay do not outlive `revert`."""
    tree = git(checkout, "rev-parse", "HEAD^{tree}")
    face("apply", "--checkout", checkout)
    git(checkout, "add", "--all")
    reverts(face, checkout)
    assert git_status(checkout) == ""
    face("apply", "--checkout", checkout)
    git(checkout, "commit", "-qam", "half of it")
    reverts(face, checkout, "--commit")
    assert git_status(checkout) == ""
    assert git(checkout, "rev-parse", "HEAD^{tree}") == tree


def test_line_ends_that_git_changes(checkout, face, git_status):
    git(checkout, "config", "core.autocrlf", "true")
    face("apply", "--checkout", checkout, "--commit")
    git(checkout, "rm", "-q", "--cached", "-r", ".")
    git(checkout, "reset", "-q", "--hard")
    assert b"\r\n" in (checkout / OWN).read_bytes()
    assert "already" in face("apply", "--checkout", checkout).out
    reverts(face, checkout, "--commit")
    assert git_status(checkout) == ""


def test_main_of_upstream(checkout, face, git_status):
    """Hunks that do not fit any more are warnings with `--force`, once."""
    (checkout / "version.txt").write_text("2.16.0a0\n")
    (checkout / "torch/distributed/distributed_c10d.py").write_text("# all new\n")
    commit_all(checkout, "main")
    refused = face("apply", "--checkout", checkout)
    assert refused.code == 2
    assert "distributed_c10d.py: as in no supported version" in refused.err
    done = face("apply", "--checkout", checkout, "--force")
    assert (done.code, "0002-local-groups" in done.err) == (0, True)
    again = face("apply", "--checkout", checkout, "--force")
    assert (again.code, again.err) == (0, "")
    assert face("status", "--checkout", checkout).err == ""
    reverts(face, checkout)
    assert git_status(checkout) == ""


@pytest.mark.parametrize("rel", [MUON, "test/optim/test_muon.py"])
def test_files_of_no_release_are_named(checkout, face, git_status, rel):
    (checkout / rel).parent.mkdir(parents=True, exist_ok=True)
    (checkout / rel).write_text("# a fix of upstream\n")
    commit_all(checkout, "a fix")
    done = face("apply", "--checkout", checkout)
    assert (done.code, f"warning: {rel} there is of no release" in done.err) == (
        0,
        True,
    )
    reverts(face, checkout)
    assert git_status(checkout) == ""


def test_amended_and_rebased_overlay(checkout, face, git_status):
    """`revert --commit` ended in a traceback after the commit was made."""
    face("apply", "--checkout", checkout, "--commit")
    git(checkout, "commit", "-q", "--amend", "-m", "testing: amended")
    assert "not committed" in reverts(face, checkout)
    reverts(face, checkout, "--commit")
    assert git_status(checkout) == ""
    # Now on top of upstream's changes around the hunks.
    git(checkout, "reset", "-q", "--hard", "HEAD~1")
    git(checkout, "switch", "-q", "-c", "newer", "HEAD~4")
    doc = checkout / "docs/source/optim.md"
    doc.write_text("# A new first line\n" + doc.read_text())
    tree = git(checkout, "rev-parse", f"{commit_all(checkout)}^{{tree}}")
    git(checkout, "rebase", "-q", "newer", "main")
    assert state(checkout) == "current"
    assert "already" in face("apply", "--checkout", checkout).out
    reverts(face, checkout, "--commit")
    assert git(checkout, "rev-parse", "HEAD^{tree}") == tree


def test_edits_in_an_amended_commit_are_edits(checkout, face):
    face("apply", "--checkout", checkout, "--commit")
    append(checkout / OWN, "# amended\n")
    git(checkout, "commit", "-qa", "--amend", "--no-edit")
    git(checkout, "reflog", "delete", "--rewrite", "HEAD@{0}")
    done = face("revert", "--checkout", checkout)
    assert (done.code, f"  {OWN}\n" in done.err) == (3, True)


def test_shallow_clone_names_unshallow(checkout, face, snapshot, tmp_path, git_status):
    """The way out was a `git revert` of the graft root, which deletes all files."""
    face("apply", "--checkout", checkout, "--commit")
    append(checkout / OWN, "# an edit\n")
    commit_all(checkout)
    place = tmp_path / "shallow"
    git(checkout, "clone", "-q", "--depth=1", f"file://{checkout}", place)
    before = snapshot(place)
    for words in (["apply"], ["revert"], ["pull"], ["export", "--out", tmp_path / "o"]):
        done = face(*words, "--checkout", place)
        assert done.code == 2
        assert "fetch --unshallow" in done.err
        assert "git revert" not in done.err.replace(" -C ", "")
    assert "fetch --unshallow" in face("status", "--checkout", place).out
    assert (snapshot(place), (tmp_path / "o").exists()) == (before, False)
    # The printed way out leads on.
    (line,) = [ln for ln in done.err.splitlines() if ln.startswith("  git")]
    run(*shlex.split(line))
    assert face("pull", "--checkout", place, "--dry-run").code == 0


@pytest.fixture
def conflicted(checkout, face):
    """A rebase stopped at a conflict in a file of the overlay."""
    face("apply", "--checkout", checkout, "--commit")
    git(checkout, "switch", "-q", "-c", "newer", "HEAD~4")
    (checkout / MUON).write_text(OTHER)
    commit_all(checkout)
    run("git", "rebase", "-q", "newer", "main", cwd=checkout, check=False)
    assert "<<<<<<<" in (checkout / MUON).read_text()
    return checkout


def test_conflict_of_a_rebase_comes_first(
    conflicted, face, ours, tool, tmp_path, snapshot
):
    """`pull` took the file with its conflict markers, and `--commit` committed it."""
    before, here = snapshot(conflicted), snapshot(ours)
    for words in (
        ["apply"], ["apply", "--commit"], ["revert"], ["pull"],
        ["export", "--out", tmp_path / "out"],
    ):  # fmt: skip
        done = tool(*words, "--checkout", conflicted, root=ours)
        assert (done.code, "rebase --abort" in done.err) == (3, True)
    assert (snapshot(conflicted), snapshot(ours)) == (before, here)
    assert face("status", "--checkout", conflicted).code == 0
    git(conflicted, "rebase", "--abort")
    assert face("apply", "--checkout", conflicted).code == 0


@pytest.mark.parametrize("unmerged", [False, True])
def test_commit_during_a_merge(checkout, face, snapshot, unmerged):
    """`apply --commit` wrote all files, and failed then."""
    for branch in ("one", "two"):
        git(checkout, "switch", "-q", "-c", branch, "main")
        (checkout / (branch if not unmerged else "a")).write_text(branch)
        commit_all(checkout)
    run(
        "git", "merge", "-q", "--no-commit", "--no-ff", "one", cwd=checkout, check=False
    )
    if unmerged:
        (checkout / ".git/MERGE_HEAD").unlink()
    before = snapshot(checkout)
    done = face("apply", "--checkout", checkout, "--commit")
    words = "unmerged files (a)" if unmerged else "merge --abort"
    assert (done.code, words in done.err) == (3, True)
    assert snapshot(checkout) == before


def test_stashed_overlay_is_found_again(checkout, face, git_status):
    """`status` said "no overlay" with 46 changed paths, once another branch was used."""
    face("apply", "--checkout", checkout)
    git(checkout, "stash", "-qu")
    git(checkout, "switch", "-q", "-c", "other")
    assert face("apply", "--checkout", checkout).code == 0
    reverts(face, checkout)
    git(checkout, "switch", "-q", "main")
    git(checkout, "stash", "pop", "-q")
    assert state(checkout) == "current"
    reverts(face, checkout)
    assert git_status(checkout) == ""


def test_each_branch_has_its_own_overlay(checkout, face, overlay, git_status):
    """One record for all branches: `revert` on the first one refused."""
    trees = {}
    for branch, version in (("a", "2.13.0a0"), ("b", "2.12.0a0")):
        git(checkout, "switch", "-q", "-c", branch, "main")
        (checkout / "version.txt").write_text(version + "\n")
        (checkout / MUON).write_text(f"{OTHER}# {branch}\n")
        trees[branch] = git(checkout, "rev-parse", f"{commit_all(checkout)}^{{tree}}")
        append(overlay / OWN, f"# for {branch}\n")
        find_checkout(checkout).apply(overlay, commit=True)
    git(checkout, "switch", "-q", "main")
    assert state(checkout) == "none"
    assert "nothing to revert" in reverts(face, checkout)
    for branch, tree in trees.items():
        git(checkout, "switch", "-q", branch)
        reverts(face, checkout, "--commit")
        assert (git_status(checkout), git(checkout, "rev-parse", "HEAD^{tree}")) == (
            "",
            tree,
        )


def test_upstream_that_was_merged_over_the_overlay(checkout, face, git_status):
    """`revert` restores the files of the merged version, not those before the overlay."""
    git(checkout, "switch", "-q", "-c", "release")
    (checkout / "version.txt").write_text("2.12.0a0\n")
    (checkout / MUON).write_text(OTHER)
    append(checkout / "docs/source/optim.md", "\nA new last line.\n")
    commit_all(checkout)
    git(checkout, "switch", "-q", "main")
    face("apply", "--checkout", checkout, "--commit")
    git(checkout, "merge", "-q", "-X", "ours", "release", "-m", "m")
    assert state(checkout) == "current"
    assert "already" in face("apply", "--checkout", checkout).out
    reverts(face, checkout, "--commit")
    assert git(checkout, "diff", "release") == git_status(checkout) == ""


def test_git_clean_does_not_take_the_record(checkout, face, git_status):
    face("apply", "--checkout", checkout)
    git(checkout, "clean", "-qfdx")
    found = json.loads(face("status", "--checkout", checkout, "--json").out)
    assert (found["state"], found["files"][OWN]) == ("changed", "missing")
    reverts(face, checkout)
    assert git_status(checkout) == ""


def test_older_clone_does_not_downgrade(checkout, ours, tool, tmp_path, snapshot):
    """It went on without a word, and `status` called the newer one older."""
    older = tmp_path / "older"
    run("git", "clone", "-q", ours, older)
    append(ours / OWN, "# newer\n")
    commit_all(ours)
    assert tool("apply", "--checkout", checkout, root=ours).code == 0
    before = snapshot(checkout)
    done = tool("apply", "--checkout", checkout, root=older)
    assert (done.code, "which is older" in done.err) == (3, True)
    assert snapshot(checkout) == before
    assert "came after" in tool("status", "--checkout", checkout, root=older).out
    git(older, "pull", "-q")
    assert tool("apply", "--checkout", checkout, root=older).code == 0
    assert tool("revert", "--checkout", checkout, root=older).code == 0


def test_without_an_identity(checkout, tool, tmp_path):
    plain = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    plain |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "EMAIL": ""}
    git(checkout, "config", "user.useConfigOnly", "true")
    done = tool("apply", "--checkout", checkout, "--commit", env=plain)
    assert (done.code, done.err) == (0, "")


def test_foreign_index_lock_is_not_taken(checkout, face, git_status):
    lock = checkout / ".git/index.lock"
    lock.touch()
    done = face("apply", "--checkout", checkout, "--commit")
    assert (done.code, "another git command" in done.err) == (1, True)
    assert lock.exists()
    lock.unlink()
    assert face("apply", "--checkout", checkout, "--commit").code == 0
    assert git_status(checkout) == ""


@pytest.mark.parametrize("rel", [OWN, "torch/optim/_muon_engine"])
def test_folder_where_a_file_goes(checkout, there, snapshot, rel):
    path = checkout / rel
    path.mkdir() if rel == OWN else path.write_text("a file\n")
    before = snapshot(checkout)
    with pytest.raises(Refused, match=rel):
        there.apply(ROOT)
    assert snapshot(checkout) == before
    # The next command has nothing to finish.
    path.rmdir() if rel == OWN else path.unlink()
    assert state(checkout) == "none"


def am(where, mails):
    git(where, "am", "-q", *sorted(mails.iterdir()))


def test_export_and_git_am_give_the_same_tree(checkout, small, face, tmp_path):
    face("apply", "--checkout", checkout, "--commit")
    expected = git(checkout, "rev-parse", "HEAD^{tree}")
    out, second = tmp_path / "series", tmp_path / "second"
    done = face("export", "--checkout", checkout, "--out", out)
    assert git(checkout, "rev-parse", "HEAD~4") in done.out
    git(tmp_path, "clone", "-q", small, second)
    am(second, out)
    assert git(second, "rev-parse", "HEAD^{tree}") == expected
    assert git(second, "log", "--format=%s", "--reverse").splitlines()[1:] == SUBJECTS
    # `apply`, `status` and `revert` know the commits of `git am`.
    assert "already" in face("apply", "--checkout", second).out
    assert state(second) == "current"
    assert face("export", "--checkout", second, "--out", out).code == 0
    reverts(face, second, "--commit")
    am(second, out)
    assert git(second, "rev-parse", "HEAD^{tree}") == expected


def test_settings_of_the_user_do_not_change_the_series(checkout, small, face, tmp_path):
    """With `diff.context=0`, `git am` said "patch does not apply"."""
    for name, value in {
        "diff.context": "0", "diff.noprefix": "true", "diff.mnemonicPrefix": "true",
        "diff.external": "false", "diff.renames": "copies", "color.ui": "always",
        "format.attach": "true", "format.coverLetter": "true", "format.numbered": "false",
        "format.subjectPrefix": "MINE", "format.suffix": ".txt", "format.signature": "me",
        "format.thread": "true", "format.signOff": "true", "format.useAutoBase": "true",
        "log.showSignature": "true", "log.follow": "true", "core.quotePath": "false",
        "format.outputDirectory": str(tmp_path / "elsewhere"), "diff.relative": "true",
    }.items():  # fmt: skip
        git(checkout, "config", name, value)
    out, second = tmp_path / "series", tmp_path / "second"
    assert face("export", "--checkout", checkout, "--out", out).code == 0
    assert not (tmp_path / "elsewhere").exists()
    git(tmp_path, "clone", "-q", small, second)
    am(second, out)
    assert git(second, "log", "-1", "--format=%s") == SUBJECTS[-1]
    assert state(second) == "current"


def test_export_replaces_its_own_mails_alone(installed, small, face, tmp_path):
    out, second = tmp_path / "a series", tmp_path / "second"
    out.mkdir()
    mine = out / "0009-mine.patch"
    mine.write_text("not ours\n")
    for _ in range(2):
        done = face("export", "--python", installed, "--out", out)
        assert (done.code, f"git am '{out}'/*.patch" in done.out) == (0, True)
    assert mine.read_text() == "not ours\n"
    mine.unlink()
    git(tmp_path, "clone", "-q", small, second)
    am(second, out)
    for rel, text in payload.read(ROOT).whole.items():
        assert (second / rel).read_bytes() == text


def test_export_to_what_is_no_folder(checkout, face, tmp_path):
    (tmp_path / "file").touch()
    done = face("export", "--checkout", checkout, "--out", tmp_path / "file/inside")
    assert (done.code, "cannot be a folder" in done.err) == (2, True)


def test_documented_example_leaves_the_ends_to_adamw():
    (patch,) = (
        p
        for p in patches.series(payload.read(ROOT).patches, "2.13.0")
        if "docs" in p.name
    )
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
    assert run(sys.executable, "-c", code).out.splitlines() == [
        "blocks.0.weight",
        "blocks.0.bias embedding.weight head.bias head.weight",
    ]
