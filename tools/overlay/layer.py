"""The overlay on an installed torch: a folder next to it. No file of torch changes.

The folder has the overlay's files, patched copies of some of torch's, and links to the rest.
A ``.pth`` file has Python find it before the stock torch.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import git, payload, versions
from .errors import Refused, WrongTarget
from .payload import MUON


NAME = "_distributed_muon_torch"
STARTUP = Path(__file__).with_name("startup.py")
# The first entry is the current folder, where anybody's torch/ or json.py may be. This never
# imports torch: that takes seconds, and fails on exactly those that need help.
_PROBE = f"""
import sys
sys.path[:] = [p for p in sys.path if p and not p.endswith({NAME!r})]
import importlib.util, json, os, site, sysconfig
spec = importlib.util.find_spec("torch")
sites = {{*site.getsitepackages(), site.getusersitepackages()}} & {{*sys.path}}
print(json.dumps([spec and spec.origin, sysconfig.get_path("purelib"), *sites]))
"""


def given_paths() -> list[str]:
    """The absolute folders of PYTHONPATH, by which modules of a cluster bring a torch."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [path for path in paths if os.path.isabs(path)]


def plain_environment(*paths: str) -> dict[str, str]:
    """With this PYTHONPATH: the user's could put another torch before an environment's own."""
    plain = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    plain.pop("PYTHONSAFEPATH", None)
    return plain


def find_interpreter(python: str | Path) -> Path:
    # Not a Path yet: it would make a name on PATH of "./python".
    where = shutil.which(os.path.expanduser(python))
    if where is None:
        raise WrongTarget(f"{python}: no such interpreter")
    # Absolute, but not resolved: the link leads to an environment.
    return Path(where).absolute()


