"""Runs the tests, and finds out how much of the optimizer they execute."""

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import env, git
from .errors import WrongTarget
from .wheel import ask_python, find_wheel, plain_environment, Wheel


# Folders of torch without Python.
WHOLE = {"bin", "include", "lib", "share"}
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
            # One place, also for processes that tests start in other folders. The caller may keep it.
            "COVERAGE_FILE": os.environ.get("COVERAGE_FILE", f"{folder}/data"),
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


def run_with(python: str, words: list[str], root: Path) -> int:
    """Run Python with these words on the torch of ``python``, with the overlay.

    It installs no package, and writes nothing into that torch. Ranks that find too few
    GPUs share them, over gloo.
    """
    target = find_wheel(python)
    with _overlaid(target, root) as folder:
        paths = plain_environment(with_path=True).get("PYTHONPATH", "")
        shared = {"PYTHONPATH": f"{folder}{os.pathsep}{paths}".rstrip(os.pathsep)}
        shared["MUON_TEST_SHARE_GPU"] = "1"
        return env.run_in(target.python, words, root, shared)


def run_elsewhere(python: str, args: list[str], root: Path) -> int:
    """Run pytest on the torch of ``python``; needs neither xdist nor coverage."""
    exe = find_wheel(python).python
    missing = ask_python(exe, MISSING).strip()
    if missing:
        first = f"{shlex.quote(str(exe))} -m pip install {missing}"
        raise WrongTarget(f"{exe} lacks packages:\n  {first}")
    return run_with(python, ["-m", "pytest", *(args or ELSEWHERE)], root)


@contextlib.contextmanager
def _overlaid(target: Wheel, root: Path) -> Iterator[Path]:
    """A folder with that torch as links, and with the overlay's files.

    The torch may be read-only, come by PYTHONPATH, or belong to running jobs.
    """
    plan = target.plan(root)
    for line in plan.misfits:
        print(f"warning: {line}", file=sys.stderr)
    with git.scratch() as place:
        top = target.torch_dir
        for folder, names, found in os.walk(top, followlinks=True):
            if folder == str(top):  # libraries find others from where they are
                found += WHOLE & {*names}
                names[:] = {*names} - WHOLE
            copy = place / Path(folder).relative_to(target.root)
            copy.mkdir()
            for name in found:
                (copy / name).symlink_to(Path(folder, name))
        known = plan.base.keys() | plan.new.keys()
        texts = {rel: text for rel, text in plan.wanted.items() if rel in known}
        for rel in plan.new:  # tests compare with stock Muon
            copy = target.copy_of(rel).relative_to(target.root)
            texts[str(copy)] = plan.base.get(rel)
        for rel in texts:
            (place / rel).unlink(missing_ok=True)  # not through a link
        git.put(place, texts)
        yield place
