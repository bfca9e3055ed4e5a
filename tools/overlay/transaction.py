"""Many files changed as one.

Every new text is first written beside its place; a journal with the old texts is
on disk before the first rename. Whatever then happens, an error, ctrl-C or a
kill, ``recover`` puts the old texts back: at once, or when the next command
looks at the target.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

from . import manifest
from .errors import WorkFailed


_SUFFIX = ".muon-new"


def _journal(torch_dir: Path) -> Path:
    return manifest.folder(torch_dir) / "journal.json"


def _missing_parents(path: Path) -> list[Path]:
    found = []
    parent = path.parent
    while not parent.exists():
        found.append(parent)
        parent = parent.parent
    return found


def _write_beside(path: Path, data: bytes, mode: int | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + _SUFFIX)
    with open(beside, "wb") as file:
        file.write(data)
    if mode is not None:
        os.chmod(beside, mode)


def _put(path: Path, data: bytes, mode: int | None) -> None:
    _write_beside(path, data, mode)
    os.replace(path.with_name(path.name + _SUFFIX), path)


def _flush(path: Path) -> None:
    # The journal alone: it is what a machine that goes down half way must find.
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def commit(torch_dir: Path, changes: dict[Path, bytes | None]) -> None:
    """Write all ``changes`` (None: remove the file) or none of them."""
    journal = _journal(torch_dir)
    new_folders: dict[str, None] = {}
    for path in [journal, *changes]:
        new_folders.update(dict.fromkeys(map(str, _missing_parents(path))))
    old = {}
    try:
        for path in changes:
            if path.is_file():
                text = base64.b64encode(path.read_bytes()).decode()
                old[str(path)] = {"text": text, "mode": path.stat().st_mode & 0o7777}
            else:
                old[str(path)] = None
        record = {"old": old, "folders": list(new_folders)}
        _put(journal, json.dumps(record).encode(), None)
        _flush(journal)
        for path, data in changes.items():
            if data is not None:
                before = old[str(path)]
                _write_beside(path, data, before["mode"] if before else None)
        for path, data in changes.items():
            if data is None:
                path.unlink(missing_ok=True)
            else:
                os.replace(path.with_name(path.name + _SUFFIX), path)
        journal.unlink()
    except OSError as error:
        back = _undo(torch_dir)
        what = f"cannot write {error.filename or torch_dir}: {error.strerror or error}"
        raise WorkFailed(f"{what}. {back}") from None
    except BaseException:
        _undo(torch_dir)
        raise


def _undo(torch_dir: Path) -> str:
    try:
        recover(torch_dir)
    except OSError as error:
        return f"Putting the old files back failed too ({error}); run `revert` again."
    return "The target is as it was."


def pending(torch_dir: Path) -> bool:
    """Whether a commit was cut off, so that the target is neither old nor new."""
    return _journal(torch_dir).is_file()


def recover(torch_dir: Path) -> bool:
    """Put back what a commit that did not end left; whether there was one."""
    journal = _journal(torch_dir)
    if not journal.is_file():
        # Stopped before the journal was in place: at most its own half is there.
        journal.with_name(journal.name + _SUFFIX).unlink(missing_ok=True)
        _remove_if_empty(journal.parent)
        return False
    record = json.loads(journal.read_text())
    for name, before in record["old"].items():
        path = Path(name)
        path.with_name(path.name + _SUFFIX).unlink(missing_ok=True)
        if before is None:
            path.unlink(missing_ok=True)
        else:
            text = base64.b64decode(before["text"])
            if not path.is_file() or path.read_bytes() != text:
                _put(path, text, before["mode"])
    journal.unlink()
    # Deepest first, and only folders that this commit made.
    for name in sorted(record["folders"], key=len, reverse=True):
        _remove_if_empty(Path(name))
    return True


def _remove_if_empty(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        pass  # not empty, or not there: both are fine
