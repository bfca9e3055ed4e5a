"""Which torch the overlay is for."""

import hashlib
import re

from .errors import WrongTarget


PINNED = "2.13.0"
OLDEST, NEWEST = (2, 11), (2, 15)
SUPPORTED = "2.11 to 2.15"
# A fork has commits of its own. These are the releases' torch/optim/_muon.py, by the beginning
# of the sha256.
STOCK = {
    "38e95918424bd266": "2.11", "4d003aba2d0c7fcc": "2.12, 2.13",
    "c17abbb8af4c935d": "2.14", "9b36a3b576352feb": "2.15",
}  # fmt: skip
# As in PEP 440: a release, then what is before or after it.
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?[-_.+a-zA-Z0-9]*")


def release(version: str) -> tuple[int, ...]:
    """``2.14.0a0+git1234`` is ``(2, 14, 0)``: an alpha has its release's sources."""
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        raise WrongTarget(f"{version!r} is not a torch version; supported: {SUPPORTED}")
    return tuple(int(number or 0) for number in match.groups())


def supported(version: str) -> bool:
    """Not a nightly, which has sources of any day before its release."""
    return OLDEST <= release(version)[:2] <= NEWEST and ".dev" not in version


def full(version: str | None) -> str:
    """2.13 is 2.13.0: one version has one environment."""
    version = version or PINNED
    if not supported(version):
        raise WrongTarget(f"torch {version} is not supported: {SUPPORTED}")
    return version + ".0" * (version.count(".") < 2)


def warnings(
    version: str, misfits: dict[str, str], muon: bytes, force: bool = True
) -> list[str]:
    """Warnings for the user of that torch. ``misfits``: file -> the patch that does not fit.

    ``muon`` is the text that the overlay replaces, if any. Without ``force``, raises where going
    on takes a decision.
    """
    lines = []
    if not supported(version):
        lines.append(f"torch {version} is untested; the overlay supports {SUPPORTED}")
    for path, patch in misfits.items():
        lines.append(
            f"{patch} does not fit {path} there, or its lines were edited. --force leaves "
            "that file as it is. Make the change by hand, there or in the patch"
        )
    takes_decision = bool(lines)
    if muon and hashlib.sha256(muon).hexdigest()[:16] not in STOCK:
        lines.append(
            "torch/optim/_muon.py there is of no release that this overlay knows. The "
            "overlay replaces the whole file: make changes of it in this repository, too. "
            "`revert` restores it"
        )
    if takes_decision and not force:
        raise WrongTarget("\n".join([*lines, "`apply --force` goes on"]))
    return lines
