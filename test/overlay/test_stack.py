"""The commits of patches/stack.toml: each has what it imports, and tests that it names."""

import ast
import fnmatch
import os
import re
import sys

import pytest
from overlay.conftest import MUON, put, run, stock_of, UNINSTALLED
from tools.overlay import patches, payload
from tools.overlay.payload import ROOT
from tools.series import earlier
from tools.series.earlier import imports
from tools.series.modules import module_of
from tools.series.names import NoForm


@pytest.fixture(scope="module")
def stock(wheel):
    """The stock files that the overlay changes."""
    rels = (MUON, *patches.series(payload.read(ROOT)))
    files = {rel: stock_of(wheel, rel) for rel in rels}
    texts = {rel: path.read_bytes() for rel, path in files.items() if path.is_file()}
    return texts | UNINSTALLED


@pytest.fixture(scope="module")
def overlay_texts(stock):
    texts, misfits = patches.overlay(payload.read(ROOT), stock)
    assert not misfits
    return texts


@pytest.fixture(scope="module")
def commits(stock, overlay_texts):
    """(message, texts) of each commit on the stock files."""
    return patches.commits(payload.read(ROOT), stock, overlay_texts, stack=True)


@pytest.fixture(scope="module")
def added(commits):
    """Path -> the lines that a commit adds to a file of ours, for each commit."""
    ours, before, rows = payload.discover(ROOT), {}, []
    listed = patches.stack_of((ROOT / "patches/stack.toml").read_text())
    for (_, texts), commit in zip(commits, listed, strict=True):
        row = {}
        for rel in texts.keys() & ours.keys() - {*commit.imports}:
            lines = texts[rel].count(b"\n")
            row[rel] = lines - before.get(rel, 0)
            before[rel] = lines
        rows.append(row)
    return rows


def test_messages(commits):
    listed = patches.stack_of((ROOT / "patches/stack.toml").read_text())
    titles = [message.splitlines()[0] for message, _ in commits]
    assert titles == [commit.title for commit in listed]
    files = {rel for _, texts in commits for rel in texts}
    for message, texts in commits:
        plan = message.partition("\n\nTest plan:")[2]
        tests = fnmatch.filter(texts, "test/*/test_*.py")
        assert plan
        assert all(f"\n    python {rel}" in plan for rel in tests)
        for rel in re.findall(r"test/[\w]+/[\w/]+\.py", message):
            assert rel in files
    for pattern in (pattern for commit in listed for pattern in commit.paths):
        assert fnmatch.filter(files, pattern), pattern


def words_of(text):
    """What matters for the order of two forms: an arm of an ``if`` may become its first one."""
    return re.findall(r"\w+", text.decode().replace("elif", "if"))


def test_forms_of_files(commits, overlay_texts):
    """A later form has all words of the one before, in their order. Each commit has a file in its last
    form, by which `apply` knows it."""
    before = {}
    for message, texts in commits:
        title = message.splitlines()[0]
        for rel in texts.keys() & before.keys() - {MUON}:
            words = iter(words_of(texts[rel]))
            assert all(word in words for word in words_of(before[rel])), (title, rel)
        before |= texts
        assert any(text == overlay_texts[rel] for rel, text in texts.items()), title
    assert before == overlay_texts


def test_options_are_there_from_their_commit_on(commits):
    """Before it, they would have no effect."""
    arguments = {}
    for message, texts in commits:
        tree = ast.parse(texts.get(MUON, b""))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                for argument in node.args.args:
                    arguments.setdefault(argument.arg, message.splitlines()[0])
    assert "DTensors" in arguments["distributed_config"]
    assert "batches" in arguments["foreach"]
    assert "batches" in arguments["allow_batched_matrices"]
    assert "Gram" in arguments["ns_algorithm"]
    assert "kernels" in arguments["fused"]


def test_nothing_is_left_over(commits, tmp_path):
    """Imports and names that only later commits use."""
    pytest.importorskip("torch")
    config = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(config)
    for message, texts in commits:
        put(tmp_path, texts)
        words = ("-m", "ruff", "check", "--quiet", "--select", "F,E9")
        done = run(sys.executable, *words, cwd=tmp_path, check=False)
        assert done.code == 0, message.splitlines()[0] + done.out


