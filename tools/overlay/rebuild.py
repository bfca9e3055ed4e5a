"""Make a checkout importable: upstream's own build, or a wheel's compiled parts."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from . import git, parts, progress, versions
from .errors import WorkFailed, WrongTarget
from .interpreter import ask_python, find_interpreter, origin
from .repo import ROOT


if TYPE_CHECKING:
    from .checkout import Checkout
    from .wheel import Wheel
    from .worktree import Worktree


TEST = "test/distributed/optim/test_muon.py"
TEST_NEEDS = ("expecttest", "numpy")

# A full build takes an hour or two where there are many cores, a day where not.
BUILD_TIMEOUT_S = 36 * 3600

# As upstream documents it.
COMMAND = ("-m", "pip", "install", "--no-build-isolation", "-v", "-e", ".")

# Names alone: pip and the build check versions.
_LACKING = """
import importlib.metadata as m, re
found = {{re.sub("[-_.]+", "-", d.metadata["Name"] or "").lower() for d in m.distributions()}}
for line in {!r}.splitlines():
    name = re.match(r"[A-Za-z0-9._-]+", line)
    if name and ";" not in line:
        name = re.sub("[-_.]+", "-", name[0]).lower()
        if name not in found | {{"cmake", "ninja"}}:
            print(name, end=" ")
"""

_PYTHON_ONLY = re.compile(
    r"(docs|test|benchmarks|\.github|\.ci)/.*|(torch|functorch)/.*\.pyi?|[^/]*\.md"
)


def from_wheel(
    checkout: Checkout, wheel: Wheel, *, copy: bool = False, pth: bool = False
) -> None:
    tree = checkout.tree
    wanted = versions.release(checkout.version or "")
    if versions.release(wheel.version or "") != wanted:
        raise WrongTarget(
            f"{checkout.words} and {wheel.words} are not the same version: their compiled "
            "parts would not fit. Give --python an interpreter with torch "
            f"{'.'.join(map(str, wanted))}."
        )
    if pth and wheel.root.is_relative_to(ROOT):
        raise WrongTarget(
            "--pth would have this repository's own environment import the checkout: its "
            "tests would run there. Give --python another interpreter, or omit --pth. "
            "Nothing was touched."
        )
    _say_native_changes(tree, wheel)
    started = time.monotonic()
    had = parts.load(tree) is not None
    count = parts.lend(tree, wheel, copy=copy)
    if count:
        print(f"{count} files brought from {wheel.root}/torch")
    else:
        print("the compiled parts are in place already")
    try:
        where = _import_from(tree, wheel.python)
    except WorkFailed:
        if not had:
            parts.remove(tree)
        raise
    print(f"import torch gives {where} ({time.monotonic() - started:.1f} s)")
    if pth:
        print(f"installed {parts.install_pth(tree, wheel)}; `revert` removes it")
    _say_how_to_use_it(tree, wheel, pth)


def _say_how_to_use_it(tree: Worktree, wheel: Wheel, pth: bool) -> None:
    root, python = shlex.quote(str(tree.root)), shlex.quote(str(wheel.python))
    path = "" if pth else f"PYTHONPATH={root} "
    if not (tree.root / TEST).is_file():
        print(f"use it:\n  {path}{python}")
        return
    code = "import importlib.util as u; print(*[m for m in {!r} if not u.find_spec(m)])"
    lacks = ask_python(wheel.python, code.format(TEST_NEEDS)).split()
    if lacks:
        print(f"the tests need more:\n  {python} -m pip install {' '.join(lacks)}")
    print(
        f"run its tests (-v says why one is skipped):\n  cd {root} && {path}{python} {TEST}"
    )


def _import_from(tree: Worktree, python: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(tree.root)}
    try:
        done = subprocess.run(
            [str(python), "-c", "import torch, torch.optim; print(torch.__file__)"],
            capture_output=True,
            text=True,
            env=env,
            cwd=tree.root,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )
    except subprocess.TimeoutExpired:
        raise WorkFailed("import torch took over 300 s") from None
    where = done.stdout.strip()
    if done.returncode or not Path(where).is_relative_to(tree.root):
        lines = done.stderr.strip().splitlines()[-8:]
        raise WorkFailed(
            "import torch does not run out of the checkout:\n"
            + "\n".join(lines or [where])
        )
    return where


def _git_version(torch_dir: Path) -> str | None:
    """The commit that a build was made from; torch writes it into version.py."""
    path = torch_dir / "version.py"
    text = path.read_text() if path.is_file() else ""
    found = re.search(r"git_version = '([0-9a-f]{7,40})'", text)
    return found.group(1) if found else None


def native_changes(tree: Worktree, commit: str) -> list[str] | None:
    """Files that differ from ``commit`` and that a compiler sees; None: unknown."""
    done = git.git(
        tree.root, "rev-parse", "--verify", f"{commit}^{{commit}}", check=False
    )
    if done.returncode:
        return None
    changed = git.lines(tree.root, "diff", "--name-only", "-z", commit)
    new = git.lines(tree.root, "ls-files", "-z", "--others", "--exclude-standard")
    return [rel for rel in [*changed, *new] if not _PYTHON_ONLY.fullmatch(rel)]


def _say_native_changes(tree: Worktree, wheel: Wheel) -> None:
    commit = _git_version(wheel.torch_dir)
    changed = native_changes(tree, commit) if commit else None
    if changed is None:
        print(
            "note: this clone does not have the commit that the wheel was built of, so the "
            "C++ sources were not compared. To change C++, use --mode source"
        )
    elif changed:
        names = ", ".join(changed[:5])
        print(
            f"warning: {len(changed)} files that the build compiles or generates from "
            f"differ from the wheel's ({names}): use --mode source to see their effect"
        )


def reusable(tree: Worktree, python: Path) -> str | None:
    """Why no build is needed, in words; None: a build is needed."""
    commit = _git_version(tree.torch_dir)
    built = parts.own_build(tree) or (tree.root / "build").is_dir()
    if commit is None or not built:
        return None
    imported = origin(python)
    if imported is None or imported.resolve().parent != tree.torch_dir.resolve():
        return None
    if native_changes(tree, commit) != []:
        return None
    return f"only Python files differ from the build of {commit[:12]}"


def from_source(tree: Worktree, python: str | None, *, reuse: bool = True) -> None:
    # Upstream documents the command for the Python that is active in the shell.
    active = "python" if shutil.which("python") else "python3"
    found = find_interpreter(python or active)
    reason = reusable(tree, found) if reuse else None
    if reason:
        print(f"the existing build of {tree.root} is used again: {reason}")
        return
    path = os.pathsep.join([os.environ.get("PATH", ""), str(found.parent)])
    missing = _missing(tree, found, path)
    if missing:
        raise WrongTarget(
            "a source build cannot start:\n"
            + "".join(f"  it needs {line}\n" for line in missing)
            + "Or use --mode wheel. Nothing was touched."
        )
    lent = parts.remove(tree)
    if lent:
        print(f"took out {lent} files that came from a wheel")
    given = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("USE_"))
    print(
        "options: "
        + (" ".join(given) or "none (USE_CUDA=0 and the like are passed on)")
    )
    log = tree.keep / "source-build.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("")
    code = progress.run(
        [str(found), *COMMAND],
        "building PyTorch from source",
        log,
        timeout=BUILD_TIMEOUT_S,
        cwd=tree.root,
        env={**os.environ, "PATH": path},
    )
    if code:
        raise WorkFailed(
            f"the build failed with exit code {code}\n{_first_error(log)}its last lines:\n"
            f"{progress.tail(log, 20)}\nall of it: {log}"
        )
    print(f"built; the log is {log}")


def _first_error(log: Path) -> str:
    """The words of cmake or the compiler; pip's own lines follow them and say less."""
    lines = log.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines):
        if re.search(r"CMake Error|^FAILED: |(fatal )?error: (?!subprocess)", line):
            return "\n".join(lines[number : number + 5]) + "\n...\n"
    return ""


