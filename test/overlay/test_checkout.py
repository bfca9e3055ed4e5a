"""`apply`, `revert`, `status`, `diff` and `export` on a PyTorch git checkout."""

import os
import re
import shlex
import shutil
import sys
import tempfile

import pytest
from overlay.conftest import append, commit_all, fails, git, git_status, run, snapshot
from overlay.conftest import BASE, C10D, MUON, OTHER, OWN, script, SUBJECTS
from tools.overlay import patches, payload
from tools.overlay.checkout import Checkout
from tools.overlay.payload import ROOT


ENGINE = "torch/optim/_muon_engine"


def tree_of(where, commit="HEAD"):
    return git(where, "rev-parse", f"{commit}^{{tree}}")


def state(where):
    return Checkout(where).status(ROOT)["state"]


def restored(checkout, tree):
    """Whether the branch and the work tree have those files, and nothing else."""
    return (git_status(checkout), tree_of(checkout)) == ("", tree)


@pytest.fixture
def on(face, checkout):
    """A command on the checkout that succeeds: `on("apply", "--commit")`; its output."""

    def call(command, *more, where=checkout):
        done = face(command, "--checkout", where, *more)
        assert done.code == 0, done.err
        return done.out

    return call


def test_apply_and_revert(checkout, on):
    append(checkout / MUON, "# an edit of upstream's file is no overlay\n")
    assert state(checkout) == "none"
    git(checkout, "restore", MUON)
    before = snapshot(checkout)
    on("apply")
    for rel, text in payload.read(ROOT).whole.items():
        assert (checkout / rel).read_bytes() == text
    assert "## Distributed Muon" in (checkout / "docs/source/optim.md").read_text()
    # It is staged, and HEAD stays.
    assert {line[:3] for line in git_status(checkout).splitlines()} == {"A  ", "M  "}
    assert "nothing to do" in on("apply")
    found = Checkout(checkout).status(ROOT)
    assert (found["state"], found["overlay"]) == ("current", payload.name(ROOT))
    assert set(found["files"].values()) == {"current"}
    on("revert")
    assert (snapshot(checkout), git_status(checkout)) == (before, "")
    assert "nothing to do" in on("revert")


def test_commits(checkout, on):
    """The commits are the stack, without the user's other work."""
    tree = tree_of(checkout)
    (checkout / "torch/optim/sgd.py").write_text("# somebody's other work\n")
    git(checkout, "add", "torch/optim/sgd.py")
    on("apply")
    assert "committed as" in on("apply", "--commit")
    assert git(checkout, "log", "--reverse", "--format=%s").splitlines()[1:] == SUBJECTS
    assert f"Muon-Overlay: {payload.name(ROOT)}" in git(checkout, "log", "-1")
    head = git(checkout, "rev-parse", "HEAD")
    assert "already" in on("apply", "--commit")
    assert git(checkout, "rev-parse", "HEAD") == head
    # A revert that is not committed; `status` listed each file as missing.
    assert f"revert --checkout {checkout} --commit" in on("revert")
    assert f"M  {MUON}\n" in git_status(checkout)
    assert "reverted, not committed" in on("status")
    on("apply")  # a second thought
    on("revert", "--commit")
    assert git_status(checkout) == "M  torch/optim/sgd.py\n"
    assert tree_of(checkout) == tree


@pytest.mark.parametrize("committed", [False, True])
def test_edits_of_the_overlay_are_refused(checkout, on, face, committed):
    on("apply", *["--commit"] * committed)
    append(checkout / OWN, "# an edit\n")
    if committed:  # into the overlay's own commit
        git(checkout, "commit", "-qa", "--amend", "--no-edit")
    before = snapshot(checkout)
    for command in ("apply", "revert"):
        done = fails(face(command, "--checkout", checkout), 3, f"  {OWN}\n")
        assert f"pull --checkout {checkout}" in done.err
    exported = face("export", "--checkout", checkout, "--out", "x", "--dry-run")
    assert f"lacks edits of this checkout ({OWN})" in exported.err
    assert (snapshot(checkout), state(checkout)) == (before, "changed")


