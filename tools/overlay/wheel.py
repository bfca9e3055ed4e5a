"""The overlay on an installed torch. RECORD says what torch was installed with.

``<torch>/.muon_overlay`` has copies of the stock files, which are written first, and a
manifest with the hashes of each file before and after a command. The files come last:
after a kill, the manifest says which ones the next command finishes.
"""

import base64
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from . import files, patches, payload
from .errors import Refused, WrongTarget
from .payload import sha256
from .target import FOLDER, Plan, Report, Target


FORMAT = 2


class Entry(NamedTuple):
    """Hashes of one file; None: no file."""

    stock: str | None
    was: str | None  # before the command that wrote the manifest
    new: str | None  # after it


class Manifest(NamedTuple):
    torch: str | None = None
    overlay: str | None = None  # this repository's commit
    files: dict[str, Entry] = {}


class Wheel(Target):
    kind = "wheel"
    instead = (
        f". This builds a package that changes no torch:\n  {payload.COMMAND} wheel"
    )

    def __init__(
        self, python: Path, root: Path, version: str | None, record: str | None
    ) -> None:
        super().__init__(root, version)
        self.python, self.record = python, record
        self.copies = self.torch_dir / FOLDER / "original"
        self.lock, self.option = self.torch_dir, ("--python", str(python))
        self.words = f"torch {version or '(uninstalled)'} in {root}"
        self._path = self.torch_dir / FOLDER / "manifest.json"
        # path,hash,size: paths of the torch package never hold a comma or a quote.
        rows = [line.rsplit(",", 2) for line in (record or "").splitlines()]
        hashes = {row[0]: row[1] for row in rows if len(row) == 3}
        # conda and distributions keep no RECORD; an editable build lists no torch files.
        self._hashes = hashes if "torch/__init__.py" in hashes else None

    def _manifest(self) -> Manifest:
        """Empty also if it is damaged: RECORD and the copies' hashes tell enough."""
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError, AttributeError
        ):
            data = json.loads(self._path.read_bytes())
            if data.pop("format") == FORMAT:
                entries = {rel: Entry(*entry) for rel, entry in data["files"].items()}
                return Manifest(**data | {"files": entries})
        return Manifest()

    def added(self) -> set[str]:
        """The files that the overlay added."""
        entries = self._manifest().files
        return {rel for rel, entry in entries.items() if entry.stock is None}

    def read(self, rel: str) -> bytes | None:
        return files.read(self.root / rel)

    @property
    def _sibling(self) -> Path:
        """The file whose mode and owner new files get."""
        path = self.torch_dir / "__init__.py"
        return path if path.is_file() else self.torch_dir

    def copy_of(self, rel: str) -> Path:
        """Where a copy of the stock file lies."""
        return self.copies / rel.removeprefix("torch/")

    def _finish(self) -> bool:
        """The next command knows the files that a killed one wrote: the manifest has both."""
        places = [self.root / rel for rel in self._manifest().files]
        scrap = [*self._path.parent.rglob("*.muon-new"), *map(files.scratch, places)]
        left = [path for path in scrap if path.exists()]
        for path in left:
            path.unlink()
            files.tidy(path, self.root)
        return bool(left)

    def _stock(self, manifest: Manifest, rels: list[str]) -> dict[str, bytes | None]:
        """The texts that torch was installed with; no key: the text is not known."""
        out: dict[str, bytes | None] = {}
        now = {rel: self.read(rel) for rel in (*rels, *manifest.files)}
        # An installer that keeps no RECORD may bring another build of the same version.
        replaced = {
            r: (sha256(now[r]), e) for r, e in manifest.files.items() if e.stock
        }
        again = all(have != e.new for have, e in replaced.values())
        again = again and any(have not in e for have, e in replaced.values())
        for rel in rels:
            kept, entry = files.read(self.copy_of(rel)), manifest.files.get(rel)
            texts: list[bytes | None] = [now[rel], kept, None]
            if self.version is None:
                texts = [None]
            elif self._hashes is not None:
                texts = [t for t in texts if record_hash(t) == self._hashes.get(rel)]
            elif entry and (have := sha256(now[rel])) == entry.stock:
                pass
            elif entry and manifest.torch == self.version and not again:
                texts = [t for t in texts if sha256(t) == entry.stock]
            elif entry and have in (entry.was, entry.new):
                # The overlay's text is still there.
                texts = [None] if entry.stock is None else []
            elif b"_muon_engine" in (now[rel] or b""):
                texts = []
            if texts:
                out[rel] = texts[0]
        return out

    def plan(self, root: Path) -> Plan:
        source, manifest = payload.read(root), self._manifest()
        whole = {r: t for r, t in source.whole.items() if r.startswith("torch/")}
        source, before = source._replace(whole=whole), manifest.files
        every = dict.fromkeys([*patches.paths(source), *before])
        rels = [rel for rel in every if rel.startswith("torch/")]
        base = self._stock(manifest, rels)
        new, misfits = patches.overlay(source, base)
        now = {rel: self.read(rel) for rel in rels}
        edited = [
            rel
            for rel, text in now.items()
            if text not in (base.get(rel), new.get(rel))
            and sha256(text) not in before.get(rel, ())
        ]
        laid: files.Texts = {r: b"" for r, e in before.items() if e.new != e.stock}
        name = manifest.overlay if laid else None
        return Plan(source, new, misfits, base, now, edited, laid, name)

    def _check_edits(self, plan: Plan, changes: files.Texts) -> None:
        """The one rule: a file whose text is of no known origin is not written."""
        if plan.edited:
            raise Refused(
                f"{self.words} has other changes in files of the overlay:\n"
                + "".join(f"  {rel}\n" for rel in plan.edited)
                + self._way_out(plan, plan.edited)
            )
        unknown = [rel for rel in plan.now if rel not in plan.base]
        if unknown:
            raise WrongTarget(
                f"the stock text of these files of {self.words} is neither there nor kept:\n"
                + "".join(f"  {rel}\n" for rel in unknown)
                + self._reinstall()
            )

    def _reinstall(self) -> str:
        return f"Reinstall torch {self.version}, with the program and from the index it is from"

    def _way_out(self, plan: Plan, rels: list[str]) -> str:
        lines = ["Keep a copy of your changes. There is no git there; these drop them:"]
        for rel in rels:
            place, base = shlex.quote(str(self.root / rel)), plan.base.get(rel, b"")
            if base is None:
                lines.append(f"  rm {place}")
            elif files.read(copy := self.copy_of(rel)) == base:
                lines.append(f"  cp {shlex.quote(str(copy))} {place}")
        if len(lines) <= len(rels):
            lines.append(f"  {self._reinstall()}")
        return "\n".join(lines)

    def _apply(self, plan: Plan, report: Report) -> None:
        texts = {self.copy_of(rel): plan.base[rel] for rel in plan.new}
        kept = {path: text for path, text in texts.items() if text is not None}
        self._write(plan, plan.wanted, report.changes, plan.source.name, kept)

    def _revert(self, plan: Plan, report: Report) -> None:
        if report.changes:
            self._write(plan, plan.base, report.changes, plan.laid_name, {})
        shutil.rmtree(self._path.parent, ignore_errors=True)
        if self.version is None:
            files.remove_empty_folders(self.torch_dir, self.root)

    def _write(
        self, plan: Plan, want: files.Texts, changes: files.Texts, name: str | None,
        kept: dict[Path, bytes],
    ) -> None:  # fmt: skip
        manifest = self._manifest()
        if (manifest.torch, manifest.overlay) == (self.version, name) and not changes:
            return
        hashes = {r: [*map(sha256, (plan.base[r], plan.now[r], want[r]))] for r in want}
        entries = {rel: Entry(*of) for rel, of in hashes.items() if len(set(of)) > 1}
        new = {"format": FORMAT, **Manifest(self.version, name, entries)._asdict()}
        text = json.dumps(new, indent=1, sort_keys=True).encode()
        places = {self.root / rel: text for rel, text in changes.items()}
        try:
            files.write({**kept, self._path: text}, self._sibling, self.root)
            files.write(places, self._sibling, self.root)
        except BaseException:
            if plan.now == plan.base:  # no overlay was there
                shutil.rmtree(self._path.parent, ignore_errors=True)
            raise

    def _state(self, plan: Plan, there: bool) -> tuple[str, str]:
        before = self._manifest()
        if self.version is None:
            return "gone", ""
        if there and before.torch not in (None, self.version):
            return "upgraded", (
                f": applied to {before.torch}, torch is {self.version} now. Apply it again, "
                "or `revert`:" + self.command("apply")
            )
        return super()._state(plan, there)


