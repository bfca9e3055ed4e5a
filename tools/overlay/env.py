"""This repository's virtual environments, and the programs that run in them."""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from . import layer, versions
from .errors import OverlayError, Refused


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
    "torchtitan==0.3.0",
)  # fmt: skip
MARKER = ".muon_overlay_env.json"
SIZE = "about 0.3 GB from a CPU-only index (PIP_INDEX_URL), up to 4 GB with CUDA"


def python_of(env: Path) -> Path:
    return env / "bin" / "python"


def packages_of(env: Path) -> str:
    """The packages that it was made with; empty: it was not finished, or its base is gone."""
    marker = env / MARKER
    there = marker.exists() and python_of(env).exists()
    return marker.read_text() if there else ""


def ensure(root: Path, version: str | None, *, frameworks: bool = False) -> Path:
    """Find or make the environment, apply the overlay to it, return its Python."""
    version = versions.full(version)
    kind = f"-{version}" * (version != versions.PINNED) + "-frameworks" * frameworks
    env, packages = root / f".venv{kind}", [*PACKAGES, *FRAMEWORKS * frameworks]
    python, marker = python_of(env), env / MARKER
    # Our marker is written first, so a folder without it is somebody's.
    if env.exists() and not marker.exists() and any(env.iterdir()):
        raise Refused(f"{env} was not made by this tool. Move it away")
    if packages_of(env):
        print(f"found {env}", flush=True)
    else:
        words = f"torch {version} and {len(packages)} packages. pip downloads {SIZE}"
        print(f"making {env}: {words}", flush=True)
        shutil.rmtree(env, ignore_errors=True)
        env.mkdir()
        marker.touch()
        run_tool(sys.executable, ["venv", str(env)], root)
    wanted = json.dumps(packages)
    if packages_of(env) != wanted:
        marker.write_text("")
        # torch takes minutes, which pip shows. The others are many.
        for words in [f"torch=={version}"], ["-qq", *packages]:
            pip = ["pip", "install", "--no-input", "--disable-pip-version-check"]
            run_tool(python, [*pip, *words], env)
        marker.write_text(wanted)
    print(layer.find(python, root).apply(live=True), flush=True)
    return python


def run_tool(python: str | Path, words: list[str], cwd: Path) -> None:
    """Run a module of Python that installs something."""
    label = " ".join(words[:2])
    print(f"{label} ...", flush=True)
    command = [str(python), "-m", *words]
    done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise OverlayError(f"{label} failed with exit code {done.returncode}")


def run_in(
    python: Path, words: list[str], cwd: Path, env: dict[str, str] | None = None
) -> int:
    """Run a Python in the foreground, with this terminal."""
    env = env or layer.plain_environment()
    with subprocess.Popen([str(python), *words], cwd=cwd, env=env) as process:
        try:
            while True:
                # The child got it too, and ends in its own way.
                with contextlib.suppress(KeyboardInterrupt):
                    code = process.wait()
                    return code if code >= 0 else 128 - code
        finally:
            process.terminate()  # this process is told to end
