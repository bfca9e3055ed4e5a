"""test/conftest.py: each test has the marker of one of TESTING.md's stages, and failures are named at once."""

import shutil
import sys

import pytest
from overlay.conftest import run
from tools.overlay.payload import ROOT


ON_ONE_GPU = {
    "TestMuonOnGPU",
    "TestMuonOnOneGPU",
    "TestMuonFusedOnGPU",
    "TestMuonGraphsOnOneGPU",
}
STAGES = {"stage1", "stage2", "stage3", "stage4", "overlay"}


def test_each_test_has_one_stage(request):
    for item in request.session.items:
        (stage,) = {mark.name for mark in item.iter_markers()} & STAGES
        case = getattr(item.cls, "__name__", "")
        assert (stage == "stage2") == (case in ON_ONE_GPU)


ENDS_EARLY = """
import os
import unittest

class TestEnd(unittest.TestCase):
    def test_1(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertEqual(number, 0)

    def test_2(self):
        os._exit(7)
"""


def test_failures_are_named_at_once(tmp_path):
    """A run of 43 minutes was stopped, and its only failure had no name."""
    pytest.importorskip("xdist")
    for name in ("pyproject.toml", "test/conftest.py", "test/frozen_imports.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    folder = tmp_path / "test" / "optim"
    folder.mkdir()
    (folder / "test_end.py").write_text(ENDS_EARLY)
    words = ("-m", "pytest", "-n", 1, "--max-worker-restart", 0)
    done = run(sys.executable, *words, cwd=tmp_path, check=False)
    assert done.code != 0, done.out
    text, _, _ = done.out.partition("short test summary")
    place = "test/optim/test_end.py::TestEnd"
    line = f"FAILED {place}::test_1: AssertionError: 1 != 0"
    assert text.splitlines().count(line) == 1, done.out
