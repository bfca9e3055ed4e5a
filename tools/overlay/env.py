"""The environment of this repository: a virtual environment with an overlaid torch."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from . import files, progress, versions
from .errors import Refused, WorkFailed, WrongTarget
from .interpreter import ask_python
from .wheel import find_wheel


if TYPE_CHECKING:
    from pathlib import Path

    from .target import Report
    from .wheel import Wheel


# The tests, the examples and verify import these and torch. The linter checks them.
# The type checker has upstream's version: each version of it finds other errors.
# A hypothesis of another version draws other configurations.
# torch's run_tests() writes its reports with xmlrunner wherever CI is set.
PACKAGES = (
    "numpy",
    "expecttest",
    "hypothesis==6.155.7",
    "pytest",
    "pytest-xdist",
    "coverage",
    "jupytext",
    "matplotlib",
    "ruff",
    "pyrefly==0.58.0",
    "unittest-xml-reporting<=3.2.0",
)
MARKER = ".muon_overlay_env.json"
SIZE = "about 0.3 GB from a CPU-only index (PIP_INDEX_URL), up to 4 GB with CUDA"
PIP_TIMEOUT_S = 3600


def full(version: str | None) -> str:
    """2.13 is 2.13.0: one version has one environment."""
    version = version or versions.PINNED
    versions.check_supported(version)
    return version + ".0" * (version.count(".") < 2)


def folder(root: Path, version: str) -> Path:
    return root / (".venv" if version == versions.PINNED else f".venv-{version}")


def python_of(env: Path) -> Path:
    if os.name == "nt":
        return env / "Scripts" / "python.exe"
    return env / "bin" / "python"


def existing_python(root: Path) -> Path:
    """The environment's interpreter, for commands that do not make one."""
    env = folder(root, versions.PINNED)
    if _state(env) != "ready":
        raise WrongTarget(
            f"there is no environment at {env}; make it with `setup_overlay.py env`, "
            "or name a target with --python or --checkout"
        )
    return python_of(env)


def _marker(env: Path) -> dict:
    try:
        return json.loads((env / MARKER).read_text())
    except (OSError, ValueError):
        return {}


def _state(env: Path) -> str:
    """absent, foreign (not ours), partial (interrupted, broken) or ready."""
    if not env.exists():
        return "absent"
    marker = _marker(env)
    if not marker:
        # Our marker is written before anything else, so this one is somebody's.
        half = files.scratch(env / MARKER)
        if (env / MARKER).exists() or all(path == half for path in env.iterdir()):
            return "partial"
        return "foreign"
    works = python_of(env).exists()  # False too if the base interpreter is gone
    return "ready" if marker.get("state") == "ready" and works else "partial"


def _write_marker(env: Path, **data: object) -> None:
    files.write(env / MARKER, (json.dumps(data) + "\n").encode(), env)


def check_interpreter() -> None:
    """Debian and its kin split venv and ensurepip from python3 itself."""
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise WrongTarget(
                f"{sys.executable} has no {module}, so it cannot make an environment. "
                f"On Debian and Ubuntu: apt install python{version}-venv. "
                "Or run this with another Python 3.10 or later."
            )


def ensure(
    root: Path,
    version: str | None = None,
    *,
    name: str | None = None,
    more: tuple[str, ...] = (),
    dry_run: bool = False,
) -> Path:
    """Find or make the environment, apply the overlay to it, return its Python.

    Args:
        name: the folder of an environment that is not the tests'.
        more: packages that it has in addition to the tests'.
    """
    version = full(version)
    env = root / name if name else folder(root, version)
    packages = [*PACKAGES, *more]
    # Not the lock of the environment's own folder, which comes and goes.
    with files.held(root):
        started = time.monotonic()
        state = _state(env)
        if state == "foreign":
            raise Refused(
                f"{env} exists and was not made by this tool. Move it away and try again."
            )
        if state == "partial":
            print(f"{env} is half made (interrupted?): making it again", flush=True)
        if dry_run:
            print(_plan(env, version, packages) if state != "ready" else f"found {env}")
            return python_of(env)
        if state == "partial":
            shutil.rmtree(env)
        if state != "ready":
            print(_plan(env, version, packages), flush=True)
            _make(env, version, packages)
        elif _marker(env).get("packages") != packages:
            _install(env, version, packages)
        python = python_of(env)
        target = _torch_of(env, version)
        with target.held():
            report = _apply(target, root, env)
        made = "found" if state == "ready" else "made"
        print(f"{made} {env}: torch {target.version}, {_words(report)}")
        print(f"({time.monotonic() - started:.1f} s; its Python is {python})")
    return python


