"""One command at a time on one target."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from .errors import WorkFailed


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix: two commands at once are then the user's care
    fcntl = None  # type: ignore[assignment]


def _open(folder: Path) -> int:
    """The folder itself: no file is left there, and whoever may read it may wait for it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    except OSError:
        # Some network file systems lock nothing but files that are open for writing.
        os.close(handle)
        return os.open(folder / ".muon_overlay.lock", os.O_CREAT | os.O_RDWR, 0o666)
    return handle


@contextlib.contextmanager
def held(folder: Path, *, wait_s: float = 1800) -> Iterator[None]:
    """Hold the folder; the kernel lets go of it even if this process is killed."""
    if fcntl is None:
        yield
        return
    handle = _open(folder)
    try:
        said = False
        started = time.monotonic()
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - started > wait_s:
                    raise WorkFailed(f"another command holds {folder}") from None
                if not said:
                    print(f"waiting: another command works on {folder}", flush=True)
                    said = True
                time.sleep(0.2)
        yield
    finally:
        os.close(handle)
