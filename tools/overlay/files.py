"""Writes files so that each of them is old or new, and locks folders."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import Refused, WorkFailed


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def scratch(path: Path) -> Path:
    """The name under which a new text waits for its rename."""
    return path.with_name(path.name + ".muon-new")


def _flush(path: Path) -> None:
    """Have the disk hold a file's text, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _take_after(path: Path, model: Path, mask: int = 0o7777) -> None:
    """Give it the mode of ``model``, whatever this user's umask is, and the owner.

    The owner of an environment must be able to upgrade and remove what root writes.
    """
    stat = model.stat()
    path.chmod(stat.st_mode & mask)
    if os.geteuid() == 0:
        os.chown(path, stat.st_uid, stat.st_gid)


def _prepare(path: Path, data: bytes, sibling: Path) -> None:
    for folder in reversed(path.parents):
        if not folder.is_dir():
            folder.mkdir()
            _take_after(folder, folder.parent)
    new = scratch(path)
    new.write_bytes(data)
    if path.is_file():
        _take_after(new, path)
    else:
        _take_after(new, sibling, 0o666)
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
    for path, data in changes.items():
        above = next(parent for parent in path.parents if os.path.lexists(parent))
        if path.is_dir() or (data is not None and not above.is_dir()):
            taken = path if path.is_dir() else above
            raise Refused(
                f"{taken} is a {'folder' if taken.is_dir() else 'file'}, and the overlay "
                "needs that name. Move it away and try again. Nothing was touched."
            )
    before = {path: path.read_bytes() if path.is_file() else None for path in changes}
    begun: list[Path] = []
    try:
        for path, data in changes.items():
            if data is not None:
                _prepare(path, data, sibling)
        for path, data in changes.items():
            begun.append(path)
            _put(path, data)
        for folder in {path.parent for path in changes if path.parent.is_dir()}:
            _flush(folder)
    except BaseException as error:
        for path in changes:
            scratch(path).unlink(missing_ok=True)
        for path in begun:
            if (text := before[path]) is not None:
                _prepare(path, text, sibling)
            _put(path, text)
        if isinstance(error, OSError):
            raise WorkFailed(
                f"cannot write {error.filename or top}: {error.strerror or error}. "
                "The target is as it was."
            ) from None
        raise
    finally:
        for path in changes:
            tidy(path, top)


def _put(path: Path, data: bytes | None) -> None:
    path.unlink(missing_ok=True) if data is None else os.replace(scratch(path), path)


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
            if any(path.name != "__pycache__" for path in folder.iterdir()):
                return
            shutil.rmtree(folder)
        folder = folder.parent


def remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _open(folder: Path) -> int:
    """Open the folder itself: no file stays there, and readers may wait for it, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _locked(handle)
        return handle
    except OSError:
        # Some network file systems only lock files that are open for writing.
        os.close(handle)
        return os.open(folder / ".muon_overlay.lock", os.O_CREAT | os.O_RDWR, 0o666)


@contextlib.contextmanager
def held(folder: Path, *, wait_s: float = 1800) -> Iterator[None]:
    """Hold the folder; the kernel lets go of it even if this process is killed."""
    handle = _open(folder)
    try:
        # git.py passes it on: after a kill, the next command waits for git's end.
        os.set_inheritable(handle, True)
        said, end = False, time.monotonic() + wait_s
        while not _locked(handle):
            if time.monotonic() > end:
                raise WorkFailed(f"another command holds {folder}")
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
