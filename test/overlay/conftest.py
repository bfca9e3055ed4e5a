"""The overlay's tests run on a PyTorch work tree, a small installed torch, and a
copy of this repository that a test may change."""

import os
import pathlib
import re
import shutil
import shlex
import stat
import subprocess
import sys
from collections import namedtuple

import pytest
from tools.overlay import cli, payload, versions
from tools.overlay.checkout import Checkout
from tools.overlay.payload import ROOT
from tools.overlay.target import FOLDER
from tools.overlay.wheel import find_wheel, record_hash


# An installed torch has neither: the lines of upstream around which the patches go.
UNINSTALLED = {
    "docs/source/optim.md": b"""# torch.optim

```{eval-rst}
    :class:`SGD`;beta;beta;beta
```

## How to adjust learning rate

{class}`torch.optim.lr_scheduler.LRScheduler` provides several methods.
""",
    "test/distributed/test_c10d_common.py": b"""from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests


if __name__ == "__main__":
    run_tests()
""",
}
MUON, OWN = "torch/optim/_muon.py", "torch/optim/muon.py"
C10D = "torch/distributed/distributed_c10d.py"
# The commits that `apply` makes.
SUBJECTS = re.findall(r'(?m)^\["(.+)"\]$', (ROOT / "patches/stack.toml").read_text())
BASE = f"HEAD~{len(SUBJECTS)}"
OTHER = "# Muon as another release has it\n"
BINARY = {"bin", "include", "share", "test"}  # folders of compiled parts
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"


Result = namedtuple("Result", "code out err")


def run(*command, check=True, timeout=120, data="", **options):
    words, options = [str(word) for word in command], {"input": data, **options}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, **options
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


def leads_on(text):
    """Run each command that is printed there."""
    ways = ("  git ", "  rm ", "  cp ", f"  {sys.executable} ")
    lines = [line for line in text.splitlines() if line.startswith(ways)]
    assert lines
    return [run(*shlex.split(line)) for line in lines]


def git(where, *words):
    return run("git", *words, cwd=where).out.strip()


@pytest.fixture(scope="session", autouse=True)
def git_identity():
    """Commits in the test trees must not depend on anybody's configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        for who in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{who}_NAME", "A Tester")
            patch.setenv(f"GIT_{who}_EMAIL", "tester@example.invalid")
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
        base = wheel.plan(ROOT).base
        for path in paths:
            rel = path.relative_to(wheel.root).as_posix()
            added = base.get(rel, b"") is None or FOLDER in path.parts
            if not added and rel != "torch/version.py":  # which is generated
                (root / rel).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(stock_of(wheel, rel), root / rel)
        numbers = map(str, versions.release(wheel.version))
        (root / "version.txt").write_text(".".join(numbers) + "a0\n")
        # As in upstream's.
        built = [f"torch/{top}/" for top in sorted(BINARY)]
        built += ["__pycache__/", "*.so*", "torch/version.py", "torch/lib/", "*.pyi"]
        (root / ".gitignore").write_text("\n".join(built))
        put(root, UNINSTALLED)
        commit_all(root, "PyTorch")
        assert (root / MUON).read_bytes() == stock_muon
        return root

    return make


@pytest.fixture(scope="session")
def small(tmp_path_factory, stock_tree, wheel):
    """A checkout with torch.optim and what patches change: enough for all but importing it."""
    rels = ("torch/__init__.py", C10D, "torch/testing/_internal/common_optimizers.py")
    paths = [wheel.root / rel for rel in rels]
    paths += (wheel.torch_dir / "optim").rglob("*.py")
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
    put(place, payload.read(ROOT).whole)
    copy_tools(place)
    return place


def copy_tools(place):
    for top in ("tools", "patches"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / top, place / top, ignore=ignore)
    shutil.copyfile(ROOT / "setup_overlay.py", place / "setup_overlay.py")


def put(folder, texts):
    for rel, text in texts.items():
        (folder / rel).parent.mkdir(parents=True, exist_ok=True)
        (folder / rel).write_bytes(text)


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
        info = site / f"torch-{version}.dist-info"
        texts = {
            "torch/__init__.py": b"raise ImportError('torch must not be imported')\n",
            "torch/version.py": b"torch/version.py",
            "torch/optim/__init__.py": b"",
            MUON: stock_muon,
        }
        put(site, texts)
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format("torch", version))
        write_record(site, texts)
        path = f"${{PYTHONPATH:+$PYTHONPATH:}}{site}"
        body = f'PYTHONPATH="{path}" exec "{sys.executable}" "$@"\n'
        return script(tmp_path / name / "python", body)

    return make


@pytest.fixture
def installed(make_installed):
    return make_installed()


@pytest.fixture
def small_wheel(installed):
    """With compiled parts, as far as a test needs any."""
    found = find_wheel(installed)
    rels = ("torch/_C.so", "torch/lib/libtorch.so", "torch/lib/sub/x", "torch/v.pyi")
    put(found.root, {rel: rel.encode() for rel in rels})
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
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)

    def call(*args, root=ROOT):
        monkeypatch.setattr(cli, "ROOT", root)
        capsys.readouterr()
        try:
            code = cli.main([str(word) for word in args])
        except SystemExit as wrong:  # argparse's
            code = wrong.code
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def on(request, face):
    """A command on the checkout, or on the installed torch: `on("apply")`; its output.

    With a ``code``, it fails so, its errors have ``words``, and nothing has changed.
    """
    kind = "checkout" if "checkout" in request.fixturenames else "installed"
    option = "--checkout" if kind == "checkout" else "--python"
    target = request.getfixturevalue(kind)

    def call(command, *more, where=target, root=ROOT, code=0, words=()):
        roots = [where if where.is_dir() else where.parent, *[root] * (root != ROOT)]
        before = [everything(each) for each in roots]
        done = face(command, option, where, *more, root=root)
        fails(done, code, *words)
        assert not code or [everything(each) for each in roots] == before
        return done.err if code else done.out

    return call


def everything(where):
    """A user's files, index and branches."""
    if not (where / ".git").exists():
        return snapshot(where)
    refs = ("for-each-ref", "refs/heads", "refs/stash")
    return snapshot(where), git_status(where), git(where, *refs)


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


def tree_of(where, commit="HEAD"):
    return git(where, "rev-parse", f"{commit}^{{tree}}")


def branch(checkout, name, texts, at="main"):
    """Make a branch of one commit with these texts; its commit."""
    git(checkout, "switch", "-q", "-c", name, at)
    put(checkout, {rel: text.encode() for rel, text in texts.items()})
    return commit_all(checkout, name)


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
