"""Long commands with a line that lives, and their whole output in a log."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
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
    """Run it, show that it lives, return its exit code (output: in ``log``)."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    last = [""]
    with open(log, "ab") as sink:
        sink.write(f"$ {' '.join(command)}\n".encode())
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            raise WrongTarget(f"cannot run {command[0]}: {error.strerror}") from None

        def drain() -> None:
            for line in process.stdout or ():
                sink.write(line)
                text = line.decode(errors="replace").strip()
                if text:
                    last[0] = text

        reader = threading.Thread(target=drain, daemon=True)
        reader.start()
        try:
            _show_until_done(process, label, last, started, timeout)
        except BaseException:
            _end(process)
            raise
        finally:
            # A grandchild may hold the pipe open: its output is not waited for.
            reader.join(timeout=5)
    return process.returncode


def _show_until_done(
    process: subprocess.Popen[bytes],
    label: str,
    last: list[str],
    started: float,
    timeout: float,
) -> None:
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if not live:
        print(f"{label} ...", flush=True)
    said = started
    frame = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1 if live else 0.5)
        spent = time.monotonic() - started
        if process.returncode is not None:
            break
        if spent > timeout:
            raise WorkFailed(f"{label}: stopped after {timeout:.0f} s")
        if live:
            frame += 1
            text = f"{_FRAMES[frame % 4]} {label} {spent:5.0f} s  {last[0]}"
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:width]}", end="", flush=True)
        elif time.monotonic() - said > _PLAIN_EVERY_S:
            said = time.monotonic()
            print(f"{label} ... {spent:.0f} s  {last[0][:100]}", flush=True)
    end = "\r\033[K" if live else ""
    word = "done" if process.returncode == 0 else f"failed ({process.returncode})"
    print(f"{end}{label}: {word} in {spent:.1f} s", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with its children: a build leaves dozens of compilers otherwise."""
    for sign, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return


def tail(log: Path, count: int = 30) -> str:
    text = log.read_text(errors="replace") if log.is_file() else ""
    return "\n".join("  " + line for line in text.splitlines()[-count:])
