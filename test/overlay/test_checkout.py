"""`apply`, `revert`, `status`, `diff` and `export` on a PyTorch git checkout."""

import os
import re
import shutil
import tempfile

import pytest
from overlay.conftest import append, BASE, branch, C10D, commit_all, everything, fails
from overlay.conftest import git, git_status, leads_on, MUON, OTHER, OWN, put, run
from overlay.conftest import script, snapshot, SUBJECTS, tree_of
from tools.overlay import patches, payload, worktree
from tools.overlay.checkout import Checkout
from tools.overlay.errors import WorkFailed
from tools.overlay.payload import ROOT


ENGINE, SGD = "torch/optim/_muon_engine", "torch/optim/sgd.py"
DOC = "docs/source/optim.md"


def state(where):
    return Checkout(where).status(ROOT)["state"]


def restored(checkout, tree):
    """Whether the branch and the work tree have those files, and nothing else."""
    return (git_status(checkout), tree_of(checkout)) == ("", tree)


def test_apply_and_revert(checkout, on):
    append(checkout / MUON, "# an edit of upstream's file is no overlay\n")
    assert state(checkout) == "none"
    git(checkout, "restore", MUON)
    before, tree = snapshot(checkout), tree_of(checkout)
    assert "committed as" in on("apply")
    for rel, text in payload.read(ROOT).whole.items():
        assert (checkout / rel).read_bytes() == text
    assert "## Distributed Muon" in (checkout / DOC).read_text()
    assert git_status(checkout) == ""
    assert "nothing to do" in on("apply")
    found = Checkout(checkout).status(ROOT)
    assert (found["state"], found["overlay"]) == ("current", payload.name(ROOT))
    assert set(found["files"].values()) == {"current"}
    on("revert")
    assert snapshot(checkout) == before
    assert restored(checkout, tree)
    assert "nothing to do" in on("revert")


@pytest.mark.parametrize("word", [(), ("--commit",)])
def test_commits(checkout, on, word):
    """The commits are the stack, without the user's other work. `--commit` has no effect."""
    tree = tree_of(checkout)
    (checkout / SGD).write_text("# somebody's other work\n")
    git(checkout, "add", SGD)
    assert "committed as" in on("apply", *word)
    assert git(checkout, "log", "--reverse", "--format=%s").splitlines()[1:] == SUBJECTS
    assert f"Muon-Overlay: {payload.name(ROOT)}" in git(checkout, "log", "-1")
    head = git(checkout, "rev-parse", "HEAD")
    assert "already" in on("apply", *word)
    assert git(checkout, "rev-parse", "HEAD") == head
    on("revert", *word)
    assert git_status(checkout) == "M  torch/optim/sgd.py\n"
    assert tree_of(checkout) == tree


@pytest.mark.parametrize("committed", [False, True])
def test_edits_of_the_overlay(checkout, on, face, committed):
    tree = tree_of(checkout)
    on("apply")
    append(checkout / OWN, "# an edit\n")
    words = (f"  {OWN}\n", f"pull --checkout {checkout}")
    if committed:  # into the overlay's own commit
        git(checkout, "commit", "-qa", "--amend", "--no-edit")
        on("apply", code=3, words=words)
    else:
        assert "already" in on("apply")
        on("revert", code=3, words=words)
    exported = face("export", "--checkout", checkout, "--out", "x", "--dry-run")
    assert f"lacks edits of this checkout ({OWN})" in exported.err
    assert state(checkout) == "changed"
    if committed:  # a commit loses none
        done = face("revert", "--checkout", checkout)
        fails(done, 0, f"lacks edits of {OWN}", f"log -p -- {OWN}")
        assert tree_of(checkout) == tree
        assert "# an edit" in leads_on(done.err)[0].out


def test_dry_runs_and_diff_write_nothing(checkout, on, tool, tmp_path):
    count = len(list((checkout / ".git").rglob("*")))
    before = everything(checkout)
    assert "would write " in on("apply", "--commit", "--dry-run")
    on("export", "--out", tmp_path / "out", "--dry-run")
    patch = tool("diff", "--checkout", checkout).out
    assert everything(checkout) == before
    assert len(list((checkout / ".git").rglob("*"))) == count
    assert not (tmp_path / "out").exists()
    run("git", "apply", "-p1", "-", cwd=checkout, data=patch)
    assert state(checkout) == "uncommitted"
    assert "not committed" not in on("apply")
    assert git_status(checkout) == ""
    assert on("diff") == ""
    append(checkout / "torch/optim/__init__.py", "# an edit\n")
    before = everything(checkout)
    for command in ("revert", "pull"):
        on(command, "--dry-run")
    assert everything(checkout) == before


