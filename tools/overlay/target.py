"""What the overlay can be laid over: an installed torch, or a PyTorch checkout."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import git, lock, manifest, parts, stock, transaction, versions
from .errors import WorkFailed, WrongTarget
from .payload import sha256


if TYPE_CHECKING:
    from collections.abc import Iterator


# Asked of the interpreter itself; never `import torch`, which takes seconds and
# fails on exactly those targets that need help.
_WHERE = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("torch")
found = {"origin": spec.origin if spec else None}
found |= {"version": None, "record": None, "site": None}
try:
    dist = importlib.metadata.distribution("torch")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    found["version"] = dist.version
    found["record"] = dist.read_text("RECORD")
    found["site"] = str(dist.locate_file(""))
print(json.dumps(found))
"""


# The first entry is the current folder, which may have a torch/ or a json.py of anybody.
_ALONE = "import sys; sys.path[:] = [p for p in sys.path if p]\n"


def ask_python(python: str | Path, code: str, *, timeout: float = 120) -> str:
    """Run ``code`` in that interpreter, away from the caller's own paths."""
    # PYTHONPATH could name a checkout, and the current folder has a torch/ of its own.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [str(python), "-c", _ALONE + code],
            capture_output=True,
            text=True,
            env=env,
            cwd=Path(python).parent,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )
    except OSError as error:
        raise WrongTarget(f"cannot run {python}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise WorkFailed(f"{python} gave no answer in {timeout:.0f} s") from None
    if done.returncode:
        tail = (done.stderr.strip().splitlines() or ["no message"])[-1].strip()
        # Programs that are no Python tend to repeat the whole probe.
        if len(tail) > 200 or any(
            len(line) > 20 and line in tail for line in code.splitlines()
        ):
            tail = f"exit code {done.returncode}"
        raise WrongTarget(f"{python} is not a working Python: {tail}")
    return done.stdout


def _ask_where(python: str | Path) -> dict[str, Any]:
    # The last line: a sitecustomize may have said something before it.
    lines = ask_python(python, _WHERE).splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        raise WrongTarget(f"{python} is not a Python interpreter") from None


def origin(python: str | Path) -> Path | None:
    """The file that ``import torch`` would begin with in that interpreter."""
    found = _ask_where(python)["origin"]
    return Path(found) if found else None


def find_interpreter(python: str | Path) -> Path:
    """The interpreter that is meant: a path, a name on PATH, or an environment's folder."""
    # Not a Path yet: it would make a name on PATH of "./python".
    python = os.path.expanduser(python)
    where = shutil.which(python)
    if where is None and os.path.isdir(python):
        inside = ("bin/python", "bin/python3", "Scripts/python.exe", "python.exe")
        found = (shutil.which(os.path.join(python, rel)) for rel in inside)
        where = next(filter(None, found), None)
        if where is None:
            raise WrongTarget(f"{python} is a folder without bin/python")
    if where is None:
        lack = "not executable" if os.path.isfile(python) else "no such interpreter"
        raise WrongTarget(f"{python}: {lack}")
    # Not resolved: an environment's python is a link that must not be followed. But
    # absolute, because it is not run in the present folder.
    return Path(os.path.abspath(where))


class Target:
    """A tree that has a ``torch`` package at ``torch_dir``."""

    kind: str
    words: str  # how messages call it
    keep: Path  # where the record lies
    lock: Path  # the folder that one command at a time may hold

    def __init__(self, root: Path, version: str) -> None:
        self.root = root
        self.torch_dir = root / "torch"
        self.version = version

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Work on it alone, after what a killed command left half done is undone."""
        with lock.held(self.lock):
            # One after the other: a record may be half written, its files half there.
            if transaction.recover(self) | parts.recover(self):
                print("an earlier command was cut off half way: undone")
            yield

    def read(self, rel: str) -> bytes | None:
        path = self.root / rel
        return path.read_bytes() if path.is_file() else None

    def takes(self, rel: str) -> bool:
        """Whether the overlay brings this file to it; an installed torch has no tests."""
        return self.kind == "checkout" or rel.startswith("torch/")

    def manifest(self) -> manifest.Manifest | None:
        return manifest.load(self.keep)

    def originals(
        self, found: manifest.Manifest | None, rels: list[str]
    ) -> dict[str, bytes | None]:
        """What this tree has at those paths without the overlay (None: no such file).

        A path is left out if nobody knows. What merely is there does not count, nor what
        stood there when the tree was of another version.
        """
        raise NotImplementedError

    def way_out(self, rels: list[str], found: manifest.Manifest | None) -> str:
        """How somebody gets rid of their changes to those files, in words."""
        raise NotImplementedError


class Wheel(Target):
    kind = "wheel"

    def __init__(
        self, python: Path, root: Path, version: str, record: str | None
    ) -> None:
        super().__init__(root, version)
        self.python = python
        self.keep = manifest.folder(self.torch_dir)
        self.lock = self.torch_dir
        self.words = f"torch {version} in {root}"
        hashes = dict(_record_lines(record)) if record else {}
        # conda and distributions keep no RECORD, an editable build lists no files of torch.
        self._hashes = hashes if "torch/__init__.py" in hashes else None

    def originals(
        self, found: manifest.Manifest | None, rels: list[str]
    ) -> dict[str, bytes | None]:
        out: dict[str, bytes | None] = {}
        for rel in rels:
            now = self.read(rel)
            entry = found.files.get(rel) if found else None
            copy = self.keep / (manifest.copy_name(rel) or "none")
            kept = copy.read_bytes() if copy.is_file() else None
            same_torch = found is not None and found.torch == self.version
            if self._own(rel, now, entry, same_torch):
                out[rel] = now
            elif kept is not None and (same_torch or self._of_release(rel, kept)):
                out[rel] = kept
            elif entry and entry.original:
                continue
            elif entry or rel not in (self._hashes or stock.KNOWN):
                out[rel] = None
        return out

    def _of_release(self, rel: str, data: bytes) -> bool:
        if self._hashes is not None:
            return self._hashes.get(rel) == _record_hash(data)
        minor = ".".join(map(str, versions.release(self.version)[:2]))
        return minor in (stock.known(rel, data) or "")

    def _own(
        self,
        rel: str,
        data: bytes | None,
        entry: manifest.Entry | None,
        same_torch: bool,
    ) -> bool:
        """Whether torch was installed with this text there."""
        if self._hashes is not None:
            return (
                rel not in self._hashes if data is None else self._of_release(rel, data)
            )
        if stock.known(rel, data):
            return True
        if entry is None:
            # Nothing better is known, and a copy of it is kept either way.
            return data is None or b"_muon_engine" not in data
        return not same_torch and sha256(data) != entry.sha256

    def way_out(self, rels: list[str], found: manifest.Manifest | None) -> str:
        known = self.originals(found, rels)
        added, kept, lost = [], [], []
        for rel in rels:
            place = shlex.quote(str(self.root / rel))
            copy = self.keep / (manifest.copy_name(rel) or "none")
            if rel in known and known[rel] is None:
                added.append(place)
            elif rel in known and copy.is_file():
                kept.append(f"  cp {shlex.quote(str(copy))} {place}")
            else:
                lost.append(rel)
        lines = [
            "Keep what you need of them elsewhere, then, as there is no git there:"
        ]
        if lost:
            lines.append(
                f"  install torch {self.version} anew, with the program and from the index "
                "that it came from"
            )
        lines += kept
        if added:
            lines.append(f"  rm {' '.join(added)}")
        return "\n".join(lines)


def _record_hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


def _record_lines(record: str) -> list[tuple[str, str]]:
    # path,hash,size: paths of the torch package never hold a comma or a quote.
    rows = (line.rsplit(",", 2) for line in record.splitlines() if line)
    return [(row[0], row[1]) for row in rows if len(row) == 3]


def _from_version_file(torch_dir: Path) -> str | None:
    path = torch_dir / "version.py"
    found = (
        re.search(r"__version__ = '([^']+)'", path.read_text())
        if path.is_file()
        else None
    )
    return found.group(1) if found else None


def find_wheel(python: str | Path) -> Wheel:
    where = find_interpreter(python)
    found = _ask_where(where)
    if found["origin"] is None:
        raise WrongTarget(
            f"{where} has no torch; {where} -m pip install torch=={versions.PINNED}"
        )
    root = Path(found["origin"]).parent.parent
    if found["site"] and (Path(found["site"]) / parts.PTH).is_file():
        root = Path(found["site"])  # `rebuild --pth` put a checkout before it
    if (root / "version.txt").is_file() and (root / ".git").exists():
        raise WrongTarget(
            f"the torch of {python} is the checkout {root}; use --checkout {root}"
        )
    version = found["version"] or _from_version_file(root / "torch")
    if version is None:
        raise WrongTarget(f"cannot tell the version of the torch in {root}")
    return Wheel(where, root, version, found["record"])


class Checkout(Target):
    kind = "checkout"
    # Where commits bring the overlay's own modules, and what all of those name.
    _OWN = ("torch/optim/_muon.py", "torch/optim/muon.py", "torch/optim/_muon_engine")
    _MARK = "_muon_engine"

    def __init__(self, root: Path, version: str, git_dir: Path, common: Path) -> None:
        super().__init__(root, version)
        self.words = f"PyTorch {version} checkout {root}"
        # Of this work tree alone; linked ones share the rest of .git.
        self.git_dir = git_dir
        self.keep = git_dir / "muon_overlay"
        self.lock = common
        self.exclude = common / "info" / "exclude"

    def dirty(self, rels: list[str]) -> set[str]:
        """Changed, staged, deleted, conflicting or untracked among these paths."""
        if not rels:
            return set()
        entries = git.lines(
            self.root, "status", "--porcelain", "-z", "--no-renames",
            "--untracked-files=all", "--ignored=matching", "--", *rels,
        )  # fmt: skip
        dirty = {entry[3:] for entry in entries}
        # git names a wholly ignored folder once, with a slash, not its files.
        folders = tuple(name for name in dirty if name.endswith("/"))
        return {rel for rel in rels if rel in dirty or rel.startswith(folders)}

    def commits(self) -> tuple[str | None, list[str]]:
        """The newest commit here without the overlay, and those since that changed it.

        None: the history that this clone has does not reach back to one.
        """
        since: list[str] = []
        at = "HEAD"
        while self._holds(at):
            last = self._git("log", "-1", "--format=%H", at, "--", *self._OWN)
            since.append(last)
            at = f"{last}^"
            if git.git(
                self.root, "rev-parse", "-q", "--verify", at, check=False
            ).returncode:
                return None, since
        return self._git("rev-parse", at), since

    def _holds(self, commit: str) -> bool:
        command = ["grep", "-q", "-e", self._MARK, commit, "--", *self._OWN]
        return git.git(self.root, *command, check=False).returncode == 0

    def _git(self, *args: str) -> str:
        return git.git(self.root, *args).stdout.decode().strip()

    def at(self, commit: str, rels: list[str]) -> dict[str, bytes | None]:
        """The texts of a commit, as git would write them into the work tree."""
        command = ["ls-tree", "-r", "--name-only", "-z", commit, "--", *rels]
        there = set(git.lines(self.root, *command)) if rels else set()
        smudged = ("cat-file", "--filters")
        return {
            rel: git.git(self.root, *smudged, f"{commit}:{rel}").stdout
            if rel in there
            else None
            for rel in rels
        }

    def originals(
        self, found: manifest.Manifest | None, rels: list[str]
    ) -> dict[str, bytes | None]:
        base, since = self.commits()
        if base is None:
            return {}
        out = self.at(base, [*rels, "version.txt"])
        version = out.pop("version.txt")
        if since and version != self.read("version.txt"):
            return {}  # upstream's files have moved on under the overlay
        if not since:
            clean = set(rels) - self.dirty(rels)
            out |= {rel: self.read(rel) for rel in clean}  # whatever git's filters do
        return out

    def way_out(self, rels: list[str], found: manifest.Manifest | None) -> str:
        where = shlex.quote(str(self.root))
        base, since = self.commits()
        if since:
            return (
                "They may be edits of the overlay: `setup_overlay.py pull --checkout "
                f"{where}` takes these into this repository. Else git undoes the overlay's "
                f"commits, newest first:\n  git -C {where} revert {' '.join(since)}"
            )
        return (
            "Edits of the overlay's files are taken into this repository by\n"
            f"  setup_overlay.py pull --checkout {where}\n"
            "Commit or undo any other change there first."
        )

    def tracked(self, rels: list[str]) -> set[str]:
        return (
            set(git.lines(self.root, "ls-files", "-z", "--", *rels)) if rels else set()
        )

    def head(self) -> str:
        return self._git("rev-parse", "HEAD")


def find_checkout(where: str | Path) -> Checkout:
    root = Path(where).expanduser().resolve()
    lacks = f"{root} is not a PyTorch checkout"
    if not root.is_dir():
        raise WrongTarget(f"{root}: no such folder")
    for rel in ("version.txt", "torch/__init__.py", "torch/optim/_muon.py"):
        if not (root / rel).is_file():
            raise WrongTarget(f"{lacks}: it has no {rel}")
    names = ("--show-toplevel", "--absolute-git-dir", "--git-common-dir")
    done = git.git(root, "rev-parse", *names, check=False)
    found = done.stdout.decode().splitlines()
    if done.returncode or Path(found[0]).resolve() != root:
        # git's own words: they may name a setting, such as safe.directory.
        words = done.stderr.decode(errors="replace").strip()
        raise WrongTarget(
            f"{lacks}: it is not the top of a git work tree"
            + (f"\n{words}" * bool(words))
        )
    if git.git(root, "rev-parse", "--verify", "HEAD", check=False).returncode:
        raise WrongTarget(f"{lacks}: it has no commit yet")
    version = (root / "version.txt").read_text().strip()
    # --git-common-dir is relative to the folder that was asked.
    return Checkout(root, version, Path(found[1]), (root / found[2]).resolve())
