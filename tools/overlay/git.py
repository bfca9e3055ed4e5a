"""Runs git, without the settings that would change what a command writes or prints."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from .errors import Refused, WorkFailed, WrongTarget


# Of git's variables, a command gets those that say who commits and how to reach a server.
# The others would redirect it, for instance to the index of a hook that runs this tool.
_KEPT = re.compile(
    r"(?!GIT_)|GIT_(AUTHOR|COMMITTER|SSH|SSL|HTTP|ASKPASS|EXEC_PATH|ALLOW_PROTOCOL"
    r"|CONFIG_(GLOBAL|SYSTEM|NOSYSTEM))"
)
# A file system monitor would outlive the command.
_SETTINGS = (
    "core.fsmonitor=false", "core.safecrlf=false", "log.showSignature=false",
    "log.follow=false", "log.showRoot=true", "diff.orderFile=/dev/null",
    "diff.noprefix=false", "diff.mnemonicPrefix=false", "index.sparse=false",
    "merge.verifySignatures=false", "format.attach=", "user.useConfigOnly=true",
)  # fmt: skip


def git(
    where: Path,
    *words: str,
    data: bytes = b"",
    env: dict[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    if shutil.which("git") is None:
        raise WrongTarget("git is not on PATH; install git and try again")
    variables = {name: v for name, v in os.environ.items() if _KEPT.match(name)}
    variables |= {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", "GIT_PAGER": "cat"}
    command = ["git", "-C", str(where), "--literal-pathspecs"]
    for setting in _SETTINGS:
        command += ["-c", setting]
    process = subprocess.Popen(
        [*command, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables | (env or {}),
        # A killed git leaves its lock. In a session of its own, it ends its work when this
        # process is killed.
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(data)
    except BaseException:
        process.terminate()  # git removes its lock
        process.wait()
        raise
    if check and process.returncode:
        message = errors.decode(errors="replace").strip()
        raise WorkFailed(f"git {words[0]} failed in {where}: {message}")
    return subprocess.CompletedProcess(words, process.returncode, out, errors)


def ask(where: Path, *words: str, **options: Any) -> str:
    """The output, without white space around it."""
    out = git(where, *words, **options).stdout
    return out.decode(errors="surrogateescape").strip()


def names(where: Path, *words: str, **options: Any) -> list[str]:
    """The output of a command with ``-z``."""
    out = git(where, *words, **options).stdout.decode(errors="surrogateescape")
    return out.split("\0")[:-1]


def tree(where: Path, commit: str, *paths: str, **options: Any) -> dict[str, str]:
    """Path -> blob of the files in a commit or tree."""
    blobs = {}
    for line in names(where, "ls-tree", "-r", "-z", commit, "--", *paths, **options):
        kind, _, path = line.partition("\t")
        blobs[path] = kind.split()[2]
    return blobs


def texts(where: Path, objects: list[str], **options: Any) -> list[bytes | None]:
    """The texts of blobs (or COMMIT:PATH); None: there is no such file."""
    asked = os.fsencode("".join(f"{name}\n" for name in objects))
    out = git(where, "cat-file", "--batch", data=asked, **options).stdout
    found: list[bytes | None] = []
    for _ in objects:
        head, _, out = out.partition(b"\n")
        size = head.split()[-1]
        if not size.isdigit():
            found.append(None)
            continue
        found.append(out[: int(size)])
        out = out[int(size) + 1 :]
    return found


def changes(where: Path, *words: str) -> list[tuple[str, str, str]]:
    """(path, blob before, blob after) of each change that ``git log`` or ``diff-tree`` lists."""
    raw = names(
        where, *words[:1], "--raw", "-z", "--no-abbrev", "--no-renames", *words[1:]
    )
    found = []
    for head, path in zip(raw[::2], raw[1::2]):
        before, after = head.split()[2:4]
        found.append((path, before, after))
    return found


def lend(
    source: Path,
    place: Path,
    blobs: set[str],
    *,
    source_env: Any = None,
    env: Any = None,
) -> None:
    """Copy blobs from one repository into another."""
    asked = "".join(f"{blob}\n" for blob in sorted(blobs)).encode()
    words = ("pack-objects", "-q", "--stdout")
    pack = git(source, *words, data=asked, env=source_env).stdout
    git(place, "unpack-objects", "-q", data=pack, env=env)


def refuse_unfinished(where: Path) -> None:
    """Raise if somebody is in the middle of a merge or rebase there."""
    folder = Path(ask(where, "rev-parse", "--absolute-git-dir"))
    for name in (
        "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply",
    ):  # fmt: skip
        if (folder / name).exists():
            raise Refused(
                f"git has unfinished work in {where} ({name}): finish or abort it"
            )
    if names(where, "ls-files", "--unmerged", "-z"):
        raise Refused(f"git has unmerged files in {where}: resolve or reset them")