def record_hash(data: bytes | None) -> str | None:
    if data is None:
        return None
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


# The interpreter itself runs this. It never imports torch: that takes seconds, and
# fails on exactly those targets that need help.
_WHERE = """
import importlib.metadata, importlib.util, json, os, sys
spec = importlib.util.find_spec("torch")
folders = list(spec.submodule_search_locations or []) if spec else []
closed = [p for p in sys.path + folders if os.path.isdir(p) and not os.access(p, os.R_OK | os.X_OK)]
found = {"origin": spec.origin if spec else None, "folders": folders, "closed": closed}
dists = list(importlib.metadata.distributions(name="torch"))
at = [d for d in dists if [os.path.realpath(d.locate_file("torch"))] == [*map(os.path.realpath, folders)]]
dist = (at or dists or [None])[0]
found |= {"version": dist.version if dist else None, "prefix": sys.prefix}
found |= {"record": dist.read_text("RECORD") if dist else None}
print(json.dumps(found))
"""
# The first entry is the current folder, where anybody's torch/ or json.py may be.
_ALONE = "import sys; sys.path[:] = [p for p in sys.path if p]\n"


def plain_environment(*, with_path: bool = False) -> dict[str, str]:
    """Without PYTHONPATH, which could put another torch before an environment's own.

    ``with_path``: with its absolute folders, as modules of a cluster bring a torch, and
    without those that anybody's files may be in.
    """
    dropped = ("PYTHONPATH", "PYTHONSAFEPATH")
    plain = {name: text for name, text in os.environ.items() if name not in dropped}
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    shared = (os.getcwd(), tempfile.gettempdir())
    paths = [p for p in paths if os.path.isabs(p) and os.path.realpath(p) not in shared]
    return plain | (
        {"PYTHONPATH": os.pathsep.join(paths)} if with_path and paths else {}
    )


