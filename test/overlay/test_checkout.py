"""The overlay on a checkout: which states a command refuses, and that no history loses anything."""

import os

import pytest
from overlay.conftest import (
    append,
    C10D,
    commit_all,
    ENGINE,
    git,
    leads_on,
    MUON,
    OWN,
    prepend,
    put,
    run,
    snapshot,
    tree_of,
)


EDIT = "# an edit of the fork\n"
SGD = "torch/optim/sgd.py"


def edit(where, path):
    prepend(where / path, EDIT)
    commit_all(where)


def replace(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def hide(fork):
    git(fork, "update-index", "--assume-unchanged", MUON)
    append(fork / MUON, EDIT)


def conflict(where, path):
    """A merge that is not finished, in a file with two edits."""
    git(where, "switch", "-q", "-c", "side")
    edit(where, path)
    git(where, "switch", "-q", "-")
    prepend(where / path, "# other\n")
    commit_all(where)
    git(where, "merge", "-q", "side", check=False)


def stop_rebase(fork):
    edit(fork, SGD)
    git(fork, "rebase", "-x", "false", "HEAD~1", check=False)


def commit(where, texts):
    put(where, texts)
    commit_all(where)


def break_context(fork):
    replace(fork / C10D, "use_hashed_name=", "hashed=")
    commit_all(fork)


# A change of a fork and of this repository; a command, its exit code, and words that it prints.
REFUSED = {
    "dirty": (lambda f, o: append(f / MUON, EDIT), "apply", 3, "local changes"),
    "staged": (lambda f, o: (append(f / C10D, EDIT), git(f, "add", C10D)), "apply", 3, "local changes"),
    "begins like ours": (lambda f, o: (put(f, {OWN: "#"}), append(f / MUON, EDIT)), "apply", 3, "local changes"),
    "untracked": (lambda f, o: put(f, {OWN: "mine\n"}), "apply", 3, "untracked"),
    "ignored": (lambda f, o: put(f, {OWN: "mine\n", ".git/info/exclude": OWN}), "apply", 3, "untracked"),
    "assumed unchanged": (lambda f, o: hide(f), "apply", 3, "refuses"),
    "merging": (lambda f, o: conflict(f, SGD), "apply", 3, "MERGE_HEAD"),
    "rebasing": (lambda f, o: stop_rebase(f), "apply", 3, "rebase-merge"),
    "locked index": (lambda f, o: put(f, {".git/index.lock": ""}), "apply", 3, "index.lock"),
    "own file": (lambda f, o: commit(f, {OWN: "mine\n"}), "apply", 3, "files of its own"),
    "old": (lambda f, o: commit(f, {"version.txt": "2.10.0\n"}), "apply", 2, "2.10.0 is untested"),
    "misfit": (lambda f, o: break_context(f), "apply", 2, f"does not fit {C10D}"),
    "no PyTorch": (lambda f, o: (f / "torch/__init__.py").unlink(), "apply", 2, "it has no torch"),
    "changes here": (lambda f, o: append(o / OWN, EDIT), "apply", 3, "commit the changes"),
    "applied, dirty": (lambda f, o: append(f / OWN, EDIT), "revert", 3, "local changes"),
    "applied, merging edits": (lambda f, o: conflict(f, OWN), "pull", 3, "MERGE_HEAD"),
    "applied, merging here": (lambda f, o: conflict(o, OWN), "pull", 3, "MERGE_HEAD"),
    "applied, edited": (lambda f, o: edit(f, OWN), "apply", 3, "lacks"),
    "applied, edited in both": (lambda f, o: (append(f / OWN, EDIT), append(o / OWN, "# here\n")), "pull", 3, "refuses to merge here"),
}  # fmt: skip


@pytest.mark.parametrize("state", REFUSED)
def test_refused(fork, ours, on, state):
    change, command, code, says = REFUSED[state]
    if state.startswith("applied"):
        on("apply")
    change(fork, ours)
    on(command, code=code, says=[says])


def test_ways_out(fork, on, tmp_path):
    """What a refusal or a warning names works."""
    before = tree_of(fork)
    on("apply")
    edit(fork, OWN)
    on("export", "--out", tmp_path / "mails", says=["the mails lack edits"])
    on("apply", code=3, says=["`revert`, then `apply`, drops them"])
    done = on("revert", says=["stay in the history"])
    assert OWN in leads_on(done.out)[0].out
    assert tree_of(fork) == before
    on("apply")
    assert EDIT not in (fork / OWN).read_text()


def test_forced_misfit_is_left_to_the_fork(fork, on):
    break_context(fork)
    before = tree_of(fork)
    on("apply", "--force")
    assert "hashed=" in (fork / C10D).read_text()
    on("status", says=[f"edited or do not fit: {C10D}"])
    on("apply", says=["nothing to do", f"does not fit {C10D}"])
    on("revert")
    assert tree_of(fork) == before


def test_git_fails_after_it_has_moved_the_files(fork, on):
    """`apply` said that nothing was touched."""
    lock = fork / ".git/HEAD.lock"
    lock.touch()
    failed = on("apply", code=1, says=["HEAD.lock"])
    assert "touched" not in failed.err and (fork / OWN).exists()
    lock.unlink()
    on("apply")
    assert git(fork, "status", "--porcelain") == ""


def test_commits(fork, ours, on, tmp_path):
    """Three commits; the mails give the same tree; `status` and `diff` agree with them."""
    base = git(fork, "rev-parse", "HEAD")
    on("status", says=["holds no overlay"])
    patch = tmp_path / "all.patch"
    patch.write_text(on("diff").out)
    on("apply", says=["of no release that this overlay knows"])
    log = git(fork, "log", "--reverse", "--format=%s", f"{base}..").splitlines()
    assert [subject.partition(":")[0] for subject in log] == ["c10d", "optim", "optim"]
    assert git(ours, "rev-parse", "HEAD") in git(fork, "log", "-1", "--format=%B")
    names = git(fork, "diff", "--name-only", "HEAD~2", "HEAD~1").splitlines()
    assert names == ["test/optim/test_newton_schulz.py", "torch/optim/_newton_schulz.py"]  # fmt: skip
    on("status", says=["as in this repository"])
    on("apply", says=["nothing to do"])
    assert on("diff").out == "\n"
    mails = tmp_path / "mails"
    on("export", "--out", mails)
    full = tree_of(fork)
    git(fork, "switch", "-q", "-c", "mails", base)
    git(fork, "am", "-q", *sorted(mails.iterdir()))
    assert tree_of(fork) == full
    on("apply", says=["nothing to do"])
    git(fork, "reset", "-q", "--hard", base)
    git(fork, "apply", patch)
    commit_all(fork)
    assert tree_of(fork) == full


def upgrade(fork, ours, on):
    append(ours / OWN, "# newer\n")
    (ours / ENGINE[0]).unlink()
    commit_all(ours)
    on("status", says=["holds another overlay"])
    on("apply")
    assert git(fork, "log", "-1", "--format=%s") == "optim: update distributed Muon"
    assert not (fork / ENGINE[0]).exists()


def squash(fork, ours, on):
    git(fork, "reset", "-q", "--soft", "HEAD~3")
    git(fork, "commit", "-q", "-m", "other words")


def drop(fork, ours, on):
    git(fork, "rebase", "-q", "--onto", "HEAD~3", "HEAD~2")


def pick(fork, ours, on):
    git(fork, "switch", "-q", "-c", "other", "origin/2.13.0")
    git(fork, "cherry-pick", "work~3..work")


def rebase(fork, ours, on):
    """One stop: upstream has changed the file that the overlay replaces."""
    done = run("git", "rebase", "-q", "origin/2.15.0", cwd=fork, check=False)
    assert MUON in done.out
    git(fork, "checkout", "-q", "--theirs", MUON)
    git(fork, "add", MUON)
    git(fork, "-c", "core.editor=true", "rebase", "--continue")


def merge_upstream(fork, ours, on):
    git(fork, "merge", "-q", "origin/2.15.0", check=False)
    git(fork, "checkout", "-q", "--ours", MUON)
    commit_all(fork)


def amend_here(fork, ours, on):
    """The branches of this repository have the applied text no longer."""
    append(ours / OWN, "# for a while\n")
    commit_all(ours)
    on("apply")
    git(ours, "reset", "-q", "--hard", "HEAD~1")
    assert "edited there" not in on("status").out


def hunk_for_a_while(fork, ours, on):
    """The present hunks of a file are a part of those that it has."""
    patch = ours / "patches/0001-docs-distributed-muon.patch"
    text = patch.read_text()
    more = "@@ -1,2 +1,3 @@\n # torch.optim\n+# for a while\n \n@@"
    patch.write_text(text.replace("@@", more, 1))
    commit_all(ours)
    on("apply")
    assert "for a while" in (fork / "docs/source/optim.md").read_text()
    patch.write_text(text)
    commit_all(ours)


def revert_one(fork, ours, on):
    git(fork, "revert", "--no-edit", "HEAD~1")


# An event between `apply` and `revert`.
ON_RELEASE = [upgrade, hunk_for_a_while, squash, drop, pick, amend_here, revert_one]
ON_NEXT_RELEASE = [rebase, merge_upstream]


@pytest.mark.parametrize("change", ON_RELEASE + ON_NEXT_RELEASE)
def test_histories_end_at_the_base(fork, ours, on, change):
    on("apply")
    change(fork, ours, on)
    on("revert")
    release = "2.15.0" if change in ON_NEXT_RELEASE else "2.13.0"
    assert tree_of(fork) == tree_of(fork, f"origin/{release}")
    assert git(fork, "status", "--porcelain") == ""
    # And it comes again.
    on("apply")
    on("status", says=["as in this repository"])


def test_own_changes_stay(fork, on):
    """In patched files, in other files, and in the stock file."""
    put(fork, {MUON: "# the fork's own\n", "torch/optim/mine.py": "mine\n"})
    edit(fork, C10D)
    before = tree_of(fork)
    on("apply")
    on("revert")
    assert tree_of(fork) == before


def test_two_stock_files(fork, on):
    on("apply")
    git(fork, "switch", "-q", "-c", "side", "origin/2.13.0")
    commit(fork, {MUON: "# another stock file\n"})
    git(fork, "switch", "-q", "work")
    git(fork, "merge", "-q", "-s", "ours", "-m", "merge", "side")
    git(fork, "merge", "-q", "-s", "ours", "-m", "merge", "origin/2.15.0")
    refused = on("revert", code=3, says=["different stock"]).err
    leads_on(next(line for line in refused.splitlines() if line.startswith("  git ")))
    commit_all(fork)
    on("revert")


# How to make another checkout of a fork, in the fork's parent folder.
PLACES = {
    "shallow": "clone -q --depth 1 file://{fork} shallow",
    "linked": "-C {fork} worktree add -q --detach ../linked",
    "sparse": "clone -q --sparse {fork} sparse",
    "windows": "clone -q -c core.autocrlf=true {fork} windows",
    "with:colon": "clone -q {fork} with:colon",
}


@pytest.mark.parametrize("name", PLACES)
def test_places(fork, ours, tool, name):
    git(fork.parent, *PLACES[name].format(fork=fork).split())
    place = fork.parent / name
    if name == "sparse":
        git(place, "sparse-checkout", "set", "--cone", "torch/distributed")
    tool(ours, "apply", "--checkout", place)
    assert git(place, "status", "--porcelain") == ""
    tool(ours, "revert", "--checkout", place)
    assert tree_of(place) == tree_of(fork)


def test_clone_that_begins_with_the_overlay(fork, ours, on, tool, tmp_path):
    """An update needs no stock file, `revert` does."""
    on("apply")
    git(tmp_path, "clone", "-q", "--depth", "1", fork.as_uri(), "late")
    append(ours / OWN, "# newer\n")
    commit_all(ours)
    late = ("--checkout", tmp_path / "late")
    tool(ours, "apply", *late)
    tool(ours, "revert", *late, code=2, says=["fetch --unshallow"])


def test_nothing_is_written_by_what_reads(fork, ours, on, tmp_path):
    on("apply")
    before = sorted((fork / ".git").rglob("*"))
    for words in ["status"], ["diff"], ["export", "--out", tmp_path / "out"], ["pull"]:
        on(*words)
    assert sorted((fork / ".git").rglob("*")) == before


def test_pull(fork, ours, on):
    """Committed and other edits, and new files; what is here since stays."""
    commit(fork, {"test/optim/test_muon_of_mine.py": "the fork's own\n"})
    on("apply")
    # This line comes with an update, and is taken back here: the edit begins after it.
    before = (ours / ENGINE[0]).read_text()
    append(ours / ENGINE[0], "# for a while\n")
    commit_all(ours)
    on("apply")
    put(ours, {ENGINE[0]: before})
    append(ours / OWN, "# here\n")
    commit_all(ours)
    edit(fork, OWN)
    on("status", says=[f"edited there, `pull` takes it: {OWN}"])
    prepend(fork / ENGINE[0], EDIT)
    new = {"torch/optim/_muon_new.py": "new\n", "torch/optim/other.py": "not Muon's\n"}
    put(fork, new)
    took = {"torch/optim/_muon_new.py", ENGINE[0], OWN}
    on("pull", says=[f"took {path}" for path in took])
    assert {*git(ours, "diff", "--name-only", "HEAD").splitlines()} == took
    text = (ours / OWN).read_text()
    assert text.startswith(EDIT) and text.endswith("# here\n")
    assert (ours / ENGINE[0]).read_text() == EDIT + before
    commit_all(ours, "merge")
    on("pull", says=["nothing to take"])
    commit_all(fork)
    on("apply")
    assert (fork / OWN).read_text() == text


def test_pull_names_edits_of_hunks(fork, on):
    on("apply")
    edit(fork, C10D)  # between hunks
    assert "lines of a patch" not in on("pull").out
    replace(fork / C10D, "_local_sync_group_counts", "_counts")
    says = ["nothing to take", f"edited in {C10D}"]
    on("pull", says=says)
    commit_all(fork)
    (log,) = leads_on(on("pull", says=says).out)
    assert "-_local_sync_group_counts" in log.out


def test_conflict_returns_once(fork, ours, on):
    on("apply")
    edit(fork, OWN)
    prepend(ours / OWN, "# an edit here\n")
    commit_all(ours)
    done = on("pull", code=1, says=[OWN])
    leads_on(done.err)  # merge --abort
    on("pull", code=1)
    assert "<<<<<<<" in (ours / OWN).read_text()
    commit(ours, {OWN: "# resolved\n"})
    on("pull", says=["nothing to take"])
    on("apply")
    assert (fork / OWN).read_text() == "# resolved\n"


def test_rebuild_by_wheel(fork, on, installed):
    """Python has the checkout's files and the compiled parts of an installed torch."""
    put(installed.torch, {"_C.so": "library", "lib/libtorch.so.2": "library"})
    on("apply")
    before = snapshot(fork), snapshot(installed.site)
    words = ("rebuild", "--mode", "wheel", "--python", installed.python)
    variable, python, _ = on(*words).out.splitlines()[-1].split()
    code = (
        "import torch, torch.optim.muon as m, os; print(os.path.realpath(m.__file__))"
    )
    code += "; print(os.listdir(torch.__path__[0] + '/lib'))"
    done = run("env", variable, python, "-B", "-c", code, cwd=fork.parent)
    assert done.out == f"{fork / OWN}\n['libtorch.so.2']\n"
    assert (snapshot(fork), snapshot(installed.site)) == before
    on("revert")
    assert not os.path.exists(variable.partition("=")[2])
    commit(fork, {"version.txt": "2.14.0\n"})
    on(*words, code=2, says=["not of the checkout's version"])
