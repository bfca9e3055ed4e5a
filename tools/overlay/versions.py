"""Which torch the overlay is for: its versions, and their stock files where it writes."""

import re

from .errors import WrongTarget
from .payload import sha256


PINNED = "2.13.0"
OLDEST, NEWEST = (2, 11), (2, 15)
SUPPORTED = "2.11 to 2.15"
# A fork has commits of its own, and a patched torch can be packed into a wheel. These
# are the files of the releases, by the beginning of their sha256.
STOCK = {
    "torch/optim/_muon.py": {
        "38e95918424bd266": "2.11", "4d003aba2d0c7fcc": "2.12, 2.13",
        "c17abbb8af4c935d": "2.14", "9b36a3b576352feb": "2.15",
    },
    "torch/distributed/distributed_c10d.py": {
        "796ffcd9664734a8": "2.11", "c03488a330d66d9b": "2.12", "cb2926a8eeaa4a04": "2.13",
        "ffa3de81159c96c1": "2.14", "6d0bbb7be66d992e": "2.15",
    },
    "torch/testing/_internal/common_optimizers.py": {
        "9a61a64a750cf3df": "2.11", "3c834975c8d10d5d": "2.12", "2f8b3f7f95437e6a": "2.13",
        "b54444cb3c52c2f1": "2.14", "3845e06ca97042e7": "2.15",
    },
}  # fmt: skip


def stock(rel: str, text: bytes | None) -> str | None:
    """The versions whose file this is."""
    return STOCK.get(rel, {}).get((sha256(text) or "")[:16])


# PEP 440: a release, then what is before or after it.
_VERSION = re.compile(r"(\d+(?:\.\d+)+)([-_.+a-z0-9]*)", re.IGNORECASE)


def _match(version: str) -> re.Match[str]:
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        raise WrongTarget(f"{version!r} is not a torch version; supported: {SUPPORTED}")
    return match


def release(version: str) -> tuple[int, ...]:
    """``2.14.0a0+git1234`` is ``(2, 14, 0)``: an alpha has its release's sources."""
    numbers = [int(number) for number in _match(version)[1].split(".")]
    return tuple((numbers + [0])[:3])


def supported(version: str) -> bool:
    """Not a nightly, which has sources of any day before its release."""
    nightly = "dev" in _match(version)[2].partition("+")[0].lower()
    return OLDEST <= release(version)[:2] <= NEWEST and not nightly


def untested(words: str, version: str, base: dict[str, bytes | None]) -> str:
    """A warning about a torch that is not among the supported ones."""
    warning = (
        f"{words}; the overlay supports {SUPPORTED}, and is untested on {version}."
    )
    there = {rel: text for rel in STOCK if (text := base.get(rel)) is not None}
    for rel, text in there.items():
        warning += f"\n  {rel}: as in {stock(rel, text) or 'no supported version'}"
    return warning
