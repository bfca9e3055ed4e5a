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
from .payload import COMMAND, MUON


NAME = "_distributed_muon_torch"
STARTUP = Path(__file__).with_name("startup.py")
# The first entry is the current folder, where anybody's torch/ or json.py may be. This never
# imports torch: that takes seconds, and fails on exactly those that need help.
_PROBE = f"""
import sys
sys.path[:] = [p for p in sys.path if p and not p.endswith({NAME!r})]
import importlib.util, json, os, site, sysconfig
spec = importlib.util.find_spec("torch")
sites = [*site.getsitepackages(), site.getusersitepackages()]
print(json.dumps([spec and spec.origin, sysconfig.get_path("purelib"), sites]))
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
        origin, home, sites = json.loads(done.stdout)
    except ValueError:
        # Programs that are no Python tend to repeat the whole probe.
        last = done.stderr.strip().rpartition("\n")[2][:200]
        raise WrongTarget(
            f"{python} failed as a Python with exit code {done.returncode}: {last}"
        ) from None
    home = Path(home)
    if origin is None and not (home / NAME).exists():
        raise WrongTarget(f"{where} has no torch")
    torch = Path(origin).resolve().parent if origin else home / "torch"
    is_site = str(torch.parent) in map(os.path.realpath, sites)
    if is_site and os.access(torch.parent, os.W_OK):
        home = torch.parent
    return Installed(where, torch, home.resolve(), root)


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
        self.version = None  # torch was uninstalled
        if (torch / "version.py").is_file():
            text = (torch / "version.py").read_text()
            match = re.search(r"(?m)^__version__\b.*=\s*['\"](.+?)['\"]", text)
            self.version = match[1] if match else "unknown"
        self.words = f"torch {self.version or '(uninstalled)'} of {python}"
        self.quoted = shlex.quote(str(python))

    def _command(self, name: str) -> str:
        return f"\n  {COMMAND} {name} --python {self.quoted}"

    # The files of a layer

    def make(self, place: Path, *, live: bool) -> dict[str, str]:
        """Write a layer; file -> the patch that does not fit it.

        ``live``: with links to this repository's files, so that edits of them count.
        """
        if self.version is None:
            raise WrongTarget(
                f"{self.words}. This removes it:{self._command('revert')}"
            )
        if (self.torch / ".muon_overlay").exists():
            raise Refused(
                f"{self.words} has a former version of the overlay, which replaced files. "
                "Reinstall torch"
            )
        stock = self.torch.parent
        patches = payload.patches(self.root)
        patched = {hunks.path for hunks in patches if (stock / hunks.path).is_file()}
        both = {*payload.files(self.root), *patched}
        paths = {Path(path) for path in both if path.startswith("torch/")}
        # Tests and benchmarks compare with the stock files.
        hidden = place / "torch/.muon_overlay/original"
        folders = {folder for path in paths for folder in path.parents} - {Path(".")}
        for folder in sorted(folders):
            (place / folder).mkdir(parents=True, exist_ok=True)
            (hidden / folder.relative_to("torch")).mkdir(parents=True, exist_ok=True)
            for entry in (stock / folder).glob("*"):
                path = folder / entry.name
                if path in paths:
                    (hidden / path.relative_to("torch")).symlink_to(entry)
                elif path not in folders and entry.name != "__pycache__":
                    (place / path).symlink_to(entry)
        for path in paths:
            source = stock if path.as_posix() in patched else self.root
            if live and source == self.root:
                (place / path).symlink_to(source / path)
            else:
                shutil.copyfile(source / path, place / path)
        misfits = {}
        # git would find a work tree that the folder is in.
        env = {"GIT_CEILING_DIRECTORIES": str(place.resolve().parent)}
        words = ("apply", "--recount", "--whitespace=nowarn")
        for path, patch, text in patches:
            if Path(path) in paths:
                done = git.git(place, *words, data=text, env=env, check=False)
                if done.returncode:
                    misfits[path] = patch
        shutil.copyfile(STARTUP, place / "__init__.py")
        shutil.copyfile(self.torch / "version.py", place / "version.py")
        (place / "start.pth").write_text(f"import {NAME}\n")
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
                f"this user may not write {self.home}. This builds a package that changes "
                f"no torch:\n  {COMMAND} wheel"
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
            new = Path(name)
            misfits = self.make(new, live=live)
            muon = self.torch.parent / MUON
            text = muon.read_bytes() if muon.exists() else None
            again = None if force else self._command("apply --force")
            lines = versions.warnings(self.version, misfits, text, again)
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
        again = self._command("apply")
        return f"{self.words}\nholds the overlay of another torch or commit:{again}"
