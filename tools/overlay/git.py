"""Runs git without prompts, pager or colour, and raises an error in words."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from . import files
from .errors import WorkFailed, WrongTarget


# git sets these inside a hook. They would redirect every call to that repository.
_REDIRECTS = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"}
# Settings of the user that would change what a command here reads or writes. (A
# file system monitor would outlive the command and keep its lock.)
_SETTINGS = ("core.fsmonitor", "core.safecrlf", "log.follow", "log.showSignature")
# In a scratch folder, no setting of the user counts.
ALONE = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def git(
    where: Path,
    *args: str,
    data: bytes | None = None,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    if shutil.which("git") is None:
        raise WrongTarget("git is not on PATH; install git and try again")
    keep = {k: v for k, v in os.environ.items() if k not in _REDIRECTS}
    keep |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", "GIT_PAGER": "cat"}
    # git would find a work tree that the temporary folders are in.
    keep["GIT_CEILING_DIRECTORIES"] = str(where.parent)
    command = ["git", "-C", str(where), "--literal-pathspecs"]
    command += [word for name in _SETTINGS for word in ("-c", f"{name}=false")]
    process = subprocess.Popen(
        [*command, *args],
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
        env=keep | (env or {}),
        # A killed git would leave its lock files. In a session of its own, git ends
        # its work when this process is killed; the lock is passed on by close_fds.
        start_new_session=True,
        close_fds=False,
    )
    try:
        out, words = process.communicate(data)
    except BaseException:
        process.terminate()  # git removes its lock files
        process.wait()
        raise
    if check and process.returncode:
        said = words.decode(errors="replace").strip()
        raise WorkFailed(f"git {' '.join(args[:2])} failed in {where}: {said}")
    return subprocess.CompletedProcess(args, process.returncode, out, words)


def works(where: Path, *args: str, **how: Any) -> bool:
    return git(where, *args, check=False, **how).returncode == 0


def text(where: Path, *args: str, check: bool = False, **how: Any) -> str:
    """Output of a command; empty if it fails."""
    done = git(where, *args, check=check, **how)
    return done.stdout.decode(errors="replace").strip()


def lines(where: Path, *args: str) -> list[str]:
    """Output of a ``-z`` command, one entry per name."""
    out = git(where, *args).stdout.decode(errors="surrogateescape")
    return [name for name in out.split("\0") if name]


def texts(where: Path, commit: str, rels: list[str]) -> dict[str, bytes | None]:
    """The texts of those paths at a commit (empty: in the index; None: no file)."""
    asked = "".join(f"{commit or ':0'}:{rel}\n" for rel in rels).encode()
    out = git(where, "cat-file", "--batch", data=asked).stdout
    found: dict[str, bytes | None] = {}
    for rel in rels:
        head, _, out = out.partition(b"\n")
        kind, size = head.split()[-2:]
        found[rel] = None
        if size.isdigit():
            found[rel] = out[: int(size)] if kind == b"blob" else None
            out = out[int(size) + 1 :]
    return found


def put(folder: Path, texts: files.Texts) -> None:
    """Write the texts below a scratch folder."""
    folder.mkdir(exist_ok=True)
    for rel, content in texts.items():
        if content is not None:
            (folder / rel).parent.mkdir(parents=True, exist_ok=True)
            (folder / rel).write_bytes(content)


def difference(before: files.Texts, after: files.Texts, *more: str) -> bytes:
    """The patch from one set of texts to another."""
    with files.scratch_folder() as scratch:
        put(scratch / "a", before)
        put(scratch / "b", after)
        command = ("diff", "--no-index", "--no-prefix", "--no-renames", *more, "a", "b")
        return git(scratch, *command, check=False, env=ALONE).stdout


def merged(mine: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """Both sides' edits of ``base`` in one text; None if they overlap."""
    with files.scratch_folder() as scratch:
        put(scratch, {"mine": mine, "base": base, "theirs": theirs})
        command = ("merge-file", "-p", "--quiet", "mine", "base", "theirs")
        done = git(scratch, *command, check=False)
        return None if done.returncode else done.stdout
