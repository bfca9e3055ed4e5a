"""`pull`: edits in a checkout come back into this repository."""

import pytest
from tools.overlay import apply, patches, pull, revert, status, target
from tools.overlay.errors import Refused, WorkFailed


@pytest.fixture
def there(checkout):
    return target.find_checkout(checkout)


@pytest.fixture
def ours(overlay, shell):
    shell("git", "init", "-q", cwd=overlay)
    shell("git", "add", "--all", cwd=overlay)
    shell("git", "commit", "-qm", "the overlay", cwd=overlay)
    return overlay


def append(path, text):
    path.write_text(path.read_text() + text)


@pytest.mark.parametrize("committed", [False, True])
def test_whole_files(there, ours, shell, git_status, committed):
    apply.apply(there, ours, commit=committed)
    append(there.root / "torch/optim/_muon.py", "# an edit\n")
    added = there.root / "torch/optim/_muon_engine/added.py"
    added.write_text("# new\n")
    if committed:
        shell("git", "add", "--all", cwd=there.root)
        shell("git", "commit", "-qm", "edits", cwd=there.root)
    report = pull.pull(there, ours)
    rels = ["torch/optim/_muon.py", "torch/optim/_muon_engine/added.py"]
    assert (report.taken, report.missing) == (rels, [])
    for rel in rels:
        assert (ours / rel).read_bytes() == (there.root / rel).read_bytes()
    shown = git_status(ours)
    assert shown == f" M {rels[0]}\n?? {rels[1]}\n"
    assert pull.pull(there, ours).taken == []
    # Then `apply` and `revert` know the edits as the overlay's own.
    assert apply.apply(there, ours).changed == []
    assert status.status(there, ours).state == "current"
    revert.revert(there, commit=committed)
    assert git_status(there.root) == ""
    assert not added.exists()


def test_hunks(there, ours, git_status):
    apply.apply(there, ours)
    rel = "docs/source/optim.md"
    path = there.root / rel
    path.write_text(path.read_text().replace("one owner\nrank", "one owning\nrank", 1))
    text = path.read_text().replace("## Distributed Muon", "## Muon on many ranks")
    path.write_text(text)
    report = pull.pull(there, ours)
    assert report.taken == ["patches/0001-docs-distributed-muon.patch"]
    (patch,) = [p for p in patches.series(ours, "2.13.0") if rel in p.paths]
    assert patch.message.startswith("optim: document distributed Muon\n")
    # As short as it was: a line before it and one after.
    hunk = patch.hunks.splitlines()
    assert [hunk[3][:1], hunk[4][:1], hunk[-2][:1], hunk[-1][:1]] == [
        b" ", b"+", b"+", b" ",
    ]  # fmt: skip
    assert apply.apply(there, ours).changed == []
    assert path.read_text() == text
    revert.revert(there)
    assert git_status(there.root) == ""


def test_edits_here_are_not_overwritten(there, ours, snapshot):
    apply.apply(there, ours)
    append(ours / "torch/optim/muon.py", "# here\n")
    assert pull.pull(there, ours).taken == []
    append(there.root / "torch/optim/muon.py", "# there\n")
    append(there.root / "torch/optim/_muon.py", "# there\n")
    before = snapshot(ours)
    with pytest.raises(Refused, match="  torch/optim/muon.py\n") as caught:
        pull.pull(there, ours)
    assert "_muon.py" not in str(caught.value)
    assert snapshot(ours) == before


def test_hunks_edited_on_both_sides(there, ours, snapshot):
    apply.apply(there, ours)
    patch = ours / "patches/0001-docs-distributed-muon.patch"
    patch.write_text(patch.read_text().replace("+## Distributed", "+## Spread"))
    assert pull.pull(there, ours).taken == []
    path = there.root / "docs/source/optim.md"
    path.write_text(path.read_text().replace("## Distributed", "## Shared"))
    before = snapshot(ours)
    with pytest.raises(Refused, match="  docs/source/optim.md\n"):
        pull.pull(there, ours)
    assert snapshot(ours) == before


@pytest.mark.parametrize("dirty", [False, True])
def test_without_a_record(there, ours, shell, tmp_path, dirty):
    """A clone of a branch that has the overlay, or what came by `git am`."""
    apply.apply(there, ours, commit=True)
    shell("git", "clone", "-q", there.root, tmp_path / "clone")
    clone = target.find_checkout(tmp_path / "clone")
    append(clone.root / "torch/optim/muon.py", "# there\n")
    if dirty:  # what git here does not have could be lost
        append(ours / "torch/optim/muon.py", "# here\n")
        with pytest.raises(Refused, match="torch/optim/muon.py"):
            pull.pull(clone, ours)
    else:
        assert pull.pull(clone, ours).taken == ["torch/optim/muon.py"]


def test_nothing_of_upstreams_is_taken(there, ours):
    """A checkout without the overlay has files of the same names."""
    assert pull.pull(there, ours).taken == []
    (there.root / "torch/optim/sgd.py").write_text("# somebody's\n")
    (there.root / "test/optim").mkdir(parents=True, exist_ok=True)
    (there.root / "test/optim/test_sgd.py").write_text("# somebody's\n")
    assert pull.pull(there, ours).taken == []


def test_deleted_files_are_named(there, ours):
    apply.apply(there, ours)
    (there.root / "torch/optim/muon.py").unlink()
    report = pull.pull(there, ours)
    assert (report.taken, report.missing) == ([], ["torch/optim/muon.py"])
    assert (ours / "torch/optim/muon.py").is_file()


def test_history_that_is_cut_off(there, ours, shell, tmp_path):
    apply.apply(there, ours, commit=True)
    place = tmp_path / "shallow"
    shell("git", "clone", "-q", "--depth=1", f"file://{there.root}", place)
    with pytest.raises(WorkFailed, match="does not reach back"):
        pull.pull(target.find_checkout(place), ours)


def test_older_overlay_without_a_record_is_brought_up_to_date(
    there, ours, shell, git_status, tmp_path
):
    """A fork's branch has it, and a colleague's clone: its texts are no edits."""
    apply.apply(there, ours, commit=True)
    shell("git", "clone", "-q", there.root, tmp_path / "clone")
    clone = target.find_checkout(tmp_path / "clone")
    append(ours / "torch/optim/muon.py", "# newer\n")
    shell("git", "commit", "-qam", "newer", cwd=ours)
    assert pull.pull(clone, ours).taken == []
    assert apply.apply(clone, ours, commit=True).changed == ["torch/optim/muon.py"]
    revert.revert(clone, commit=True)
    assert git_status(clone.root) == ""
    assert shell("git", "diff", "HEAD~3", cwd=clone.root).out == ""
