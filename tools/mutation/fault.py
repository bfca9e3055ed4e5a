"""A fault, and the copy of the optimizer that has it."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


REDIRECT = Path(__file__).with_name("redirect.py")
SOURCES = (
    "_muon.py",
    "_newton_schulz.py",
    "muon.py",
    "_muon_partition.py",
    "_muon_engine",
)


class CannotTry(Exception):
    """The check itself does not work, so it says nothing about the tests."""


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
            CannotTry: the text of the place is not in the source exactly once.
        """
        count = source.count(self.old)
        if count != 1 or self.old == self.new:
            raise CannotTry(
                f"rewrite {self.name!r}: its text occurs {count} times in {self.file}"
            )
        return source.replace(self.old, self.new)


@contextmanager
def copied(optim: Path, fault: Fault | None = None) -> Iterator[Path]:
    """A folder with a copy of the optimizer, with ``fault`` and the redirection of imports to the copy."""
    with tempfile.TemporaryDirectory(prefix="muon-fault-") as name:
        folder = Path(name)
        for source in (optim / name for name in SOURCES):
            place = folder / "optim" / source.name
            place.parent.mkdir(exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, place)
            else:
                shutil.copyfile(source, place)
        if fault is not None:
            place = folder / "optim" / fault.file
            place.write_text(fault.edit(place.read_text()))
        shutil.copyfile(REDIRECT, folder / "sitecustomize.py")
        yield folder