def test_dry_runs_and_diff_write_nothing(checkout, on, tool, tmp_path):
    def everything():
        refs = git(checkout, "for-each-ref")
        return snapshot(checkout), refs, len(list((checkout / ".git").rglob("*")))

    before = everything()
    assert "would write " in on("apply", "--commit", "--dry-run")
    on("export", "--out", tmp_path / "out", "--dry-run")
    patch = tool("diff", "--checkout", checkout).out
    assert everything() == before
    assert not (tmp_path / "out").exists()
    run("git", "apply", "-p1", "-", cwd=checkout, data=patch)
    assert state(checkout) == "current"
    on("apply")
    assert on("diff") == ""
    append(checkout / "torch/optim/__init__.py", "# an edit\n")
    before = everything()
    for command in ("revert", "pull"):
        on(command, "--dry-run")
    assert everything() == before


def test_current_folder_is_the_checkout(checkout, face, tmp_path, monkeypatch):
    monkeypatch.chdir(checkout)
    for command in ("apply", "status", "revert", "pull"):
        assert face(command).code == 0
    monkeypatch.chdir(tmp_path)
    assert [face(command).code for command in ("apply", "revert", "pull")] == [2] * 3


def test_not_a_checkout(checkout, face, tmp_path, monkeypatch):
    bare = tmp_path / "bare"
    shutil.copytree(checkout, bare, ignore=shutil.ignore_patterns(".git"))
    for place, words in (
        (tmp_path / "none", "version.txt"),
        (ROOT, "version.txt"),
        (checkout / "torch", "not a PyTorch checkout"),
        (bare, "not the top of a git work tree"),
    ):
        fails(face("apply", "--checkout", place), 2, words)
    # A checkout that is mounted into a container has another owner.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert "safe.directory" in face("apply", "--checkout", checkout).err


def test_staged_and_partly_committed_overlay(checkout, on):
    """`git add` and `git commit -a` of the overlay do not outlive `revert`."""
    tree = tree_of(checkout)
    on("apply")
    git(checkout, "add", "--all")
    on("revert")
    assert git_status(checkout) == ""
    for rest in (), ("--commit",):
        on("apply")
        git(checkout, "commit", "-qam", "half of it")
        on("apply", *rest)
        on("revert", "--commit")
        assert restored(checkout, tree)


def test_main_of_upstream(checkout, on, face):
    """Files of no release, and hunks that do not fit, are warnings with `--force`, once."""
    (checkout / MUON).write_text("# a fix of upstream\n")
    (checkout / "version.txt").write_text("2.16.0a0\n")
    (checkout / "torch/distributed/distributed_c10d.py").write_text("# all new\n")
    commit_all(checkout, "main")
    refused = face("apply", "--checkout", checkout)
    assert refused.code == 2
    assert "distributed_c10d.py: as in no supported version" in refused.err
    done = face("apply", "--checkout", checkout, "--force")
    assert (done.code, "0002-local-groups" in done.err) == (0, True)
    assert f"warning: {MUON} there is of no release" in done.err
    assert face("apply", "--checkout", checkout, "--force").err == ""
    on("revert")
    assert git_status(checkout) == ""


def test_amended_and_rebased_overlay(checkout, on):
    """`revert --commit` ended in a traceback after the commit was made."""
    on("apply", "--commit")
    git(checkout, "commit", "-q", "--amend", "-m", "testing: amended")
    assert "not committed" in on("revert")
    on("revert", "--commit")
    assert git_status(checkout) == ""
    # Now on top of upstream's changes around the hunks.
    git(checkout, "reset", "-q", "--hard", "HEAD~1")
    git(checkout, "switch", "-q", "-c", "newer", BASE)
    doc = checkout / "docs/source/optim.md"
    doc.write_text("# A new first line\n" + doc.read_text())
    tree = tree_of(checkout, commit_all(checkout))
    git(checkout, "rebase", "-q", "newer", "main")
    assert state(checkout) == "current"
    assert "already" in on("apply")
    on("revert", "--commit")
    assert restored(checkout, tree)