def test_what_is_a_checkout(checkout, face, tmp_path, monkeypatch):
    for folder, code in (tmp_path, 2), (checkout, 0):
        monkeypatch.chdir(folder)  # the default
        for command in ("apply", "revert", "pull"):
            assert face(command).code == code
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


@pytest.mark.parametrize("half", [False, True])
def test_overlay_that_is_staged(checkout, on, half):
    """Older versions of this tool staged it. `apply` commits it."""
    tree = tree_of(checkout)
    on("apply")
    applied = tree_of(checkout)
    git(checkout, "reset", "-q", "--soft", BASE)
    if half:
        git(checkout, "commit", "-qm", "half of it", "--", MUON, OWN, C10D)
    else:
        assert "`apply` commits it" in on("status")
        leads_on(on("status"))
        git(checkout, "reset", "-q", "--soft", BASE)
        leads_on(on("revert", code=3, words=["stash"]))
        assert restored(checkout, tree)
        git(checkout, "stash", "pop", "-q", "--index")
    on("apply")
    assert restored(checkout, applied)
    on("revert")
    assert restored(checkout, tree)


def test_main_of_upstream(checkout, on, face):
    """Files of no release, and hunks that do not fit, are warnings with `--force`."""
    texts = {MUON: "# a fix of upstream\n", C10D: "# all new\n"}
    branch(checkout, "newer", {**texts, "version.txt": "2.16.0a0\n"})
    words = ("apply", "--checkout", checkout)
    on("apply", code=2, words=[" --force\n", "in no supported ver"])
    warnings = ("0002-local-groups", f"warning: {MUON} there is of no release")
    for _ in range(2):  # it was said once
        fails(face(*words, "--force"), 0, *warnings)
    on("revert")
    assert git_status(checkout) == ""


def test_amended_and_rebased_overlay(checkout, on):
    """`revert --commit` ended in a traceback after the commit was made."""
    on("apply", "--commit")
    git(checkout, "commit", "-q", "--amend", "-m", "testing: amended")
    on("revert", "--commit")
    assert git_status(checkout) == ""
    # Now on top of upstream's changes around the hunks.
    git(checkout, "reset", "-q", "--hard", "HEAD~1")
    doc = f"# A new first line\n{git(checkout, 'show', f'{BASE}:{DOC}')}\n"
    tree = tree_of(checkout, branch(checkout, "newer", {DOC: doc}, BASE))
    git(checkout, "rebase", "-q", "newer", "main")
    assert state(checkout) == "current"
    assert "already" in on("apply")
    on("revert", "--commit")
    assert restored(checkout, tree)


def test_shallow_clone_names_unshallow(checkout, on, tmp_path):
    """The way out was a `git revert` of the graft root, which deletes all files."""
    on("apply", "--commit")
    append(checkout / OWN, "# an edit\n")
    commit_all(checkout)
    place = tmp_path / "shallow"
    git(checkout, "clone", "-q", "--depth=1", f"file://{checkout}", place)
    for command in "apply", "revert", "status", "pull", "export":
        errors = on(command, where=place, code=2, words=["fetch --unshallow"])
    leads_on(errors)
    on("pull", "--dry-run", where=place)


def test_conflict_of_a_rebase_comes_first(checkout, on, ours, tmp_path):
    """`pull` took the file with its conflict markers, and `--commit` committed it."""
    on("apply", "--commit")
    branch(checkout, "newer", {MUON: OTHER}, BASE)
    run("git", "rebase", "-q", "newer", "main", cwd=checkout, check=False)
    assert "<<<<<<<" in (checkout / MUON).read_text()
    for command in "apply", "apply --commit", "revert", "pull", "export":
        on(*command.split(), root=ours, code=3, words=["rebase --abort"])
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


@pytest.mark.parametrize("names", ["one two", "a a"])
def test_commit_during_a_merge(checkout, on, names):
    """`apply --commit` wrote all files, and failed then."""
    for name, rel in zip(("one", "two"), names.split()):
        branch(checkout, name, {rel: name})
    merge = ("git", "merge", "-q", "--no-commit", "--no-ff", "one")
    if run(*merge, cwd=checkout, check=False).code:
        (checkout / ".git/MERGE_HEAD").unlink()
    words = "add -- a\n" if names == "a a" else "merge --abort"
    on("apply", "--commit", code=3, words=[words])


