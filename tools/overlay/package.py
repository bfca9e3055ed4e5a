"""The optimizer as a package of its own, for a torch that its user may not change.

Only names differ: ``torch.optim.muon`` is ``distributed_muon``, and the private modules
that come with it are in there. One module is not in the patch: ``combined`` makes one of several
optimizers, of whatever kind.
"""

import io
import re
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from . import files, git, payload, versions
from .errors import WrongTarget
from .wheel import record_hash


NAME = "distributed_muon"
_HOME = "torch/optim/"
_COMBINED = "examples/frameworks/combined.py"
_EXPORTS = "__all__ = ["
_METADATA = """\
Metadata-Version: 2.1
Name: distributed-muon
Version: {version}
Summary: Muon for FSDP, DDP and tensor parallelism
License: BSD-3-Clause
Requires-Python: >=3.10
Requires-Dist: torch>={oldest},<{after}
"""
_WHEEL = """\
Wheel-Version: 1.0
Generator: setup_overlay.py
Root-Is-Purelib: true
Tag: py3-none-any
"""


def _renamed(text: str, place: str, private: Iterable[str]) -> str:
    """A module with the package's names for what is in the package, and torch's for the rest."""
    ours = rf"(?=({'|'.join(['Muon', *private])})\b)"

    def apart(match: re.Match[str]) -> str:
        return "\n".join(match[1] + each for each in match[2].split(", "))

    if "/" not in place:  # deeper, relative imports stay in the package
        text = re.sub(r"(?m)^( *from )\.(?= import )", r"\1torch.optim", text)
        text = re.sub(r"(?m)^( *from )\.(?=\w)", r"\1torch.optim.", text)
    text = re.sub(r"(?m)^( *from torch\.optim import )([^(\n]+)$", apart, text)
    text = re.sub(rf"\btorch\.optim(\.| import ){ours}", rf"{NAME}\1", text)
    return re.sub(r"\btorch\.optim\.muon\b", NAME, text)


def write(root: Path, out: Path, *, dry: bool = False) -> Path:
    """Write the wheel there. One commit gives the same bytes everywhere."""
    source = payload.read(root)
    payload.refuse_markers(source)
    if source.name is None:
        raise WrongTarget(f"{root} has no commit to name the wheel after: clone it")
    commit = source.name.removesuffix(payload.DIRTY)
    when = time.gmtime(int(git.text(root, "show", "-s", "--format=%ct", commit)))
    numbers = *when[:3], when.tm_hour * 100 + when.tm_min
    others = git.text(root, "status", "--porcelain", "--", _COMBINED, "LICENSE")
    dirty = ".dirty" * (commit != source.name or bool(others))
    version = f"{'.'.join(map(str, numbers))}+g{commit[:12]}{dirty}"
    texts = {
        f"{NAME}/py.typed": b"",
        f"{NAME}/combined.py": (root / _COMBINED).read_bytes(),
    }
    ours = {r.removeprefix(_HOME): r for r in source.whole if r.startswith(_HOME)}
    private = {place.split("/")[0].removesuffix(".py") for place in ours} - {"muon"}
    for place, rel in ours.items():
        text = _renamed(source.whole[rel].decode(), place, sorted(private))
        if place == "muon.py":
            place = "__init__.py"
            # Type checkers take no other name for exported.
            text = text.replace(_EXPORTS, f'{_EXPORTS}\n    "Muon",', 1)
        texts[f"{NAME}/{place}"] = text.encode()
    info = f"{NAME}-{version}.dist-info"
    after = f"{versions.NEWEST[0]}.{versions.NEWEST[1] + 1}"
    oldest = ".".join(map(str, versions.OLDEST))
    metadata = _METADATA.format(version=version, oldest=oldest, after=after)
    texts |= {
        f"{info}/LICENSE": (root / "LICENSE").read_bytes(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": _WHEEL.encode(),
    }
    rows = [f"{rel},{record_hash(text)},{len(text)}\n" for rel, text in texts.items()]
    texts[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    packed = io.BytesIO()
    # Not compressed: each zlib has its own bytes.
    with zipfile.ZipFile(packed, "w") as wheel:
        for rel, text in texts.items():
            entry = zipfile.ZipInfo(rel, when[:6])
            entry.create_system, entry.external_attr = 3, 0o100644 << 16  # Unix
            wheel.writestr(entry, text)
    place = out / f"{NAME}-{version}-py3-none-any.whl"
    if not dry:
        files.write({place: packed.getvalue()}, root / "LICENSE", out)
    return place
