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


KILLS = int(os.environ.get("MUON_TEST_KILLS", "2"))
# The tool starts git in a session of its own. Half of the kills reach git, too.
BOTH = """
import subprocess, sys
real = subprocess.Popen
subprocess.Popen = lambda *a, **k: real(*a, **k | {"start_new_session": False})
sys.path.insert(0, sys.argv.pop(1))
from tools.overlay.cli import main
sys.exit(main(sys.argv[1:]))
"""


def prepare(ours, command, target, number):
    """Bring a target to where a command begins, kill the command, and repeat it until it is done."""
    tool = (sys.executable, ours / "setup_overlay.py")
    began = time.monotonic()
    run(*tool, "apply", *target)
    seconds = time.monotonic() - began
    if command == "apply":
        run(*tool, "revert", *target)
    elif command == "update":
        append(ours / OWN, "# newer\n" * 9)
        commit_all(ours)
    name = "revert" if command == "revert" else "apply"
    killed = (sys.executable, "-c", BOTH, ours) if number % 2 == 0 else tool
    process = subprocess.Popen(
        [str(word) for word in (*killed, name, *target)], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(random.Random(f"{command}{number}").uniform(0.2, 1.1) * seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    yield  # it may look at what there is
    for _ in range(9):
        done = run(*tool, name, *target, check=False)
        if done.code == 0:
            return
        # git names the lock that a killed git has left.
        locks = re.findall(r"'([^']*\.lock)'", done.err)
        assert locks, done
        time.sleep(0.2)  # a git that was not killed ends
        for lock in locks:
            Path(lock).unlink(missing_ok=True)
    raise AssertionError(done)


each_kill = pytest.mark.parametrize(
    ("command", "number"),
    [(name, n) for name in ("apply", "update", "revert") for n in range(KILLS)],
)


@each_kill
def test_checkout(fork, ours, on, command, number):
    base = tree_of(fork)
    for _ in prepare(ours, command, ("--checkout", fork), number):
        pass
    assert git(fork, "status", "--porcelain") == ""
    if command != "revert":
        assert (fork / OWN).read_text() == (ours / OWN).read_text()
        on("revert")
    assert tree_of(fork) == base
    assert git(fork, "status", "--porcelain") == ""


@each_kill
def test_installed(installed, ours, tool, command, number):
    before = snapshot(installed.site)
    target = ("--python", installed.python)
    for _ in prepare(ours, command, target, number):
        # Python has the stock torch or the overlay, whole.
        where = "import torch.optim._muon as muon; print(muon.__file__)"
        assert MUON in run(installed.python, "-c", where).out
    if command != "revert":
        tool(ours, "status", *target, says=["as in this"])
        tool(ours, "revert", *target)
    assert snapshot(installed.site) == before
