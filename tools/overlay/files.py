"""Writes files so that each of them is old or new, and locks folders."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from .errors import WorkFailed


Texts = Mapping[str, bytes | None]  # by path; None: no file


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


def _take_after(path: Path, model: Path) -> None:
    """Give it the mode of ``model``, whatever this user's umask is, and the owner.

    The owner of an environment must be able to upgrade and remove what root writes.
    """
    stat = model.stat()
    path.chmod(stat.st_mode)
    if os.geteuid() == 0:
        os.chown(path, stat.st_uid, stat.st_gid)


def read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _prepare(path: Path, data: bytes, sibling: Path) -> None:
    if path.is_dir():
        raise WorkFailed(f"{path} is a folder, where the overlay has a file")
    for folder in reversed(path.parents):
        if not folder.is_dir():
            folder.mkdir()
            _take_after(folder, folder.parent)
    new = scratch(path)
    # Never through a link that somebody put there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(new, flags, 0o600), "wb") as file:
        file.write(data)
    _take_after(new, path if path.is_file() else sibling)
    _flush(new)


def write(changes: Mapping[Path, bytes | None], sibling: Path, top: Path) -> None:
    """Write all files (None: remove the file), or none if an error stops it.

    All new texts are on the disk before the first rename. New files get the mode and
    owner of ``sibling``. After a kill, the caller decides whether the files that remain are
    renamed or removed.
    """
    before = {path: read(path) for path in changes}
    try:
        for path, data in changes.items():
            if data is not None:
                _prepare(path, data, sibling)
        for path, data in changes.items():
            if data is None:
                path.unlink(missing_ok=True)
            else:
                os.replace(scratch(path), path)
        for folder in {path.parent for path in changes if path.parent.is_dir()}:
            _flush(folder)
    except BaseException as error:
        for path, text in before.items():
            with contextlib.suppress(OSError):
                scratch(path).unlink()
            if read(path) != text:
                write({path: text}, sibling, top)
        if isinstance(error, OSError):
            raise WorkFailed(f"{error}. The target is as it was") from None
        raise
    finally:
        for path in changes:
            tidy(path, top)


def tidy(path: Path, top: Path) -> None:
    """Remove bytecode of ``path`` that is stale, and folders without sources."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc*"):
        compiled.unlink(missing_ok=True)
    remove_empty_folders(path.parent, top)


def remove_empty_folders(folder: Path, top: Path) -> None:
    """Remove the folder and its parents below ``top`` that hold bytecode at most."""
    while folder != top:
        if folder.is_dir():
            if any(path.name != "__pycache__" for path in folder.iterdir()):
                return
            shutil.rmtree(folder)
        folder = folder.parent


def _locked(handle: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
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
def held(folder: Path) -> Iterator[None]:
    """Hold the folder; the kernel lets go of it even if this process is killed."""
    handle = _open(folder)
    try:
        # git.py passes it on: after a kill, the next command waits for git's end.
        os.set_inheritable(handle, True)
        if not _locked(handle):
            print(f"waiting: another command works on {folder}", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
