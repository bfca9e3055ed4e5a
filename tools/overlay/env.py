"""This repository's virtual environment with an overlaid torch, and long commands."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from . import files, payload, versions
from .errors import Refused, WorkFailed, WrongTarget
from .wheel import find_wheel, plain_environment


# The tests, the examples and verify import these and torch. The linter checks them.
# The type checker has upstream's version: each version of it finds other errors.
# A hypothesis of another version draws other configurations.
# torch's run_tests() writes its reports with xmlrunner wherever CI is set.
PACKAGES = (
    "numpy", "expecttest", "hypothesis==6.155.7", "pytest", "pytest-xdist", "coverage",
    "jupytext", "matplotlib", "cosmic-ray==8.7.0", "ruff", "pyrefly==0.58.0", "unittest-xml-reporting<=3.2.0",
)  # fmt: skip
# docs/frameworks.md says what holds with these. torchtitan imports triton, which only
# torch with CUDA brings, of its own version.
FRAMEWORKS = (
    "accelerate==1.15.0", "transformers==5.23.0", "lightning==2.6.6", "torchtitan==0.3.0",
    "muon-optimizer==0.1.0", "triton; sys_platform == 'linux'",
)  # fmt: skip
MARKER = ".muon_overlay_env.json"
_EVERY_S = 20.0  # seconds between two lines of a long command
SIZE = "about 0.3 GB from a CPU-only index (PIP_INDEX_URL), up to 4 GB with CUDA"


def full(version: str | None) -> str:
    """2.13 is 2.13.0: one version has one environment."""
    version = version or versions.PINNED
    if not versions.supported(version):
        raise WrongTarget(f"torch {version} is not supported: {versions.SUPPORTED}")
    return version + ".0" * (version.count(".") < 2)


def python_of(env: Path) -> Path:
    return env / "bin" / "python"


def existing_python(root: Path) -> Path:
    """The environment's interpreter, for commands that do not make one."""
    env = root / ".venv"
    if _state(env) != "ready":
        raise WrongTarget(f"there is no environment at {env}:\n  {payload.COMMAND} env")
    return python_of(env)


def _packages(env: Path) -> list[str]:
    """The packages that it was made with; empty: it was not finished."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((env / MARKER).read_text()).get("packages", [])
    return []


def _state(env: Path) -> str:
    """absent, foreign (not ours), partial (interrupted, broken) or ready."""
    if not env.exists():
        return "absent"
    # Our marker is written first, so a folder without it is somebody's.
    if not (env / MARKER).exists() and any(env.iterdir()):
        return "foreign"
    # The last is False too if the base interpreter is gone.
    return "ready" if _packages(env) and python_of(env).exists() else "partial"


def mark(env: Path, packages: list[str]) -> None:
    (env / MARKER).write_text(json.dumps({"packages": packages}) + "\n")


def ensure(
    root: Path, version: str | None, *, frameworks: bool = False, dry: bool = False
) -> Path:
    """Find or make the environment, apply the overlay to it, return its Python."""
    version = full(version)
    kind = f"-{version}" * (version != versions.PINNED) + "-frameworks" * frameworks
    env, packages = root / f".venv{kind}", [*PACKAGES, *FRAMEWORKS * frameworks]
    # Not the lock of the environment's own folder, which comes and goes.
    with files.held(root):
        state = _state(env)
        if state == "foreign":
            raise Refused(f"{env} was not made by this tool. Move it away")
        if state == "partial":
            print(f"{env} is half made (interrupted?): making it again", flush=True)
        what = f"torch {version} and {len(packages)} packages. pip downloads {SIZE}"
        found = f"found {env}" if state == "ready" else f"making {env}: {what}"
        print(found, flush=True)
        if dry:
            return python_of(env)
        if state != "ready":
            shutil.rmtree(env, ignore_errors=True)
            env.mkdir()
            mark(env, [])
            # The base interpreter: it outlives an environment that this may run in.
            base = getattr(sys, "_base_executable", None) or sys.executable
            run_long([base, "-m", "venv", str(env)], f"making {env.name}", root)
        if _packages(env) != packages:
            _install(env, version, packages)
        target = find_wheel(python_of(env), with_path=False)
        # Its user may have changed it.
        if versions.release(target.version or "0.0") != versions.release(version):
            raise Refused(
                f"{env} was made with torch {version} and has torch {target.version} now. "
                "Remove that folder, and it is made again; `--torch VERSION` makes another."
            )
        with target.held():
            count = len(target.apply(root).changes)
        done = f"applied (files changed: {count})" if count else "in place already"
        print(f"torch {target.version}: overlay {done}\nits Python is {target.python}")
    return target.python


def _install(env: Path, version: str, packages: list[str]) -> None:
    mark(env, [])
    pip = [str(python_of(env)), "-m", "pip", "install", "-qq", "--no-input"]
    torch = f"torch=={version}"
    for names, words in (torch, [torch]), ("the tests' packages", packages):
        label = f"pip install {names}"
        run_long([*pip, "--disable-pip-version-check", *words], label, env)
    mark(env, packages)


def run_in(
    python: Path,
    args: list[str],
    root: Path,
    variables: dict[str, str] | None = None,
) -> int:
    """Run a Python in the foreground, with this terminal."""
    env = plain_environment() | (variables or {})
    with subprocess.Popen([str(python), *args], cwd=root, env=env) as process:
        try:
            while True:
                # The child got it too, and ends in its own way.
                with contextlib.suppress(KeyboardInterrupt):
                    code = process.wait()
                    return code if code >= 0 else 128 - code
        finally:
            process.terminate()  # this process is told to end


def run_long(command: list[str], label: str, cwd: Path) -> None:
    """Run it and show that it lives."""
    started = time.monotonic()
    process = subprocess.Popen(
        command, cwd=cwd, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        print(f"{label} ...", flush=True)
        while process.returncode is None:
            try:
                process.wait(_EVERY_S)
            except subprocess.TimeoutExpired:
                print(f"{label} ... {time.monotonic() - started:.0f} s", flush=True)
    except BaseException:
        # With its children: a build would leave dozens of compilers.
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(process.pid, sign)
                process.wait(5)
        raise
    if process.returncode:
        raise WorkFailed(f"{label} failed with exit code {process.returncode}")
    print(f"{label}: done in {time.monotonic() - started:.1f} s", flush=True)
