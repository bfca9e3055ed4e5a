"""One command at a time on one target."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import WorkFailed


if TYPE_CHECKING:
    from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # not a Unix: two commands at once are then the user's care
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def held(what: Path, *, wait_s: float = 1800) -> Iterator[None]:
    """Hold the target; the kernel lets go of it even if this process is killed."""
    if fcntl is None:
        yield
        return
    key = hashlib.sha256(str(what.resolve()).encode()).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else 0
    path = Path(tempfile.gettempdir()) / f"muon-overlay-{user}-{key}.lock"
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        said = False
        started = time.monotonic()
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - started > wait_s:
                    raise WorkFailed(f"another command holds {what}") from None
                if not said:
                    print(f"waiting: another command works on {what}", flush=True)
                    said = True
                time.sleep(0.2)
        yield
    finally:
        os.close(handle)