def _missing(tree: Worktree, python: Path, path: str) -> list[str]:
    """The needs of upstream's build that lack, each with the command that brings it."""
    lines = []
    pip = f"{shlex.quote(str(python))} -m pip install"
    tools = [tool for tool in ("cmake", "ninja") if not shutil.which(tool, path=path)]
    if tools:
        lines.append(f"{' and '.join(tools)} on PATH: {pip} {' '.join(tools)}")
    if not any(shutil.which(c, path=path) for c in _compilers()):
        lines.append("a C++ compiler on PATH: g++ or clang++, or name it in CXX")
    modules = tree.root / ".gitmodules"
    text = modules.read_text() if modules.is_file() else ""
    folders = [tree.root / rel for rel in re.findall(r"(?m)^\s*path = (.+)$", text)]
    if not all(folder.is_dir() and any(folder.iterdir()) for folder in folders):
        update = "submodule update --init --recursive"
        lines.append(f"the submodules: git -C {shlex.quote(str(tree.root))} {update}")
    named = tree.root / "requirements-build.txt"
    if named.is_file():
        lacks = ask_python(python, _LACKING.format(named.read_text())).strip()
        if lacks:
            place = shlex.quote(str(named))
            lines.append(f"the packages {lacks}: {pip} -r {place}")
    return lines


def _compilers() -> list[str]:
    named = os.environ.get("CXX", "").split()
    return named[:1] or ["c++", "g++", "clang++", "cl"]
