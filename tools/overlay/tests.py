"""Runs the tests, and finds out how much of the optimizer they execute."""

import os
import shlex
import sys
import tempfile
from pathlib import Path

from . import env, git
from .errors import WrongTarget
from .wheel import ask_python, find_wheel, plain_environment, Wheel


# All tests, as the README says, too.
TIME = "fifteen minutes on two cores"
# Folders of torch without Python.
WHOLE = {"bin", "include", "lib", "share"}
# On another interpreter: the optimizer's tests, why some are skipped, and what they import.
ELSEWHERE = ["-rs", "test/optim", "test/distributed/optim"]
NEEDS = ["pytest", "expecttest", "numpy"]


def run_measured(python: Path, args: list[str], root: Path) -> int:
    """Run pytest, and print the table of coverage.

    Without ``args``, all tests run; it is a failure if they do not execute enough.
    """
    # This run's own folder: another run may use the same environment.
    with tempfile.TemporaryDirectory(prefix="coverage") as folder:
        variables = {
            # One place, also for processes that tests start in other folders. The caller may keep it.
            "COVERAGE_FILE": os.environ.get("COVERAGE_FILE", f"{folder}/data"),
            # Not the copies that tests of the overlay make.
            "MUON_MEASURED": f"{find_wheel(python, with_path=False).torch_dir}/optim",
            # All tests execute most of it many times: see test/conftest.py.
            "MUON_MEASURE": "each" if args else "once",
        }
        if not args:
            print(f"running all tests: {TIME}", flush=True)
        chosen = args or ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
        command = ["-m", "coverage", "run", "-m", "pytest", *chosen]
        code = env.run_in(python, command, root, variables)
        report = ["-m", "tools.coverage", *["--no-limits"] * bool(args or code)]
        print("\nCoverage of the optimizer, all processes:", flush=True)
        shown = env.run_in(python, report, root, variables)
        return code or shown


def check_packages(python: Path) -> None:
    """The tests need neither xdist nor coverage."""
    code = f"from importlib.util import find_spec\nprint(*filter(lambda n: not find_spec(n), {NEEDS}))"
    if missing := ask_python(python, code).strip():
        first = f"{shlex.quote(str(python))} -m pip install {missing}"
        raise WrongTarget(f"{python} lacks packages:\n  {first}")


def run_elsewhere(python: str, words: list[str], root: Path) -> int:
    """Run Python with these words on the torch of ``python``, with the overlay.

    It installs no package, and writes nothing into that torch, which may be read-only, come
    by PYTHONPATH, or belong to running jobs: the words get a folder with that torch as
    links, and with the overlay's files.
    """
    target = find_wheel(python)
    if "pytest" in words:
        check_packages(target.python)
    target.revert(root, dry=True)  # it refuses edits by their own paths
    with git.scratch() as place:
        copy = Wheel(target.python, place, target.version, target.record)
        for folder, names, rest in os.walk(target.torch_dir, followlinks=True):
            if folder == str(target.torch_dir):
                # Libraries find others from where they are.
                rest += WHOLE & {*names}
                names[:] = {*names} - WHOLE
            links = place / Path(folder).relative_to(target.root)
            links.mkdir()
            for name in rest:
                (links / name).symlink_to(Path(folder, name))
        copy.revert(root)  # another overlay, newer ones too
        for line in copy.apply(root, force=True).warnings:
            print(f"warning: {line}", file=sys.stderr)
        paths = plain_environment(with_path=True).get("PYTHONPATH", "")
        path = f"{place}{os.pathsep}{paths}".rstrip(os.pathsep)
        return env.run_in(target.python, words, root, {"PYTHONPATH": path})