def test_cleaned_overlay_is_found_again(checkout, on):
    on("apply")
    (checkout / OWN).unlink()
    found = Checkout(checkout).status(ROOT)
    assert (found["state"], found["files"][OWN]) == ("changed", "missing")
    # The file is as `revert` leaves it.
    on("revert")
    assert git_status(checkout) == ""
    on("apply")
    rels = payload.read(ROOT).whole
    git(checkout, "rm", "-q", "--", *rels)
    assert state(checkout) == "changed"


def test_each_branch_has_its_own_overlay(checkout, on, overlay):
    """One record for all branches: `revert` on the first one refused."""
    trees = {}
    for name, version in (("a", "2.13.0a0"), ("b", "2.12.0a0")):
        texts = {"version.txt": f"{version}\n", MUON: f"{OTHER}# {name}\n"}
        trees[name] = tree_of(checkout, branch(checkout, name, texts))
        append(overlay / OWN, f"# for {name}\n")
        Checkout(checkout).apply(overlay)
    git(checkout, "switch", "-q", "main")
    assert state(checkout) == "none"
    assert "nothing to do" in on("revert")
    for name, tree in trees.items():
        git(checkout, "switch", "-q", name)
        on("revert", "--commit")
        assert restored(checkout, tree)


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
    plain |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    plain["EMAIL"] = "me@example.org"
    lock = checkout / ".git/index.lock"
    lock.touch()
    words = ("apply", "--checkout", checkout, "--commit")
    fails(tool(*words), 1, "another git command")
    lock.unlink()
    # The name of an invented author was in the history.
    before = everything(checkout)
    fails(tool(*words, env=plain), 1, "git config --global user.email")
    assert everything(checkout) == before


def test_failure_half_way_leaves_it_as_it_was(checkout, on, overlay, monkeypatch):
    """A git that was killed before left its lock. An edit that `pull` took was gone."""
    (checkout / ".git/packed-refs.lock").touch()
    on("apply")
    append(overlay / OWN, "# newer\n")
    append(overlay / MUON, "# newer\n")
    shutil.copyfile(overlay / OWN, checkout / OWN)
    real = worktree.git.git

    def fails_at_last(where, *words, **options):
        done = real(where, *words, **options)
        if words[:2] == ("read-tree", "-m"):
            raise WorkFailed("no space left")
        return done

    monkeypatch.setattr(worktree.git, "git", fails_at_last)
    on("apply", root=overlay, code=1, words=["no space left"])
    monkeypatch.undo()
    on("apply", root=overlay)
    on("revert", root=overlay)
    assert git_status(checkout) == ""


