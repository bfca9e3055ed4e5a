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
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import git, payload, versions
from .errors import Refused, WrongTarget
from .payload import COMMAND


NAME = "_distributed_muon_torch"
STARTUP = Path(__file__).with_name("startup.py")
# Tests and benchmarks compare with the stock files that the overlay hides.
STOCK = Path("torch/.muon_overlay/original")
# The first entry is the current folder, where anybody's torch/ or json.py may be.
_ALONE = "import sys; sys.path[:] = [p for p in sys.path if p]\n"
# It never imports torch: that takes seconds, and fails on exactly those that need help.
_PROBE = f"""
sys.path[:] = [p for p in sys.path if not p.endswith({NAME!r})]
import importlib.util, json, os, site, sysconfig
spec = importlib.util.find_spec("torch")
sites = [*site.getsitepackages(), site.getusersitepackages()]
print(json.dumps([spec and spec.origin, sysconfig.get_path("purelib"), sites]))
"""


def plain_environment(*, with_path: bool = False) -> dict[str, str]:
    """Without PYTHONPATH, which could put another torch before an environment's own.

    ``with_path``: with its absolute folders, by which modules of a cluster bring a torch.
    """
    dropped = ("PYTHONPATH", "PYTHONSAFEPATH")
    plain = {name: text for name, text in os.environ.items() if name not in dropped}
    # Relative ones would be of the current folder.
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in paths if os.path.isabs(path)]
    if with_path and paths:
        plain["PYTHONPATH"] = os.pathsep.join(paths)
    return plain


