"""The overlay on an installed torch. RECORD says what torch was installed with.

``<torch>/.muon_overlay/original`` has copies of the stock files, and ``manifest.json``
the hashes of each file before and after the command that wrote it. The copies are
written first, then the manifest, then the files: after a kill, the manifest says which
files the next command finishes.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import files, patches, payload, stock, versions, worktree
from .errors import WrongTarget
from .interpreter import PTH, ask_where, find_interpreter
from .payload import sha256
from .target import FOLDER, Plan, Report, Target


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .target import Texts


FORMAT = 2


class Entry(NamedTuple):
    """Hashes of one file; None: no file."""

    stock: str | None
    was: str | None  # before the command that wrote the manifest
    new: str | None  # after it


class Manifest(NamedTuple):
    torch: str | None
    overlay: str | None  # this repository's commit
    files: dict[str, Entry]

    def dump(self) -> bytes:
        data = {"format": FORMAT, **self._asdict()}
        return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


class Wheel(Target):
    kind = "wheel"

    def __init__(
        self, python: Path, root: Path, version: str | None, record: str | None
    ) -> None:
        super().__init__(root, version)
        self.python = python
        self.lock = self.torch_dir
        self.words = (
            f"torch {version} in {root}" if version else f"{root}, without torch"
        )
        self._path = self.torch_dir / FOLDER / "manifest.json"
        hashes = dict(_record_lines(record)) if record else {}
        # conda and distributions keep no RECORD; an editable build lists no torch files.
        self._hashes = hashes if "torch/__init__.py" in hashes else None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Work on it alone, after the work of a killed command is finished."""
        with files.held(self.lock):
            if self._finish():
                print("an earlier command was cut off half way: finished")
            yield

    def manifest(self) -> Manifest | None:
        """None also if it is damaged: RECORD and the copies' hashes tell enough."""
        try:
            data = json.loads(self._path.read_bytes())
            if data.pop("format") != FORMAT:
                return None
            entries = {rel: Entry(*entry) for rel, entry in data.pop("files").items()}
            return Manifest(files=entries, **data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def overlaid(self, rels: list[str]) -> set[str]:
        """Those files that the overlay added."""
        found = self.manifest()
        if found is None:  # lost, if there are copies
            known = self._hashes if self.copies.is_dir() else None
            return {rel for rel in rels if known is not None and rel not in known}
        return {rel for rel, entry in found.files.items() if entry.stock is None}

    def _scrap(self, found: Manifest | None) -> list[Path]:
        own = [*self._path.parent.rglob("*.muon-new")]
        return own + [
            path
            for rel in (found.files if found else ())
            if (path := files.scratch(self.root / rel)).exists()
        ]

    def interrupted(self) -> bool:
        return bool(self._scrap(self.manifest()))

    def _finish(self) -> bool:
        """All new texts wait next to their places before the first rename."""
        found = self.manifest()
        changes: dict[str, bytes | None] = {}
        complete = True
        for rel, entry in (found.files if found else {}).items():
            now = sha256(self.read(rel))
            if now == entry.new or now != entry.was:
                continue  # done, or edited since
            waits = files.scratch(self.root / rel)
            changes[rel] = waits.read_bytes() if waits.is_file() else None
            complete &= sha256(changes[rel]) == entry.new
        scrap = self._scrap(found)
        if complete:
            self.write(changes)
        for path in scrap:
            path.unlink(missing_ok=True)
        for rel in found.files if found else ():
            files.tidy(self.root / rel, self.root)
        if found and all(
            e.new == e.stock == sha256(self.read(r)) for r, e in found.files.items()
        ):
            shutil.rmtree(self._path.parent)  # a revert that was nearly done
            return True
        return bool(scrap) or (complete and bool(changes))

    def _stock(
        self, found: Manifest | None, rels: list[str]
    ) -> dict[str, bytes | None]:
        """The texts that torch was installed with; no key: the text is not known."""
        out: dict[str, bytes | None] = {}
        for rel in rels:
            now, copy = self.read(rel), self.copy_of(rel)
            kept = payload.unix(copy.read_bytes()) if copy.is_file() else None
            entry = found.files.get(rel) if found else None
            if self.version is None or rel not in (self._hashes or [rel]):
                out[rel] = None
            elif self._hashes is not None:
                if now is not None and record_hash(now) == self._hashes[rel]:
                    out[rel] = now
                elif kept is not None and record_hash(kept) == self._hashes[rel]:
                    out[rel] = kept
            elif entry and found and found.torch == self.version:
                if entry.stock in (sha256(now), sha256(kept)):
                    out[rel] = now if sha256(now) == entry.stock else kept
            elif stock.known(rel, now) or self._is_stock(rel, now, entry):
                out[rel] = now
            elif kept is not None and self._minor() in (stock.known(rel, kept) or ""):
                out[rel] = kept
            elif entry.stock is None if entry else rel not in stock.KNOWN:
                out[rel] = None
        return out

    def _minor(self) -> str:
        return ".".join(map(str, versions.release(self.version or "")[:2]))

    def _is_stock(self, rel: str, now: bytes | None, entry: Entry | None) -> bool:
        """Without RECORD: whether the file there counts as torch's own."""
        if entry:  # torch was upgraded since
            return now is not None and sha256(now) not in (entry.was, entry.new)
        return rel in stock.KNOWN and b"_muon_engine" not in (now or b"")

    def plan(self, root: Path) -> Plan:
        source, found = payload.read(root), self.manifest()
        before = found.files if found else {}
        version = self.version or versions.PINNED
        series = patches.series(source.patches, version)
        hunked = [rel for patch in series for rel in patch.paths]
        rels = [
            rel
            for rel in dict.fromkeys([*source.whole, *hunked, *before])
            if self.takes(rel)
        ]
        base = self._stock(found, rels)
        layers, lacking, misfits = patches.layers(source, version, base, self.takes)
        laid = {
            rel: entry.new for rel, entry in before.items() if entry.new != entry.stock
        }
        return Plan(
            source, layers, lacking, misfits, base,
            now={rel: self.read(rel) for rel in rels},
            ours={r: {before[r].was, before[r].new} if r in before else set() for r in rels},
            laid=laid, laid_name=found.overlay if found and laid else None,
        )  # fmt: skip

    def _check_base(self, plan: Plan) -> None:
        unknown = [rel for rel in plan.now if rel not in plan.base]
        if unknown:
            found = self.manifest()
            came = f"The copies came with torch {found.torch}.\n" if found else ""
            raise WrongTarget(
                f"the stock text of these files of {self.words} is not known: what RECORD "
                "or the manifest names is neither there nor among the copies.\n"
                + "".join(f"  {rel}\n" for rel in unknown)
                + f"{came}{self._reinstall()}. Nothing was touched."
            )

    def _reinstall(self) -> str:
        return (
            f"Reinstall torch {self.version}, with the program and from the index that it "
            "came from; then `apply` or `revert` again"
        )

    def way_out(self, plan: Plan, rels: list[str]) -> str:
        lines = ["Keep a copy of your changes. There is no git there; these drop them:"]
        added = [rel for rel in rels if rel in plan.base and plan.base[rel] is None]
        for rel in rels:
            place, copy = shlex.quote(str(self.root / rel)), self.copy_of(rel)
            if rel in added:
                lines.append(f"  rm {place}")
            elif copy.is_file() and payload.unix(copy.read_bytes()) == plan.base.get(
                rel
            ):
                lines.append(f"  cp {shlex.quote(str(copy))} {place}")
            elif rel not in plan.base or plan.now[rel] != plan.base[rel]:
                lines.append(f"  {self._reinstall()}")
        return "\n".join(dict.fromkeys(lines))

    def _apply(self, plan: Plan, changes: Texts, report: Report, commit: bool) -> None:
        copies = {
            self.copy_of(r): t for r in plan.new if (t := plan.base[r]) is not None
        }
        self._write(plan, plan.wanted, changes, copies, plan.source.name)

    def _revert(self, plan: Plan, changes: Texts, report: Report, commit: bool) -> None:
        if changes:
            self._write(plan, plan.base, changes, {}, plan.laid_name)
        shutil.rmtree(self._path.parent, ignore_errors=True)
        if self.version is None:
            files.remove_empty_folders(self.torch_dir, self.root)

    def _write(
        self,
        plan: Plan,
        want: Texts,
        changes: Texts,
        copies: Mapping[Path, bytes],
        name: str | None,
    ) -> None:
        entries = {}
        for rel, text in want.items():
            entry = Entry(*map(sha256, (plan.base[rel], plan.now[rel], text)))
            if len(set(entry)) > 1 or entry.new != entry.stock:
                entries[rel] = entry
        found = self.manifest()
        if found and not changes and _news(found.files) == _news(entries):
            entries = found.files  # no file changes: the earlier hashes stay true
        new = Manifest(self.version, name, entries).dump()
        before = self._path.read_bytes() if self._path.is_file() else None
        try:
            for path, text in copies.items():
                if not path.is_file() or path.read_bytes() != text:
                    files.write(path, text, self.sibling)
            if before != new:
                files.write(self._path, new, self.sibling)
            self.write(changes)
        except BaseException:
            with contextlib.suppress(OSError):
                if before is not None:
                    files.write(self._path, before, self.sibling)
                elif plan.now == plan.base:  # no overlay was there
                    shutil.rmtree(self._path.parent)
                else:
                    self._path.unlink()
            raise

    def _state(self, plan: Plan, there: bool) -> tuple[str, str]:
        before = self.manifest()
        if self.version is None:
            return "gone", ""
        if there and before and before.torch != self.version:
            return "upgraded", (
                f": applied to {before.torch}, torch is {self.version} now. `apply` again "
                "or `revert`"
            )
        return super()._state(plan, there)

    def export(
        self, root: Path, out: Path, *, dry_run: bool = False
    ) -> tuple[list[Path], str]:
        """Write the ``git am`` series; the files, and the base in words."""
        plan, words = self.plan(root), f"a pristine torch {self.version}"
        self._check_base(plan)
        if dry_run:
            return [], words
        with files.scratch_folder() as scratch:
            tree = worktree.new(scratch, plan.base)
            tip = base = tree.resolve("HEAD")
            # The tests, too: a wheel takes none, a tree of that version does.
            layers = patches.layers(plan.source, self.version or "", plan.base, bool)[0]
            for layer in layers:
                tip = tree.commit(tip, layer.texts, layer.message, plan.source.name)
            return worktree.write_series(tree, base, tip, out), words


def _news(entries: Mapping[str, Entry]) -> dict[str, str | None]:
    return {rel: entry.new for rel, entry in entries.items()}


def record_hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


def _record_lines(record: str) -> list[tuple[str, str]]:
    # path,hash,size: paths of the torch package never hold a comma or a quote.
    rows = (line.rsplit(",", 2) for line in record.splitlines() if line)
    return [(row[0], row[1]) for row in rows if len(row) == 3]


def _from_version_file(torch_dir: Path) -> str | None:
    path = torch_dir / "version.py"
    text = path.read_text() if path.is_file() else ""
    found = re.search(r"__version__ = '([^']+)'", text)
    return found.group(1) if found else None


def find_wheel(python: str | Path) -> Wheel:
    where = find_interpreter(python)
    found = ask_where(where)
    if found["origin"] is None:
        for folder in map(Path, found["folders"]):
            if (folder / FOLDER).is_dir():
                return Wheel(where, folder.parent, None, None)
        if found["closed"]:
            raise WrongTarget(
                f"{where}: this user may not read {', '.join(found['closed'])}"
            )
        raise WrongTarget(
            f"{where} has no torch; {where} -m pip install torch=={versions.PINNED}"
        )
    root = Path(found["origin"]).parent.parent
    if found["site"] and (Path(found["site"]) / PTH).is_file():
        root = Path(found["site"])  # `rebuild --pth` put a checkout before it
    if (root / "version.txt").is_file() and (root / ".git").exists():
        raise WrongTarget(
            f"the torch of {python} is the checkout {root}; use --checkout {root}"
        )
    version = found["version"] or _from_version_file(root / "torch")
    if version is None:
        raise WrongTarget(f"cannot tell the version of the torch in {root}")
    return Wheel(where, root, version, found["record"])