def test_edit_while_the_command_works(checkout, face, monkeypatch):
    """It was overwritten: a passphrase for a signature leaves a minute for it."""
    real = worktree.Worktree.move

    def late(tree, *args):
        append(checkout / MUON, "# mine\n")
        real(tree, *args)

    monkeypatch.setattr(worktree.Worktree, "move", late)
    fails(face("apply", "--checkout", checkout), 1, "changed meanwhile")
    assert (checkout / MUON).read_text().endswith("# mine\n")


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
    for name, value in zip(("COUNT", "KEY_0", "VALUE_0"), ("1", "diff.noprefix", "1")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    for name, value in SETTINGS.items():
        git(checkout, "config", name, value)
    on("apply", "--commit")
    expected = tree_of(checkout)
    out, second = tmp_path / "a series", tmp_path / "second"
    shown = on("export", "--out", out, "--stack")
    on("export", "--out", out, code=3, words=["has mails already"])
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
    for mail in [*out.iterdir(), *(tmp_path / "a series").iterdir()]:
        assert "Muon-Overlay" not in mail.read_text()
    assert not (checkout / "elsewhere").exists()
    on("revert", "--commit", where=second)
    assert tree_of(second) == tree_of(small)
    am(second, out)
    assert tree_of(second) == expected
    assert state(second) == "current"
    on("revert", where=second)
    assert tree_of(second) == tree_of(small)
    git(second, "reset", "-q", "--hard", "HEAD~1")
    assert git(second, "log", "-1", "--format=%s") == patches.SUBJECT


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


def test_fork_with_its_own_muon(checkout, on):
    """`revert --commit` deleted it, and `apply` overwrote it."""
    rels = (OWN, "torch/optim/_newton_schulz.py", "test/optim/test_muon_engine.py")
    put(checkout, dict.fromkeys(rels, b"# the fork's\n"))
    tree = tree_of(checkout, commit_all(checkout))
    assert state(checkout) == "none"
    assert "nothing to do" in on("revert", "--commit")
    leads_on(on("apply", code=3, words=(f"  {OWN}\n", "of its own")))
    on("apply", "--commit")
    assert (checkout / OWN).read_text() != "# the fork's\n"
    assert state(checkout) == "current"
    on("revert", "--commit")
    assert restored(checkout, tree)


@pytest.mark.parametrize("first", ["release", "topic"])
def test_topic_cut_before_upstream_was_merged(checkout, on, first):
    """The base moved back, and `revert` undid upstream's change."""
    for name, *rels in (("release", MUON, DOC), ("topic", SGD)):
        texts = {rel: (checkout / rel).read_text() for rel in rels}
        texts = {rel: f"{text}\n# {name}\n" for rel, text in texts.items()}
        if MUON in texts:
            # A line that the overlay changes, too.
            stock = (checkout / MUON).read_text()
            texts[MUON] = stock.replace("optimizer.", f"optimizer, {name}.", 1)
        branch(checkout, name, texts)
    git(checkout, "switch", "-q", "main")
    on("apply", "--commit")
    for name in dict.fromkeys([first, "release", "topic"]):
        git(checkout, "merge", "-q", "-X", "ours", name, "-m", "m")
    assert state(checkout) == "current"
    assert "already" in on("apply")
    base = git(checkout, "rev-parse", first)  # the other one is no descendant
    assert f" at {base}: git am" in on("export", "--out", "x", "--dry-run")
    on("revert", "--commit")
    assert git(checkout, "diff", "release", "--stat").count("|") == 1
    assert (checkout / SGD).read_text().endswith("# topic\n")


@pytest.mark.parametrize("how", ["--no-ff", "--squash"])
def test_topic_with_a_fix_below_the_overlay(checkout, on, how):
    """On the branch that merged it, `apply` and `revert` took the fix away."""
    fixed = f"# a fix\n{(checkout / C10D).read_text()}"
    branch(checkout, "topic", {C10D: fixed})
    on("apply", "--commit")
    git(checkout, "switch", "-q", "main")
    branch(checkout, "other", {SGD: ""})
    git(checkout, "merge", "-q", how, "topic")
    commit_all(checkout) if how == "--squash" else None
    assert state(checkout) == "current"
    on("revert", "--commit")
    assert (checkout / C10D).read_text() == fixed


def test_part_of_the_stack_on_a_branch(checkout, on, ours):
    """`pull` took an earlier form of _muon.py; after `revert`, the overlay elsewhere was reverted to an older PyTorch."""
    branch(checkout, "last-year", {MUON: "# of last year\n"})
    tree = tree_of(checkout, "main")
    git(checkout, "restore", "--source=main", "--", MUON)
    commit_all(checkout)
    on("apply", "--commit")
    for later in range(len(SUBJECTS)):
        git(checkout, "switch", "-q", "--detach", f"HEAD~{min(later, 1)}")
        assert "nothing to take" in on("pull", root=ours), later
    git(checkout, "switch", "-q", "-c", "part")
    on("revert")
    git(checkout, "switch", "-q", "last-year")
    on("revert", "--commit")
    assert restored(checkout, tree)


def test_shallow_clone_of_this_repository(there, ours, tmp_path):
    """It was told that it is older than what it had applied."""
    there.apply(ours)
    append(ours / OWN, "# newer\n")
    commit_all(ours)
    git(tmp_path, "clone", "-q", "--depth=1", ours.as_uri(), "shallow")
    assert there.apply(tmp_path / "shallow").written == [OWN]


def test_folder_that_this_user_may_not_write(checkout, on, monkeypatch):
    on("apply")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    on("revert", code=2, words=["may not write"])


@pytest.mark.parametrize("how", ["commit -qam fix", "add ."])
def test_own_fix_in_a_patched_file_stays(checkout, on, face, how, tmp_path):
    """`pull` took it into the patch, and `revert --commit` removed it."""
    on("apply", "--commit")
    fixed = f"# a fix\n{(checkout / C10D).read_text()}# a fix\n"
    (checkout / C10D).write_text(fixed)
    git(checkout, *how.split())
    committed = how.startswith("commit")
    assert "already" in on("apply", "--commit")
    assert "nothing to take" in on("pull", "--dry-run")
    assert face("export", "--checkout", checkout, "--out", tmp_path / "o").err == ""
    if not committed:
        errors = on("revert", code=3, words=[f"  {C10D}\n"])
        assert "pull" not in errors
        leads_on(errors)
        on("revert")
        git(checkout, "stash", "pop", "-q")
        assert (checkout / C10D).read_text().count("# a fix\n") == 2
        return
    on("revert", "--commit")
    assert git_status(checkout) == ""
    stock = git(checkout, "show", f"{BASE}~{1 + committed}:{C10D}")
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
    words = ("--checkout", checkout, "--commit")
    assert face("apply", *words).code == (3 if rel == ENGINE else 0)
    face("revert", *words)
    assert snapshot(outside) == {".gitignore": b"mine"}
    assert restored(checkout, tree)


@pytest.mark.parametrize("edit", ["add -N", "add", "deleted", "untracked"])
def test_ways_out_lead_on(checkout, on, edit):
    """The printed way out changed nothing."""
    rel = {"deleted": DOC, "add": C10D}.get(edit, OWN)
    (checkout / rel).write_text("# mine\n")
    if edit == "untracked":  # and ignored
        (checkout / ".git/info/exclude").write_text(f"{rel}\n")
    elif edit == "deleted":
        (checkout / rel).unlink()
    else:
        git(checkout, *edit.split(), "--", rel)
    errors = on("apply", code=3, words=[f"  {rel}\n"])
    assert state(checkout) == "none"
    leads_on(errors)
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
    assert "## Distributed Muon" in git(second, "show", f"HEAD:{DOC}")


def test_vendored_import(checkout, on, overlay):
    """There was no history to fetch, and `fetch --unshallow` was the way out."""
    on("apply")
    shutil.rmtree(checkout / ".git")
    commit_all(checkout, "an import")
    assert "nothing to do" in on("apply")
    # A newer overlay replaces it, and `revert` restores what was imported.
    tree = tree_of(checkout)
    commit_all(overlay)
    append(overlay / OWN, "# newer\n")
    on("apply", root=overlay, code=3, words=[f"  {OWN}\n", "--force"])
    on("apply", "--force", root=overlay)
    assert state(checkout) != "imported"
    on("revert", root=overlay)
    assert restored(checkout, tree)
    (checkout / OWN).write_text("# edited\n")
    commit_all(checkout)
    assert "unshallow" not in on("apply", code=3, words=[f"  {OWN}\n"])


def test_signatures_and_hooks_of_the_user(checkout, on, tmp_path):
    """A hook that refused the branch left all files staged; no commit was signed."""
    signs = script(tmp_path / "signs", f"touch {tmp_path}/signed\nexit 1\n")
    git(checkout, "config", "commit.gpgsign", "true")
    git(checkout, "config", "gpg.program", signs)
    on("apply", "--commit", code=1, words=["git commit-tree"])
    assert (tmp_path / "signed").exists()
    git(checkout, "config", "commit.gpgsign", "false")
    body = 'while read old new ref; do [ "$ref" != refs/heads/main ] || exit 1; done\n'
    hook = script(checkout / ".git/hooks/reference-transaction", body)
    on("apply", "--commit", code=1, words=["git update-ref"])
    hook.unlink()
    on("apply")


def test_names_that_are_not_utf_8_and_safe_path(checkout, tool):
    """They ended in a traceback."""
    (checkout / ".git/info/exclude").write_bytes(b"\xe9.txt\n")
    (checkout / "version.txt").write_bytes(b"2.13.0a0\n\xe9")
    commit_all(checkout)
    env = {**os.environ, "PYTHONSAFEPATH": "1", "GIT_COMMON_DIR": "/nowhere"}
    for command, error in (("apply", "is not a torch version"), ("status", "")):
        done = tool(command, "--checkout", checkout, env=env)
        assert (error in done.err, "Traceback" in done.err) == (True, False)


def test_documented_example_leaves_the_ends_to_adamw():
    torch = pytest.importorskip("torch")
    patch = patches.series(payload.read(ROOT))[DOC]
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