def ask_python(python: Path, code: str, *, with_path: bool = True) -> str:
    """The last line that this code prints in that interpreter."""
    done = subprocess.run(
        [python, "-c", _ALONE + code], capture_output=True, text=True, check=False,
        env=plain_environment(with_path=with_path), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        # Programs that are no Python tend to repeat the whole probe.
        last = (done.stderr.strip().splitlines() or [""])[-1].strip()[:200]
        raise WrongTarget(f"{python} failed with exit code {done.returncode}: {last}")
    return "".join(done.stdout.splitlines()[-1:])


def find_interpreter(python: str | Path) -> Path:
    # Not a Path yet: it would make a name on PATH of "./python".
    where = shutil.which(os.path.expanduser(python))
    if where is None:
        raise WrongTarget(f"{python}: no such interpreter")
    # Absolute, but not resolved: the link leads to an environment.
    return Path(os.path.abspath(where))


def find(python: str | Path, root: Path, *, with_path: bool = True) -> "Installed":
    """The torch that this interpreter imports; without PYTHONPATH, its own."""
    where = find_interpreter(python)
    try:
        origin, home, sites = json.loads(ask_python(where, _PROBE, with_path=with_path))
    except ValueError:
        raise WrongTarget(f"{python} is not a Python interpreter") from None
    home = Path(home)
    if origin is None and not (home / NAME).exists():
        raise WrongTarget(f"{where} has no torch")
    torch = Path(origin).resolve().parent if origin else home / "torch"
    if (torch.parent / "version.txt").is_file() and (torch.parent / ".git").exists():
        raise WrongTarget(
            f"{python} has the torch of a checkout: --checkout {torch.parent}"
        )
    is_site = str(torch.parent) in map(os.path.realpath, sites)
    if is_site and os.access(torch.parent, os.W_OK):
        home = torch.parent
    return Installed(where, torch, home.resolve(), root)


def listing(folder: Path) -> dict[str, str]:
    """Path -> where a link leads, or the hash of a file."""
    found = {}
    for place, folders, names in os.walk(folder):
        for path in [Path(place, name) for name in [*names, *folders]]:
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
            match = re.search(
                r"(?m)^__version__ *(?:: *\w+)? *= *['\"](.+?)['\"]", text
            )
            self.version = match[1] if match else "unknown"
        self.words = f"torch {self.version or '(uninstalled)'} of {python}"
        self.quoted = shlex.quote(str(python))

    def _command(self, name: str) -> str:
        return f"\n  {COMMAND} {name} --python {self.quoted}"

    # The files of a layer

    def _patched(self) -> tuple[dict[str, bytes], dict[str, str]]:
        """The patched files, and the patches that do not fit."""
        texts: dict[str, bytes] = {}
        misfits: dict[str, str] = {}
        for path, patch, hunks in payload.patches(self.root):
            stock = self.torch.parent / path
            if not path.startswith("torch/") or not stock.is_file():
                continue
            with tempfile.TemporaryDirectory(prefix="distributed-muon-") as name:
                file = Path(name, path)
                file.parent.mkdir(parents=True)
                shutil.copyfile(stock, file)
                # git would find a work tree that the temporary folders are in.
                env = {"GIT_CEILING_DIRECTORIES": str(Path(name).resolve().parent)}
                words = ("apply", "--recount", "--whitespace=nowarn")
                done = git.git(Path(name), *words, data=hunks, env=env, check=False)
                if done.returncode:
                    misfits[path] = patch
                else:
                    texts[path] = file.read_bytes()
        return texts, misfits

    def _make(self, place: Path, final: Path, *, live: bool) -> list[str]:
        """Write a layer that will be at ``final``; why it may not work.

        ``live``: with links to this repository's files, so that edits of them count.
        """
        if self.version is None:
            raise WrongTarget(
                f"{self.words}. This removes it:{self._command('revert')}"
            )
        patched, misfits = self._patched()
        ours = {}
        for path, file in payload.files(self.root).items():
            if path.startswith("torch/"):
                ours[Path(path)] = file
        paths = {*ours, *map(Path, patched)}

        def link(path: Path, target: Path) -> None:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).symlink_to(os.path.relpath(target, (final / path).parent))

        folders = {folder for path in paths for folder in path.parents} - {Path(".")}
        for folder in sorted(folders):
            (place / folder).mkdir(parents=True, exist_ok=True)
            stock = self.torch.parent / folder
            for entry in stock.iterdir() if stock.is_dir() else ():
                path = folder / entry.name
                if path in paths:
                    link(STOCK / path.relative_to("torch"), entry)
                elif path not in folders and entry.name != "__pycache__":
                    link(path, entry)
        for path, file in ours.items():
            if live:
                link(path, file)
            else:
                shutil.copyfile(file, place / path)
        for path, text in patched.items():
            (place / path).write_bytes(text)
        shutil.copyfile(STARTUP, place / "__init__.py")
        shutil.copyfile(self.torch / "version.py", place / "version.py")
        (place / "stock.txt").write_text(os.path.relpath(self.torch.parent, final))
        (place / "record.json").write_text(
            json.dumps(listing(place), indent=0, sort_keys=True)
        )
        texts = {}
        for path in versions.STOCK:
            file = self.torch.parent / path
            texts[path] = file.read_bytes() if file.is_file() else None
        return versions.problems(self.version, texts, misfits)

    def _refuse_edits(self) -> None:
        record = {}
        with contextlib.suppress(OSError, ValueError):  # half of a layer
            record = json.loads((self.layer / "record.json").read_text())
        now = listing(self.layer)
        now.pop("record.json", None)
        # Users edit and add files. A missing file is half of a layer, too.
        edited = [
            path for path, text in now.items() if record and record.get(path) != text
        ]
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
            with contextlib.suppress(
                OSError
            ):  # some network file systems lock no folder
                fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                self._remove_halves()
                self._refuse_edits()
                yield
            finally:
                self._remove_halves()
        finally:
            os.close(handle)

    def _remove_halves(self) -> None:
        for path in self.home.glob(f"{NAME}.*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    # Commands

    def apply(self, *, force: bool = False, live: bool = False) -> str:
        former = self.torch / ".muon_overlay/manifest.json"
        if former.exists():
            commit = json.loads(former.read_text())["overlay"]
            raise Refused(
                f"{self.words} has the overlay {commit}, which replaced files. Run `revert` "
                f"of that commit, or reinstall torch and remove {former.parent}"
            )
        new, old = (self.layer.with_name(f"{NAME}.{end}") for end in ("new", "old"))
        with self._held():
            lines = self._make(new, self.layer, live=live)
            if lines and not force:
                again = self._command("apply --force")
                raise WrongTarget("\n".join([*lines, f"This goes on:{again}"]))
            lines += versions.warning((self.torch / "optim/_muon.py").read_bytes())
            done = f"{self.words} has the overlay already; nothing to do"
            if listing(new) != listing(self.layer) or not self.pth.exists():
                done = f"applied to {self.words}: {self.layer} is before it now"
                if self.layer.exists():
                    self.layer.rename(old)
                new.rename(self.layer)
                line = self.layer.with_name(f"{NAME}.line")
                line.write_text(f"import {NAME}\n")
                line.rename(self.pth)
        return "\n".join([*lines, done])

    def revert(self) -> str:
        # A killed `revert` may have left a folder of another name.
        if not self.pth.exists() and not [*self.home.glob(f"{NAME}*")]:
            return f"{self.words} has no overlay; nothing to do"
        with self._held():
            self.pth.unlink(missing_ok=True)
            if self.layer.exists():
                self.layer.rename(self.layer.with_name(f"{NAME}.old"))
        return f"reverted {self.words}"

    def status(self) -> str:
        if not self.layer.exists():
            return f"{self.words}\nholds no overlay"
        there = listing(self.layer)
        for live in (False, True):
            with tempfile.TemporaryDirectory() as name:
                self._make(Path(name), self.layer, live=live)
                if listing(Path(name)) == there and self.pth.exists():
                    return f"{self.words}\nholds the overlay, as in this repository"
        self._refuse_edits()
        again = self._command("apply")
        return f"{self.words}\nholds the overlay of another torch or commit:{again}"

    @contextlib.contextmanager
    def temporary(self) -> Iterator[dict[str, str]]:
        """Variables with which the interpreter has the overlay. Its torch stays the same."""
        with tempfile.TemporaryDirectory(prefix="distributed-muon-") as name:
            folder = Path(name).resolve()
            for problem in self._make(folder, folder, live=True):
                print(f"warning: {problem}", file=sys.stderr)
            paths = plain_environment(with_path=True).get("PYTHONPATH")
            path = os.pathsep.join(filter(None, [name, paths]))
            # The links lead into that torch, where Python would write its bytecode.
            yield {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
