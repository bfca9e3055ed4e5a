"""`pull`: edits in a checkout come back into this repository."""

import re

import pytest
from overlay.conftest import append, BASE, commit_all, git, git_status
from overlay.conftest import MUON, OWN, put, replace, run, snapshot
from tools.overlay import patches, payload
from tools.overlay.checkout import Checkout
from tools.overlay.errors import Refused, WrongTarget


DOC = "docs/source/optim.md"
DATABASE = "torch/testing/_internal/common_optimizers.py"
PATCH = "patches/0001-docs-distributed-muon.patch"


@pytest.mark.parametrize("committed", [False, True])
def test_whole_files(there, ours, committed):
    there.apply(ours)
    append(there.root / MUON, "# an edit\n")
    # The second one was not seen.
    added = [
        "torch/optim/_muon_engine/added.py",
        "torch/testing/_internal/distributed/_muon/added.py",
    ]
    for rel in added:
        (there.root / rel).write_text("# new\n")
    if committed:
        commit_all(there.root, "edits")
    assert there.pull(ours, dry=True) == ([MUON, *added], {}, [])
    assert git_status(ours) == ""
    assert there.pull(ours) == ([MUON, *added], {}, [])
    for rel in (MUON, *added):
        assert (ours / rel).read_bytes() == (there.root / rel).read_bytes()
    assert there.pull(ours) == ([], {}, [])
    # Then `apply` and `revert` know the edits as the overlay's own.
    assert there.apply(ours).written == ([] if committed else [MUON, *added])
    assert there.status(ours)["state"] == "current"
    there.revert(ours)
    assert git_status(there.root) == ""


def test_hunks(there, ours):
    there.apply(ours)
    path, database = there.root / DOC, there.root / DATABASE
    replace(path, "one owner rank", "one owning rank")
    replace(path, "## Distributed Muon", "## Muon on many ranks")
    replace(database, '"flatten"', '"flatten", "mine"')
    # Other lines of upstream's file are not ours.
    database.write_text(f"# somebody's\n{database.read_text()}# somebody's\n")
    git(there.root, "commit", "-qam", "edits")
    names, conflicts, missing = there.pull(ours)
    assert (len(names), conflicts, missing) == (2, {}, [])
    for rel, first in ((DOC, " ++ "), (DATABASE, None)):
        hunks = patches.series(payload.read(ours))[rel].hunks.decode()
        assert "somebody" not in hunks
        hunk = hunks.split("@@\n")[1].splitlines()
        # A line of context that occurs twice would let the hunk land elsewhere.
        lines = [line[1:] for line in hunk if line[0] in " -"]
        stock = git(there.root, "show", f"{BASE}~1:{rel}")
        assert stock.count("\n".join(lines)) == 1
        # As little of it as before: a line before it and one after.
        signs = [line[0] for line in (hunk[0], hunk[1], hunk[-2], hunk[-1])]
        assert first in ("".join(signs), None)
    assert there.apply(ours).written == []
    assert "owning" in path.read_text()
    there.revert(ours)
    assert git_status(there.root) == ""
    assert git(there.root, "diff", "--name-only", f"{BASE}~2") == DATABASE
    assert there.tree.texts("HEAD", [DATABASE])[DATABASE].count(b"somebody's") == 2


@pytest.mark.parametrize("rel", [OWN, DOC])
def test_edits_on_both_sides_are_merged(there, ours, rel):
    there.apply(ours)
    here = ours / (PATCH if rel == DOC else rel)
    before = (there.root / rel).read_text().splitlines()
    theirs = next(i for i, line in enumerate(before) if "DistributedConfig" in line)
    replace(here, "Distributed Muon" if rel == DOC else before[0], "Changed here")
    lines = list(before)
    lines[theirs] += " # there"
    (there.root / rel).write_text("\n".join(lines) + "\n")
    taken, _, _ = there.pull(ours)
    assert taken == [here.relative_to(ours).as_posix()]
    text = here.read_text()
    assert "Changed here" in text
    assert "# there" in text
    # The checkout's own text is known by now, so that `apply` brings both.
    with pytest.raises(Refused, match="stash"):
        there.apply(ours)
    git(there.root, "commit", "-qam", "an edit")
    assert there.apply(ours).written == [rel]
    assert "# there" in (there.root / rel).read_text()
    assert there.status(ours)["state"] == "current"


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("rel", [OWN, DOC])
def test_overlapping_edits_have_markers(there, ours, rel, face, committed):
    there.apply(ours)
    place = PATCH if rel == DOC else rel
    old = (ours / OWN).read_text().splitlines()[0] if rel == OWN else "Distributed Muon"
    replace(ours / place, old, "here")
    replace(there.root / rel, old, "there")
    append(there.root / MUON, "# there\n")
    if committed:
        git(there.root, "commit", "-qam", "edits")
    done = face("pull", "--checkout", there.root, root=ours)
    assert (done.code, f"this repository:\n  {place}\n" in done.out) == (1, True)
    sides = (ours / place).read_text().split("<<<<<<< this repository\n")[1]
    mine, theirs = sides.split(">>>>>>> the checkout\n")[0].split("=======\n")
    assert ("here" in mine, "there" in theirs) == (True, True)
    assert (ours / MUON).read_text().endswith("# there\n")
    # A second run does not change the markers.
    before = snapshot(ours)
    assert face("pull", "--checkout", there.root, root=ours).code == 1
    assert snapshot(ours) == before
    with pytest.raises(Refused, match="not resolved"):
        there.apply(ours)
    if committed:  # this repository's lines stay
        text = re.sub(
            r"(?ms)^\+?=======\n.*?>>>>>>> the checkout\n", "", before[place].decode()
        )
        (ours / place).write_text(
            re.sub(r"(?m)^\+?<<<<<<< this repository\n", "", text)
        )
        with pytest.raises(Refused, match="These drop them"):
            there.apply(ours)
        words = ("--checkout", there.root)
        for command in ("revert", "apply"):  # the printed lines name this repository
            assert f" {command} --checkout {there.root}\n" in done.out
            assert face(command, *words, root=ours).code == 0
    else:  # both stay
        text = (ours / place).read_text()
        for sign in ("<<<<<<< this repository", "=======", ">>>>>>> the checkout"):
            text = re.sub(rf"(?m)^\+?{sign}\n", "", text)
        (ours / place).write_text(text)
        with pytest.raises(Refused, match="stash"):
            there.apply(ours)
        git(there.root, "stash", "-q")
    there.apply(ours)
    assert there.status(ours)["state"] == "current"


