"""Runs git without prompts, pager or colour, and raises an error in words."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from . import files
from .errors import WorkFailed, WrongTarget


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


TIMEOUT = 300
# git sets these inside a hook. They would redirect every call to that repository.
_REDIRECTS = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"}
# Settings of the user that would change what a command here reads or writes. (A
# file system monitor would outlive the command and keep its lock.)
_PLAIN = {
    "core.fsmonitor": "false",
    "core.safecrlf": "false",
    "diff.orderFile": "/dev/null",
    "diff.suppressBlankEmpty": "false",
    "log.follow": "false",
    "log.showSignature": "false",
}
_SETTINGS = [word for item in _PLAIN.items() for word in ("-c", "=".join(item))]
# For every patch that is shown or written, whatever the user's settings are.
PATCH = (
    "-U3", "--inter-hunk-context=0", "--no-renames", "--no-ext-diff", "--no-textconv",
    "--no-color", "--diff-algorithm=default", "--no-relative",
)  # fmt: skip


def git(
    where: Path,
    *args: str,
    data: bytes | None = None,
    check: bool = True,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    if shutil.which("git") is None:
        raise WrongTarget("git is not on PATH; install git and try again")
    keep = {k: v for k, v in os.environ.items() if k not in _REDIRECTS}
    keep |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", "GIT_PAGER": "cat"}
    command = ["git", "-C", str(where), "--literal-pathspecs", *_SETTINGS, *args]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if data is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=keep | dict(env or {}),
        # A killed git would leave its lock files. In a session of its own, git ends
        # its work when this process is killed; the lock is passed on by close_fds.
        start_new_session=True,
        close_fds=False,
    )
    try:
        out, words = process.communicate(data, TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise WorkFailed(f"git {args[0]} took over {TIMEOUT} s in {where}") from None
    except BaseException:
        if data is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=10)
        process.kill()
        process.wait()
        raise
    if check and process.returncode:
        said = words.decode(errors="replace").strip()
        raise WorkFailed(f"git {' '.join(args[:2])} failed in {where}: {said}")
    return subprocess.CompletedProcess(command, process.returncode, out, words)


def text(where: Path, *args: str) -> str:
    """Output of a command; empty if it fails."""
    return git(where, *args, check=False).stdout.decode(errors="replace").strip()


def lines(where: Path, *args: str) -> list[str]:
    """Output of a ``-z`` command, one entry per name."""
    out = git(where, *args).stdout.decode(errors="surrogateescape")
    return [name for name in out.split("\0") if name]


def difference(
    before: Mapping[str, bytes | None], after: Mapping[str, bytes | None], *more: str
) -> bytes:
    """The patch from one set of texts to another."""
    with files.scratch_folder() as scratch:
        for side, texts in (("a", before), ("b", after)):
            (scratch / side).mkdir()
            for rel, content in texts.items():
                if content is not None:
                    path = scratch / side / rel
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
        command = ("diff", "--no-index", "--no-prefix", *PATCH, *more, "a", "b")
        done = git(scratch, *command, check=False)
        if done.returncode > 1:
            raise WorkFailed(f"git diff failed: {done.stderr.decode(errors='replace')}")
        return done.stdout


def merged(mine: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """Both sides' edits of ``base`` in one text; None if they overlap."""
    with files.scratch_folder() as scratch:
        for part, content in (("mine", mine), ("base", base), ("theirs", theirs)):
            (scratch / part).write_bytes(content)
        names = ("mine", "base", "theirs")
        done = git(scratch, "merge-file", "-p", "--quiet", *names, check=False)
        return done.stdout if done.returncode == 0 else None


def known(root: Path, texts: Iterable[bytes]) -> set[bytes]:
    """Those texts that the repository at ``root`` has or had in some file."""
    names = {
        hashlib.sha1(b"blob %d\0" % len(t) + t, usedforsecurity=False).hexdigest(): t
        for t in texts
    }
    asked = "\n".join(names).encode()
    done = git(root, "cat-file", "--batch-check", data=asked, check=False)
    found = [line.split() for line in done.stdout.decode().splitlines()]
    return {names[words[0]] for words in found if words[1:2] == ["blob"]}
