"""Runs git, without the settings that would change what a command writes or prints."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from .errors import OverlayError, Refused


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
    "diff.noprefix=false", "diff.suppressBlankEmpty=false", "diff.mnemonicPrefix=false", "index.sparse=false",
    "merge.verifySignatures=false", "format.attach=", "user.useConfigOnly=true",
)  # fmt: skip


def git(
    where: Path,
    *words: str,
    data: bytes = b"",
    env: dict[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[bytes]:
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
        raise OverlayError(f"git {words[0]} failed in {where}: {said(errors)}")
    return subprocess.CompletedProcess(words, process.returncode, out, errors)


def said(output: bytes) -> str:
    return os.fsdecode(output).strip("\n")


def ask(where: Path, *words: str, **options: Any) -> str:
    """The output, without line breaks around it."""
    return said(git(where, *words, **options).stdout)


def names(where: Path, *words: str, **options: Any) -> list[str]:
    """The output of a command with ``-z``."""
    return ask(where, *words, **options).split("\0")[:-1]


def tree(where: Path, commit: str, *paths: str, **options: Any) -> dict[str, str]:
    """Path -> blob of the files in a commit or tree."""
    blobs = {}
    for line in names(where, "ls-tree", "-r", "-z", commit, "--", *paths, **options):
        kind, _, path = line.partition("\t")
        blobs[path] = kind.split()[2]
    return blobs


def text(where: Path, blob: str, **options: Any) -> bytes:
    """The text of a blob (or COMMIT:PATH); empty if there is no such file."""
    return git(where, "cat-file", "blob", blob, check=False, **options).stdout


def changes(where: Path, *words: str) -> list[tuple[str, str]]:
    """(path, new blob) of each change that ``git log`` or ``diff-tree`` lists."""
    command, *others = words
    raw = names(where, command, "--raw", "-z", "--no-abbrev", "--no-renames", *others)
    return [(path, head.split()[3]) for head, path in zip(raw[::2], raw[1::2])]


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
