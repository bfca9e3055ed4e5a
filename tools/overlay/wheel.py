"""An installed torch."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from pathlib import Path

from . import manifest, parts, stock, versions
from .errors import WrongTarget
from .interpreter import ask_where, find_interpreter
from .payload import sha256
from .tree import Target


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
            return self._hashes.get(rel) == record_hash(data)
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


def record_hash(data: bytes) -> str:
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
    found = ask_where(where)
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
