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
from tools.overlay.checkout import COMMITS


EDIT = "# an edit of the fork\n"


def exclude(fork):
    put(fork, {OWN: "mine\n", ".git/info/exclude": f"{OWN}\n"})


def hide(fork, flag):
    git(fork, "update-index", flag, MUON)
    append(fork / MUON, EDIT)


def conflict(where, path):
    """A merge that is not finished, in a file with two edits."""
    git(where, "switch", "-q", "-c", "side")
    prepend(where / path, "# one\n")
    commit_all(where)
    git(where, "switch", "-q", "-")
    prepend(where / path, "# other\n")
    commit_all(where)
    git(where, "merge", "-q", "side", check=False)


def stop_rebase(fork):
    append(fork / "torch/optim/sgd.py", EDIT)
    commit_all(fork)
    git(fork, "rebase", "-x", "false", "HEAD~1", check=False)


def commit_own(fork):
    put(fork, {OWN: "mine\n"})
    commit_all(fork)


def set_version(fork, version):
    put(fork, {"version.txt": f"{version}\n"})
    commit_all(fork)


def break_context(fork):
    text = (fork / C10D).read_text()
    (fork / C10D).write_text(text.replace("use_hashed_name=", "hashed="))
    commit_all(fork)


# The state of a fork, a command, its exit code, and words that it prints.
REFUSED = {
    "dirty": (lambda f: append(f / MUON, EDIT), "apply", 3, "local changes"),
    "staged": (lambda f: (append(f / C10D, EDIT), git(f, "add", C10D)), "apply", 3, "local changes"),
    "untracked": (lambda f: put(f, {OWN: "mine\n"}), "apply", 3, "untracked"),
    "ignored": (exclude, "apply", 3, "untracked"),
    "assumed unchanged": (lambda f: hide(f, "--assume-unchanged"), "apply", 3, "refuses"),
    "skipped": (lambda f: hide(f, "--skip-worktree"), "apply", 3, "refuses"),
    "merging": (lambda f: conflict(f, "torch/optim/sgd.py"), "apply", 3, "MERGE_HEAD"),
    "rebasing": (stop_rebase, "apply", 3, "rebase-merge"),
    "locked": (lambda f: put(f, {".git/index.lock": ""}), "apply", 3, "index.lock"),
    "own file": (commit_own, "apply", 3, "files of its own"),
    "old": (lambda f: set_version(f, "2.10.0"), "apply", 2, "as in no supported version"),
    "nightly": (lambda f: set_version(f, "2.14.0.dev20260101"), "apply", 2, "untested"),
    "misfit": (break_context, "apply", 2, f"does not fit {C10D}"),
    "no PyTorch": (lambda f: (f / "version.txt").unlink(), "apply", 2, "no version.txt"),
}  # fmt: skip
REFUSED_LATER = {
    "dirty": (lambda f: append(f / OWN, EDIT), "revert", 3, "local changes"),
    "merging": (lambda f: conflict(f, "torch/optim/sgd.py"), "revert", 3, "MERGE_HEAD"),
    "merging edits": (lambda f: conflict(f, OWN), "pull", 3, "MERGE_HEAD"),
    "edited": (lambda f: (append(f / OWN, EDIT), commit_all(f)), "apply", 3, "lacks"),
    "own build": (lambda f: put(f, {"torch/_C.so": "mine"}), "rebuild", 3, "build of its own"),
}  # fmt: skip


@pytest.mark.parametrize("state", REFUSED)
def test_refused_before(fork, on, state):
    change, command, code, says = REFUSED[state]
    change(fork)
    on(command, code=code, says=[says])


@pytest.mark.parametrize("state", REFUSED_LATER)
def test_refused_later(fork, on, installed, state):
    change, command, code, says = REFUSED_LATER[state]
    on("apply")
    change(fork)
    more = (
        ["--mode", "wheel", "--python", installed.python]
        if command == "rebuild"
        else []
    )
    on(command, *more, code=code, says=[says])


