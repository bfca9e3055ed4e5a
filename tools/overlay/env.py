"""The environment of this repository: a virtual environment with an overlaid torch."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from . import files, progress, versions
from .errors import Refused, WorkFailed, WrongTarget
from .wheel import find_wheel, plain_environment


if TYPE_CHECKING:
    from pathlib import Path

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
    if not versions.supported(version):
        raise WrongTarget(
            f"asked for torch {version}; this overlay supports torch "
            f"{versions.SUPPORTED}. Nothing was touched."
        )
    return version + ".0" * (version.count(".") < 2)


def folder(root: Path, version: str) -> Path:
    return root / (".venv" if version == versions.PINNED else f".venv-{version}")


def python_of(env: Path) -> Path:
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
    # Our marker is written first, so a folder without it is somebody's.
    if not (env / MARKER).exists() and any(env.iterdir()):
        half = list(env.iterdir()) == [files.scratch(env / MARKER)]
        return "partial" if half else "foreign"
    works = python_of(env).exists()  # False too if the base interpreter is gone
    return "ready" if marker.get("state") == "ready" and works else "partial"


def _write_marker(env: Path, **data: object) -> None:
    files.write(env / MARKER, (json.dumps(data) + "\n").encode(), env)


def ensure(
    root: Path,
    version: str | None = None,
    *,
    name: str | None = None,
    more: tuple[str, ...] = (),
    dry: bool = False,
) -> Path:
    """Find or make the environment, apply the overlay to it, return its Python.

    Args:
        name: the folder of an environment that is not the tests'.
        more: packages that it has in addition to the tests'.
    """
    version = full(version)
    env = root / name if name else folder(root, version)
    packages = [*PACKAGES, *more]
    making = (
        f"making {env}: torch {version} and {len(packages)} packages of the tests. pip "
        f"downloads {SIZE}."
    )
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
        print(f"found {env}" if state == "ready" else making, flush=True)
        if dry:
            return python_of(env)
        if state == "partial":
            shutil.rmtree(env)
        if state != "ready":
            _make(env, version)
        if _marker(env).get("packages") != packages:
            _install(env, version, packages)
        target = _torch_of(env, version)
        with target.held():
            try:
                count = len(target.apply(root).changes)
            except Refused as error:
                raise Refused(
                    f"{error}\nEdit files here, in {root / 'torch'}: each command applies "
                    f"them to {env.name}. Or remove {env}: it is made again."
                ) from None
        done = f"overlay applied (files changed: {count})"
        print(
            f"torch {target.version}: {done if count else 'overlay in place already'}"
        )
        spent = time.monotonic() - started
        print(f"({spent:.1f} s; its Python is {target.python})")
    return target.python


def _torch_of(env: Path, version: str) -> Wheel:
    """The environment's torch, which its user may have changed."""
    target = find_wheel(python_of(env))
    if versions.release(target.version or "0.0") != versions.release(version):
        raise Refused(
            f"{env} was made with torch {version} and has torch {target.version} now. Remove "
            "that folder, and it is made again; `--torch VERSION` makes another one."
        )
    return target


def _make(env: Path, version: str) -> None:
    # Debian and its kin split venv and ensurepip from python3 itself.
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            number = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise WrongTarget(
                f"{sys.executable} has no {module}, so it cannot make an environment. "
                f"On Debian and Ubuntu: apt install python{number}-venv. "
                "Or run this with another Python 3.10 or later."
            )
    env.mkdir()
    _write_marker(env, state="making", torch=version)
    # The base interpreter: it outlives an environment that this may run in.
    base = getattr(sys, "_base_executable", None) or sys.executable
    _run(env, [base, "-m", "venv", str(env)], f"making {env.name}", 300)


def _install(env: Path, version: str, packages: list[str]) -> None:
    _write_marker(env, state="making", torch=version)
    pip = [str(python_of(env)), "-m", "pip", "install", "--disable-pip-version-check"]
    torch = f"torch=={version}"
    for names, words in (torch, [torch]), ("the tests' packages", packages):
        _run(env, [*pip, "--no-input", *words], f"pip install {names}", PIP_TIMEOUT_S)
    _write_marker(env, state="ready", torch=version, packages=packages)


def _run(env: Path, command: list[str], label: str, timeout: float) -> None:
    log = env / "install.log"
    if progress.run(command, label, log, timeout=timeout):
        raise WorkFailed(
            f"{label} failed; its last lines:\n{progress.tail(log)}\nall of it: {log}"
        )


def run_in(
    python: Path, args: list[str], root: Path, variables: dict[str, str] | None = None
) -> int:
    """Run the environment's Python in the foreground, with this terminal."""
    env = plain_environment() | (variables or {})
    process = subprocess.Popen([str(python), *args], cwd=root, env=env)
    try:
        while True:
            try:
                code = process.wait()
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:
                continue  # the child got it too, and ends in its own way
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
