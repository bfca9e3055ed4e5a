"""Long commands with a line that lives, and their whole output in a log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from .errors import WorkFailed, WrongTarget


if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


_EVERY_S = 20.0


def run(
    command: Sequence[str],
    label: str,
    log: Path,
    *,
    timeout: float,
    cwd: Path | None = None,
) -> int:
    """Run it, show that it lives, return its exit code; its output goes to ``log``."""
    with open(log, "ab") as sink:
        sink.write(f"$ {' '.join(command)}\n".encode())
        sink.flush()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                cwd=cwd, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise WrongTarget(f"cannot run {command[0]}: {error.strerror}") from None
    print(f"{label} ...", flush=True)
    started = time.monotonic()
    try:
        while process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(_EVERY_S, timeout))
                break
            spent = time.monotonic() - started
            if spent > timeout:
                raise WorkFailed(f"{label}: stopped after {timeout:.0f} s")
            last = tail(log, 1).strip()[:100]
            print(f"{label} ... {spent:.0f} s  {last}", flush=True)
    except BaseException:
        _end(process)
        raise
    word = "done" if process.returncode == 0 else f"failed ({process.returncode})"
    print(f"{label}: {word} in {time.monotonic() - started:.1f} s", flush=True)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with its children: a build would leave dozens of compilers."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            os.killpg(process.pid, sign)
            process.wait(5)


def tail(log: Path, count: int = 30) -> str:
    """The last lines; of a long log, only its end is read."""
    with open(log, "rb") as source:
        source.seek(max(0, log.stat().st_size - 100_000))
        text = source.read().decode(errors="replace")
    return "\n".join("  " + line for line in text.splitlines()[-count:])
