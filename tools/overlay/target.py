"""What the overlay can be laid over: an installed torch, or a PyTorch checkout."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from . import git, manifest, versions
from .errors import WorkFailed, WrongTarget


# Asked of the interpreter itself; never `import torch`, which takes seconds and
# fails on exactly those targets that need help.
_WHERE = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("torch")
found = {"origin": spec.origin if spec else None, "version": None, "record": None}
try:
    dist = importlib.metadata.distribution("torch")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    found["version"] = dist.version
    found["record"] = dist.read_text("RECORD")
print(json.dumps(found))
"""


def ask_python(python: str | Path, code: str, *, timeout: float = 120) -> str:
    """Run ``code`` in that interpreter, away from the caller's own paths."""
    # PYTHONPATH could name a checkout, and the current folder has a torch/ of its own.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [str(python), "-c", code],
            capture_output=True,
            text=True,
            env=env,
            cwd=tempfile.gettempdir(),
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

    def __init__(self, root: Path, version: str) -> None:
        self.root = root
        self.torch_dir = root / "torch"
        self.version = version

    def read(self, rel: str) -> bytes | None:
        path = self.root / rel
        return path.read_bytes() if path.is_file() else None

    def manifest(self) -> manifest.Manifest | None:
        return manifest.load(self.torch_dir)

    def stock(self, rels: list[str]) -> set[str]:
        """Those paths whose present content is the target's own, unchanged."""
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
        self.words = f"torch {version} in {root}"
        self._hashes = dict(_record_lines(record)) if record else None

    def stock(self, rels: list[str]) -> set[str]:
        found = set()
        for rel in rels:
            data = self.read(rel)
            if self._hashes is None:
                # conda and distributions keep no RECORD: what is there when there is
                # no manifest has to count as theirs. Its text is kept either way.
                clean = data is None or self.manifest() is None
            elif data is None:
                clean = rel not in self._hashes
            else:
                clean = self._hashes.get(rel) == _record_hash(data)
            if clean:
                found.add(rel)
        return found

    def way_out(self, rels: list[str], found: manifest.Manifest | None) -> str:
        entries = found.files if found else {}
        added, own = [], []
        for rel in rels:
            entry = entries.get(rel)
            replaced = entry.original if entry else rel in (self._hashes or {})
            (own if replaced else added).append(rel)
        lines = [
            "Keep what you need of them elsewhere, then, as there is no git there:"
        ]
        if own:
            lines.append(
                f"  {self.python} -m pip install --force-reinstall --no-deps "
                f"torch=={self.version}"
            )
        if added:
            # pip does not know these, so it would leave them where they are.
            names = " ".join(shlex.quote(str(self.root / rel)) for rel in added)
            lines.append(f"  rm {names}")
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
    torch_dir = Path(found["origin"]).parent
    root = torch_dir.parent
    if (root / "version.txt").is_file() and (root / ".git").exists():
        raise WrongTarget(
            f"the torch of {python} is the checkout {root}; use --checkout {root}"
        )
    version = found["version"] or _from_version_file(torch_dir)
    if version is None:
        raise WrongTarget(f"cannot tell the version of the torch in {root}")
    versions.check_supported(version, f"the torch of {python}")
    return Wheel(where, root, version, found["record"])


class Checkout(Target):
    kind = "checkout"

    def __init__(self, root: Path, version: str) -> None:
        super().__init__(root, version)
        self.words = f"PyTorch {version} checkout {root}"

    def tracked(self, rels: list[str]) -> set[str]:
        return (
            set(git.lines(self.root, "ls-files", "-z", "--", *rels)) if rels else set()
        )

    def dirty(self, rels: list[str]) -> set[str]:
        """Changed, staged, deleted, conflicting or untracked among these paths."""
        if not rels:
            return set()
        command = ["status", "--porcelain", "-z", "--no-renames"]
        entries = git.lines(
            self.root,
            *command,
            "--untracked-files=all",
            "--ignored=matching",
            "--",
            *rels,
        )
        return {entry[3:] for entry in entries}

    def stock(self, rels: list[str]) -> set[str]:
        dirty = self.dirty(rels)
        # git names a wholly ignored folder once, with a slash, not its files.
        folders = tuple(name for name in dirty if name.endswith("/"))
        return {r for r in rels if r not in dirty and not r.startswith(folders)}

    def way_out(self, rels: list[str], found: manifest.Manifest | None) -> str:
        return "Commit or undo them there first."

    def head(self) -> str:
        return git.git(self.root, "rev-parse", "HEAD").stdout.decode().strip()

    def exclude_file(self) -> Path:
        # Asked of git: in a linked work tree .git is a file, the exclude is shared.
        out = git.git(self.root, "rev-parse", "--git-path", "info/exclude").stdout
        return self.root / out.decode().strip()


def find_checkout(where: str | Path) -> Checkout:
    root = Path(where).resolve()
    lacks = f"{root} is not a PyTorch checkout"
    if not root.is_dir():
        raise WrongTarget(f"{root}: no such folder")
    for rel in ("version.txt", "torch/__init__.py", "torch/optim/_muon.py"):
        if not (root / rel).is_file():
            raise WrongTarget(f"{lacks}: it has no {rel}")
    done = git.git(root, "rev-parse", "--show-toplevel", check=False)
    if done.returncode or Path(done.stdout.decode().strip()).resolve() != root:
        raise WrongTarget(f"{lacks}: it is not the top of a git work tree")
    if git.git(root, "rev-parse", "--verify", "HEAD", check=False).returncode:
        raise WrongTarget(f"{lacks}: it has no commit yet")
    version = (root / "version.txt").read_text().strip()
    versions.check_supported(version, f"the checkout {root}")
    return Checkout(root, version)
