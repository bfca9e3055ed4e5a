"""Processes hand back what they return, and none of them is left."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from examples import processes
from examples.processes import Failed, Processes
from tools.overlay.repo import ROOT


# Says who is there, and waits.
WAITS = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from processes import leave_on_signals, Processes

def wait(place):
    os.write(1, f"{os.getpid()}\\n".encode())
    signal.pause()

if __name__ == "__main__":
    leave_on_signals()
    with Processes(2) as started:
        started.run(wait, seconds=600)
"""


def ranks(place, factor):
    return factor * place.rank, place.size


def environment(place, name):
    return os.environ.get(name)


def raises_on_one(place):
    if place.rank == 1:
        raise KeyError("the culprit")
    signal.pause()


def ends_on_one(place):
    if place.rank == 1:
        os._exit(3)
    signal.pause()


def waits(place):
    signal.pause()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.2)


def gone(pid):
    """Whether nobody has this number any more; one that has just ended may have it for a moment."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_results_by_rank_time_after_time():
    with Processes(3) as started:
        for factor in (1, 10):
            found = started.run(ranks, factor, seconds=60)
            assert found == [(0, 3), (factor, 3), (2 * factor, 3)]
        pids = [process.pid for process in started.processes]
        folder = started.folder.name
    assert all(map(gone, pids))
    assert not os.path.exists(folder)


def test_environment_of_the_moment(monkeypatch):
    for value in ("one", "other"):
        monkeypatch.setenv("PROCESSES_ARE_TOLD", value)
        with Processes(1) as started:
            assert started.run(environment, "PROCESSES_ARE_TOLD", seconds=60) == [value]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises_on_one, "(?s)rank 1 of 2: Traceback.*KeyError: 'the culprit'"),
        (ends_on_one, "rank 1 of 2: the process ended"),
        (waits, "rank 0 of 2: no answer in time"),
    ],
)
def test_first_that_fails_ends_the_others(impatient, function, words):
    with pytest.raises(Failed, match=words):
        with Processes(2) as started:
            pids = [process.pid for process in started.processes]
            started.run(function, seconds=60 if function is not waits else 0.5)
    assert all(map(gone, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_with_who_started_them(tmp_path, number):
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, tmp_path / "waits.py", ROOT / "examples"]
    # A path of pytest's own would be too long for a socket in it.
    temporary = tempfile.mkdtemp()
    environ = {**os.environ, "TMPDIR": temporary}
    with subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        # Both pipes are open as long as one of the processes is there.
        _, err = process.communicate(timeout=60)
        assert process.returncode == (
            -number if number == signal.SIGKILL else 128 + number
        )
    assert all(map(gone, pids))
    assert "Traceback" not in err
    if number != signal.SIGKILL:
        assert not list(Path(temporary).glob("processes-*"))
    shutil.rmtree(temporary)
