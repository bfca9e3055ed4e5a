"""Tests the recipes for training frameworks, in an environment that has these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import env


if TYPE_CHECKING:
    from pathlib import Path


FOLDER = ".venv-frameworks"
# docs/frameworks.md says what holds with these.
VERSIONS = {
    "accelerate": "1.15.0",
    "transformers": "5.23.0",
    "lightning": "2.6.6",
    "torchtitan": "0.3.0",
}
PACKAGES = (
    *(f"{name}=={version}" for name, version in VERSIONS.items()),
    # torchtitan imports it. Only torch with CUDA brings one, of its own version.
    "triton; sys_platform == 'linux'",
)
TESTS = "test/frameworks"


def test(root: Path, args: list[str]) -> int:
    """Run pytest with ``args`` on the recipes' tests; pytest's exit code."""
    python = env.ensure(root, name=FOLDER, more=PACKAGES)
    chosen = [] if any(arg.startswith(TESTS) for arg in args) else [TESTS]
    return env.run_in(python, ["-m", "pytest", *chosen, *args], root)
