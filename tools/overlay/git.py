"""Runs git without prompts, pager or colour, and raises an error in words."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import files
from .errors import WorkFailed, WrongTarget


# Variables of the user's shell that git may see: who commits, and how to reach a server.
# Everything else would redirect a command, or change what it reads or writes.
_THEIRS = re.compile(
    r"(?!GIT_)|GIT_(AUTHOR|COMMITTER|SSH|SSL|HTTP|ASKPASS|EXEC_PATH|TEST|ALLOW_PROTOCOL"
    r"|CONFIG_(GLOBAL|SYSTEM|NOSYSTEM))"
)
# Settings that would do the same. (A file system monitor would outlive the command
# and keep its lock.)
_SETTINGS = (
    "core.fsmonitor=false", "core.safecrlf=false", "log.follow=false",
    "log.showSignature=false", "log.showRoot=true", "diff.orderFile=/dev/null",
    "index.sparse=false", "log.diffMerges=separate", "user.useConfigOnly=true",
)  # fmt: skip
# In a scratch folder, no setting of the user counts.
ALONE = dict.fromkeys(("GIT_CONFIG_GLOBAL", "XDG_CONFIG_HOME"), os.devnull)
ALONE |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}


def git(
    where: Path,
    *args: str,
    data: bytes | None = None,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    if shutil.which("git") is None:
        raise WrongTarget("git is not on PATH; install git and try again")
    keep = {k: v for k, v in os.environ.items() if _THEIRS.match(k)}
    keep |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", "GIT_PAGER": "cat"}
    # git would find a work tree that the temporary folders are in.
    keep["GIT_CEILING_DIRECTORIES"] = str(where.parent)
    command = ["git", "-C", str(where), "--literal-pathspecs"]
    command += [word for setting in _SETTINGS for word in ("-c", setting)]
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
        message = words.decode(errors="replace").strip()
        raise WorkFailed(f"git {' '.join(args[:2])} failed in {where}: {message}")
    return subprocess.CompletedProcess(args, process.returncode, out, words)


def works(where: Path, *args: str, **options: Any) -> bool:
    return git(where, *args, check=False, **options).returncode == 0


def text(where: Path, *args: str, check: bool = False, **options: Any) -> str:
    """Output of a command; empty if it fails."""
    done = git(where, *args, check=check, **options)
    return done.stdout.decode(errors="replace").strip()


def is_shallow(where: Path) -> bool:
    return text(where, "rev-parse", "--is-shallow-repository") == "true"


def object_format(commit: str) -> str:
    """The hash that names this commit. Older versions of git cannot be asked."""
    return "sha256" if len(commit) == 64 else "sha1"


def lines(where: Path, *args: str, **options: Any) -> list[str]:
    """Output of a ``-z`` command, one entry per name."""
    out = git(where, *args, **options).stdout.decode(errors="surrogateescape")
    return [name for name in out.split("\0") if name]


def texts(
    where: Path, commit: str, rels: list[str], **options: Any
) -> dict[str, bytes | None]:
    """The texts of those paths at a commit (empty: in the index; None: no file)."""
    asked = os.fsencode("".join(f"{commit or ':0'}:{rel}\n" for rel in rels))
    out = git(where, "cat-file", "--batch", data=asked, **options).stdout
    by_path: dict[str, bytes | None] = {}
    for rel in rels:
        head, _, out = out.partition(b"\n")
        kind, size = head.split()[-2:]
        is_blob = kind == b"blob" and size.isdigit()
        by_path[rel] = out[: int(size)] if is_blob else None
        out = out[int(size) + 1 :] if size.isdigit() else out
    return by_path


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    # An older version of this tool deletes each muon-overlay-* that it finds there.
    with tempfile.TemporaryDirectory(prefix="distributed-muon-") as name:
        yield Path(name).resolve()


def put(folder: Path, texts: files.Texts) -> None:
    """Write the texts below a scratch folder."""
    folder.mkdir(exist_ok=True)
    for rel, content in texts.items():
        if content is not None:
            (folder / rel).parent.mkdir(parents=True, exist_ok=True)
            (folder / rel).write_bytes(content)


def difference(before: files.Texts, after: files.Texts, *more: str) -> bytes:
    """The patch from one set of texts to another."""
    with scratch() as folder:
        put(folder / "a", before)
        put(folder / "b", after)
        command = ("diff", "--no-index", "--no-prefix", "--no-renames", *more, "a", "b")
        return git(folder, *command, check=False, env=ALONE).stdout


def merged(ours: bytes, base: bytes, theirs: bytes, *more: str) -> tuple[bytes, bool]:
    """Both sides' edits of ``base`` in one text, and whether no two overlap."""
    with scratch() as folder:
        put(folder, {"this repository": ours, "base": base, "the checkout": theirs})
        command = ("merge-file", "-p", *more, "this repository", "base", "the checkout")
        done = git(folder, *command, check=False, env=ALONE)
        if done.returncode > 127:  # it merges no binary files
            return ours, False
        return done.stdout, done.returncode == 0
