"""The stock files of the releases, at the paths where the overlay writes.

"Unchanged" according to git or to pip does not make a file the original: a fork has
commits of its own, and a patched torch can be packed into a wheel. These are the
files of the releases, by the beginning of their sha256.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import versions
from .payload import sha256


if TYPE_CHECKING:
    from collections.abc import Mapping


KNOWN = {
    "torch/optim/_muon.py": {
        "38e95918424bd266": "2.11",
        "4d003aba2d0c7fcc": "2.12, 2.13",
        "c17abbb8af4c935d": "2.14",
        "9b36a3b576352feb": "2.15",
    },
    "torch/distributed/distributed_c10d.py": {
        "796ffcd9664734a8": "2.11",
        "c03488a330d66d9b": "2.12",
        "cb2926a8eeaa4a04": "2.13",
        "ffa3de81159c96c1": "2.14",
        "6d0bbb7be66d992e": "2.15",
    },
    "torch/testing/_internal/common_optimizers.py": {
        "9a61a64a750cf3df": "2.11",
        "3c834975c8d10d5d": "2.12",
        "2f8b3f7f95437e6a": "2.13",
        "b54444cb3c52c2f1": "2.14",
        "3845e06ca97042e7": "2.15",
    },
}


def known(rel: str, data: bytes | None) -> str | None:
    """The versions whose file this is."""
    return KNOWN.get(rel, {}).get((sha256(data) or "")[:16])


def untested(words: str, version: str, originals: Mapping[str, bytes | None]) -> str:
    """A warning about a torch that is not among the supported ones."""
    lines = [
        f"{words}; the overlay supports {versions.supported_words()}, and nothing of it "
        f"was tested on {version}."
    ]
    for rel in KNOWN:
        found = known(rel, originals.get(rel))
        what = f"as in {found}" if found else "as in no supported version"
        if originals.get(rel) is not None:
            lines.append(f"  {rel}: {what}")
    return "\n".join(lines)
