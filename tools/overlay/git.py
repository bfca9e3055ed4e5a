"""git, asked in one way: no prompts, no pager, no colour, words when it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import WorkFailed, WrongTarget


if TYPE_CHECKING:
    from collections.abc import Mapping


TIMEOUT = 300


def environment() -> dict[str, str]:
    # Set by git itself when this runs inside a hook: it would redirect every call
    # to that other repository.
    keep = {k: v for k, v in os.environ.items() if k not in _REDIRECTS}
    return {**keep, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", "GIT_PAGER": "cat"}


_REDIRECTS = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"}


def git(
    where: Path, *args: str, data: bytes | None = None, check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    if shutil.which("git") is None:
        raise WrongTarget("git is not on PATH; install git and try again")
    try:
        done = subprocess.run(
            ["git", "-C", str(where), "--literal-pathspecs", *args],
            input=data,
            stdin=subprocess.DEVNULL if data is None else None,
            capture_output=True,
            env=environment(),
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise WorkFailed(f"git {args[0]} took over {TIMEOUT} s in {where}") from None
    if check and done.returncode:
        words = done.stderr.decode(errors="replace").strip()
        raise WorkFailed(f"git {' '.join(args[:2])} failed in {where}: {words}")
    return done


def difference(
    before: Mapping[str, bytes], after: Mapping[str, bytes], *options: str
) -> bytes:
    """From one set of texts to another, as a patch."""
    with tempfile.TemporaryDirectory(prefix="muon-diff-") as name:
        for side, texts in (("a", before), ("b", after)):
            (Path(name) / side).mkdir()
            for rel, text in texts.items():
                path = Path(name) / side / rel
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)
        plain = ("--no-renames", "--no-ext-diff", "--no-color", "--no-prefix")
        done = git(
            Path(name), "diff", "--no-index", *plain, *options, "a", "b", check=False
        )
        if done.returncode > 1:
            raise WorkFailed(f"git diff failed: {done.stderr.decode(errors='replace')}")
        return done.stdout


def has_had(root: Path, rel: str, text: bytes) -> bool:
    """Whether a commit of that repository has this text at that path."""
    text = text.replace(b"\r\n", b"\n")
    name = git(root, "hash-object", "--stdin", data=text).stdout.decode().strip()
    found = git(
        root,
        "log",
        "-1",
        "--format=%h",
        f"--find-object={name}",
        "--",
        rel,
        check=False,
    )
    return bool(found.stdout.strip())


def lines(where: Path, *args: str) -> list[str]:
    """Output of a ``-z`` command, one entry a name."""
    out = git(where, *args).stdout.decode(errors="surrogateescape")
    return [name for name in out.split("\0") if name]
