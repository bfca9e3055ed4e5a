"""Faults that carriers of the patch met in their forks."""

import re
import shutil

import pytest
from overlay.conftest import append, BASE, branch, C10D, commit_all, everything, fails
from overlay.conftest import git, git_status, leads_on, MUON, OTHER, OWN, replace
from overlay.conftest import run, write_record
from overlay.conftest import SUBJECTS, tree_of
from tools.overlay import payload, taken
from tools.overlay.payload import ROOT


@pytest.fixture
def squashed(checkout, on, ours, tmp_path):
    """A colleague's clone of a fork that merged the overlay as one commit of its own words."""
    git(checkout, "switch", "-q", "-c", "topic")
    on("apply", "--commit", root=ours)
    git(checkout, "switch", "-q", "main")
    git(checkout, "merge", "-q", "--squash", "topic")
    git(checkout, "commit", "-q", "-m", "Distributed Muon (#12)")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", checkout, clone)
    return clone


def test_squash_with_words_of_the_fork(squashed, on, ours, face, tmp_path):
    """`status` saw no overlay, `revert` left all files, and `export` wrote an empty mail."""
    shown = on("status", where=squashed, root=ours)
    assert "as in this repository" in shown
    assert git(ours, "rev-parse", "HEAD") in shown
    out = tmp_path / "mails"
    on("export", "--out", out, where=squashed, root=ours)
    assert all(mail.stat().st_size for mail in out.iterdir())
    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", squashed, other)
    git(other, "reset", "-q", "--hard", "HEAD~1")
    git(other, "am", "-q", *out.iterdir())
    assert tree_of(other) == tree_of(squashed)
    # An edit there is an edit of the overlay.
    append(squashed / OWN, "# there\n")
    assert f"took {OWN}" in on("pull", where=squashed, root=ours)
    assert (ours / OWN).read_text().endswith("# there\n")
    git(squashed, "restore", OWN)
    # A newer overlay replaces it, without --force.
    commit_all(ours, "newer")
    on("apply", "--commit", where=squashed, root=ours)
    assert (squashed / OWN).read_bytes() == (ours / OWN).read_bytes()
    on("revert", "--commit", where=squashed, root=ours)
    assert tree_of(squashed) == tree_of(squashed, "HEAD~3")


def test_squash_of_an_older_overlay_with_an_edit(squashed, on, ours):
    """Every file differed from this repository, or was edited: `pull` took newer lines away."""
    append(squashed / OWN, "# there\n")
    commit_all(squashed, "an edit")
    first = (ours / OWN).read_text()
    (ours / OWN).write_text(f"# newer\n{first}")
    append(ours / MUON, "# newer\n")
    commit_all(ours, "newer")
    shown = on("status", where=squashed, root=ours)
    assert git(ours, "rev-parse", "HEAD~1") in shown
    assert f"changed   {OWN}" in shown
    on("pull", where=squashed, root=ours)
    assert (ours / OWN).read_text() == f"# newer\n{first}# there\n"
    assert (ours / MUON).read_text().endswith("# newer\n")


@pytest.mark.parametrize("how", ["squashed", "applied"])
def test_edits_of_all_files(squashed, checkout, on, ours, tmp_path, how):
    """A fork formats all files in its own way. `status` saw no overlay."""
    where = squashed
    if how == "applied":
        where = checkout
        git(checkout, "reset", "-q", "--hard", "topic")
    base = tree_of(where, "HEAD~1" if how == "squashed" else BASE)
    for rel in payload.read(ours).whole:
        append(where / rel, "# in the fork's style\n")
    commit_all(where)
    assert git(ours, "rev-parse", "HEAD") in on("status", where=where, root=ours)
    on("apply", where=where, root=ours, code=3, words=["pull"])
    on("revert", where=where, root=ours)
    assert tree_of(where) == base


def test_commits_with_other_messages(checkout, on, ours):
    """`revert` left the hunks of the first commit."""
    tree, start = tree_of(checkout), git(checkout, "rev-parse", "HEAD")
    on("apply", "--commit", root=ours)
    commits = git(checkout, "rev-list", "--reverse", f"{BASE}..HEAD").split()
    git(checkout, "reset", "-q", "--hard", BASE)
    for number, commit in enumerate(commits):
        git(checkout, "cherry-pick", commit)
        git(checkout, "commit", "-q", "--amend", "-m", f"part {number}")
        if number == 3:  # a fork has commits of its own in between
            append(checkout / "torch/optim/sgd.py", "# the fork's\n")
            commit_all(checkout)
    shutil.rmtree(checkout / ".git/refs/worktree", ignore_errors=True)
    shutil.rmtree(checkout / ".git/logs/refs/worktree", ignore_errors=True)
    on("revert", "--commit", root=ours)
    git(checkout, "restore", f"--source={start}", "torch/optim/sgd.py")
    assert tree_of(checkout, commit_all(checkout)) == tree


