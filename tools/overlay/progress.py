"""Long commands with a line that lives, and their whole output in a log."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from .errors import WorkFailed, WrongTarget


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


_FRAMES = "|/-\\"
_PLAIN_EVERY_S = 20.0


def run(
    command: Sequence[str],
    label: str,
    log: Path,
    *,
    timeout: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run it, show that it lives, return its exit code; its output goes to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as sink:
        sink.write(f"$ {' '.join(command)}\n".encode())
        sink.flush()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                cwd=cwd, env=env, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise WrongTarget(f"cannot run {command[0]}: {error.strerror}") from None
    try:
        _show_until_done(process, label, log, timeout)
    except BaseException:
        _end(process)
        raise
    return process.returncode


def _show_until_done(
    process: subprocess.Popen[bytes], label: str, log: Path, timeout: float
) -> None:
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if not live:
        print(f"{label} ...", flush=True)
    started = said = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1 if live else 0.5)
        spent = time.monotonic() - started
        if process.returncode is not None:
            break
        if spent > timeout:
            raise WorkFailed(f"{label}: stopped after {timeout:.0f} s")
        last = tail(log, 1).strip()
        if live:
            frame = _FRAMES[int(10 * spent) % 4]
            width = shutil.get_terminal_size().columns - 1
            text = f"{frame} {label} {spent:5.0f} s  {last}"[:width]
            print(f"\r\033[K{text}", end="", flush=True)
        elif time.monotonic() - said > _PLAIN_EVERY_S:
            said = time.monotonic()
            print(f"{label} ... {spent:.0f} s  {last[:100]}", flush=True)
    end = "\r\033[K" if live else ""
    word = "done" if process.returncode == 0 else f"failed ({process.returncode})"
    print(f"{end}{label}: {word} in {spent:.1f} s", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with its children: a build would leave dozens of compilers."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            return


def tail(log: Path, count: int = 30) -> str:
    """The last lines; of a long log, only its end is read."""
    with open(log, "rb") as source:
        source.seek(max(0, log.stat().st_size - 100_000))
        text = source.read().decode(errors="replace")
    return "\n".join("  " + line for line in text.splitlines()[-count:])