def test_shallow_clone_names_unshallow(checkout, on, face, tmp_path):
    """The way out was a `git revert` of the graft root, which deletes all files."""
    on("apply", "--commit")
    append(checkout / OWN, "# an edit\n")
    commit_all(checkout)
    place, out = tmp_path / "shallow", tmp_path / "o"
    git(checkout, "clone", "-q", "--depth=1", f"file://{checkout}", place)
    before = snapshot(place)
    for words in ["apply"], ["revert"], ["status"], ["pull"], ["export", "--out", out]:
        done = fails(face(*words, "--checkout", place), 2, "fetch --unshallow")
    assert (snapshot(place), out.exists()) == (before, False)
    # The printed way out leads on.
    (line,) = [ln for ln in done.err.splitlines() if ln.startswith("  git")]
    run(*shlex.split(line))
    on("pull", "--dry-run", where=place)


def test_conflict_of_a_rebase_comes_first(checkout, on, ours, tool, tmp_path):
    """`pull` took the file with its conflict markers, and `--commit` committed it."""
    on("apply", "--commit")
    git(checkout, "switch", "-q", "-c", "newer", BASE)
    (checkout / MUON).write_text(OTHER)
    commit_all(checkout)
    run("git", "rebase", "-q", "newer", "main", cwd=checkout, check=False)
    assert "<<<<<<<" in (checkout / MUON).read_text()
    before, here = snapshot(checkout), snapshot(ours)
    for words in (
        ["apply"], ["apply", "--commit"], ["revert"], ["pull"],
        ["export", "--out", tmp_path / "out"],
    ):  # fmt: skip
        fails(tool(*words, "--checkout", checkout, root=ours), 3, "rebase --abort")
    assert (snapshot(checkout), snapshot(ours)) == (before, here)
    on("status")
    # Resolved, the edits are the overlay of that tree, and its series fits there.
    git(checkout, "checkout", "--theirs", MUON)
    git(checkout, "add", MUON)
    git(checkout, "-c", "core.editor=true", "rebase", "--continue")
    on("apply", "--commit")
    on("export", "--out", tmp_path / "out", "--stack")
    git(checkout, "switch", "-q", "newer")
    am(checkout, tmp_path / "out")
    assert git(checkout, "diff", "main") == ""


@pytest.mark.parametrize("unmerged", [False, True])
def test_commit_during_a_merge(checkout, face, unmerged):
    """`apply --commit` wrote all files, and failed then."""
    for branch in ("one", "two"):
        git(checkout, "switch", "-q", "-c", branch, "main")
        (checkout / ("a" if unmerged else branch)).write_text(branch)
        commit_all(checkout)
    merge = ("git", "merge", "-q", "--no-commit", "--no-ff", "one")
    run(*merge, cwd=checkout, check=False)
    if unmerged:
        (checkout / ".git/MERGE_HEAD").unlink()
    before = snapshot(checkout)
    done = face("apply", "--checkout", checkout, "--commit")
    words = "add -- a\n" if unmerged else "merge --abort"
    assert (done.code, words in done.err) == (3, True)
    assert snapshot(checkout) == before


def test_stashed_and_cleaned_overlay_is_found_again(checkout, on):
    """`status` said "no overlay" with 46 changed paths, once another branch was used."""
    on("apply")
    git(checkout, "stash", "-qu")
    git(checkout, "switch", "-q", "-c", "other")
    on("apply")
    on("revert")
    git(checkout, "switch", "-q", "main")
    git(checkout, "stash", "pop", "-q")
    assert state(checkout) == "current"
    (checkout / OWN).unlink()
    found = Checkout(checkout).status(ROOT)
    assert (found["state"], found["files"][OWN]) == ("changed", "missing")
    on("revert")
    assert git_status(checkout) == ""