def find(python: str | Path, root: Path, *paths: str) -> "Installed":
    """The torch that this interpreter imports, with this PYTHONPATH."""
    where = find_interpreter(python)
    done = subprocess.run(
        [where, "-c", _PROBE], capture_output=True, text=True, check=False,
        env=plain_environment(*paths), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        origin, *homes = json.loads(done.stdout)
    except ValueError:
        # Programs that are no Python tend to repeat the whole probe.
        raise WrongTarget(
            f"{python} failed as a Python with exit code {done.returncode}: "
            f"{done.stderr[-200:]}"
        ) from None
    home, *others = (Path(folder).resolve() for folder in homes)
    if origin:
        torch = Path(origin).resolve().parent
        if torch.parent in others and os.access(torch.parent, os.W_OK):
            home = torch.parent
    else:
        layers = [each for each in (home, *others) if (each / NAME).exists()]
        if not layers:
            raise WrongTarget(f"{where} has no torch")
        home = layers[0]
        torch = home / "torch"
    return Installed(where, torch, home, root)


def listing(folder: Path) -> dict[str, str]:
    """Path -> where a link leads, or the hash of a file."""
    found = {}
    for path in folder.rglob("*"):
        key = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[key] = f"-> {os.readlink(path)}"
        elif path.is_file() and path.suffix != ".pyc":
            found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


class Installed:
    """The torch that an interpreter imports, and the layer in ``home``, a folder of its packages."""

    def __init__(self, python: Path, torch: Path, home: Path, root: Path) -> None:
        self.python, self.torch, self.home, self.root = python, torch, home, root
        self.layer, self.pth = home / NAME, home / "distributed_muon_torch.pth"
        file = torch / "version.py"
        text = file.read_text() if file.is_file() else ""
        match = re.search(r"(?m)^__version__\b.*=\s*['\"](.+?)['\"]", text)
        self.version = match and match[1]  # None: torch was uninstalled
        self.words = f"torch {self.version or '(uninstalled)'} of {python}"

    # The files of a layer

    def make(self, place: Path, *, live: bool) -> dict[str, str]:
        """Write a layer; file -> the patch that does not fit it.

        ``live``: with links to this repository's files, so that edits of them count.
        """
        if self.version is None:
            raise WrongTarget(f"{self.words}: `revert` removes the overlay")
        stock = self.torch.parent
        ours = payload.files(self.root / "torch")
        sources = {f"torch/{path}": file for path, file in ours.items()}
        patches = [
            hunks
            for hunks in payload.patches(self.root)
            if hunks.path.startswith("torch/") and (stock / hunks.path).is_file()
        ]
        patched = {hunks.path: stock / hunks.path for hunks in patches}
        sources |= patched
        folders = {str(top) for path in sources for top in Path(path).parents} - {"."}
        for folder in sorted(folders):
            (place / folder).mkdir(parents=True)
            for entry in (stock / folder).glob("*"):
                path = f"{folder}/{entry.name}"
                if path not in {*sources, *folders} and entry.name != "__pycache__":
                    (place / path).symlink_to(entry)
        for path, source in sources.items():
            put = os.symlink if live and path not in patched else shutil.copyfile
            put(source, place / path)
        misfits = {}
        words = ("apply", "--recount", "--whitespace=nowarn")
        # git would find a work tree that the folder is in.
        env = {"GIT_DIR": os.devnull}
        for path, patch, text in patches:
            done = git.git(place, *words, data=text, env=env, check=False)
            if done.returncode:
                misfits[path] = patch
        shutil.copyfile(STARTUP, place / "__init__.py")
        shutil.copyfile(self.torch / "version.py", place / "version.py")
        (place / "start.pth").write_text(f"import {NAME}\n")
        # Tests and benchmarks compare with the stock files, too.
        (place / "stock.txt").write_text(str(stock))
        record = json.dumps(listing(place), indent=0, sort_keys=True)
        (place / "record.json").write_text(record)
        return misfits

    def _refuse_edits(self) -> None:
        if not self.pth.exists():
            return  # half of a layer, which Python does not find
        record = json.loads((self.layer / "record.json").read_text())
        now = listing(self.layer)
        now.pop("record.json", None)
        # A missing file is half of a layer, too.
        edited = [path for path, text in now.items() if record.get(path) != text]
        if edited:
            raise Refused(
                f"files of the overlay of {self.words} were edited:\n  "
                + "\n  ".join(str(self.layer / path) for path in edited)
                + f"\nThis drops the edits:\n  rm -r {shlex.quote(str(self.layer))}"
            )

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """One command at a time; the kernel lets go even if this process is killed."""
        if not os.access(self.home, os.W_OK):
            raise WrongTarget(
                f"this user may not write {self.home}. `wheel` builds a package that "
                "changes no torch"
            )
        handle = os.open(self.home, os.O_RDONLY)
        try:
            # Some network file systems lock no folder.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            self._refuse_edits()
            yield
        finally:
            os.close(handle)

    def _remove(self) -> None:
        # Without the first, Python has the stock torch.
        self.pth.unlink(missing_ok=True)
        shutil.rmtree(self.layer, ignore_errors=True)

    # Commands

    def apply(self, force: bool = False, live: bool = False) -> str:
        with self._held(), tempfile.TemporaryDirectory() as name:
            # The folder itself is for this user only.
            new = Path(name, NAME)
            misfits = self.make(new, live=live)
            muon = self.torch.parent / MUON
            text = muon.read_bytes() if muon.exists() else b""
            lines = versions.warnings(self.version, misfits, text, force)
            if listing(new) == listing(self.layer) and self.pth.exists():
                return "\n".join(
                    [*lines, f"{self.words} has the overlay; nothing to do"]
                )
            self._remove()
            shutil.copytree(new, self.layer, symlinks=True)
            self.pth.symlink_to(f"{NAME}/start.pth")
        lines.append(f"applied to {self.words}: {self.layer} is before it now")
        return "\n".join(lines)

    def revert(self) -> str:
        if not self.layer.exists() and not self.pth.is_symlink():
            return f"{self.words} has no overlay; nothing to do"
        with self._held():
            self._remove()
        return f"reverted {self.words}"

    def status(self) -> str:
        if not self.layer.exists():
            return f"{self.words}\nholds no overlay"
        with tempfile.TemporaryDirectory() as name:
            live = (self.layer / MUON).is_symlink()
            self.make(Path(name), live=live)
            is_same = listing(Path(name)) == listing(self.layer)
        if is_same and self.pth.exists():
            return f"{self.words}\nholds the overlay, as in this repository"
        self._refuse_edits()
        return (
            f"{self.words}\nholds the overlay of another torch or commit: `apply` again"
        )