def _plan(env: Path, version: str, packages: list[str]) -> str:
    return (
        f"making {env}: torch {version} and {len(packages)} packages of the tests. pip "
        f"downloads {SIZE}."
    )


def _torch_of(env: Path, version: str) -> Wheel:
    """The environment's torch, which its user may have changed."""
    try:
        target = find_wheel(python_of(env))
        there = target.version
    except WrongTarget:
        there = None
    if there is None or versions.release(there) != versions.release(version):
        raise Refused(
            f"{env} was made with torch {version} and has "
            f"{f'torch {there}' if there else 'none'} now. Remove that folder, and it is "
            "made again; `--torch VERSION` makes another one."
        )
    return target


def _apply(target: Wheel, root: Path, env: Path) -> Report:
    try:
        return target.apply(root)
    except Refused as error:
        raise Refused(
            f"{error}\nEdit files here, in {root / 'torch'}: each command applies them to "
            f"{env.name}. Or remove {env}: it is made again."
        ) from None


def _words(report: Report) -> str:
    count = len(report.written) + len(report.removed)
    if not count:
        return "overlay in place already"
    return f"overlay applied ({count} file{'s' if count > 1 else ''} changed)"


def _make(env: Path, version: str, packages: list[str]) -> None:
    check_interpreter()
    env.mkdir()
    _write_marker(env, state="making", torch=version)
    # The base interpreter: it outlives an environment that this may run in.
    base = getattr(sys, "_base_executable", None) or sys.executable
    log = env / "install.log"
    command = [base, "-m", "venv", str(env)]
    if progress.run(command, f"making {env.name}", log, timeout=300):
        raise WorkFailed(f"python -m venv failed:\n{progress.tail(log)}")
    _install(env, version, packages)


def _install(env: Path, version: str, packages: list[str]) -> None:
    log = env / "install.log"
    _write_marker(env, state="making", torch=version)
    for names, what in (
        (f"torch=={version}", [f"torch=={version}"]),
        ("the tests' packages", packages),
    ):
        command = [str(python_of(env)), "-m", "pip", "install"]
        command += ["--disable-pip-version-check", "--no-input", *what]
        if progress.run(command, f"pip install {names}", log, timeout=PIP_TIMEOUT_S):
            raise WorkFailed(
                f"pip install {names} failed; its last lines:\n{progress.tail(log)}\n"
                f"all of it: {log}"
            )
    code = "import importlib.metadata as m; print(m.version('torch'))"
    got = ask_python(python_of(env), code).strip()
    if versions.release(got) != versions.release(version):
        raise WorkFailed(f"pip installed torch {got}, not {version}")
    _write_marker(env, state="ready", torch=version, packages=packages)


def run_in(
    python: Path,
    args: list[str],
    root: Path,
    *,
    timeout: float | None,
    variables: dict[str, str] | None = None,
) -> int:
    """Run the environment's Python in the foreground, with this terminal."""
    # A PYTHONPATH could put another torch before the environment's.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env.update(variables or {})
    process = subprocess.Popen([str(python), *args], cwd=root, env=env)
    try:
        while True:
            try:
                code = process.wait(timeout)
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:
                continue  # the child got it too, and ends in its own way
            except subprocess.TimeoutExpired:
                raise WorkFailed(f"stopped after {timeout:.0f} s") from None
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