def test_each_branch_has_its_own_overlay(checkout, on, overlay):
    """One record for all branches: `revert` on the first one refused."""
    trees = {}
    for branch, version in (("a", "2.13.0a0"), ("b", "2.12.0a0")):
        git(checkout, "switch", "-q", "-c", branch, "main")
        (checkout / "version.txt").write_text(version + "\n")
        (checkout / MUON).write_text(f"{OTHER}# {branch}\n")
        trees[branch] = tree_of(checkout, commit_all(checkout))
        append(overlay / OWN, f"# for {branch}\n")
        Checkout(checkout).apply(overlay, commit=True)
    git(checkout, "switch", "-q", "main")
    assert state(checkout) == "none"
    assert "nothing to do" in on("revert")
    for branch, tree in trees.items():
        git(checkout, "switch", "-q", branch)
        on("revert", "--commit")
        assert restored(checkout, tree)


def test_upstream_that_was_merged_over_the_overlay(checkout, on):
    """`revert` restores the files of the merged version, not those before the overlay."""
    git(checkout, "switch", "-q", "-c", "release")
    (checkout / "version.txt").write_text("2.12.0a0\n")
    (checkout / MUON).write_text(OTHER)
    append(checkout / "docs/source/optim.md", "\nA new last line.\n")
    commit_all(checkout)
    git(checkout, "switch", "-q", "main")
    on("apply", "--commit")
    git(checkout, "merge", "-q", "-X", "ours", "release", "-m", "m")
    assert state(checkout) == "current"
    assert "already" in on("apply")
    on("revert", "--commit")
    assert git(checkout, "diff", "release") == git_status(checkout) == ""


@pytest.mark.parametrize("kind", ["--checkout", "--python"])
def test_older_clone_does_not_downgrade(request, kind, ours, tool, tmp_path):
    """It went on without a word, and `status` called the newer one older."""
    name = "checkout" if kind == "--checkout" else "installed"
    target = (kind, request.getfixturevalue(name))
    older = tmp_path / "older"
    run("git", "clone", "-q", ours, older)
    append(ours / OWN, "# newer\n")
    commit_all(ours)
    assert tool("apply", *target, root=ours).code == 0
    fails(tool("apply", *target, root=older), 3, "which is older")
    assert "came after" in tool("status", *target, root=older).out
    git(older, "pull", "-q")
    assert tool("apply", *target, root=older).code == 0
    assert tool("revert", *target, root=older).code == 0


def test_foreign_index_lock_and_no_identity(checkout, tool):
    plain = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    plain |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "EMAIL": ""}
    git(checkout, "config", "user.useConfigOnly", "true")
    lock = checkout / ".git/index.lock"
    lock.touch()
    words = ("apply", "--checkout", checkout, "--commit")
    fails(tool(*words), 1, "another git command")
    lock.unlink()
    # The name of an invented author was in the history.
    before = snapshot(checkout), git(checkout, "for-each-ref")
    fails(tool(*words, env=plain), 1, "git config --global user.email")
    assert (snapshot(checkout), git(checkout, "for-each-ref")) == before
    assert tool(*words[:-1], env=plain).code == 0


def am(where, mails):
    git(where, "am", "-q", *sorted(mails.iterdir()))


# With `diff.context=0`, `git am` said "patch does not apply".
SETTINGS = {
    "diff.context": "0", "diff.noprefix": "true", "diff.external": "false",
    "color.ui": "always", "format.attach": "true", "format.coverLetter": "true",
    "format.subjectPrefix": "MINE", "format.suffix": ".txt", "format.signature": "me",
    "format.outputDirectory": "elsewhere", "core.quotePath": "false",
}  # fmt: skip