@pytest.mark.parametrize("named", [False, True])
def test_clone_of_a_fork_on_an_older_overlay(there, ours, tmp_path, named):
    """`pull` took the edit, and took newer lines of the overlay away."""
    there.apply(ours)
    if not named:  # a commit made by hand
        git(there.root, "reset", "-q", "--soft", BASE)
        git(there.root, "commit", "-qm", "ours")
        clone = Checkout(there.root)  # it knows what was applied
    else:
        git(tmp_path, "clone", "-q", there.root, "clone")
        clone = Checkout(tmp_path / "clone")
    replace(ours / OWN, '"""', '"""Newer. ')
    commit_all(ours, "newer")
    assert clone.pull(ours) == ([], {}, [])
    append(clone.root / OWN, "# there\n")
    assert clone.pull(ours) == ([OWN], {}, [])
    text = (ours / OWN).read_text()
    assert '"""Newer. ' in text
    assert text.endswith("# there\n")
    git(clone.root, "commit", "-qam", "an edit")
    assert clone.apply(ours).written == [OWN]
    clone.revert(ours)
    assert git_status(clone.root) == ""
    assert git(clone.root, "diff", f"{BASE}~3" if named else "HEAD~4") == ""


def test_what_is_no_source_of_the_overlay(there, ours, monkeypatch):
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "echo")
    assert there.pull(ours) == ([], {}, [])
    there.apply(ours)
    scrap = ("muon.core.1234", "muon_debug.log", "#muon.py#", "muon.py~")
    rels = ["sgd.py", "../../test/optim/test_sgd.py", *scrap]
    put(there.torch_dir / "optim", dict.fromkeys(rels, b"# somebody's\n"))
    assert there.pull(ours) == ([], {}, [])
    # A deleted file is named.
    (there.root / OWN).unlink()
    assert there.pull(ours) == ([], {}, [OWN])
    assert (ours / OWN).is_file()
    replace(there.root / DOC, "one owner rank", "one owning rank")
    assert there.pull(ours)[0] == [PATCH]
    assert "+one owning rank" in (ours / PATCH).read_text()


def test_what_cannot_be_merged_stays(there, ours):
    """A patch that misfits the checkout and a binary file took the lines here away."""
    there.apply(ours)
    append(ours / OWN, "# mine\n")
    (there.root / OWN).write_bytes(b"\0")
    assert there.pull(ours) == ([OWN], {OWN: OWN}, [])
    assert (ours / OWN).read_text().endswith("# mine\n")
    replace(there.root / DOC, "one owner rank", "one owning rank")
    replace(ours / PATCH, "\n ", "\n other ")
    with pytest.raises(WrongTarget, match="does not fit"):
        there.pull(ours)


def test_edits_that_left_this_repository(there, ours, face):
    """`pull` said "no edits", and `apply` overwrote them."""
    there.apply(ours)
    append(there.root / OWN, "# an edit\n")
    new = "torch/optim/_muon_engine/added.py"
    (there.root / new).write_text("# new\n")
    assert there.pull(ours)[0] == [new, OWN]
    git(ours, "stash", "-qu")
    words = ("--checkout", there.root)
    commit_all(there.root, "edits")
    assert face("apply", *words, root=ours).code == 3
    assert there.pull(ours)[0] == [new, OWN]
    # A later edit of the same line is no conflict.
    replace(there.root / OWN, "# an edit\n", "# another edit\n")
    assert there.pull(ours) == ([OWN], {}, [])
    assert face("apply", *words, root=ours).code == 0
    assert (there.root / OWN).read_text().endswith("# another edit\n")
    assert (there.root / new).exists()


@pytest.mark.parametrize("count", [7, 12])
def test_an_edit_of_an_earlier_form(ours, checkout, small, tmp_path, face, count):
    """A fork that has the first commits of a series lacks later ones. `pull` took that for removed lines."""
    face("apply", "--checkout", checkout, root=ours)
    mails = tmp_path / "series"
    face("export", "--checkout", checkout, "--out", mails, "--stack", root=ours)
    fork = tmp_path / "fork"
    run("git", "clone", "--quiet", small, fork)
    run("git", "am", "--quiet", *sorted(mails.glob("*.patch"))[:count], cwd=fork)
    before = (ours / MUON).read_text()
    append(fork / MUON, "\n\n# The end\n")
    done = face("pull", "--checkout", fork, root=ours)
    assert done.code == 0, done
    assert "missing there" not in done.out
    assert (ours / MUON).read_text() == before + "\n\n# The end\n"
    done = face("pull", "--checkout", fork, root=ours)
    assert "nothing to take" in done.out
