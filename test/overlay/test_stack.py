"""The commits of patches/stack.toml: each file is in one, and each commit works alone."""

import fnmatch
import inspect
import os
import shutil
import sys

import pytest
from overlay.conftest import OPTIM_MD, run, stock_of
from tools.overlay import patches, payload
from tools.overlay.payload import ROOT
from tools.overlay.target import FOLDER


# The suite runs the tests of these on the whole overlay.
WHOLE = "Muon takes a distributed_config"


@pytest.fixture(scope="module")
def commits(wheel):
    """(message, texts) of each commit on the stock files."""
    source = payload.read(ROOT)
    files = {rel: stock_of(wheel, rel) for rel in patches.series(source)}
    base = {rel: path.read_bytes() for rel, path in files.items() if path.is_file()}
    base["docs/source/optim.md"] = OPTIM_MD.encode()
    new, misfits = patches.overlay(source, base, bool)
    assert not misfits
    return patches.commits(source, new, stack=True)


def test_each_file_is_in_one_commit(commits):
    text = (ROOT / "patches/stack.toml").read_text()
    listed = patches.stack_of(text)
    assert [message.splitlines()[0] for message, _ in commits] == [
        t for t, *_ in listed
    ]
    assert 5 <= len(commits) <= 7
    files = [rel for _, texts in commits for rel in texts]
    assert len(files) == len(set(files))
    for _, _, paths in listed:
        for pattern in paths:
            assert fnmatch.filter(files, pattern), pattern


def test_the_list_is_toml():
    tomllib = pytest.importorskip("tomllib")
    text = (ROOT / "patches/stack.toml").read_text()
    found = [
        (title, inspect.cleandoc(of["why"]), of["paths"])
        for title, of in tomllib.loads(text).items()
    ]
    assert found == patches.stack_of(text)


AS_STOCK = """
import importlib.util, runpy, sys, torch
spec = importlib.util.spec_from_file_location("torch.optim.stock_muon", sys.argv[1])
spec.loader.exec_module(stock := importlib.util.module_from_spec(spec))
both = [torch.full((4, 6), 0.5, requires_grad=True) for _ in range(2)]
for param, cls in zip(both, (torch.optim.Muon, stock.Muon)):
    optimizer = cls([param], lr=0.1)
    for step in range(3):
        param.grad = torch.arange(24.0).reshape(4, 6).sin() * (step + 1)
        optimizer.step()
assert torch.equal(*both)
for sys.argv in [[path] for path in sys.argv[2:]]:
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code
"""


def link(source, place):
    try:
        os.link(source, place)
    except OSError:  # another file system
        os.symlink(source, place)


@pytest.mark.slow
def test_each_commit_works_alone(commits, wheel, tmp_path):
    """It steps as stock does; until the engine comes, its own tests run on it."""
    skipped = shutil.ignore_patterns(
        "include", "share", "_muon_engine", "_muon", FOLDER
    )
    place = tmp_path / "torch"
    shutil.copytree(wheel.torch_dir, place, copy_function=link, ignore=skipped)
    for rel in payload.discover(ROOT):
        (tmp_path / rel).unlink(missing_ok=True)
    for path in wheel.copies.rglob("*.py"):
        rel = path.relative_to(wheel.copies)
        (place / rel).unlink(missing_ok=True)
        shutil.copyfile(path, place / rel)
    stock = stock_of(wheel, "torch/optim/_muon.py")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    whole = False
    for message, texts in commits:
        for rel, text in texts.items():
            (tmp_path / rel).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / rel).unlink(missing_ok=True)
            (tmp_path / rel).write_bytes(text)
        if whole and not fnmatch.filter(texts, "torch/*"):
            continue
        whole |= WHOLE in message
        tests = [] if whole else fnmatch.filter(texts, "test/*")
        words = ("-c", AS_STOCK, stock, *tests)
        run(sys.executable, *words, env=env, cwd=tmp_path, timeout=600)
    assert whole