def test_export_and_git_am_give_the_same_tree(
    checkout, small, on, face, tmp_path, monkeypatch
):
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "echo")
    monkeypatch.setenv("GIT_DIFF_OPTS", "-u0")
    config = {"COUNT": "1", "KEY_0": "diff.noprefix", "VALUE_0": "true"}
    for name, value in config.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    for name, value in SETTINGS.items():
        git(checkout, "config", name, value)
    on("apply", "--commit")
    expected = tree_of(checkout)
    out, second = tmp_path / "a series", tmp_path / "second"
    out.mkdir()
    mine = out / "0009-mine.patch"
    mine.write_text("not ours\n")
    fails(face("export", "--checkout", checkout, "--out", out), 3, "has mails already")
    mine.unlink()
    shown = on("export", "--out", out, "--stack")
    assert git(checkout, "rev-parse", BASE) in shown
    assert f"git am '{out}'/*.patch" in shown
    git(tmp_path, "clone", "-q", small, second)
    am(second, out)
    assert tree_of(second) == expected
    assert git(second, "log", "--format=%s", "--reverse").splitlines()[1:] == SUBJECTS
    # `apply`, `status` and `revert` know the commits of `git am`.
    assert "already" in on("apply", where=second)
    assert state(second) == "current"
    # One mail has the same tree.
    out = tmp_path / "one"
    on("export", "--out", out, where=second)
    assert len(list(out.iterdir())) == 1
    assert not (checkout / "elsewhere").exists()
    on("revert", "--commit", where=second)
    am(second, out)
    assert tree_of(second) == expected
    assert git(second, "log", "-1", "--format=%s") == patches.SUBJECT


def leads_on(done):
    """Run each command that a refusal prints."""
    ways = ("  git ", f"  {sys.executable} ")
    lines = [line for line in done.err.splitlines() if line.startswith(ways)]
    for line in lines:
        run(*shlex.split(line))
    assert lines


def test_folders_of_others_stay(checkout, on, tmp_path, monkeypatch):
    """Each command deleted what had the name of its temporary folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    notes = tmp_path / "muon-overlay-notes"
    notes.mkdir()
    (notes / "mine").touch()
    for command in ("status", "diff", "apply", "revert"):
        on(command)
    assert (notes / "mine").exists()
    assert not list(tmp_path.glob("distributed-muon-*"))


def test_fork_with_its_own_muon(checkout, on, face):
    """`revert --commit` deleted it, and `apply` overwrote it."""
    for rel in (OWN, "test/optim/test_muon_engine.py"):
        (checkout / rel).parent.mkdir(parents=True, exist_ok=True)
        (checkout / rel).write_text("# the fork's\n")
    tree = tree_of(checkout, commit_all(checkout))
    assert state(checkout) == "none"
    assert "nothing to do" in on("revert", "--commit")
    fails(face("apply", "--checkout", checkout), 3, f"  {OWN}\n", "of its own")
    assert restored(checkout, tree)
    leads_on(face("apply", "--checkout", checkout))
    on("apply", "--commit")
    assert (checkout / OWN).read_text() != "# the fork's\n"
    assert state(checkout) == "current"
    on("revert", "--commit")
    assert restored(checkout, tree)


@pytest.mark.parametrize("first", ["release", "topic"])
def test_topic_cut_before_upstream_was_merged(checkout, on, first):
    """The base moved back, and `revert` undid upstream's change."""
    for branch, rel in (("release", MUON), ("topic", "torch/optim/sgd.py")):
        git(checkout, "switch", "-q", "-c", branch, "main")
        append(checkout / rel, f"# {branch}\n")
        commit_all(checkout)
    git(checkout, "switch", "-q", "main")
    on("apply", "--commit")
    for branch in dict.fromkeys([first, "release", "topic"]):
        git(checkout, "merge", "-q", "-X", "ours", branch, "-m", "m")
    assert "already" in on("apply")
    base = git(checkout, "rev-parse", first)  # the other one is no descendant
    assert f" at {base}: git am" in on("export", "--out", "x", "--dry-run")
    on("revert", "--commit")
    assert git(checkout, "diff", "release", "--stat").count("|") == 1
    assert (checkout / "torch/optim/sgd.py").read_text().endswith("# topic\n")