def test_refusals_of_this_repository(fork, ours, on, tmp_path):
    on("apply")
    append(fork / OWN, EDIT)
    append(ours / OWN, "# not committed here\n")
    on("pull", code=3, says=["refuses to merge here"])
    git(ours, "restore", OWN)
    put(tmp_path, {"mails/old.patch": ""})
    on("export", "--out", tmp_path / "mails", code=3, says=["has mails already"])
    conflict(ours, OWN)
    for command in ("apply", "export", "pull"):
        on(command, code=3, says=["conflicts" if command != "pull" else "MERGE_HEAD"])


def test_ways_out(fork, on):
    """Each command that a refusal prints works."""
    base = tree_of(fork)
    commit_own(fork)
    leads_on(on("apply", code=3).err)
    commit_all(fork)
    before = tree_of(fork)
    on("apply")
    append(fork / ENGINE[0], EDIT)
    commit_all(fork)
    refused = on("apply", code=3).err
    lines = [line for line in refused.splitlines() if " pull " not in line]
    leads_on("\n".join(lines))
    assert EDIT not in (fork / ENGINE[0]).read_text()
    on("revert")
    assert tree_of(fork) == before != base


def test_forced_misfit_is_left_to_the_fork(fork, on):
    break_context(fork)
    before = tree_of(fork)
    leads_on(on("apply", code=2).err)
    assert "hashed=" in (fork / C10D).read_text()
    assert C10D in on("status").out
    on("revert")
    assert tree_of(fork) == before


def test_edited_hunk_is_not_silent(fork, on):
    on("apply")
    text = (fork / C10D).read_text()
    (fork / C10D).write_text(text.replace("_local_sync_group_counts", "_counts"))
    commit_all(fork)
    assert f"edited or do not fit: {C10D}" in on("status").out
    on("apply", says=["nothing to do", f"does not fit {C10D}"])
    on("revert")
    assert "_counts" in (fork / C10D).read_text()


def test_commits(fork, ours, on, tool, tmp_path):
    """Three commits; the mails give the same tree; `status` and `diff` agree with them."""
    base = git(fork, "rev-parse", "HEAD")
    assert "holds no overlay" in on("status").out
    patch = tmp_path / "all.patch"
    patch.write_text(on("diff").out)
    done = on("apply")
    assert "of no release that this overlay knows" in done.out
    log = git(fork, "log", "--reverse", "--format=%s", f"{base}..").splitlines()
    assert log == [message.partition("\n")[0] for message in COMMITS]
    assert git(ours, "rev-parse", "HEAD") in git(fork, "log", "-1", "--format=%B")
    names = git(fork, "diff", "--name-only", "HEAD~2", "HEAD~1").splitlines()
    assert names == [
        "test/optim/test_newton_schulz.py",
        "torch/optim/_newton_schulz.py",
    ]
    assert "as in this repository" in on("status").out
    assert "nothing to do" in on("apply").out
    assert on("diff").out == ""
    mails = tmp_path / "mails"
    assert f"for {base}: git am" in on("export", "--out", mails).out
    full = tree_of(fork)
    git(fork, "switch", "-q", "-c", "mails", base)
    git(fork, "am", "-q", *sorted(mails.iterdir()))
    assert tree_of(fork) == full
    assert "nothing to do" in on("apply").out
    git(fork, "reset", "-q", "--hard", base)
    git(fork, "apply", patch)
    commit_all(fork)
    assert tree_of(fork) == full


def upgrade(fork, ours, on):
    append(ours / OWN, "# newer\n")
    (ours / ENGINE[0]).unlink()
    commit_all(ours)
    on("apply")
    assert git(fork, "log", "-1", "--format=%s") == "optim: update distributed Muon"
    assert not (fork / ENGINE[0]).exists()


def squash(fork, ours, on):
    git(fork, "reset", "-q", "--soft", "HEAD~3")
    git(fork, "commit", "-q", "-m", "other words")


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


def uncommit(fork, ours, on):
    git(fork, "reset", "-q", "--soft", "HEAD~1")
    on("apply")
    assert git(fork, "status", "--porcelain") == ""


def edit_here_only(fork, ours, on):
    """An overlay that was applied before it was committed here, and changed since."""
    append(ours / OWN, "# not committed\n")
    on("apply")
    git(ours, "restore", OWN)
    assert "# not committed" in (fork / OWN).read_text()
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


