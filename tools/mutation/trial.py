"""Runs tests over a copy of the optimizer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TYPE_CHECKING

from .fault import CannotTry, make_copy


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .fault import Fault


# Of the tests of one fault, and of one test without a fault. Longer is a hang.
SECONDS = 600

# Where each module that should come from the copy does come from.
ASK = """
import torch.optim.muon, torch.optim._muon_engine.engine, torch.optim._newton_schulz
for name, module in sorted(sys.modules.items()):
    if name.startswith(("torch.optim._muon", "torch.optim._newton", "torch.optim.muon")):
        print(module.__file__)
"""
# In this process, and in one that it starts as the tests start theirs.
WHERE = (
    f"import subprocess, sys\nask = {ASK!r}\nexec(ask)\nsys.stdout.flush()\n"
    "subprocess.run([sys.executable, '-c', 'import sys\\n' + ask], check=True)\n"
)


class Outcome(NamedTuple):
    """What became of one run of tests: ``code`` is pytest's, None where it had to be ended."""

    code: int | None
    failed: tuple[str, ...]
    seconds: float
    output: str

    @property
    def noticed(self) -> bool:
        """Whether a test failed.

        Raises:
            CannotTry: pytest did not get as far as that.
        """
        if self.code is None:
            return True
        if self.code not in (0, 1) or (self.code == 1 and not self.failed):
            raise CannotTry(f"pytest ended with {self.code}:\n{self.output[-3000:]}")
        return self.code == 1

    @property
    def notice(self) -> str:
        """Which test noticed."""
        if self.code is None:
            return "a hang"
        return short_name(self.failed[0]) if self.failed else ""


def short_name(test: str) -> str:
    """The file and function of a pytest node, without folders and class."""
    return f"{Path(test.partition('::')[0]).name}: {test.rpartition('::')[2]}"


@contextmanager
def copied(optim: Path, fault: Fault | None = None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="muon-fault-") as folder:
        make_copy(optim, Path(folder), fault)
        yield Path(folder)


def environment(folder: Path) -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(folder), *([before] if before else [])])
    return {**os.environ, "PYTHONPATH": path}


def check_redirect(folder: Path, root: Path) -> None:
    """Raises CannotTry unless tests of ``root`` import the modules of ``folder``."""
    done = subprocess.run(
        [sys.executable, "-c", WHERE],
        cwd=root,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    files = [Path(line) for line in done.stdout.splitlines()]
    inside = folder.resolve() / "optim"
    outside = [str(file) for file in files if inside not in file.resolve().parents]
    if done.returncode or len(files) < 2 * 4 or outside:
        raise CannotTry(
            f"tests would not import Muon from the copy in {folder} but from {outside}\n{done.stderr}"
        )


def run_tests(
    root: Path,
    folder: Path,
    tests: Sequence[str],
    *,
    first: bool,
    seconds: float = SECONDS,
) -> Outcome:
    """Runs ``tests`` of ``root`` over the copy in ``folder``.

    Args:
        first: whether to stop at the first test that fails.
        seconds: after which the processes of the run are ended.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short", "-p"]
    command += ["no:cacheprovider", *(["-x"] if first else []), *tests]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as printed:
        # A session of its own: the workers that tests spawn can be ended with it, and nothing else.
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = False
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            ended = True
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        printed.seek(0)
        output = printed.read()
    return Outcome(
        process.returncode if ended else None,
        tuple(re.findall(r"^FAILED (\S+)", output, re.MULTILINE)),
        time.monotonic() - start,
        output,
    )
