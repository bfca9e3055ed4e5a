"""A command is killed at a random moment, with the git that it runs; repeating it leads to the end.

MUON_TEST_KILLS is the number of kills into each command.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from overlay.conftest import append, commit_all, git, MUON, OWN, run, snapshot, tree_of


KILLS = int(os.environ.get("MUON_TEST_KILLS", "3"))
# The tool starts git in a session of its own. Half of the kills reach git, too.
BOTH = """
import subprocess, sys
real = subprocess.Popen
subprocess.Popen = lambda *a, **k: real(*a, **k | {"start_new_session": False})
sys.path.insert(0, sys.argv.pop(1))
from tools.overlay.cli import main
sys.exit(main(sys.argv[1:]))
"""


def killed(root, words, seconds, *, with_git):
    command = [root / "setup_overlay.py"]
    if with_git:
        command = ["-c", BOTH, root]
    process = subprocess.Popen(
        [sys.executable, *map(str, [*command, *words])], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(root, words, fork):
    """Repeat it. git names the lock that a killed git has left."""
    for _ in range(9):
        done = run(sys.executable, root / "setup_overlay.py", *words, check=False)
        if done.code == 0:
            return
        locks = re.findall(r"'([^']*\.lock)'", done.err)
        assert locks, done
        time.sleep(0.2)  # a git that was not killed ends
        for lock in locks:
            Path(lock).unlink(missing_ok=True)
    raise AssertionError(done)


def timed(root, words):
    began = time.monotonic()
    run(sys.executable, root / "setup_overlay.py", *words)
    return time.monotonic() - began


@pytest.mark.parametrize("number", range(KILLS))
@pytest.mark.parametrize("command", ["apply", "update", "revert"])
def test_checkout(fork, ours, command, number):
    rng = random.Random(f"{command}{number}")
    base = tree_of(fork)
    apply, revert = ([each, "--checkout", fork] for each in ("apply", "revert"))
    seconds = timed(ours, apply)
    if command == "apply":
        git(fork, "reset", "-q", "--hard", "origin/2.13.0")
    elif command == "update":
        append(ours / OWN, "# newer\n" * 9)
        commit_all(ours)
    words = revert if command == "revert" else apply
    killed(ours, words, rng.uniform(0.2, 1.1) * seconds, with_git=number % 2 == 0)
    finish(ours, words, fork)
    assert git(fork, "status", "--porcelain") == ""
    if command != "revert":
        assert (fork / OWN).read_text() == (ours / OWN).read_text()
        finish(ours, revert, fork)
    assert tree_of(fork) == base
    assert git(fork, "status", "--porcelain") == ""


@pytest.mark.parametrize("number", range(KILLS))
@pytest.mark.parametrize("command", ["apply", "update", "revert"])
def test_installed(installed, ours, command, number):
    rng = random.Random(f"{command}{number}")
    before = snapshot(installed.site)
    apply, revert = (
        [each, "--python", installed.python] for each in ("apply", "revert")
    )
    seconds = timed(ours, apply)
    if command == "apply":
        run(sys.executable, ours / "setup_overlay.py", *revert)
    elif command == "update":
        append(ours / OWN, "# newer\n")
    words = revert if command == "revert" else apply
    killed(ours, words, rng.uniform(0.3, 1.1) * seconds, with_git=True)
    where = "import torch.optim._muon as muon; print(muon.__file__)"
    # Python has the stock torch or the overlay, whole.
    assert MUON in run(installed.python, "-c", where).out
    finish(ours, words, installed.site)
    if command != "revert":
        assert (
            "as in this"
            in run(sys.executable, ours / "setup_overlay.py", "status", *apply[1:]).out
        )
        finish(ours, revert, installed.site)
    assert snapshot(installed.site) == before
