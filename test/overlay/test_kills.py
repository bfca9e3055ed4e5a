"""A command is killed at a random moment; the next one finds all in order.

MUON_TEST_KILLS is the number of kills into each command.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from overlay.conftest import append, commit_all, copy_tools, git, git_status, MUON, OWN
from overlay.conftest import run, snapshot
from tools.overlay.wheel import find_wheel


# Says when the first write begins, and stretches the writes, so that kills hit them.
SLOWLY = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from tools.overlay import cli, files, git, worktree
begun = []
def slow(real):
    def call(*args, **kwargs):
        time.sleep(0.004 * bool(begun))
        return real(*args, **kwargs)
    return call
def first(real):
    def call(*args, **kwargs):
        if not begun:
            begun.append(print("begins", flush=True))
        return real(*args, **kwargs)
    return call
for name in ("replace", "unlink", "link", "mkdir", "rmdir", "fsync"):
    setattr(os, name, slow(getattr(os, name)))
popen = slow(git.subprocess.Popen)
# Half of the kills reach git, which the tool starts in a session of its own.
spare = os.environ.get("MUON_KILL_GIT") != "1"
git.subprocess.Popen = lambda *a, **k: popen(*a, **k | {"start_new_session": spare})
files.write = first(files.write)
worktree.Worktree.move = first(worktree.Worktree.move)
sys.exit(cli.main(sys.argv[2:]))
"""
KILLS = int(os.environ.get("MUON_TEST_KILLS", "2"))
EDIT = "# a user's edit\n"
USERS = ("torch/optim/sgd.py", "torch/optim/user_file.py")
PART = "torch/optim/_muon_engine/part_{}.py"


@pytest.fixture
def tiny(tmp_path):
    """An overlay of few files."""
    root = tmp_path / "tiny"
    copy_tools(root)
    (root / PART).parent.mkdir(parents=True)
    for rel in (MUON, OWN, *map(PART.format, range(12))):
        (root / rel).write_text(f"import _muon_engine  # {rel}\n" * 9)
    commit_all(root, "older")
    return root


def newer(root):
    append(root / OWN, "# newer\n")
    (root / PART.format(0)).rename(root / PART.format("new"))
    commit_all(root, "newer")


def tree(root):
    """The files that a user sees."""
    texts, skipped = snapshot(root), {"__pycache__", ".muon_overlay"}
    return {rel: t for rel, t in texts.items() if not skipped & {*rel.split("/")}}


def scrap(root):
    """Locks and halves that no finished command leaves."""
    return [*root.rglob("*.muon-new"), *root.rglob("*.lock")]


class Case:
    """A target in the state before a command."""

    def __init__(self, root, overlay, kind, where):
        self.root, self.overlay, self.options = root, overlay, [kind, str(where)]

    def run(self, *words):
        face = self.overlay / "setup_overlay.py"
        run(sys.executable, face, words[0], *self.options, *words[1:])

    def run_slowly(self, *words, after=None, git_too=False):
        """Seconds since the first write, and whether the command was killed after ``after``."""
        command = [sys.executable, "-c", SLOWLY, self.overlay, words[0]]
        with subprocess.Popen(
            [*command, *self.options, *words[1:]], start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "MUON_KILL_GIT": str(int(git_too))},
        ) as process:  # fmt: skip
            while (line := process.stdout.readline()) != "begins\n":
                assert line, "the command ended before its first write"
            began = time.monotonic()
            try:
                process.communicate(timeout=after)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait(30)
            return time.monotonic() - began, code == -signal.SIGKILL

    def copy(self, place, *, back=False):
        for folder in (self.root, self.overlay):
            source, target = folder, place / folder.name
            if back:
                source, target = target, source
                shutil.rmtree(folder)
            shutil.copytree(source, target, symlinks=True)


@pytest.fixture
def case(request, kind, tiny, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    if kind == "--checkout":
        where = root = request.getfixturevalue("checkout")
    else:
        where = request.getfixturevalue("installed")
        root = find_wheel(where).root
    return Case(root, tiny, kind, where)


WORDS = {
    "apply": ["apply"], "update": ["apply"], "revert": ["revert"], "pull": ["pull"],
}  # fmt: skip
CASES = [("--checkout", command) for command in WORDS]
CASES += [("--python", command) for command in ("apply", "update", "revert")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "command"), CASES)
def test_killed_at_random(case, tmp_path, kind, command):
    """A killed `apply` left index.lock, and a killed `apply` its manifest's half."""
    on_git = kind == "--checkout"
    for rel in USERS:
        with open(case.root / rel, "a") as file:
            file.write(EDIT)
    if on_git:
        run("git", "add", USERS[0], cwd=case.root)
        # git writes a file in ten milliseconds, so that kills hit it between two.
        (case.root / ".git/info/attributes").write_text("* filter=slow\n")
        git(case.root, "config", "filter.slow.smudge", "sleep 0.01; cat")
    stock = tree(case.root)
    if command in ("update", "revert", "pull"):
        case.run("apply")
    if command == "update":
        newer(case.overlay)
    if command == "pull":
        append(case.root / OWN, EDIT)
    before, saved = tree(case.root), tmp_path / "saved"
    case.copy(saved)
    # The same command again, or the opposite one.
    other = {"revert": "apply", "pull": "pull"}.get(command, "revert")
    spent, _ = case.run_slowly(*WORDS[command])
    after_of = {"apply": before, command: tree(case.root), "revert": stock}
    rng, hit, halves = random.Random(command), 0, 0
    for number in range(4 * KILLS):
        if hit == KILLS:
            break
        case.copy(saved, back=True)
        git_too = bool(number // 2 % 2)
        when = {"after": rng.uniform(0, spent), "git_too": git_too}
        hit += case.run_slowly(*WORDS[command], **when)[1]
        found = tree(case.root)
        halves += found not in (before, after_of[command])
        for rel, text in found.items():
            after = after_of[command].get(rel) or before.get(rel, b"")
            begun = git_too and on_git and after.startswith(text)
            if not rel.endswith(".muon-new"):
                assert begun or text in (before.get(rel), after), rel
        follows = (command, other)[number % 2]
        case.run(*WORDS[follows])
        assert tree(case.root) == after_of[follows]
        assert scrap(case.root) == []
        if command == "pull":
            assert (case.overlay / OWN).read_text().endswith(EDIT)
        if on_git:
            run("git", "fsck", "--connectivity-only", cwd=case.root)
            assert USERS[0] in git(case.root, "diff", "--cached", "--name-only")
            if command != "pull":
                assert git_status(case.root) == f"M  {USERS[0]}\n?? {USERS[1]}\n"
    print(f"{kind}, {command}: {hit} killed, {halves} half done")
