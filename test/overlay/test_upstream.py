"""The patches and the mails for upstream fit the torch that is installed, and its release."""

import re
import sys

import pytest
from overlay.conftest import C10D, git, HOLES, MUON, put, run, stock_of
from tools.overlay import payload, versions
from tools.overlay.errors import WrongTarget
from tools.overlay.payload import ROOT


torch = pytest.importorskip("torch")

VERSIONS = [f"2.{minor}" for minor in range(versions.OLDEST[1], versions.NEWEST[1] + 1)]
MAILS = sorted((ROOT / "patches/upstream").glob("*.patch"))


def test_versions():
    assert versions.SUPPORTED == f"{VERSIONS[0]} to {VERSIONS[-1]}"
    assert ", ".join(versions.STOCK.values()).split(", ") == VERSIONS
    for text in [
        "2.11.0",
        "2.13.0+cpu",
        "2.14.0a0+git1234",
        "2.12",
        "2.13.0.post1+corp.7",
    ]:
        assert versions.supported(text)
    for text in ("2.15.0.dev20260101", "2.10.9+cu128", "2.16.0a0", "v2", "main", "2.x"):
        with pytest.raises(WrongTarget, match=f"{re.escape(text)}.*2.11 to 2.15"):
            versions.full(text)
    assert versions.full("2.14") == "2.14.0"
    assert versions.stock(stock_of(MUON).encode())
    assert versions.warnings("2.13.0", {}, stock_of(MUON).encode()) == []


def test_each_patch_is_read():
    """A file that is no patch of the overlay is a mail for upstream."""
    named = {hunks.patch for hunks in payload.patches(ROOT)} | {
        str(MAILS[1].relative_to(ROOT))
    }
    files = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "patches").rglob("*.*")
    }
    assert named == files


@pytest.mark.parametrize("hunks", payload.patches(ROOT), ids=lambda hunks: hunks.path)
def test_hunks_fit_at_one_place(hunks):
    """With so little context git could take another place, of the same words, unnoticed."""
    text = (
        HOLES[hunks.path]
        if not hunks.path.startswith("torch/")
        else stock_of(hunks.path)
    )
    for hunk in re.split(r"(?m)^@@ .*\n", hunks.text.decode())[1:]:
        lines = [line for line in hunk.splitlines(keepends=True) if line[:1] in " -"]
        before = "".join(line[1:] for line in lines)
        assert f"\n{text}".count(f"\n{before}") == 1, hunk


@pytest.fixture
def stock(tmp_path):
    """The files of this release that mails change."""
    place = tmp_path / "stock"
    put(place, HOLES)
    # The mails are for the sources since 2.15, where one of the lines is another.
    now = "grad.to(dtype=torch.bfloat16, copy=True)"
    muon = stock_of(MUON).replace("grad.bfloat16()", now)
    put(place, {MUON: muon, C10D: stock_of(C10D)})
    git(place, "init", "-q")
    git(place, "add", "--all")
    git(place, "commit", "-q", "-m", "stock")
    return place


def test_mails(stock):
    git(stock, "am", "-q", *MAILS)
    first, second = git(stock, "log", "--format=%s", "-2").splitlines()
    assert (first.startswith("optim: "), second.startswith("c10d: ")) == (True, True)
    for path in git(stock, "diff", "--name-only", "HEAD~2").splitlines():
        compile((stock / path).read_text(), path, "exec")
    # Muon takes the function from the module, which has the bits of the stock one.
    assert "def _zeropower_via_newtonschulz" not in (stock / MUON).read_text()
    put(stock, {"sitecustomize.py": SITE})
    test = stock / "test/optim/test_newton_schulz.py"
    done = run(
        sys.executable, test, cwd=stock, env={"PYTHONPATH": str(stock)}, timeout=300
    )
    assert "OK" in done.err
    code = (
        "import torch; p = torch.nn.Parameter(torch.ones(2, 3)); p.grad = p.detach()\n"
    )
    code += "m = torch.optim.Muon([p]); m.step(); print(type(m).__init__.__code__.co_filename)"
    done = run(sys.executable, "-c", code, cwd=stock, env={"PYTHONPATH": str(stock)})
    assert done.out == f"{stock / MUON}\n"


# It has torch.optim._muon and torch.optim._newton_schulz come from the mails' tree.
SITE = """
import pathlib, sys
from importlib.machinery import PathFinder

class Redirect:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("torch.optim._"):
            return PathFinder.find_spec(name, [str(pathlib.Path(__file__).parent / "torch/optim")])

sys.meta_path.insert(0, Redirect)
"""