# Events between `apply` and `revert`; the release whose tree remains.
HISTORIES = {
    "upgrade": (upgrade, "2.13.0"),
    "hunk": (hunk_for_a_while, "2.13.0"),
    "squash": (squash, "2.13.0"),
    "dropped": (lambda f, o, on: git(f, "rebase", "-q", "--onto", "HEAD~3", "HEAD~2"), "2.13.0"),
    "fixup": (lambda f, o, on: git(f, "reset", "-q", "--soft", "HEAD~1") or git(f, "commit", "-q", "--amend", "--no-edit"), "2.13.0"),
    "reverted in part": (lambda f, o, on: git(f, "revert", "--no-edit", "HEAD~1"), "2.13.0"),
    "picked": (lambda f, o, on: git(f, "switch", "-q", "-c", "other", "origin/2.13.0") or git(f, "cherry-pick", "work~3..work"), "2.13.0"),
    "rebase": (rebase, "2.15.0"),
    "merge": (merge_upstream, "2.15.0"),
    "uncommitted": (uncommit, "2.13.0"),
    "not committed here": (edit_here_only, "2.13.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_histories_end_at_the_base(fork, ours, on, name):
    change, release = HISTORIES[name]
    on("apply")
    change(fork, ours, on)
    on("revert")
    assert tree_of(fork) == tree_of(fork, f"origin/{release}")
    assert git(fork, "status", "--porcelain") == ""
    # And it comes again.
    on("apply")
    assert "as in this repository" in on("status").out


def test_own_changes_stay(fork, on):
    """In patched files, in other files, in the stock file, and after an edit that was lost."""
    prepend(fork / C10D, EDIT)
    put(fork, {MUON: "# the fork's own\n", "torch/optim/mine.py": "mine\n"})
    commit_all(fork)
    before = tree_of(fork)
    on("apply")
    append(fork / OWN, EDIT)
    commit_all(fork)
    done = on("revert")
    assert "stay in the history" in done.out
    leads_on(done.out)
    assert tree_of(fork) == before


def test_two_stock_files(fork, on):
    on("apply")
    git(fork, "switch", "-q", "-c", "side", "origin/2.13.0")
    put(fork, {MUON: "# another stock file\n"})
    commit_all(fork)
    git(fork, "switch", "-q", "work")
    git(fork, "merge", "-q", "-s", "ours", "-m", "merge", "side")
    git(fork, "merge", "-q", "-s", "ours", "-m", "merge", "origin/2.15.0")
    refused = on("revert", code=3, says=["different stock"]).err
    line = next(line for line in refused.splitlines() if line.startswith("  git "))
    leads_on(line)
    commit_all(fork)
    on("revert")


def test_places(fork, ours, tool, tmp_path):
    """A shallow clone, a work tree, a sparse checkout, line ends of Windows."""
    for name, words in {
        "shallow": ["clone", "-q", "--depth", "1", fork.as_uri(), "shallow"],
        "linked": [
            "-C",
            fork,
            "worktree",
            "add",
            "-q",
            "--detach",
            tmp_path / "linked",
        ],
        "sparse": ["clone", "-q", "--sparse", fork, "sparse"],
        "windows": ["clone", "-q", "-c", "core.autocrlf=true", fork, "windows"],
    }.items():
        git(tmp_path, *words)
        place = tmp_path / name
        (place / "torch").mkdir(exist_ok=True)
        if name == "sparse":
            git(place, "sparse-checkout", "set", "torch/distributed")
            put(place, {"torch/__init__.py": ""})
        tool(ours, "apply", "--checkout", place)
        assert git(place, "status", "--porcelain") in ("", "M torch/__init__.py")
        tool(ours, "revert", "--checkout", place)
        assert tree_of(place) == tree_of(fork)
    # A clone that begins with the overlay: an update needs no stock file, `revert` does.
    tool(ours, "apply", "--checkout", fork)
    git(tmp_path, "clone", "-q", "--depth", "1", fork.as_uri(), "late")
    append(ours / OWN, "# newer\n")
    commit_all(ours)
    tool(ours, "apply", "--checkout", tmp_path / "late")
    tool(
        ours,
        "revert",
        "--checkout",
        tmp_path / "late",
        code=2,
        says=["fetch --unshallow"],
    )


def test_nothing_is_written_by_what_reads(fork, ours, on, tmp_path):
    on("apply")
    before = sorted((fork / ".git").rglob("*"))
    for words in ["status"], ["diff"], ["export", "--out", tmp_path / "out"], ["pull"]:
        on(*words)
    assert sorted((fork / ".git").rglob("*")) == before


def test_pull(fork, ours, on):
    """Committed and other edits, and new files; what is here since stays."""
    put(fork, {"test/optim/test_muon_of_mine.py": "the fork's own\n"})
    commit_all(fork)
    on("apply")
    # This line comes with an update, and is taken back here: the edit begins after it.
    before = (ours / ENGINE[0]).read_text()
    append(ours / ENGINE[0], "# for a while\n")
    commit_all(ours)
    on("apply")
    put(ours, {ENGINE[0]: before})
    append(ours / OWN, "# here\n")
    commit_all(ours)
    prepend(fork / OWN, EDIT)
    commit_all(fork)
    assert f"edited there, `pull` takes it: {OWN}" in on("status").out
    prepend(fork / ENGINE[0], EDIT)
    put(
        fork,
        {"torch/optim/_muon_new.py": "new\n", "torch/optim/other.py": "not Muon's\n"},
    )
    took = {"torch/optim/_muon_new.py", ENGINE[0], OWN}
    on("pull", says=[f"took {path}" for path in took])
    assert {*git(ours, "diff", "--name-only", "HEAD").splitlines()} == took
    text = (ours / OWN).read_text()
    assert text.startswith(EDIT) and text.endswith("# here\n")
    assert (ours / ENGINE[0]).read_text() == EDIT + before
    on("pull", code=3, says=["MERGE_HEAD"])
    commit_all(ours, "merge")
    assert "nothing to take" in on("pull").out
    commit_all(fork)
    on("apply")
    assert (fork / OWN).read_text() == text


def test_conflict_returns_once(fork, ours, on):
    on("apply")
    prepend(fork / OWN, EDIT)
    commit_all(fork)
    prepend(ours / OWN, "# an edit here\n")
    commit_all(ours)
    for _ in range(2):
        done = run(*pull_of(ours, fork), check=False)
        assert (done.code, OWN in done.err) == (1, True)
        assert "<<<<<<<" in (ours / OWN).read_text()
        leads_on(done.err)  # merge --abort
    run(*pull_of(ours, fork), check=False)
    put(ours, {OWN: "# resolved\n"})
    commit_all(ours, "resolved")
    assert "nothing to take" in on("pull").out
    on("apply")
    assert (fork / OWN).read_text() == "# resolved\n"


def pull_of(ours, fork):
    return ["python3", ours / "setup_overlay.py", "pull", "--checkout", fork]


def test_rebuild_by_wheel(fork, on, installed):
    """Libraries are links, and the rest is copied: a build writes version.py in place."""
    put(
        installed.torch,
        {"_C.so": "library", "lib/libtorch.so.2": "library", "v.pyi": "text"},
    )
    before = snapshot(fork)
    words = ("rebuild", "--mode", "wheel", "--python", installed.python)
    assert f"PYTHONPATH={fork} {installed.python}" in on(*words).out
    torch = fork / "torch"
    assert (torch / "_C.so").is_symlink() and (torch / "lib/libtorch.so.2").is_symlink()
    assert not (torch / "version.py").is_symlink()
    assert (torch / "version.py").read_text() == (
        installed.torch / "version.py"
    ).read_text()
    assert "removed 2 links" in on("revert").out
    after = snapshot(fork)
    assert {path: after[path] for path in before} == before
    assert not any(path.is_symlink() for path in after)
    set_version(fork, "2.14.0")
    on(*words, code=2, says=["not of the checkout's version"])


def test_source_runs_upstreams_command(fork, ours, tool, tmp_path):
    record, words = tmp_path / "called", "-m pip install --no-build-isolation -v -e ."
    put(tmp_path, {"python": f'#!/bin/sh\necho "$PWD $@" > {record}\nexit 7\n'})
    (tmp_path / "python").chmod(0o755)
    more = ("--mode", "source", "--python", tmp_path / "python")
    tool(ours, "rebuild", "--checkout", fork, *more, code=1, says=["exit code 7"])
    assert record.read_text() == f"{os.path.realpath(fork)} {words}\n"