@pytest.mark.parametrize("how", ["committed", "staged", "in the work tree"])
def test_own_fix_in_a_patched_file_stays(checkout, on, face, how, tmp_path):
    """`pull` took it into the patch, and `revert --commit` removed it."""
    on("apply", "--commit")
    fixed = f"# a fix\n{(checkout / C10D).read_text()}# a fix\n"
    (checkout / C10D).write_text(fixed)
    if how == "committed":
        git(checkout, "commit", "-qam", "fix")
    elif how == "staged":
        git(checkout, "add", C10D)
    assert "already" in on("apply", "--commit")
    assert "nothing to take" in on("pull", "--dry-run")
    assert face("export", "--checkout", checkout, "--out", tmp_path / "o").err == ""
    if how == "in the work tree":
        done = fails(face("revert", "--checkout", checkout), 3, f"  {C10D}\n")
        assert "pull" not in done.err
        leads_on(done)
        on("revert")
        git(checkout, "stash", "pop", "-q")
        assert (checkout / C10D).read_text().count("# a fix\n") == 2
        return
    on("revert", "--commit")
    assert git_status(checkout) == ("" if how == "committed" else f"M  {C10D}\n")
    stock = git(checkout, "show", f"{BASE}~{1 + (how == 'committed')}:{C10D}")
    assert (checkout / C10D).read_text() == f"# a fix\n{stock}\n# a fix\n"
    on("apply", "--commit")
    assert (checkout / C10D).read_text() == fixed


