"""A fault, and the copy of the optimizer that has it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple


REDIRECT = Path(__file__).with_name("redirect.py")
SOURCES = ("_muon.py", "_newton_schulz.py", "muon.py", "_muon_engine")


class CannotTry(Exception):
    """The check itself does not work: no statement about the tests."""


class Fault(NamedTuple):
    """An edit of one place, as somebody might make it by mistake.

    ``file`` is relative to torch/optim. ``tests`` are pytest's arguments: those that should notice.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def edit(self, source: str) -> str:
        """``source`` with the fault.

        Raises:
            CannotTry: the place is not there any more, or is one of several.
        """
        count = source.count(self.old)
        if count != 1 or self.old == self.new:
            raise CannotTry(
                f"{self.name!r} has to be written anew: its text occurs {count} times in {self.file}"
            )
        return source.replace(self.old, self.new)


def make_copy(optim: Path, folder: Path, fault: Fault | None = None) -> None:
    """Copies the optimizer below ``optim`` into ``folder``, with ``fault`` and the redirection to it."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        source, place = optim / name, folder / "optim" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, ignore=ignore)
        else:
            shutil.copyfile(source, place)
    if fault is not None:
        place = folder / "optim" / fault.file
        place.write_text(fault.edit(place.read_text()))
    shutil.copyfile(REDIRECT, folder / "sitecustomize.py")
