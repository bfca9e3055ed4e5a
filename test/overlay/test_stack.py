"""The commits of patches/stack.toml: each file is in one, and each commit has what it imports."""

import ast
import fnmatch
import inspect
import re
from importlib.util import resolve_name

import pytest
from overlay.conftest import C10D, OPTIM_MD, stock_of
from tools.overlay import patches, payload
from tools.overlay.payload import ROOT


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
    files = [rel for _, texts in commits for rel in texts]
    for message, texts in commits:
        plan = message.partition("\n\nTest plan:")[2]
        tests = fnmatch.filter(texts, "test/*/test_*.py")
        assert plan
        assert all(f"\n    python {rel}" in plan for rel in tests)
        for rel in re.findall(r"test/[\w/]+\.py", message):
            assert rel in files
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


def imports(rel, text):
    """The modules that a file may import, at its top or later."""
    package = ".".join(rel.split("/")[:-1])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            name = resolve_name(name, package)
            yield from [name, *(f"{name}.{alias.name}" for alias in node.names)]


def modules(rels):
    named = (rel.removesuffix(".py").removesuffix("/__init__") for rel in rels)
    return {name.replace("/", ".") for name in named}


def test_each_commit_has_what_it_imports(commits):
    """An option raised ModuleNotFoundError on the first commits, and types were unknown.

    A file has its last form in its only commit, so nothing else of it can fail there.
    """
    ours, there = modules(rel for _, texts in commits for rel in texts), set()
    for message, texts in commits:
        there |= modules(texts)
        for rel, text in texts.items():
            if rel.endswith(".py") and rel in payload.discover(ROOT):
                missing = ours & {*imports(rel, text)} - there
                assert not missing, (message.splitlines()[0], rel)
        # A maintainer reviews this many lines at once.
        code = [t for r, t in texts.items() if "test" not in r and r != C10D]
        assert sum(text.count(b"\n") for text in code) < 3000
