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

from . import apply, lock, progress, versions
from .errors import Refused, WorkFailed, WrongTarget
from .target import ask_python, find_wheel


if TYPE_CHECKING:
    from pathlib import Path

    from .target import Target


# What the tests, the examples and verify import, beside torch, the linter, and the
# type checker in upstream's version: each version of it finds other errors.
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
PIP_TIMEOUT_S = 3600


def folder(root: Path, version: str | None) -> Path:
    if version is None or version == versions.PINNED:
        return root / ".venv"
    return root / f".venv-{version}"


def python_of(env: Path) -> Path:
    if os.name == "nt":
        return env / "Scripts" / "python.exe"
    return env / "bin" / "python"


def existing_python(root: Path, version: str | None = None) -> Path:
    """The environment's interpreter, for commands that do not make one."""
    env = folder(root, version)
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
        if (env / MARKER).exists() or not any(env.iterdir()):
            return "partial"
        return "foreign"
    works = python_of(env).exists()  # False too if the base interpreter is gone
    return "ready" if marker.get("state") == "ready" and works else "partial"


def _write_marker(env: Path, **data: object) -> None:
    beside = env / (MARKER + ".new")
    beside.write_text(json.dumps(data) + "\n")
    os.replace(beside, env / MARKER)


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
    quiet: bool = False,
    name: str | None = None,
    more: tuple[str, ...] = (),
) -> Path:
    """Find or make the environment, lay the overlay over it, return its Python.

    Args:
        name: of its folder, where the environment is another one than the tests'.
        more: what is installed there, beside what the tests import.
    """
    version = version or versions.PINNED
    versions.check_supported(version)
    env = root / name if name else folder(root, version)
    packages = [*PACKAGES, *more]
    # Not the environment's own folder, which comes and goes.
    with lock.held(root):
        started = time.monotonic()
        state = _state(env)
        if state == "foreign":
            raise Refused(
                f"{env} exists and was not made by this tool. Move it away and try again."
            )
        if state == "partial":
            print(f"{env} is half made (interrupted?): making it again", flush=True)
            shutil.rmtree(env)
        if state != "ready":
            _make(env, version, packages)
        elif _marker(env).get("packages") != packages:
            _install(env, version, packages)
        python = python_of(env)
        target = find_wheel(python)
        with target.held():
            report = _apply(target, root, env)
        if not quiet:
            made = "found" if state == "ready" else "made"
            print(f"{made} {env}: torch {target.version}, {_words(report)}")
            for line in report.skipped if report.changed else ():
                print(line)
            print(f"({time.monotonic() - started:.1f} s; its Python is {python})")
    return python


def _apply(target: Target, root: Path, env: Path) -> apply.Report:
    try:
        return apply.apply(target, root)
    except Refused as error:
        raise Refused(
            f"{error}\nFiles are edited here, in {root / 'torch'}, and applied to "
            f"{env.name} by each command. Or remove {env}: it is made again."
        ) from None


def _words(report: apply.Report) -> str:
    count = len(report.changed) + len(report.removed)
    if not count:
        return "overlay in place already"
    return f"overlay applied ({count} file{'s' if count > 1 else ''} changed)"


def _make(env: Path, version: str, packages: list[str]) -> None:
    check_interpreter()
    env.mkdir()
    _write_marker(env, state="making", torch=version)
    # From inside another environment its base is what outlives that environment.
    base = getattr(sys, "_base_executable", None) or sys.executable
    log = env / "install.log"
    command = [base, "-m", "venv", str(env)]
    if progress.run(command, f"making {env.name}", log, timeout=300):
        raise WorkFailed(f"python -m venv failed:\n{progress.tail(log)}")
    _install(env, version, packages)


def _install(env: Path, version: str, packages: list[str]) -> None:
    log = env / "install.log"
    _write_marker(env, state="making", torch=version)
    for what in ([f"torch=={version}"], packages):
        names = " ".join(what)
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
    """Run the environment's Python in the foreground, the terminal passed on."""
    # Somebody's PYTHONPATH could put another torch before the environment's.
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
