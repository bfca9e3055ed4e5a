"""This repository's virtual environments, and the programs that run in them."""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from . import layer, payload, versions
from .errors import Refused, WorkFailed, WrongTarget


# The tests, the examples and verify import these and torch. The linter checks them.
# The type checker has upstream's version: each version of it finds other errors.
# A hypothesis of another version draws other configurations.
# torch's run_tests() writes its reports with xmlrunner wherever CI is set.
PACKAGES = (
    "numpy", "expecttest", "hypothesis==6.155.7", "pytest", "pytest-xdist", "coverage",
    "jupytext", "matplotlib", "cosmic-ray==8.7.0", "ruff", "pyrefly==0.58.0", "unittest-xml-reporting<=3.2.0",
    # The kernels are interpreted and compiled without a GPU. A torch with CUDA brings its own version.
    "triton; sys_platform == 'linux'",
)  # fmt: skip
# docs/frameworks.md says what holds with these. torchtitan imports triton, too.
FRAMEWORKS = (
    "accelerate==1.15.0", "transformers==5.23.0", "trl==1.16.0", "peft==0.21.2", "lightning==2.6.6",
    "torchtitan==0.3.0", "muon-optimizer==0.1.0",
    "megatron-core==0.16.1; sys_platform == 'linux' and platform_machine == 'x86_64'",
)  # fmt: skip
MARKER = ".muon_overlay_env.json"
SIZE = "about 0.3 GB from a CPU-only index (PIP_INDEX_URL), up to 4 GB with CUDA"


def python_of(env: Path) -> Path:
    return env / "bin" / "python"


def existing_python(root: Path) -> Path:
    """The environment's interpreter, for commands that do not make one."""
    env = root / ".venv"
    if not is_ready(env):
        raise WrongTarget(f"there is no environment at {env}:\n  {payload.COMMAND} env")
    return python_of(env)


def _packages(env: Path) -> list[str]:
    """The packages that it was made with; empty: it was not finished."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((env / MARKER).read_text()).get("packages", [])
    return []


def is_ready(env: Path) -> bool:
    # The base interpreter may be gone.
    return bool(_packages(env)) and python_of(env).exists()


def mark(env: Path, packages: list[str]) -> None:
    (env / MARKER).write_text(json.dumps({"packages": packages}) + "\n")


def ensure(root: Path, version: str | None, *, frameworks: bool = False) -> Path:
    """Find or make the environment, apply the overlay to it, return its Python."""
    version = versions.full(version)
    kind = f"-{version}" * (version != versions.PINNED) + "-frameworks" * frameworks
    env, packages = root / f".venv{kind}", [*PACKAGES, *FRAMEWORKS * frameworks]
    python = python_of(env)
    # Our marker is written first, so a folder without it is somebody's.
    if env.exists() and not (env / MARKER).exists() and any(env.iterdir()):
        raise Refused(f"{env} was not made by this tool. Move it away")
    if is_ready(env):
        print(f"found {env}", flush=True)
    else:
        size = f"torch {version} and {len(packages)} packages. pip downloads {SIZE}"
        print(f"making {env}: {size}", flush=True)
        shutil.rmtree(env, ignore_errors=True)
        env.mkdir()
        mark(env, [])
        # The base interpreter: it outlives an environment that this may run in.
        base = getattr(sys, "_base_executable", None) or sys.executable
        run_tool(base, ["venv", str(env)], root)
    if _packages(env) != packages:
        mark(env, [])
        # torch takes minutes, which pip shows. The others are many.
        for words in [f"torch=={version}"], ["-qq", *packages]:
            pip = ["pip", "install", "--no-input", "--disable-pip-version-check"]
            run_tool(python, [*pip, *words], env)
        mark(env, packages)
    installed = layer.find(python, root, with_path=False)
    # Its user may have changed it.
    if versions.release(installed.version or "0.0") != versions.release(version):
        raise Refused(
            f"{env} was made with torch {version} and has torch {installed.version} now. "
            "Remove that folder, and it is made again; `--torch VERSION` makes another."
        )
    print(installed.apply(live=True), flush=True)
    return python


def run_tool(python: str | Path, words: list[str], cwd: Path) -> None:
    """Run a module of Python that installs something."""
    label = " ".join(words[:2])
    print(f"{label} ...", flush=True)
    command = [str(python), "-m", *words]
    done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise WorkFailed(f"{label} failed with exit code {done.returncode}")


def run_in(
    python: Path, words: list[str], cwd: Path, variables: dict[str, str] | None = None
) -> int:
    """Run a Python in the foreground, with this terminal."""
    env = layer.plain_environment() | (variables or {})
    with subprocess.Popen([str(python), *words], cwd=cwd, env=env) as process:
        try:
            while True:
                # The child got it too, and ends in its own way.
                with contextlib.suppress(KeyboardInterrupt):
                    code = process.wait()
                    return code if code >= 0 else 128 - code
        finally:
            process.terminate()  # this process is told to end
