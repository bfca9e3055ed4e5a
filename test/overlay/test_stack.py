"""The commits of patches/stack.toml: each has what it imports, and tests that it names."""

import ast
import fnmatch
import itertools
import os
import re
import sys
from importlib.util import resolve_name

import pytest
from overlay.conftest import C10D, MUON, OWN, put, run, stock_of, UNINSTALLED
from tools.overlay import patches, payload
from tools.overlay.payload import ROOT


@pytest.fixture(scope="module")
def commits(wheel):
    """(message, texts) of each commit on the stock files."""
    source = payload.read(ROOT)
    files = {rel: stock_of(wheel, rel) for rel in (MUON, *patches.series(source))}
    base = {rel: path.read_bytes() for rel, path in files.items() if path.is_file()}
    base |= UNINSTALLED
    new, misfits = patches.overlay(source, base)
    assert not misfits
    return patches.commits(source, base, new, stack=True)


def test_each_file_has_its_last_form_in_one_commit(commits):
    text = (ROOT / "patches/stack.toml").read_text()
    listed = patches.stack_of(text)
    titles = [message.splitlines()[0] for message, _ in commits]
    assert titles == [commit.title for commit in listed]
    files = [rel for _, texts in commits for rel in texts]
    for message, texts in commits:
        plan = message.partition("\n\nTest plan:")[2]
        tests = fnmatch.filter(texts, "test/*/test_*.py")
        assert plan
        assert all(f"\n    python {rel}" in plan for rel in tests)
        for rel in re.findall(r"test/[\w]+/[\w/]+\.py", message):
            assert rel in files
    files.remove(MUON)
    assert len(files) == len(set(files))
    for pattern in (pattern for commit in listed for pattern in commit.paths):
        assert fnmatch.filter(files, pattern), pattern


def test_rfc_describes_the_stack(commits):
    """It had ten commits for eleven, and a third of the lines of Newton-Schulz."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (number,) = re.findall(r"\*\*The stack\*\* has (\d+) commits", page)
    assert int(number) == len(commits)
    rows = re.findall(r"(?m)^\| (\d+) \| .+ \| ([\w, ]+) \| ([\w, ]+) \|$", page)
    assert [int(row[0]) for row in rows] == [*range(1, len(commits) + 1)]
    ours, seen = payload.discover(ROOT), set()
    for (number, *figures), (_, texts) in zip(rows, commits, strict=True):
        counted = [0, 0]
        for rel, text in texts.items():
            # An earlier commit changes the stock file.
            if rel in ours and text == (ROOT / rel).read_bytes():
                seen.add(rel)
                counted["test" in rel] += text.count(b"\n")
        for figure, lines in zip(figures, counted):
            said = 0 if figure == "a hunk" else int(figure.replace(",", ""))
            assert abs(said - lines) <= max(100, lines // 10), (number, lines)
    assert seen == {*ours}


@pytest.mark.slow
def test_commits_below_the_optimizer_pass_their_tests(commits, tmp_path):
    """Only the last commits have the optimizer as the other tests know it."""
    redirect = (ROOT / "tools/mutation/redirect.py").read_bytes()
    put(tmp_path, {"torch/sitecustomize.py": redirect})
    environment, brought = os.environ | {"PYTHONPATH": f"{tmp_path}/torch"}, []
    for _, texts in itertools.takewhile(lambda commit: OWN not in commit[1], commits):
        put(tmp_path, texts)
        for rel in fnmatch.filter(texts, "test/*/test_*.py"):
            words = sys.executable, tmp_path / rel
            done = run(*words, cwd=tmp_path, env=environment)
            brought += re.findall(r"Ran (\d+) test", done.err)
    assert brought[0] == "1" and len(brought) == 2, brought


def test_types_of_each_commit(commits, tmp_path):
    """A hunk of distributed_c10d.py had an error: the checker sees only whole files elsewhere."""
    pytest.importorskip("pyrefly")
    settings = (ROOT / "pyproject.toml").read_text()
    settings = settings.replace(".venv/bin/python", sys.executable)
    (tmp_path / "pyproject.toml").write_text(settings)
    for message, texts in commits:
        put(tmp_path, texts)
        done = run(sys.executable, "-m", "pyrefly", "check", cwd=tmp_path, check=False)
        assert "INFO 0 errors" in done.err, message + done.out


def test_stock_muon_imports_newton_schulz_with_the_same_bits(commits, stock_muon):
    torch = pytest.importorskip("torch")
    first = next(texts[MUON] for _, texts in commits if MUON in texts)
    assert b"def _zeropower" not in first
    results = []
    for text in (stock_muon, first):
        names = {"__package__": "torch.optim", "__name__": "torch.optim.other"}
        exec(text, names)
        p = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3).sin())
        muon = names["Muon"]([p], lr=0.1)
        for step in range(3):
            p.grad = (p.detach() + step).cos()
            muon.step()
        results.append(p.detach())
    assert torch.equal(*results)
    source = patches.imported(stock_muon, "_newton_schulz", ["Muon", "unknown"])
    assert source is None  # another stock file: the commit leaves it


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
    """An option raised ModuleNotFoundError on the first commits, and types were unknown."""
    ours, there = modules(rel for _, texts in commits for rel in texts), set()
    for message, texts in commits:
        there |= modules(texts)
        for rel, text in texts.items():
            if rel.endswith(".py") and rel in payload.discover(ROOT):
                missing = ours & {*imports(rel, text)} - there
                assert not missing, (message.splitlines()[0], rel)
        # A maintainer reviews this many lines at once.
        code = [t for r, t in texts.items() if "test" not in r and r != C10D]
        lines = sum(text.count(b"\n") for text in code)
        assert lines <= 2200, (message.splitlines()[0], lines)
