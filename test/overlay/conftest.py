"""The overlay's tests run on a PyTorch work tree, a small installed torch, and a
copy of this repository that a test may change."""

import importlib.util
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
from typing import NamedTuple

import pytest
from tools.overlay import cli, payload, versions
from tools.overlay.checkout import Checkout
from tools.overlay.payload import ROOT
from tools.overlay.target import FOLDER
from tools.overlay.wheel import find_wheel, record_hash


# The lines of upstream's docs/source/optim.md around which the patch goes.
OPTIM_MD = """# torch.optim

```{eval-rst}
    :class:`SGD`;beta;beta;beta
```

## How to adjust learning rate

{class}`torch.optim.lr_scheduler.LRScheduler` provides several methods.
"""


MUON, OWN = "torch/optim/_muon.py", "torch/optim/muon.py"
C10D = "torch/distributed/distributed_c10d.py"
# The commits that `apply --commit` makes.
SUBJECTS = re.findall(r'(?m)^\["(.+)"\]$', (ROOT / "patches/stack.toml").read_text())
BASE = f"HEAD~{len(SUBJECTS)}"
OTHER = "# Muon as another release has it\n"
BINARY = {"bin", "include", "share", "test"}  # folders of compiled parts
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"


class Result(NamedTuple):
    code: int
    out: str
    err: str


def run(*command, cwd=None, env=None, check=True, timeout=120, data=""):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        input=data,
    )
    if check and done.returncode:
        raise AssertionError(f"{command} gave {done.returncode}: {done.stderr}")
    return Result(done.returncode, done.stdout, done.stderr)


def fails(done, code, *words):
    """The command ended with that code, and its errors have those words."""
    assert done.code == code, done
    for each in words:
        assert each in done.err
    return done


def git(where, *words):
    return run("git", *words, cwd=where).out.strip()


@pytest.fixture(scope="session", autouse=True)
def git_identity():
    """Commits in the test trees must not depend on anybody's configuration."""
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        settings[f"GIT_{who}_NAME"] = "A Tester"
        settings[f"GIT_{who}_EMAIL"] = "tester@example.invalid"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module", autouse=True)
def not_measured():
    """A tracer slows the processes of these tests, and other tests execute the same lines
    of the optimizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        yield


@pytest.fixture(scope="session")
def wheel():
    """The torch of the interpreter that runs the tests."""
    return find_wheel(sys.executable)


def stock_of(wheel, rel):
    """The stock file of a path: the copy that the overlay keeps, if there is one."""
    copy = wheel.copy_of(rel)
    return copy if copy.is_file() else wheel.root / rel


@pytest.fixture(scope="session")
def stock_muon(wheel):
    """The text of upstream's _muon.py, which the overlay keeps."""
    return stock_of(wheel, MUON).read_bytes()


@pytest.fixture(scope="session")
def stock_tree(wheel, stock_muon):
    """Makes a PyTorch work tree of one commit: the installed torch's own Python sources."""

    def make(root, paths):
        added = payload.discover(ROOT).keys() - {MUON}
        for path in paths:
            rel = path.relative_to(wheel.root).as_posix()
            if FOLDER in path.parts or rel == "torch/version.py":  # generated
                continue
            if rel in added or "muon" in path.parent.name:
                continue
            (root / rel).parent.mkdir(parents=True, exist_ok=True)
            path = stock_of(wheel, rel)
            # With its time, so that its bytecode still counts: compiling all of torch
            # again takes longer than the tests that import it.
            shutil.copy2(path, root / rel)
            compiled = pathlib.Path(importlib.util.cache_from_source(path))
            if compiled.is_file():
                cache = (root / rel).parent / "__pycache__"
                cache.mkdir(exist_ok=True)
                shutil.copyfile(compiled, cache / compiled.name)
        numbers = map(str, versions.release(wheel.version))
        (root / "version.txt").write_text(".".join(numbers) + "a0\n")
        # As in upstream's.
        generated = ("__pycache__/", "*.so*", "torch/version.py", "torch/lib/", "*.pyi")
        (root / ".gitignore").write_text(
            "\n".join([*generated, *(f"torch/{top}/" for top in BINARY)])
        )
        (root / "docs/source").mkdir(parents=True)
        (root / "docs/source/optim.md").write_text(OPTIM_MD)
        commit_all(root, "PyTorch")
        assert (root / MUON).read_bytes() == stock_muon
        return root

    return make