@pytest.mark.parametrize("rel", [f"{OWN}.muon-new", "torch/.muon_overlay", ENGINE])
def test_links_are_not_followed(checkout, face, rel, tmp_path):
    """A file of the user's was overwritten through a link that the fork tracks."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".gitignore").write_text("mine")
    (checkout / rel).symlink_to(outside / ".gitignore" if "new" in rel else outside)
    tree = tree_of(checkout, commit_all(checkout))
    done = face("apply", "--checkout", checkout, "--commit")
    assert done.code == (3 if rel == ENGINE else 0)
    face("revert", "--checkout", checkout, "--commit")
    assert snapshot(outside) == {".gitignore": b"mine"}
    assert restored(checkout, tree)


@pytest.mark.parametrize("edit", ["add -N", "staged", "deleted", "untracked"])
def test_ways_out_lead_on(checkout, on, face, edit):
    """The printed way out changed nothing."""
    rel = {"deleted": "docs/source/optim.md", "staged": C10D}.get(edit, OWN)
    if edit == "deleted":
        (checkout / rel).unlink()
    else:
        (checkout / rel).write_text("# mine\n")
    if edit == "untracked":  # and ignored
        (checkout / ".git/info/exclude").write_text(f"{rel}\n")
    if edit in ("add -N", "staged"):
        git(checkout, "add", *["-N"] * (edit == "add -N"), "--", rel)
    done = fails(face("apply", "--checkout", checkout), 3, f"  {rel}\n")
    assert state(checkout) == "none"
    leads_on(done)
    on("apply")
    on("revert")
    assert git_status(checkout) == ""
    if edit != "deleted":
        assert "# mine" in git(checkout, "stash", "show", "-p", "--include-untracked")


def test_sparse_checkout_and_line_endings(checkout, on, tmp_path, monkeypatch):
    """Both were dead ends, and a setting of the user's made upstream's files CRLF."""
    config = tmp_path / "config"
    config.write_text("[core]\n\tautocrlf = true\n[user]\n\tname=A\n\temail=a@b\n")
    tree = tree_of(checkout)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    on("apply", "--commit")
    assert git(checkout, "show", f"HEAD:{C10D}").count("\r") == 0
    assert b"\r\n" in (checkout / OWN).read_bytes()
    second = tmp_path / "second"
    git(tmp_path, "clone", "-q", "--no-checkout", checkout, second)
    git(second, "sparse-checkout", "set", "--no-cone", "/*", "!/docs/")
    git(second, "checkout", "-q")
    for where in (checkout, second):
        assert "already" in on("apply", where=where)
        on("revert", where=where)
        assert git(where, "diff", "--stat") == ""
        on("apply", where=where)
        on("revert", "--commit", where=where)
        assert restored(where, tree)
    on("apply", "--commit", where=second)
    assert not (second / "docs").exists()
    assert "## Distributed Muon" in git(second, "show", "HEAD:docs/source/optim.md")


def test_vendored_import(checkout, on, face, tmp_path):
    """There was no history to fetch, and `fetch --unshallow` was the way out."""
    on("apply")
    shutil.rmtree(checkout / ".git")
    commit_all(checkout, "an import")
    assert "nothing to do" in on("apply")
    (checkout / OWN).write_text("# edited\n")
    commit_all(checkout)
    done = fails(face("apply", "--checkout", checkout), 3, f"  {OWN}\n")
    assert "unshallow" not in done.err


def test_signatures_and_hooks_of_the_user(checkout, on, face, tmp_path):
    """A hook that refused the branch left all files staged; no commit was signed."""
    signs = script(tmp_path / "signs", f"touch {tmp_path}/signed\nexit 1\n")
    git(checkout, "config", "commit.gpgsign", "true")
    git(checkout, "config", "gpg.program", signs)
    before = snapshot(checkout), git_status(checkout), git(checkout, "for-each-ref")
    words = ("apply", "--checkout", checkout, "--commit")
    fails(face(*words), 1, "git commit-tree")
    assert (tmp_path / "signed").exists()
    git(checkout, "config", "commit.gpgsign", "false")
    body = 'while read old new ref; do [ "$ref" != refs/heads/main ] || exit 1; done\n'
    hook = script(checkout / ".git/hooks/reference-transaction", body)
    fails(face(*words), 1, "git update-ref")
    assert (snapshot(checkout), git_status(checkout)) == before[:2]
    assert git(checkout, "for-each-ref") == before[2]
    on("apply")  # without a commit, both are not asked
    hook.unlink()


def test_names_that_are_not_utf_8_and_safe_path(checkout, tool):
    """They ended in a traceback."""
    (checkout / ".git/info/exclude").write_bytes(b"\xe9.txt\n")
    (checkout / "version.txt").write_bytes(b"2.13.0a0\n\xe9")
    commit_all(checkout)
    env = {**os.environ, "PYTHONSAFEPATH": "1", "GIT_COMMON_DIR": "/nowhere"}
    done = tool("apply", "--checkout", checkout, env=env)
    assert (done.code, "is not a torch version" in done.err) == (2, True)
    assert "Traceback" not in tool("status", "--checkout", checkout, env=env).err


def test_documented_example_leaves_the_ends_to_adamw():
    torch = pytest.importorskip("torch")
    patch = patches.series(payload.read(ROOT))["docs/source/optim.md"]
    added = "\n".join(re.findall(r"(?m)^\+(.*)", patch.hunks.decode()))
    example = added.split("```python\n")[1].split("\n```")[0]
    # Without processes there is nothing to shard.
    example = example.replace("import fully_shard", "import fully_shard as _")
    linear, layers = torch.nn.Linear(4, 4), {"embedding": torch.nn.Embedding(4, 4)}
    layers |= {"blocks": torch.nn.ModuleList([linear]), "head": torch.nn.Linear(4, 4)}
    names = {"model": torch.nn.ModuleDict(layers), "fully_shard": lambda module: module}
    exec(example, names)
    (matrix,) = names["muon"].param_groups[0]["params"]
    assert matrix is linear.weight
    assert len(names["adamw"].param_groups[0]["params"]) == 4
