"""``examples/processes.py`` hands back what its processes return, and leaves none of them behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
from examples import processes
from examples.processes import Failed, Processes
from tools.overlay.repo import ROOT


# Prints the ids of its processes, which wait.
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
    return factor * place.rank, place.size, os.environ.get("PROCESSES_ARE_TOLD")


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


def gone(pid):
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_results_by_rank_time_after_time(monkeypatch):
    monkeypatch.setenv("PROCESSES_ARE_TOLD", "so")
    with Processes(3) as started:
        for factor in (1, 10):
            found = started.run(ranks, factor, seconds=60)
            assert found == [(factor * rank, 3, "so") for rank in range(3)]
        pids = [process.pid for process in started.processes]
        folder = started.folder.name
    assert all(map(gone, pids))
    assert not os.path.exists(folder)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises_on_one, "(?s)rank 1 of 2: Traceback.*KeyError: 'the culprit'"),
        (ends_on_one, "rank 1 of 2: the process ended"),
        (waits, "rank 0 of 2: no answer in time"),
    ],
)
def test_first_that_fails_ends_the_others(monkeypatch, function, words):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.2)
    with pytest.raises(Failed, match=words):
        with Processes(2) as started:
            pids = [process.pid for process in started.processes]
            started.run(function, seconds=60 if function is not waits else 0.5)
    assert all(map(gone, pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_with_who_started_them(tmp_path, number):
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, tmp_path / "waits.py", ROOT / "examples"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        # Both pipes are open as long as one of the processes runs.
        _, err = process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert all(map(gone, pids))
    assert "Traceback" not in err
