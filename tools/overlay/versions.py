"""Which torch the overlay is for, and how its versions compare."""

from __future__ import annotations

import re
from operator import eq, ge, gt, le, lt, ne

from .errors import WrongTarget


PINNED = "2.13.0"
OLDEST = (2, 11)
NEWEST = (2, 15)

_COMPARE = {"==": eq, "!=": ne, ">=": ge, "<=": le, ">": gt, "<": lt}


def supported_words() -> str:
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def release(version: str) -> tuple[int, int, int]:
    """``2.14.0a0+git1234`` is ``(2, 14, 0)``: an alpha has its release's sources."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?![\d.])", version.strip())
    if match is None:
        raise WrongTarget(
            f"{version!r} is not a torch version; supported: {supported_words()}"
        )
    major, minor, patch = match.groups(default="0")
    return int(major), int(minor), int(patch)


def supported(version: str) -> bool:
    return OLDEST <= release(version)[:2] <= NEWEST


def check_supported(version: str) -> None:
    if not supported(version):
        raise WrongTarget(
            f"asked for torch {version}; this overlay supports torch "
            f"{supported_words()}. Nothing was touched."
        )


def matches(version: str, spec: str) -> bool:
    """Whether ``version`` is in ``spec``, such as ``>=2.13,<2.15`` (empty: any)."""
    here = release(version)
    for clause in filter(None, (part.strip() for part in spec.split(","))):
        parsed = re.fullmatch(r"(==|!=|>=|<=|>|<)\s*(\d+(?:\.\d+){1,2})", clause)
        if parsed is None:
            raise WrongTarget(f"{clause!r} is not a version condition like >=2.13")
        sign, bound = parsed.groups()
        # "==2.13" means every 2.13.x, so compare as many numbers as are written.
        length = bound.count(".") + 1
        if not _COMPARE[sign](here[:length], release(bound)[:length]):
            return False
    return True
