"""`pull`: edits in a checkout come back into this repository."""

import re
import shlex

import pytest
from overlay.conftest import append, BASE, commit_all, git_status, MUON, OWN, run
from overlay.conftest import snapshot
from tools.overlay import patches, payload
from tools.overlay.checkout import Checkout


DOC = "docs/source/optim.md"


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("committed", [False, True])
def test_whole_files(there, ours, committed):
    there.apply(ours, commit=committed)
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
    assert there.apply(ours).written == []
    assert there.status(ours)["state"] == "current"
    there.revert(ours, commit=committed)
    assert git_status(there.root) == ""


def test_hunks(there, ours):
    there.apply(ours)
    path = there.root / DOC
    replace(path, "one owner rank", "one owning rank")
    replace(path, "## Distributed Muon", "## Muon on many ranks")
    assert there.pull(ours) == (["patches/0001-docs-distributed-muon.patch"], {}, [])
    patch = patches.series(payload.read(ours))[DOC]
    # As little context as before: a line before it and one after.
    hunk = patch.hunks.splitlines()
    first = [line[:1] for line in (hunk[3], hunk[4], hunk[-2], hunk[-1])]
    assert first == [b" ", b"+", b"+", b" "]
    assert there.apply(ours).written == []
    assert "owning" in path.read_text()
    there.revert(ours)
    assert git_status(there.root) == ""


def test_hunks_have_as_much_context_as_they_need(there, ours):
    """A line of context that occurs twice would let the hunk land elsewhere."""
    path = there.root / "torch/testing/_internal/common_optimizers.py"
    stock = path.read_text()
    there.apply(ours)
    text = path.read_text()
    (hunk,) = (n for n, line in enumerate(text.splitlines()) if "flatten" in line)
    replace(path, text.splitlines()[hunk], text.splitlines()[hunk] + "  # an edit")
    # Other lines of upstream's file are not ours.
    path.write_text(f"# somebody's\n{path.read_text()}# somebody's\n")
    (name,), _, _ = there.pull(ours)
    assert "somebody" not in (ours / name).read_text()
    hunk = (ours / name).read_text().split("@@\n")[1]
    lines = [line[1:] for line in hunk.splitlines() if line[:1] in " -"]
    assert stock.count("\n".join(lines)) == 1


@pytest.mark.parametrize("rel", [OWN, DOC])
def test_edits_on_both_sides_are_merged(there, ours, rel):
    there.apply(ours)
    here = ours / (rel if rel == OWN else "patches/0001-docs-distributed-muon.patch")
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
    assert there.apply(ours).written == [rel]
    assert "# there" in (there.root / rel).read_text()
    assert there.status(ours)["state"] == "current"


@pytest.mark.parametrize("rel", [OWN, DOC])
def test_overlapping_edits_have_markers(there, ours, rel, face):
    there.apply(ours)
    patch = ours / "patches/0001-docs-distributed-muon.patch"
    old = (ours / OWN).read_text().splitlines()[0] if rel == OWN else "Distributed Muon"
    replace(ours / OWN if rel == OWN else patch, old, "here")
    replace(there.root / rel, old, "there")
    append(there.root / MUON, "# there\n")
    place = rel if rel == OWN else patch.relative_to(ours).as_posix()
    done = face("pull", "--checkout", there.root, root=ours)
    assert (done.code, f"this repository:\n  {place}\n" in done.out) == (1, True)
    sides = (ours / place).read_text().split("<<<<<<< this repository\n")[1]
    mine, theirs = sides.split(">>>>>>> the checkout\n")[0].split("=======\n")
    assert ("here" in mine, "there" in theirs) == (True, True)
    assert (ours / MUON).read_text().endswith("# there\n")
    # A second run leaves the markers as they are.
    before = snapshot(ours)
    assert face("pull", "--checkout", there.root, root=ours).code == 1
    assert snapshot(ours) == before
    text = (ours / place).read_text()
    for sign in ("<<<<<<< this repository", "=======", ">>>>>>> the checkout"):
        text = re.sub(rf"(?m)^\+?{sign}\n", "", text)
    (ours / place).write_text(text)
    # The printed way out leads on.
    (line,) = (ln for ln in done.out.splitlines() if ln.startswith("  git"))
    run(*shlex.split(line))
    there.apply(ours)
    assert there.status(ours)["state"] == "current"


@pytest.mark.parametrize("named", [False, True])
def test_clone_of_a_fork_on_an_older_overlay(there, ours, tmp_path, named):
    """`pull` took the edit, and took newer lines of the overlay away."""
    there.apply(ours, commit=True)
    if not named:  # a commit made by hand
        run("git", "reset", "-q", "--soft", BASE, cwd=there.root)
        run("git", "commit", "-qm", "ours", cwd=there.root)
        clone = Checkout(there.root)  # it knows what was applied
    else:
        run("git", "clone", "-q", there.root, tmp_path / "clone")
        clone = Checkout(tmp_path / "clone")
    replace(ours / OWN, '"""', '"""Newer. ')
    commit_all(ours, "newer")
    assert clone.pull(ours) == ([], {}, [])
    append(clone.root / OWN, "# there\n")
    assert clone.pull(ours) == ([OWN], {}, [])
    text = (ours / OWN).read_text()
    assert '"""Newer. ' in text
    assert text.endswith("# there\n")
    assert clone.apply(ours, commit=True).written == [OWN]
    clone.revert(ours, commit=True)
    assert git_status(clone.root) == ""
    base = f"{BASE}~2" if named else "HEAD~3"
    assert run("git", "diff", base, cwd=clone.root).out == ""


def test_nothing_of_upstreams_is_taken(there, ours):
    assert there.pull(ours) == ([], {}, [])
    there.apply(ours)
    (there.root / "torch/optim/sgd.py").write_text("# somebody's\n")
    (there.root / "test/optim/test_sgd.py").write_text("# somebody's\n")
    assert there.pull(ours) == ([], {}, [])
    # A deleted file is named.
    (there.root / OWN).unlink()
    assert there.pull(ours) == ([], {}, [OWN])
    assert (ours / OWN).is_file()


def test_edits_that_left_this_repository(there, ours, face):
    """`pull` said "no edits", and `apply` overwrote them."""
    there.apply(ours)
    append(there.root / OWN, "# an edit\n")
    new = "torch/optim/_muon_engine/added.py"
    (there.root / new).write_text("# new\n")
    assert there.pull(ours)[0] == [new, OWN]
    run("git", "stash", "-qu", cwd=ours)
    words = ("--checkout", there.root)
    assert face("apply", *words, root=ours).code == 3
    assert there.pull(ours)[0] == [new, OWN]
    # A later edit of the same line is no conflict.
    replace(there.root / OWN, "# an edit\n", "# another edit\n")
    assert there.pull(ours) == ([OWN], {}, [])
    assert face("apply", *words, root=ours).code == 0
    assert (there.root / OWN).read_text().endswith("# another edit\n")
    assert (there.root / new).exists()


def test_what_is_no_source(there, ours, monkeypatch):
    there.apply(ours)
    for name in ("muon.core.1234", "muon_debug.log", "#muon.py#", "muon.py~"):
        (there.root / "torch/optim" / name).write_text("")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "echo")
    assert there.pull(ours) == ([], {}, [])
    replace(there.root / DOC, "one owner rank", "one owning rank")
    ((name, *_), _, _) = there.pull(ours)
    assert "+one owning rank" in (ours / name).read_text()
