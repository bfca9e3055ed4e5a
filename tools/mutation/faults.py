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
    files = []
    for path in optim.rglob("*.py"):
        file = path.relative_to(optim)
        files.append(file.as_posix())
    return sorted(files)


def edited(file: str, old: str, new: str) -> Fault:
    """The fault, called by the lines that are different."""
    old_lines, new_lines = old.splitlines(), new.splitlines()
    start = _count_equal(old_lines, new_lines)
    end = _count_equal(old_lines[start:][::-1], new_lines[start:][::-1])
    last = len(old_lines) - end
    before = _in_one_line(old_lines[start:last])
    after = _in_one_line(new_lines[start : len(new_lines) - end])
    return Fault(f"{before} => {after}", file, start + 1, last, new)


def _count_equal(lines: list[str], others: list[str]) -> int:
    """How many lines are equal until the first that is not."""
    return len(os.path.commonprefix([lines, others]))


def _in_one_line(lines: list[str]) -> str:
    words = " ".join(lines).split()
    return " ".join(words)


def table(name: str) -> Iterator[list[str]]:
    """File, old text, new text and words of each line ``FILE: OLD => NEW # WORDS``."""
    lines = (HERE / name).read_text().splitlines()
    for line in lines:
        place, words = line.rsplit(" # ", 1)
        file, edit = place.split(": ", 1)
        texts = edit.split(" => ")
        yield [file, *texts, words]


def listed(optim: Path) -> Iterator[Fault]:
    """The faults of listed.txt. The file of a fault must contain its old text exactly once."""
    for file, old, new, name in table("listed.txt"):
        source = (optim / file).read_text()
        if source.count(old) != 1 or old == new:
            raise WrongTarget(f"{name!r}: {old} is not in {file} once: edit listed.txt")
        fault = edited(file, source, source.replace(old, new))
        yield fault._replace(name=name)


@contextmanager
def copied(optim: Path, fault: Fault | None = None) -> Iterator[Path]:
    """A folder with a copy of the optimizer, with ``fault``, for the tests to import."""
    with tempfile.TemporaryDirectory(prefix="muon-fault-") as name:
        folder = Path(name)
        for file in sources(optim):
            place = folder / "optim" / file
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(optim / file, place)
        if fault is not None:
            place = folder / "optim" / fault.file
            place.write_text(fault.source)
        shutil.copyfile(HERE / "redirect.py", folder / "sitecustomize.py")
        yield folder