def test_hunk_that_the_fork_changed(checkout, on, face, tmp_path):
    """`apply --force` and `export` failed, too: there was no way out."""
    text = (checkout / C10D).read_text()
    lines = (ROOT / "patches/0002-local-groups-named-by-ranks.patch").read_text()
    line = re.findall(r"(?m)^-(?!--)(.+)$", lines)[0]
    assert line in text
    (checkout / C10D).write_text(text.replace(line, f"{line}  # the fork's"))
    tree = tree_of(checkout, commit_all(checkout))
    errors = on("apply", "--commit", code=2, words=["does not fit", "--force"])
    words = ("export", "--checkout", checkout, "--out", tmp_path / "out")
    fails(face(*words), 2, "does not fit", "--force")
    assert "does not fit" in face("diff", "--checkout", checkout).err
    leads_on(errors)
    assert (checkout / MUON).read_bytes() == (ROOT / MUON).read_bytes()
    assert f"{line}  # the fork's" in (checkout / C10D).read_text()
    assert f"misfit    {C10D}" in on("status")
    fails(face(*words, "--force"), 0, "does not fit")
    on("revert", "--commit")
    assert tree_of(checkout) == tree


@pytest.mark.parametrize("keep", ["here", "both"])
def test_pull_after_a_resolved_conflict(checkout, on, ours, face, keep):
    """It conflicted again, and wrote markers into the resolution that was committed."""
    on("apply", "--commit", root=ours)
    for where in (ours, checkout):
        text = (where / OWN).read_text()
        (where / OWN).write_text(text.replace('"""', f'"""{where.name}. ', 1))
        commit_all(where, "an edit")
    words = ("pull", "--checkout", checkout)
    assert face(*words, root=ours).code == 1
    text = (ours / OWN).read_text()
    for sign in ("<<<<<<< .*", "=======", ">>>>>>> .*"):
        text = re.sub(rf"(?m)^{sign}\n", "", text)
    if keep == "here":
        text = text.replace('"""pytorch. ', "# ", 1)
    (ours / OWN).write_text(text)
    commit_all(ours, "resolved")
    assert "nothing to take" in on("pull", root=ours)
    # A later edit is taken, and that one only.
    append(checkout / OWN, "# later\n")
    assert f"took {OWN}" in on("pull", root=ours)
    assert (ours / OWN).read_text() == f"{text}# later\n"
    commit_all(checkout, "later")
    on("apply", "--commit", root=ours)
    assert (checkout / OWN).read_text() == f"{text}# later\n"


@pytest.mark.parametrize("place", [OWN, "patches/0001-docs-distributed-muon.patch"])
def test_markers_are_not_applied(checkout, installed, on, ours, face, place):
    """A half-resolved file was applied."""
    sign = "+" if place.startswith("patches") else ""
    before = everything(checkout)
    append(ours / place, f"{sign}=======\n{sign}>>>>>>> the checkout\n")
    words = ["conflict", f"  {place}"]
    for target in ("--checkout", checkout), ("--python", installed):
        fails(face("apply", *target, root=ours), 3, *words)
    fails(face("export", "--checkout", checkout, "--out", "x", root=ours), 3, *words)
    fails(face("wheel", "--dry-run", root=ours), 3, *words)
    assert everything(checkout) == before
    on("status", root=ours)


def test_export_of_a_sha256_repository(checkout, on, tmp_path):
    """Its mails had no blobs: "ambiguous argument"."""
    place = tmp_path / "sha256"
    shutil.copytree(checkout, place, ignore=shutil.ignore_patterns(".git"))
    git(tmp_path, "init", "-q", "-b", "main", "--object-format=sha256", place)
    tree = tree_of(place, commit_all(place))
    on("apply", "--commit", where=place)
    expected = tree_of(place)
    on("export", "--out", tmp_path / "out", "--stack", where=place)
    on("revert", "--commit", where=place)
    assert tree_of(place) == tree
    git(place, "am", "-q", *sorted((tmp_path / "out").iterdir()))
    assert tree_of(place) == expected
    git(place, "reset", "-q", "--soft", BASE)
    git(place, "commit", "-q", "-m", "squashed")
    on("revert", "--commit", where=place)
    assert tree_of(place) == tree


