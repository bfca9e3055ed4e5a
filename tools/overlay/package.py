"""The optimizer as a package of its own, for a torch that its user may not change.

Only names differ: ``torch.optim.muon`` is ``distributed_muon``, and the private modules
that come with it are in there. One module is not in the patch: ``combined`` makes one of several
optimizers, of whatever kind.
"""

import base64
import hashlib
import re
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from . import git, payload


NAME = "distributed_muon"
_COMBINED = "examples/frameworks/combined.py"
_EXPORTS = "__all__ = ["
_DESCRIPTION = "tools/overlay/package.md"
# A change of these, too, makes another package.
_OTHERS = (_COMBINED, _DESCRIPTION, "LICENSE", "tools/overlay/package.py")
# The version that has a name of SPDX for the licence, and says where its file is.
_METADATA = """\
Metadata-Version: 2.4
Name: distributed-muon
Version: {version}
Summary: Muon for FSDP, DDP and tensor parallelism
Author: the Distributed Muon for PyTorch authors
License-Expression: BSD-3-Clause
License-File: LICENSE
Classifier: Development Status :: 4 - Beta
Classifier: Intended Audience :: Developers
Classifier: Intended Audience :: Science/Research
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Programming Language :: Python :: 3.10
Classifier: Programming Language :: Python :: 3.11
Classifier: Programming Language :: Python :: 3.12
Classifier: Programming Language :: Python :: 3.13
Classifier: Programming Language :: Python :: 3.14
Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence
Classifier: Typing :: Typed
Requires-Python: >=3.10
Requires-Dist: torch>=2.11,<2.16
Description-Content-Type: text/markdown

{description}
Built from commit {name}.
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

    if "/" not in place:  # deeper, relative imports stay in the package
        text = re.sub(r"(?m)^( *from )\.(?= import )", r"\1torch.optim", text)
        text = re.sub(r"(?m)^( *from )\.(?=\w)", r"\1torch.optim.", text)
    text = re.sub(rf"\btorch\.optim(\.| import ){ours}", rf"{NAME}\1", text)
    return re.sub(r"\btorch\.optim\.muon\b", NAME, text)


def _modules(root: Path, version: str) -> dict[str, bytes]:
    """The modules of ``torch.optim`` under the package's names."""
    texts = {}
    ours = payload.files(root / "torch/optim")
    private = {place.split("/")[0].removesuffix(".py") for place in ours} - {"muon"}
    for place, file in ours.items():
        text = _renamed(file.read_text(), place, sorted(private))
        if place == "muon.py":
            place = "__init__.py"
            # Type checkers take no other name for exported.
            exports = f'__version__ = "{version}"\n\n{_EXPORTS}\n    "Muon",'
            text = text.replace(_EXPORTS, exports, 1)
        texts[f"{NAME}/{place}"] = text.encode()
    return texts


def record_hash(text: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


def write(root: Path, out: Path) -> Path:
    """Write the wheel there. One commit gives the same bytes everywhere."""
    name = payload.name(root, *_OTHERS)
    commit, _, is_dirty = name.partition("-")
    seconds = git.ask(root, "show", "-s", "--format=%ct", commit)
    when = time.gmtime(int(seconds))
    # The time of the commit. Only files that differ add a local part, which no index takes.
    version = f"{when.tm_year}.{when.tm_mon}.{when.tm_mday}."
    version += str(when.tm_hour * 10000 + when.tm_min * 100 + when.tm_sec)
    if is_dirty:
        version += f"+g{commit[:12]}.dirty"
    description = (root / _DESCRIPTION).read_text()
    metadata = _METADATA.format(version=version, description=description, name=name)
    info = f"{NAME}-{version}.dist-info"
    texts = {
        f"{NAME}/py.typed": b"",
        f"{NAME}/combined.py": (root / _COMBINED).read_bytes(),
        **_modules(root, version),
        f"{info}/licenses/LICENSE": (root / "LICENSE").read_bytes(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": _WHEEL.encode(),
    }
    rows = [f"{rel},{record_hash(text)},{len(text)}\n" for rel, text in texts.items()]
    texts[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    out.mkdir(parents=True, exist_ok=True)
    place = out / f"{NAME}-{version}-py3-none-any.whl"
    # Not compressed: each zlib has its own bytes.
    with zipfile.ZipFile(place, "w") as wheel:
        for rel, text in texts.items():
            entry = zipfile.ZipInfo(rel, when[:6])
            entry.create_system, entry.external_attr = 3, 0o100644 << 16  # Unix
            wheel.writestr(entry, text)
    return place
