"""A fault, and the copy of the optimizer that has it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tools.overlay.errors import WrongTarget


HERE = Path(__file__).parent


class Fault(NamedTuple):
    """An edit of a file of torch/optim, and the lines that it takes the place of."""

    name: str
    file: str
    first: int
    last: int
    source: str


def sources(optim: Path) -> list[str]:
    return sorted(file.relative_to(optim).as_posix() for file in optim.rglob("*.py"))


def edited(file: str, old: str, new: str) -> Fault:
    """The fault, called by the lines that are different."""
    a, b = old.splitlines(), new.splitlines()
    start = len(os.path.commonprefix([a, b]))
    rest = len(os.path.commonprefix([a[start:][::-1], b[start:][::-1]]))
    before, after = (
        " ".join(text[start : len(text) - rest]).split() for text in (a, b)
    )
    name = f"{' '.join(before)} => {' '.join(after)}"
    return Fault(name, file, start + 1, len(a) - rest, new)


def table(name: str) -> Iterator[list[str]]:
    """File, old text, new text and words of each line ``FILE: OLD => NEW # WORDS``."""
    for line in (HERE / name).read_text().splitlines():
        edit, words = line.rsplit(" # ", 1)
        file, edit = edit.split(": ", 1)
        yield [file, *edit.split(" => "), words]


def listed(optim: Path) -> Iterator[Fault]:
    """The faults of listed.txt. The file of a fault must contain its old text exactly once."""
    for file, old, new, name in table("listed.txt"):
        source = (optim / file).read_text()
        if source.count(old) != 1 or old == new:
            raise WrongTarget(f"{name!r}: {old} is not in {file} once: edit listed.txt")
        yield edited(file, source, source.replace(old, new))._replace(name=name)


@contextmanager
def copied(optim: Path, fault: Fault | None = None) -> Iterator[Path]:
    """A folder with a copy of the optimizer, with ``fault``, for the tests to import."""
    with tempfile.TemporaryDirectory(prefix="muon-fault-") as name:
        for file in sources(optim):
            place = Path(name, "optim", file)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(optim / file, place)
        if fault is not None:
            Path(name, "optim", fault.file).write_text(fault.source)
        shutil.copyfile(HERE / "redirect.py", Path(name, "sitecustomize.py"))
        yield Path(name)
