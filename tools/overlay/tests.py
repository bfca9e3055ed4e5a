"""Runs the tests, and finds out how much of the optimizer they execute."""

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import env
from .errors import Refused, WrongTarget
from .wheel import ask_python, find_wheel, Wheel


# On another interpreter: the optimizer's tests, and why some are skipped.
ELSEWHERE = ["-rs", "test/optim", "test/distributed/optim"]
MISSING = """
from importlib.util import find_spec
print(*(name for name in ("pytest", "expecttest", "numpy") if find_spec(name) is None))
"""


def run(python: Path, args: list[str], root: Path, *, measure: bool) -> int:
    """Run pytest; with ``measure``, print the table of coverage.

    Without ``args``, all tests run; it is a failure if they do not execute enough.
    """
    if not measure:
        return env.run_in(python, ["-m", "pytest", *args], root)
    # This run's own folder: another run may use the same environment.
    with tempfile.TemporaryDirectory(prefix="coverage") as folder:
        variables = {
            # One place, also for processes that tests start in other folders.
            "COVERAGE_FILE": str(Path(folder) / "data"),
            # Not the copies that tests of the overlay make.
            "MUON_MEASURED": str(
                find_wheel(python, with_path=False).torch_dir / "optim"
            ),
            # All tests execute most of it many times: see test/conftest.py.
            "MUON_MEASURE": "each" if args else "once",
        }
        chosen = args or ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
        command = ["-m", "coverage", "run", "-m", "pytest", *chosen]
        code = env.run_in(python, command, root, variables)
        report = ["-m", "tools.coverage", *["--no-limits"] * bool(args or code)]
        print("\nCoverage of the optimizer, all processes:", flush=True)
        shown = env.run_in(python, report, root, variables)
        return code or shown


def run_frameworks(python: Path, args: list[str], root: Path) -> int:
    """Run the tests of the recipes."""
    named = any(arg.startswith("test/frameworks") for arg in args)
    chosen = args if named else ["test/frameworks", *args]
    return env.run_in(python, ["-m", "pytest", *chosen], root)


def run_with(python: str, args: list[str], root: Path) -> int:
    """Run pytest on the torch of ``python``, with the overlay for the run alone.

    An overlay that was there before stays. The run needs neither xdist nor coverage: it
    installs no package. Ranks that find too few GPUs share them, over gloo.
    """
    target = find_wheel(python)
    missing = ask_python(target.python, MISSING).strip()
    if missing:
        raise WrongTarget(f"first {python} -m pip install {missing}")
    chosen = ["-m", "pytest", *(args or ELSEWHERE)]
    with overlaid(target, root):
        shared = {"MUON_TEST_SHARE_GPU": "1"}
        return env.run_in(target.python, chosen, root, shared, with_path=True)


@contextlib.contextmanager
def overlaid(target: Wheel, root: Path) -> Iterator[None]:
    """Applies the overlay, and reverts it afterwards unless it was there before."""
    with target.held():
        before = target.status(root)["state"]
        if before not in ("none", "current"):
            raise Refused(
                f"{target.words} has an overlay that is {before}: `revert` it"
            )
        target.apply(root, dry=True)
        try:
            target.apply(root)
            yield
        finally:
            if before == "none":
                # A second Ctrl-C would keep the overlay.
                for each in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(each, signal.SIG_IGN)
                target.revert(root)
                print(f"reverted {target.words}")
