"""Runs tests over a copy of the optimizer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TYPE_CHECKING

from .fault import CannotTry, make_copy


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .fault import Fault


# Tests hang that have not worked for so long. On a machine that is busy otherwise they still work a little;
# what only waits still looks now and then, for so much of a second in each.
IDLE_SECONDS = 30.0
AT_REST = 0.01

# Where each module that should come from the copy does come from.
ASK = """
import torch.optim, torch.optim.muon, torch.optim._muon_engine.engine
for name, module in sorted(sys.modules.items()):
    if name.startswith(("torch.optim._muon", "torch.optim.muon")):
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
    if done.returncode or len(files) < 2 * 3 or outside:
        raise CannotTry(
            f"tests would not import Muon from the copy in {folder} but from {outside}\n{done.stderr}"
        )


def run_tests(
    root: Path,
    folder: Path,
    tests: Sequence[str],
    *,
    first: bool,
    idle: float = IDLE_SECONDS,
) -> Outcome:
    """Runs ``tests`` of ``root`` over the copy in ``folder``.

    Args:
        first: whether to stop at the first test that fails.
        idle: seconds without work after which the processes of the run are ended.
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
        try:
            ends = _ends(process.pid, idle)
        finally:
            # Not waited for so far, so that its number is still its own, and its group's.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        output = printed.read()
    return Outcome(
        process.returncode if ends else None,
        tuple(re.findall(r"^FAILED (\S+)", output, re.MULTILINE)),
        time.monotonic() - start,
        output,
    )


def _ends(session: int, idle: float) -> bool:
    """Whether process ``session`` ends by itself, or waits with all of its session; it stays to be waited for."""
    worked, since = 0.0, time.monotonic()
    how = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while os.waitid(os.P_PID, session, how) is None:
        now, seconds = time.monotonic(), cpu_seconds(session)
        # Less, too, where a process has ended.
        if abs(seconds - worked) > AT_REST * idle:
            worked, since = seconds, now
        elif now - since > idle:
            return False
        time.sleep(0.1)
    return True


def cpu_seconds(session: int) -> float:
    """What the processes of ``session`` that are there have worked, and those that they waited for."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which may have spaces and brackets.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == session:
            total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")
