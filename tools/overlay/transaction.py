"""Many files changed as one.

Every new text is first written beside its place; a journal with the old texts is
on disk before the first rename. Whatever then happens, an error, ctrl-C, a kill or
a power cut, ``recover`` puts the old texts back: at once, or when the next command
looks at the target. Names in the journal are relative, because the tree may be
moved meanwhile.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
from typing import TYPE_CHECKING

from .errors import Refused, WorkFailed
from .payload import sha256


if TYPE_CHECKING:
    from pathlib import Path

    from .target import Target


def beside(path: Path) -> Path:
    return path.with_name(path.name + ".muon-new")


def _journal(target: Target) -> Path:
    return target.keep / "journal.json"


def _flush(path: Path) -> None:
    """Have the disk hold it: a file's text, or the names in a folder."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _make_folder(target: Target, path: Path) -> None:
    if not path.is_dir():
        _make_folder(target, path.parent)
        path.mkdir()
        # As readable as the rest, whatever this user's umask is.
        path.chmod(target.torch_dir.stat().st_mode & 0o7777)


def _write_beside(target: Target, path: Path, data: bytes, mode: int | None) -> None:
    _make_folder(target, path.parent)
    place = beside(path)
    place.write_bytes(data)
    sibling = target.torch_dir / "__init__.py"
    place.chmod(sibling.stat().st_mode & 0o666 if mode is None else mode)
    _flush(place)


def write(target: Target, path: Path, data: bytes) -> None:
    """One file, whole or not at all."""
    mode = path.stat().st_mode & 0o7777 if path.is_file() else None
    _write_beside(target, path, data, mode)
    os.replace(beside(path), path)
    _flush(path.parent)


def _name(target: Target, path: Path) -> str:
    for top, folder in (("keep", target.keep), ("root", target.root)):
        if path.is_relative_to(folder):
            return f"{top}/{path.relative_to(folder).as_posix()}"
    raise ValueError(f"{path} is not of {target.words}")


def _place(target: Target, name: str) -> Path:
    top, _, rel = name.partition("/")
    return {"keep": target.keep, "root": target.root}[top] / rel


def _refuse_folders(changes: dict[Path, bytes | None]) -> None:
    for path, data in changes.items():
        above = next(parent for parent in path.parents if os.path.lexists(parent))
        if path.is_dir() or (data is not None and not above.is_dir()):
            taken = path if path.is_dir() else above
            kind = "folder" if path.is_dir() else "file"
            raise Refused(
                f"{taken} is a {kind}, where the overlay has something else. Move it "
                "away and try again. Nothing was touched."
            )


def commit(target: Target, changes: dict[Path, bytes | None]) -> None:
    """Write all ``changes`` (None: remove the file) or none of them."""
    _refuse_folders(changes)
    journal = _journal(target)
    if journal.exists():
        raise WorkFailed(f"{journal} is of a command that was cut off; try again")
    files = {}
    for path, data in changes.items():
        old = _read(path)
        files[_name(target, path)] = {
            "new": sha256(data),
            "old": None if old is None else base64.b64encode(old).decode(),
            "mode": None if old is None else path.stat().st_mode & 0o7777,
        }
    try:
        write(target, journal, json.dumps({"files": files}).encode())
        for path, data in changes.items():
            if data is not None:
                _write_beside(target, path, data, files[_name(target, path)]["mode"])
        for path, data in changes.items():
            if data is None:
                path.unlink(missing_ok=True)
            else:
                os.replace(beside(path), path)
        for path in changes:
            _tidy(target, path)
        for folder in {path.parent for path in changes}:
            if folder.is_dir():
                _flush(folder)
        journal.unlink()
        remove_if_empty(journal.parent)
    except OSError as error:
        back = _undo(target)
        what = f"cannot write {error.filename or target.root}"
        raise WorkFailed(f"{what}: {error.strerror or error}. {back}") from None
    except BaseException:
        _undo(target)
        raise


def _tidy(target: Target, path: Path) -> None:
    """Drop the bytecode of what was there and the folders that are now empty."""
    cache = path.parent / "__pycache__"
    for compiled in cache.glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
    remove_if_empty(cache)
    parent = path.parent
    while parent not in (target.root, target.torch_dir, target.keep):
        remove_if_empty(parent)
        if parent.exists():
            break
        parent = parent.parent


def _undo(target: Target) -> str:
    try:
        recover(target)
    except OSError as error:
        return f"Putting the old files back failed too ({error}); run `revert` again."
    return "The target is as it was."


def pending(target: Target) -> bool:
    """Whether a commit was cut off, so that the target is neither old nor new."""
    return _journal(target).exists()


def _load(journal: Path) -> dict[str, tuple]:
    try:
        return {
            name: (
                file["new"],
                None if file["old"] is None else base64.b64decode(file["old"]),
                file["mode"],
            )
            for name, file in json.loads(journal.read_text())["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WorkFailed(
            f"{journal} is damaged ({error!r}): a command was cut off, and which files it "
            "had changed cannot be read. Nothing was touched. `apply` looks at each file "
            "before it changes it, so go on with\n"
            f"  rm {shlex.quote(str(journal))}\n"
            "then `apply`, and after that `revert` if the overlay is to go."
        ) from None


def recover(target: Target) -> bool:
    """Put back what a commit that did not end left; whether there was one."""
    journal = _journal(target)
    if not journal.exists():
        # Stopped before the journal was in place: at most its own half is there.
        beside(journal).unlink(missing_ok=True)
        remove_if_empty(journal.parent)
        return False
    for name, (new, old, mode) in _load(journal).items():
        path = _place(target, name)
        beside(path).unlink(missing_ok=True)
        now = _read(path)
        # What is neither the old nor the new text came later: it is somebody's.
        if now != old and sha256(now) == new and not path.is_dir():
            if old is None:
                path.unlink(missing_ok=True)
            else:
                _write_beside(target, path, old, mode)
                os.replace(beside(path), path)
        if old is None:
            _tidy(target, path)
    journal.unlink()
    remove_if_empty(journal.parent)
    return True


def remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        pass  # not empty, or not there: both are fine