@pytest.fixture(scope="session")
def small(tmp_path_factory, stock_tree, wheel):
    """A checkout with torch.optim and what patches change: enough for all but importing it."""
    paths = [
        wheel.torch_dir / "__init__.py",
        wheel.torch_dir / "distributed" / "distributed_c10d.py",
        wheel.torch_dir / "testing" / "_internal" / "common_optimizers.py",
        *(wheel.torch_dir / "optim").rglob("*.py"),
    ]
    return stock_tree(tmp_path_factory.mktemp("small") / "pytorch", paths)


@pytest.fixture
def checkout(tmp_path, small):
    place = tmp_path / "pytorch"
    run("git", "clone", "--quiet", "--local", small, place)
    return place


@pytest.fixture
def overlay(tmp_path):
    """A copy of this repository's overlay."""
    place = tmp_path / "overlay"
    for rel, path in payload.discover(ROOT).items():
        (place / rel).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place / rel)
    copy_tools(place)
    return place


def copy_tools(place):
    for top in ("tools", "patches"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / top, place / top, ignore=ignore)
    shutil.copyfile(ROOT / "setup_overlay.py", place / "setup_overlay.py")


def write_record(site, rels):
    """RECORD as an installer leaves it for those files of torch."""
    (info,) = site.glob("*.dist-info")
    texts = {rel: (site / rel).read_bytes() for rel in rels}
    rows = [f"{r},{record_hash(text)},{len(text)}\n" for r, text in texts.items()]
    (info / "RECORD").write_text("".join(rows))


@pytest.fixture
def make_installed(tmp_path, stock_muon):
    """Makes an interpreter whose only torch is a small installed one."""

    def make(version="2.13.0+cpu", name="installed"):
        site = tmp_path / name / "site-packages"
        files = {
            "torch/__init__.py": b"raise ImportError('torch must not be imported')\n",
            "torch/version.py": b"torch/version.py",
            "torch/optim/__init__.py": b"",
            MUON: stock_muon,
        }
        for rel, text in files.items():
            (site / rel).parent.mkdir(parents=True, exist_ok=True)
            (site / rel).write_bytes(text)
        info = site / f"torch-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format("torch", version))
        write_record(site, files)
        return script(
            tmp_path / name / "python",
            f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{site}" exec "{sys.executable}" "$@"\n',
        )

    return make


@pytest.fixture
def installed(make_installed):
    return make_installed()


@pytest.fixture
def small_wheel(installed):
    """With compiled parts, as far as a test needs any."""
    found = find_wheel(installed)
    for rel in ("_C.so", "lib/libtorch.so", "lib/sub/x", "v.pyi"):
        rel = f"torch/{rel}"
        (found.root / rel).parent.mkdir(parents=True, exist_ok=True)
        (found.root / rel).write_text(rel)
    return found


def script(path: pathlib.Path, body: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(scope="session")
def tool():
    """The command line itself: `tool("status", ...)`, of this repository or a copy."""

    def call(*args, root=ROOT, env=None, timeout=120):
        face = root / "setup_overlay.py"
        return run(sys.executable, face, *args, env=env, check=False, timeout=timeout)

    return call


@pytest.fixture
def face(capsys, monkeypatch):
    """The command line without an interpreter of its own: `face("status", ...)`."""
    handler = signal.getsignal(signal.SIGTERM)

    def call(*args, root=ROOT):
        monkeypatch.setattr(cli, "ROOT", root)
        capsys.readouterr()
        try:
            code = cli.main([str(word) for word in args])
        except SystemExit as wrong:  # argparse's
            code = wrong.code
        done = capsys.readouterr()
        return Result(code, done.out, done.err)

    yield call
    signal.signal(signal.SIGTERM, handler)


def snapshot(root):
    """Every file below a folder with its text, git's own files left out."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(root).parts
    }


def git_status(root):
    return run("git", "status", "--porcelain", cwd=root).out


@pytest.fixture
def there(checkout):
    return Checkout(checkout)


@pytest.fixture
def site(installed):
    return find_wheel(installed)


@pytest.fixture
def ours(overlay):
    """The copy of this repository as a git repository."""
    commit_all(overlay, "the overlay")
    return overlay


def commit_all(where, message="work"):
    if not (where / ".git").exists():
        run("git", "init", "--quiet", "--initial-branch=main", cwd=where)
    run("git", "add", "--all", cwd=where)
    run("git", "commit", "--quiet", "-m", message, cwd=where)
    return run("git", "rev-parse", "HEAD", cwd=where).out.strip()


def append(path, text):
    path.write_text(path.read_text() + text)
