"""Writes files so that each of them is old or new, and locks folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import Refused, WorkFailed


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

try:
    import fcntl
except ImportError:  # Windows: two commands at once are not excluded there
    fcntl = None  # type: ignore[assignment]


def scratch(path: Path) -> Path:
    """The name under which a new text waits for its rename."""
    return path.with_name(path.name + ".muon-new")


def _flush(path: Path) -> None:
    """Have the disk hold a file's text, or the names in a folder."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _take_after(path: Path, sibling: Path, mode: int | None = None) -> None:
    stat = sibling.stat()
    path.chmod(mode or stat.st_mode & (0o7777 if path.is_dir() else 0o666))
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        # The owner of the environment must be able to upgrade and remove it.
        os.chown(path, stat.st_uid, stat.st_gid)


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir()
        # The parent's mode, whatever this user's umask is.
        _take_after(path, path.parent)


def _prepare(path: Path, data: bytes, sibling: Path) -> None:
    _make_folder(path.parent)
    there = path if path.is_file() else None
    new = scratch(path)
    new.write_bytes(data)
    mode = there.stat().st_mode & 0o7777 if there else None
    _take_after(new, there or sibling, mode)
    _flush(new)


def write(path: Path, data: bytes, sibling: Path) -> None:
    """Write one file whole or not at all, with the mode and owner of ``sibling``."""
    _prepare(path, data, sibling)
    os.replace(scratch(path), path)
    _flush(path.parent)


def replace(changes: Mapping[Path, bytes | None], sibling: Path, top: Path) -> None:
    """Write all files (None: remove the file), or none if an error stops it.

    All new texts are on the disk before the first rename. After a kill, the caller
    decides whether the files that remain are renamed or removed.
    """
    _refuse_folders(changes)
    before = {path: path.read_bytes() if path.is_file() else None for path in changes}
    begun: list[Path] = []
    try:
        for path, data in changes.items():
            if data is not None:
                _prepare(path, data, sibling)
        for path, data in changes.items():
            begun.append(path)
            if data is None:
                path.unlink(missing_ok=True)
            else:
                os.replace(scratch(path), path)
        for folder in {path.parent for path in changes}:
            if folder.is_dir():
                _flush(folder)
    except BaseException as error:
        for path in changes:
            scratch(path).unlink(missing_ok=True)
        for path in begun:
            text = before[path]
            if text is None:
                path.unlink(missing_ok=True)
            else:
                write(path, text, sibling)
        for path in changes:
            tidy(path, top)
        if isinstance(error, OSError):
            what = f"cannot write {error.filename or top}"
            raise WorkFailed(
                f"{what}: {error.strerror or error}. The target is as it was."
            ) from None
        raise
    for path in changes:
        tidy(path, top)


def _refuse_folders(changes: Mapping[Path, bytes | None]) -> None:
    for path, data in changes.items():
        above = next(parent for parent in path.parents if os.path.lexists(parent))
        if path.is_dir() or (data is not None and not above.is_dir()):
            taken = path if path.is_dir() else above
            kind = "folder" if path.is_dir() else "file"
            raise Refused(
                f"{taken} is a {kind}, and the overlay needs that name. Move it away "
                "and try again. Nothing was touched."
            )


def tidy(path: Path, top: Path) -> None:
    """Remove bytecode of ``path`` that is stale, and folders without sources."""
    cache = path.parent / "__pycache__"
    for compiled in cache.glob(f"{path.stem}.*.pyc*"):
        compiled.unlink(missing_ok=True)
    remove_if_empty(cache)
    remove_empty_folders(path.parent, top)


def remove_empty_folders(folder: Path, top: Path) -> None:
    """Remove the folder and its parents below ``top`` that hold bytecode at most."""
    while folder != top:
        if folder.is_dir():
            cache = folder / "__pycache__"
            if any(path != cache for path in folder.iterdir()):
                return
            shutil.rmtree(folder)
        folder = folder.parent


def remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _open(folder: Path) -> int:
    """Open the folder itself: no file stays there, and readers may wait for it, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except BlockingIOError:
        return handle
    except OSError:
        # Some network file systems only lock files that are open for writing.
        os.close(handle)
        return os.open(folder / ".muon_overlay.lock", os.O_CREAT | os.O_RDWR, 0o666)


@contextlib.contextmanager
def held(folder: Path, *, wait_s: float = 1800) -> Iterator[None]:
    """Hold the folder; the kernel lets go of it even if this process is killed."""
    if fcntl is None:
        yield
        return
    handle = _open(folder)
    try:
        # git.py passes it on: after a kill, the next command waits for git's end.
        os.set_inheritable(handle, True)
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


def busy(folder: Path) -> bool:
    """Whether another command works on it at this moment."""
    try:
        with held(folder, wait_s=-1):
            return False
    except WorkFailed:
        return True


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder; the next command removes it after a kill."""
    top = Path(tempfile.gettempdir()).resolve()
    for old in top.glob("muon-overlay-*"):
        with contextlib.suppress(OSError):
            if not busy(old):
                shutil.rmtree(old)
    new = Path(tempfile.mkdtemp(prefix="muon-new-", dir=top))
    with held(new):
        # Its lock is held when it gets the name that others look for.
        place = new.rename(top / new.name.replace("new", "overlay", 1))
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)
