"""The overlay's tests run on a small PyTorch of three releases, a copy of this repository with a
small overlay, and an interpreter with a small torch."""

import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections import namedtuple
from pathlib import Path

import pytest
from tools.overlay.payload import ROOT


MUON, OWN = "torch/optim/_muon.py", "torch/optim/muon.py"
C10D = "torch/distributed/distributed_c10d.py"
RELEASES = ("2.11.0", "2.13.0", "2.15.0")
# The lines of upstream around which the patches go.
HOLES = {
    "docs/source/optim.md": "# torch.optim\n\nOptimizers.\n\n## How to adjust learning rate\n",
    "test/distributed/test_c10d_common.py": "import torch\n\n\n"
    'if __name__ == "__main__":\n    run_tests()\n',
    C10D: "import torch\nfrom torch.utils._typing_utils import not_none\n\n\n"
    "# Takes a list of ranks and computes an integer color\ndef color(): ...\n\n\n"
    "def new_group():\n\n"
    "    group_name = _process_group_name(ranks, use_hashed_name=use_local_synchronization)\n\n"
    "    return group_name\n",
    "torch/testing/_internal/common_optimizers.py": "        optim_error_inputs_func=optim_error_inputs_func_muon,\n"
    "        supported_impls=(),\n        not_og_supported_flags=(),\n        supports_complex=False,\n",
}
# A small overlay: the stock file that it replaces, and files of each commit.
ENGINE = [f"torch/optim/_muon_engine/part_{number}.py" for number in range(8)]
SMALL = [
    OWN, "torch/optim/_newton_schulz.py", "test/optim/test_newton_schulz.py",
    "test/optim/test_muon.py", *ENGINE,
]  # fmt: skip

Result = namedtuple("Result", "code out err")


def run(*command, check=True, timeout=120, **options):
    words = [str(word) for word in command]
    options = {"stdin": subprocess.DEVNULL, **options}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, **options
    )
    if check and done.returncode:
        raise AssertionError(f"{command} gave {done.returncode}: {done.stderr}")
    return Result(done.returncode, done.stdout, done.stderr)


def git(where, *words, **options):
    return run("git", *words, cwd=where, **options).out.strip()


def commit_all(where, message="work"):
    git(where, "add", "--all")
    git(where, "commit", "--quiet", "-m", message)
    return git(where, "rev-parse", "HEAD")


def put(folder, texts):
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def append(path, text):
    path.write_text(path.read_text() + text)


def prepend(path, text):
    path.write_text(text + path.read_text())


def tree_of(where, commit="HEAD"):
    return git(where, "rev-parse", f"{commit}^{{tree}}")


def text_of(path):
    return "".join(f"# {path}, line {number}\n" for number in range(9))


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


@pytest.fixture(scope="session")
def upstream(tmp_path_factory):
    """A PyTorch whose branches are its releases."""
    place = tmp_path_factory.mktemp("upstream") / "pytorch"
    place.mkdir()
    git(place, "init", "-q", "-b", "main")
    put(place, HOLES)
    others = ("torch/__init__.py", "torch/optim/__init__.py", "torch/optim/sgd.py")
    put(place, {path: text_of(path) for path in others})
    put(place, {".gitignore": "*.so\n__pycache__/\ntorch/version.py\n"})
    for release in RELEASES:
        prepend(place / C10D, f"# {release}\n")
        put(place, {MUON: f"# stock {release}\n", "version.txt": f"{release}a0\n"})
        commit_all(place, f"PyTorch {release}")
        git(place, "branch", release)
    return place


@pytest.fixture
def fork(upstream, tmp_path):
    """A checkout of the middle release."""
    place = tmp_path / "pytorch"
    git(tmp_path, "clone", "-q", upstream, place)
    git(place, "switch", "-q", "-c", "work", "origin/2.13.0")
    return place


@pytest.fixture(scope="session")
def small_overlay(tmp_path_factory):
    place = tmp_path_factory.mktemp("ours") / "overlay"
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("tools/overlay", "patches"):
        shutil.copytree(ROOT / folder, place / folder, ignore=ignore)
    shutil.copyfile(ROOT / "setup_overlay.py", place / "setup_overlay.py")
    put(place, {path: text_of(path) for path in SMALL})
    put(place, {MUON: f"distributed_config = None\n{text_of(MUON)}"})
    put(place, {"torch/optim/_muon_engine/__init__.py": ""})
    put(place, {".gitignore": "__pycache__/\n.venv*\n"})
    git(place, "init", "-q", "-b", "main")
    commit_all(place, "the overlay")
    return place


@pytest.fixture
def ours(small_overlay, tmp_path):
    place = tmp_path / "overlay"
    git(tmp_path, "clone", "-q", small_overlay, place)
    return place


@pytest.fixture
def tool():
    """The command line: `tool(root, "status", ...)`, which fails with `code` and these words."""

    def call(root, *words, code=0, says=(), **options):
        done = run(
            sys.executable, root / "setup_overlay.py", *words, check=False, **options
        )
        assert done.code == code, done
        for each in says:
            assert each in done.out + done.err, done
        return done

    return call


def commands(tool, ours, folder, *target):
    """Calls commands of the small overlay on a target in a folder. One that refuses has changed nothing."""

    def call(name, *words, code=0, says=()):
        before = everything(folder), everything(ours)
        done = tool(ours, name, *target, *words, code=code, says=says)
        assert code < 2 or (everything(folder), everything(ours)) == before
        return done

    return call


@pytest.fixture
def on(tool, ours, fork):
    """A command on the checkout."""
    return commands(tool, ours, fork, "--checkout", fork)


Installed = namedtuple("Installed", "python site torch")


@pytest.fixture
def installed(tmp_path):
    """An environment with a small torch."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    found = Installed(tmp_path / "venv/bin/python", site, site / "torch")
    packages = (
        "torch",
        "torch/optim",
        "torch/distributed",
        "torch/nn",
        "torch/testing",
    )
    put(site, {f"{package}/__init__.py": "" for package in packages})
    put(site, {MUON: "# stock\n", "torch/version.py": "__version__ = '2.13.0+cpu'\n"})
    put(site, {p: t for p, t in HOLES.items() if p.startswith("torch/")})
    return found


def leads_on(text):
    """Run each command that is printed there."""
    lines = [each for each in text.splitlines() if each.startswith(("  git ", "  rm "))]
    assert lines, text
    return [run(*shlex.split(line)) for line in lines]


def snapshot(root):
    """Every file below a folder with its text, and where links lead, git's own files left out."""
    found = {}
    for path in sorted(root.rglob("*")):
        if {".git", "__pycache__"} & {*path.parts}:
            continue
        if path.is_symlink():
            found[path] = os.readlink(path)
        elif path.is_file():
            found[path] = path.read_bytes()
    return found


def everything(where):
    """A user's files, index and branches."""
    status = git(where, "status", "--porcelain", check=False)
    staged = git(where, "ls-files", "--stage", "-t", check=False)
    refs = git(where, "for-each-ref", "refs/heads", "refs/stash", check=False)
    return snapshot(where), status, staged, refs


def stock_of(path):
    """The stock file of the torch that runs the tests."""
    import torch

    folder = Path(torch.__file__).parents[1]
    if (folder / "stock.txt").exists():
        folder = Path((folder / "stock.txt").read_text())
    return (folder / path).read_text()
