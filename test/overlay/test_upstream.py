"""The patches and the mails for upstream fit the torch that is installed, and its release."""

import re
import shutil
import sys

import pytest
from overlay.conftest import C10D, commit_all, git, HOLES, MUON, put, run, stock_of
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


def test_mails(tmp_path):
    """On the files of this release that they change."""
    place = tmp_path / "stock"
    put(place, HOLES)
    # The mails are for the sources since 2.15, where one of the lines is another.
    now = "grad.to(dtype=torch.bfloat16, copy=True)"
    muon = stock_of(MUON).replace("grad.bfloat16()", now)
    put(place, {MUON: muon, C10D: stock_of(C10D)})
    git(place, "init", "-q")
    commit_all(place)
    git(place, "am", "-q", *MAILS)
    first, second = git(place, "log", "--format=%s", "-2").splitlines()
    assert (first.startswith("optim: "), second.startswith("c10d: ")) == (True, True)
    for path in git(place, "diff", "--name-only", "HEAD~2").splitlines():
        compile((place / path).read_text(), path, "exec")
    # Muon takes the function from the module, which has the bits of the stock one.
    assert "def _zeropower_via_newtonschulz" not in (place / MUON).read_text()
    # torch.optim._muon and torch.optim._newton_schulz come from there.
    redirect = ROOT / "tools/mutation/redirect.py"
    shutil.copyfile(redirect, place / "torch/sitecustomize.py")
    env = {"PYTHONPATH": str(place / "torch")}
    test = place / "test/optim/test_newton_schulz.py"
    assert "OK" in run(sys.executable, test, cwd=place, env=env, timeout=300).err
    done = run(sys.executable, "-c", STEP, cwd=place, env=env)
    assert done.out == f"{place / MUON}\n"


STEP = """
import torch

p = torch.nn.Parameter(torch.ones(2, 3))
p.grad = p.detach()
muon = torch.optim.Muon([p])
muon.step()
print(type(muon).__init__.__code__.co_filename)
"""