def test_rfc_describes_the_stack(commits, added):
    """It had ten commits for eleven, and a third of the lines of Newton-Schulz."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (number,) = re.findall(r"\*\*The stack\*\* has (\d+) commits", page)
    assert int(number) == len(commits)
    rows = re.findall(r"(?m)^\| (\d+) \| .+ \| ([\w, ]+) \| ([\w, ]+) \|$", page)
    assert [int(row[0]) for row in rows] == [*range(1, len(commits) + 1)]
    for (number, *figures), files in zip(rows, added, strict=True):
        counted = [0, 0]
        for rel, lines in files.items():
            counted["test" in rel] += lines
        for figure, lines in zip(figures, counted):
            said = 0 if figure == "a hunk" else int(figure.replace(",", ""))
            assert abs(said - lines) <= max(50, lines // 10), (number, lines)
    assert set().union(*added) == {*payload.discover(ROOT)}


# Each takes a good part of a minute. MUON_TEST_LONG=1 runs them, too.
LONG = (
    "describe",
    "divided",
    "errors_of_models",
    "exchange",
    "fsdp1",
    "groups",
    "kernels",
    "momentum",
)


@pytest.mark.slow
def test_commits_pass_their_tests(commits, stock_muon, tmp_path):
    """All but the last commits with tests, which are of the whole optimizer."""
    pytest.importorskip("torch")
    put(tmp_path, {MUON: stock_muon})
    site = (ROOT / "test/overlay/commit_site.py").read_bytes()
    put(tmp_path, {"torch/sitecustomize.py": site})
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}/torch"}
    is_long = "MUON_TEST_LONG" in os.environ
    without_tests = []
    for message, texts in commits[:-2]:
        put(tmp_path, texts)
        title, count = message.splitlines()[0], 0
        for rel in fnmatch.filter(texts, "test/*/test_*.py"):
            if is_long or not rel.endswith(tuple(f"muon_{name}.py" for name in LONG)):
                words = sys.executable, tmp_path / rel
                done = run(*words, cwd=tmp_path, env=environment, timeout=300)
                count += sum(map(int, re.findall(r"Ran (\d+) test", done.err)))
        without_tests += [] if count else [title]
    assert without_tests == [], without_tests


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


def test_each_commit_has_what_it_imports(commits):
    """An option raised ModuleNotFoundError on the first commits, and types were unknown."""
    ours = {module_of(rel) for _, texts in commits for rel in texts}
    there, sources = set(), payload.discover(ROOT)
    for message, texts in commits:
        there |= {*map(module_of, texts)}
        for rel in fnmatch.filter(texts.keys() & sources.keys(), "*.py"):
            missing = ours & imports(rel, texts[rel]) - there
            assert not missing, (message.splitlines()[0], rel)


def test_commits_are_small(commits, added):
    """A maintainer reviews this many lines at once."""
    for (message, _), files in zip(commits, added, strict=True):
        lines = sum(count for rel, count in files.items() if "test" not in rel)
        assert lines <= 2200, (message.splitlines()[0], lines)


def test_no_results_are_relayed_before_there_are_relays(commits):
    """The owner sent them to one replica of five, and nobody passed them on."""
    forms = []
    for _, texts in commits:
        for rel in ("buckets.py", "relays.py"):
            path = f"torch/optim/_muon_engine/schedule/{rel}"
            if path in texts:
                forms.append((rel, b"relayed = True" in texts[path]))
    assert forms[0] == ("buckets.py", False)
    assert forms[-2:] in (
        [("buckets.py", True), ("relays.py", False)],
        [("relays.py", False), ("buckets.py", True)],
    )


def test_sums_are_refused_before_they_are_added(commits):
    """The first commits took one rank's contribution for the matrix: a wrong update without an error."""
    refuses = []
    for _, texts in commits:
        text = texts.get("torch/optim/_muon_engine/layouts/dtensor.py")
        if text:
            refuses.append(b"        if placement.is_partial():\n" in text)
    assert refuses[0]
    assert not refuses[-1]
    title = "optim: Muon takes contributions to sums"
    (texts,) = (texts for message, texts in commits if message.startswith(title))
    assert b"not _is_sum(" in texts["torch/optim/_muon_engine/layouts/dtensor.py"]


def test_each_form_follows_from_the_rules(stock, overlay_texts, monkeypatch):
    """A file of which no rule makes an earlier form would come whole, with options that nothing reads yet."""
    made_form, made = earlier.made_form, []

    def count(rel, text, missing):
        made.append(rel)
        try:
            return made_form(rel, text, missing)
        except NoForm as error:
            pytest.fail(f"{rel}: {error}")

    monkeypatch.setattr(earlier, "made_form", count)
    patches.commits(payload.read(ROOT), stock, overlay_texts, stack=True)
    assert len(made) > 100


def test_messages_say_no_later_option(commits):
    """Muon told users of stacks about `flatten=True` in the commit before it."""
    listed = patches.stack_of((ROOT / "patches/stack.toml").read_text())
    for at, (message, texts) in enumerate(commits):
        later = {name for commit in listed[at + 1 :] for name in commit.names}
        for rel in fnmatch.filter(texts, "torch/optim/*.py"):
            if rel == MUON and at == 1:  # stock's
                continue
            said = set(re.findall(r"(\w+)=(?:True|\d|\")", texts[rel].decode()))
            assert not said & later, (message.splitlines()[0], rel)
