"""Make a checkout importable: upstream's own build, or a wheel's compiled parts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from . import git, manifest, parts, progress, versions
from .errors import WorkFailed, WrongTarget
from .target import Checkout, Wheel, find_interpreter, origin


# A full build takes an hour or two where there are many cores, a day where not.
BUILD_TIMEOUT_S = 36 * 3600

_PYTHON_ONLY = re.compile(
    r"(docs|test|benchmarks|\.github|\.ci)/.*|(torch|functorch)/.*\.pyi?|[^/]*\.md"
)


def from_wheel(
    target: Checkout, wheel: Wheel, *, copy: bool = False, pth: bool = False
) -> None:
    if versions.release(wheel.version) != versions.release(target.version):
        raise WrongTarget(
            f"{target.words} and {wheel.words} are not the same version: their compiled "
            "parts would not fit. Give --python an interpreter with torch "
            f"{'.'.join(map(str, versions.release(target.version)))}."
        )
    _say_native_changes(target, wheel)
    started = time.monotonic()
    had = parts.load(target) is not None
    count = parts.lend(target, wheel, copy=copy)
    if count:
        print(f"{count} files brought from {wheel.root}/torch")
    else:
        print("the compiled parts are in place already")
    try:
        where = _import_from(target, wheel.python)
    except WorkFailed:
        if not had:
            parts.remove(target)
        raise
    print(f"import torch gives {where} ({time.monotonic() - started:.1f} s)")
    if pth:
        print(f"installed {parts.install_pth(target, wheel)}; `revert` removes it")
    else:
        print(f"use it: PYTHONPATH={target.root} {wheel.python}")


def _import_from(target: Checkout, python: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(target.root)}
    try:
        done = subprocess.run(
            [str(python), "-c", "import torch, torch.optim; print(torch.__file__)"],
            capture_output=True,
            text=True,
            env=env,
            cwd=target.root,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )
    except subprocess.TimeoutExpired:
        raise WorkFailed("import torch took over 300 s") from None
    where = done.stdout.strip()
    if done.returncode or not Path(where).is_relative_to(target.root):
        lines = done.stderr.strip().splitlines()[-8:]
        raise WorkFailed(
            "import torch does not run out of the checkout:\n"
            + "\n".join(lines or [where])
        )
    return where


def _git_version(torch_dir: Path) -> str | None:
    """The commit that a build was made of; torch writes it into version.py."""
    path = torch_dir / "version.py"
    text = path.read_text() if path.is_file() else ""
    found = re.search(r"git_version = '([0-9a-f]{7,40})'", text)
    return found.group(1) if found else None


def native_changes(target: Checkout, commit: str) -> list[str] | None:
    """Files that differ from ``commit`` and that a compiler sees; None: unknown."""
    done = git.git(
        target.root, "rev-parse", "--verify", f"{commit}^{{commit}}", check=False
    )
    if done.returncode:
        return None
    changed = git.lines(target.root, "diff", "--name-only", "-z", commit)
    new = git.lines(target.root, "ls-files", "-z", "--others", "--exclude-standard")
    return [rel for rel in [*changed, *new] if not _PYTHON_ONLY.fullmatch(rel)]


def _say_native_changes(target: Checkout, wheel: Wheel) -> None:
    commit = _git_version(wheel.torch_dir)
    changed = native_changes(target, commit) if commit else None
    if changed is None:
        print(
            "note: the checkout does not have the commit that the wheel was built of, "
            "so nobody can say whether its C++ sources are the same"
        )
    elif changed:
        names = ", ".join(changed[:5])
        print(
            f"warning: {len(changed)} files that the build compiles or generates from "
            f"differ from the wheel's ({names}): use --mode source to see their effect"
        )


def reusable(target: Checkout, python: Path) -> str | None:
    """Why no build is needed, in words; None: build."""
    commit = _git_version(target.torch_dir)
    built = parts.own_build(target) or (target.root / "build").is_dir()
    if commit is None or not built:
        return None
    imported = origin(python)
    if imported is None or imported.resolve().parent != target.torch_dir.resolve():
        return None
    if native_changes(target, commit) != []:
        return None
    return f"only Python files differ from the build of {commit[:12]}"


def from_source(target: Checkout, python: str | None, *, force: bool = False) -> None:
    # Upstream documents the command for the Python that is active in the shell.
    active = "python" if shutil.which("python") else "python3"
    found = find_interpreter(python or active)
    reason = None if force else reusable(target, found)
    if reason:
        print(f"the existing build of {target.root} is used again: {reason}")
        return
    path = os.pathsep.join([os.environ.get("PATH", ""), str(found.parent)])
    missing = [tool for tool in ("cmake", "ninja") if not shutil.which(tool, path=path)]
    if missing:
        raise WrongTarget(
            f"a source build needs {' and '.join(missing)} on PATH: pip install "
            f"{' '.join(missing)}, or use --mode wheel. Nothing was touched."
        )
    lent = parts.remove(target)
    if lent:
        print(f"took out {lent} files that came from a wheel")
    given = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("USE_"))
    print(
        "options: "
        + (" ".join(given) or "none (USE_CUDA=0 and the like are passed on)")
    )
    command = [
        str(found),
        "-m",
        "pip",
        "install",
        "--no-build-isolation",
        "-v",
        "-e",
        ".",
    ]
    log = manifest.folder(target.torch_dir) / "source-build.log"
    _hide_log(target)
    log.parent.mkdir(exist_ok=True)
    log.write_text("")
    code = progress.run(
        command,
        "building PyTorch from source",
        log,
        timeout=BUILD_TIMEOUT_S,
        cwd=target.root,
        env={**os.environ, "PATH": path},
    )
    if code:
        raise WorkFailed(
            f"the build failed with exit code {code}; its last lines:\n"
            f"{progress.tail(log, 40)}\nall of it: {log}"
        )
    print(f"built; the log is {log}")


def _hide_log(target: Checkout) -> None:
    from . import exclude, transaction

    changes = exclude.changed(
        target.exclude_file(), "kept files", [f"/torch/{manifest.FOLDER}/"]
    )
    if changes:
        transaction.commit(target.torch_dir, changes)