def ask_python(python: Path, code: str, *, with_path: bool = True) -> str:
    """Run ``code`` in that interpreter. A shim may choose it by the caller's folder."""
    done = subprocess.run(
        [python, "-c", _ALONE + code], capture_output=True, text=True, check=False,
        env=plain_environment(with_path=with_path), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        # Programs that are no Python tend to repeat the whole probe.
        last = (done.stderr.strip().splitlines() or [""])[-1].strip()[:200]
        raise WrongTarget(f"{python} failed with exit code {done.returncode}: {last}")
    return done.stdout


def find_interpreter(python: str | Path) -> Path:
    """The interpreter that is meant: a path, or a name on PATH."""
    # Not a Path yet: it would make a name on PATH of "./python".
    where = shutil.which(os.path.expanduser(python))
    if where is None:
        raise WrongTarget(f"{python}: no such interpreter")
    # Not resolved: an environment's python is a link that must not be followed. But
    # absolute, because it is not run in the present folder.
    return Path(os.path.abspath(where))


def find_wheel(python: str | Path, *, with_path: bool = True) -> Wheel:
    """The torch that this interpreter imports; without PYTHONPATH, its own."""
    where = find_interpreter(python)
    # The last line: a sitecustomize may have said something before it.
    lines = ask_python(where, _WHERE, with_path=with_path).splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise WrongTarget(f"{python} is not a Python interpreter") from None
    if answer["origin"] is None:
        for folder in map(Path, answer["folders"]):
            if (folder / FOLDER).is_dir():
                return Wheel(where, folder.parent, None, None)
        closed = ", ".join(answer["closed"])
        why = f": this user may not read {closed}" if closed else " has no torch"
        raise WrongTarget(f"{where}{why}")
    root = Path(answer["origin"]).parent.parent
    if (root / "version.txt").is_file() and (root / ".git").exists():
        raise WrongTarget(f"{python} has the torch of a checkout: --checkout {root}")
    if answer["version"] is None:
        raise WrongTarget(f"the torch in {root} has no metadata that name its version")
    wheel = Wheel(where, root, answer["version"], answer["record"])
    if not root.is_relative_to(answer["prefix"]):
        wheel.note = (
            f"{wheel.words} is not in the environment {answer['prefix']}: other programs "
            "may import it, too"
        )
    return wheel
