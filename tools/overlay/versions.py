"""Which torch the overlay is for: its versions, and their stock files where it writes."""

import hashlib
import re
from collections.abc import Mapping

from .errors import WrongTarget


PINNED = "2.13.0"
OLDEST, NEWEST = (2, 11), (2, 15)
SUPPORTED = "2.11 to 2.15"
# A fork has commits of its own. These are the files of the releases, by the beginning of their sha256.
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
# PEP 440: a release, then what is before or after it.
_VERSION = re.compile(r"(\d+(?:\.\d+)+)([-_.+a-z0-9]*)", re.IGNORECASE)


def _parts(version: str) -> tuple[str, str]:
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        raise WrongTarget(f"{version!r} is not a torch version; supported: {SUPPORTED}")
    return match[1], match[2]


def release(version: str) -> tuple[int, ...]:
    """``2.14.0a0+git1234`` is ``(2, 14, 0)``: an alpha has its release's sources."""
    numbers = [int(number) for number in _parts(version)[0].split(".")]
    return tuple((numbers + [0])[:3])


def supported(version: str) -> bool:
    """Not a nightly, which has sources of any day before its release."""
    is_nightly = "dev" in _parts(version)[1].partition("+")[0].lower()
    return OLDEST <= release(version)[:2] <= NEWEST and not is_nightly


def full(version: str | None) -> str:
    """2.13 is 2.13.0: one version has one environment."""
    version = version or PINNED
    if not supported(version):
        raise WrongTarget(f"torch {version} is not supported: {SUPPORTED}")
    return version + ".0" * (version.count(".") < 2)


def stock(path: str, text: bytes) -> str | None:
    """The releases whose file this is."""
    digest = hashlib.sha256(text).hexdigest()
    return STOCK.get(path, {}).get(digest[:16])


def problems(
    version: str, texts: Mapping[str, bytes | None], misfits: Mapping[str, str]
) -> list[str]:
    """Why it takes a decision to apply the overlay to that torch. ``texts`` are of its files of STOCK."""
    lines = []
    if not supported(version):
        lines.append(f"torch {version} is untested; the overlay supports {SUPPORTED}")
        for path, text in texts.items():
            if text is not None:
                same = stock(path, text) or "no supported version"
                lines.append(f"  {path}: as in {same}")
    for path, patch in misfits.items():
        lines.append(
            f"{patch} does not fit {path} there, or its lines were edited. --force leaves "
            "that file as it is. Make the change by hand, there or in the patch"
        )
    return lines


def warning(muon: bytes | None) -> list[str]:
    """A warning for a user whose own ``_muon.py`` is replaced."""
    path = "torch/optim/_muon.py"
    if muon is None or stock(path, muon):
        return []
    return [
        f"{path} there is of no release that this overlay knows. The overlay replaces "
        "the whole file: make changes of it in this repository, too. `revert` restores it"
    ]