def test_export_of_a_repository_that_may_only_be_read(checkout, on, tool, tmp_path):
    """It wrote objects there: "insufficient permission"."""
    on("apply", "--commit")
    folders = [checkout, *(path for path in checkout.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        # root may write anywhere: then the objects tell.
        before = sorted((checkout / ".git").rglob("*"))
        out = tmp_path / "out"
        done = tool("export", "--checkout", checkout, "--out", out, "--stack")
        assert (done.code, done.err) == (0, "")
        assert len([*out.iterdir()]) == len(SUBJECTS)
        assert sorted((checkout / ".git").rglob("*")) == before
    finally:
        for folder in folders:
            folder.chmod(0o755)


@pytest.mark.parametrize("flag", ["assume-unchanged", "skip-worktree"])
@pytest.mark.parametrize("edited", [False, True])
def test_flags_have_a_way_out(checkout, on, flag, edited):
    """git's words were "not uptodate. Cannot merge"."""
    tree = tree_of(checkout)
    git(checkout, "update-index", f"--{flag}", MUON)
    if edited:
        append(checkout / MUON, "# mine\n")
    leads_on(on("apply", "--commit", code=3, words=[f"--no-{flag}", f"  {MUON}"]))
    if edited:
        leads_on(on("apply", "--commit", code=3, words=["stash"]))
    on("apply", "--commit")
    git(checkout, "update-index", f"--{flag}", OWN)
    append(checkout / OWN, "# hidden\n")
    assert f"would take {OWN}" in on("pull", "--dry-run")
    run("sed", "-i", "$d", checkout / OWN)
    leads_on(on("revert", "--commit", code=3, words=[f"--no-{flag}"]))
    on("revert", "--commit")
    assert (git_status(checkout), tree_of(checkout)) == ("", tree)
    if edited:
        git(checkout, "stash", "pop", "-q")
        assert (checkout / MUON).read_text().endswith("# mine\n")


@pytest.mark.parametrize("step", ["rebase", "merge"])
@pytest.mark.parametrize("version", ["2.13.0a0", "2.16.0a0"])
def test_new_base_where_the_overlays_side_was_taken(checkout, on, face, version, step):
    """Upstream's new lines were gone, and nothing said so."""
    on("apply", "--commit")
    texts = {MUON: OTHER, "version.txt": f"{version}\n"}
    branch(checkout, "newer", texts, BASE)
    if step == "rebase":
        git(checkout, "rebase", "-q", "-X", "theirs", "newer", "main")
    else:
        git(checkout, "switch", "-q", "main")
        git(checkout, "merge", "-q", "-X", "ours", "-m", "newer", "newer")
    assert (checkout / MUON).read_bytes() == (ROOT / MUON).read_bytes()
    words = [f"{MUON} there is of no release"]
    if version == "2.16.0a0":
        words.append("untested on 2.16.0a0")
    done = fails(face("apply", "--checkout", checkout), 0, *words)
    assert "nothing to do" in done.out
    assert words[0] in on("status")


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0a0+git1234"])
def test_installed_torch_with_lines_of_its_own(make_installed, face, version):
    python = make_installed(version)
    site = python.parent / "site-packages"
    append(site / MUON, "# a vendor's fix\n")
    rels = ("torch/__init__.py", "torch/version.py", "torch/optim/__init__.py", MUON)
    write_record(site, rels)
    words = f"{MUON} there is of no release"
    for said in ("applied to", "nothing to do"):
        done = fails(face("apply", "--python", python), 0, words)
        assert said in done.out


def test_empty_mail_is_refused(checkout, on, tmp_path):
    """An import of a fork, which has no commit before the overlay, got a mail of 0 bytes."""
    on("apply")
    git(checkout, "checkout", "-q", "--orphan", "vendored")
    commit_all(checkout, "an import")
    out = ("--out", tmp_path / "out")
    on("export", *out, code=2, words=["no mail is needed"])
    assert "nothing says what was there before" in on("status")
    assert "nothing to do" in on("apply")


def test_edit_after_an_update(checkout, on, ours):
    """`pull` counted edits from what it had taken before the update, and conflicted."""
    lines = {where: f"# {where}\n" for where in ("here", "again", "there", "later")}
    on("apply", root=ours)
    append(checkout / OWN, lines["there"])
    commit_all(checkout)
    on("pull", root=ours)
    commit_all(ours)
    text = (ours / OWN).read_text()
    (ours / OWN).write_text(lines["here"] + text)
    commit_all(ours)
    on("apply", root=ours)
    (ours / OWN).write_text(lines["again"] + text)
    commit_all(ours)
    append(checkout / OWN, lines["later"])
    commit_all(checkout)
    assert f"took {OWN}" in on("pull", root=ours)
    assert (ours / OWN).read_text() == lines["again"] + text + lines["later"]


@pytest.mark.parametrize("is_squashed", [False, True])
def test_fork_with_the_first_commits_of_an_older_overlay(
    checkout, on, ours, is_squashed
):
    """The form that a file had before a later commit of the series looked like an edit."""
    base = git(checkout, "rev-parse", "HEAD")
    on("apply", root=ours)
    last = (checkout / MUON).read_bytes()
    # All but the features: the commits to DTensors.
    git(checkout, "reset", "-q", "--hard", f"HEAD~{len(SUBJECTS) - 7}")
    assert len((checkout / MUON).read_bytes()) < len(last)
    if is_squashed:
        git(checkout, "reset", "-q", "--soft", base)
        git(checkout, "commit", "-q", "-m", "Muon for DTensors (#12)")
    append(ours / MUON, "# newer\n")
    commit_all(ours)
    on("apply", root=ours)
    assert (checkout / MUON).read_bytes() == last + b"# newer\n"
    on("revert", root=ours)
    assert tree_of(checkout) == tree_of(checkout, base)


def test_record_of_pull_that_cannot_be_written(checkout, on, ours):
    """This repository had the edit, and the command said that nothing was written."""
    on("apply", root=ours)
    append(checkout / OWN, "# there\n")
    record = checkout / ".git" / taken.RECORD
    record.mkdir()
    on("pull", root=ours, code=1, words=["is a folder"])
    record.rmdir()
    record.write_text('{"torch": [1]}')  # of a disk that was full
    assert f"took {OWN}" in on("pull", root=ours)


@pytest.mark.parametrize("below", [False, True])
def test_upstream_took_the_first_commit(checkout, on, below):
    """`status` took it for an overlay, and `revert` removed upstream's commit."""
    on("apply")
    git(checkout, "reset", "-q", "--hard", BASE)
    first, *_ = git(checkout, "rev-list", "--reverse", "HEAD..ORIG_HEAD").split()
    git(checkout, "cherry-pick", first)
    git(checkout, "commit", "-q", "--amend", "-m", "c10d: names of local groups (#1)")
    if below:
        append(checkout / "torch/optim/sgd.py", "# upstream's\n")
        commit_all(checkout)
    tree = tree_of(checkout)
    assert "no overlay" in on("status")
    assert "nothing to do" in on("revert")
    on("apply")
    on("revert")
    assert tree_of(checkout) == tree


@pytest.mark.parametrize("where", ["there", "clone"])
def test_squash_of_an_overlay_that_was_not_committed_here(
    checkout, on, ours, tmp_path, where
):
    """Nothing but the texts of the other files names it."""
    start = tree_of(checkout)
    append(ours / OWN, "# not committed here\n")
    new = "torch/optim/_muon_engine/new.py"
    (ours / new).write_text("# new\n")
    on("apply", root=ours)
    git(checkout, "reset", "-q", "--soft", BASE)
    git(checkout, "commit", "-q", "-m", "Distributed Muon (#12)")
    if where == "clone":
        git(tmp_path, "clone", "-q", checkout, "clone")
        checkout = tmp_path / "clone"
    assert "as in this repository" in on("status", where=checkout, root=ours)
    (ours / new).unlink()
    git(ours, "restore", OWN)
    on("apply", where=checkout, root=ours, code=3, words=[f"  {OWN}\n"])
    assert new in on("pull", "--dry-run", where=checkout, root=ours)
    shown = on("revert", where=checkout, root=ours)
    git(checkout, "rm", "-q", "--ignore-unmatch", new)
    git(checkout, "commit", "-q", "--allow-empty", "-m", "x")
    assert tree_of(checkout) == start, shown


def test_conflict_of_a_binary_file(checkout, on, ours, face):
    """The second `pull` found nothing to take, and `apply` replaced the file."""
    on("apply", root=ours)
    append(ours / OWN, "# here\n")
    commit_all(ours)
    (checkout / OWN).write_bytes(b"\0")
    commit_all(checkout)
    for _ in range(2):
        assert face("pull", "--checkout", checkout, root=ours).code == 1
    on("apply", root=ours, code=3, words=["edits of the overlay"])


DOC, DOC_PATCH = "docs/source/optim.md", "patches/0001-docs-distributed-muon.patch"
# A line that the fork edits, and one that this repository edits.
LINES = {
    OWN: ("one owner rank for each matrix", "number of ranks that orthogonalize"),
    DOC: ("orthogonalizes whole momentum matrices", "once and sends every rank"),
}


@pytest.mark.parametrize("rel", LINES)
def test_lines_that_changed_here_after_a_pull(checkout, on, ours, rel):
    """`pull` took its own edit once more, and conflicted with what had become of it."""
    on("apply", root=ours)
    place = DOC_PATCH if rel == DOC else rel
    line, other = LINES[rel]
    replace(ours / place, other, f"{other} (here)")
    replace(checkout / rel, line, f"{line} (there)")
    commit_all(checkout, "an edit")
    assert f"took {place}" in on("pull", root=ours)
    commit_all(ours, "the edit")
    replace(ours / place, f"{line} (there)", f"{line} (reviewed)")
    commit_all(ours, "a review")
    assert "nothing to take" in on("pull", root=ours)
    on("apply", root=ours)
    assert f"{line} (reviewed)" in (checkout / rel).read_text()
