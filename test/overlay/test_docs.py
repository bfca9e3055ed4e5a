"""Runs every code block of the documents as printed, and checks that what they name exists.

A page's blocks of Python are one program, of as many processes as the comment `<!-- processes: 2 -->` says, or of one.
A block of text that follows is what the first process prints; `...` matches anything.
"""

import contextlib
import inspect
import re
import shlex
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import pytest
from overlay.example_runs import run_example
from tools.overlay import cli
from tools.overlay.payload import ROOT


torch = pytest.importorskip("torch")
muon = pytest.importorskip("torch.optim.muon")


DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Folders of this repository; a path that begins otherwise may be anybody's.
OURS = (".ci", "docs", "examples", "patches", "test", "tools", "torch")
STOCK = Path(torch.__file__).parents[1]


def each(documents):
    return pytest.mark.parametrize(
        "document", documents, ids=lambda path: path.relative_to(ROOT).as_posix()
    )


class Program(NamedTuple):
    processes: int
    code: str
    output: str


def blocks_of(document):
    """Language, lines before it, and text."""
    text = document.read_text()
    pattern = r"^```(\w*)\n(.*?)^```"
    for found in re.finditer(pattern, text, re.DOTALL | re.MULTILINE):
        yield found[1], text[: found.start(2)].count("\n"), found[2]


def program_of(document):
    mark = r"^<!-- processes: (\d+) -->$"
    marked = re.search(mark, document.read_text(), re.MULTILINE)
    processes = int(marked[1]) if marked else 1
    code = output = last = ""
    for language, line, text in blocks_of(document):
        if language == "python":
            # Blank lines keep the numbers of the document's own lines.
            code += "\n" * (line - code.count("\n")) + text
        elif language == "text" and last == "python":
            output += text
        last = language
    return Program(processes, code, output)


WITH_PROGRAMS = [
    document
    for document in DOCUMENTS
    # test/frameworks runs that one.
    if program_of(document).code and document.name != "frameworks.md"
]


@each(WITH_PROGRAMS)
def test_programs_run(document, tmp_path):
    program = program_of(document)
    script = tmp_path / f"{document.stem}.py"
    script.write_text(program.code)
    code, (first, *_), err = run_example(script, processes=program.processes)
    assert code == 0, first + err
    pieces = [re.escape(piece) for piece in program.output.split("...")]
    assert re.search(".*?".join(pieces), first, re.DOTALL), first


def commands():
    for document in DOCUMENTS:
        for language, _, text in blocks_of(document):
            if language in ("bash", "dockerfile"):
                for line in text.replace("\\\n", " ").splitlines():
                    words = shlex.split(line, comments=True)
                    if words:
                        yield document.relative_to(ROOT), words


def exists(word):
    """Whether a script or a module of this repository is there, if it is one."""
    if word.startswith("tools."):
        word = word.replace(".", "/")
    elif not re.fullmatch(r"[\w/]+\.py", word):
        return True
    return any(ROOT.glob(f"{word}*"))


def test_commands_exist():
    wrong = []
    for page, words in commands():
        names = [word.rpartition("/")[2] for word in words]
        if "setup_overlay.py" not in names:
            wrong += [(page, word) for word in words if not exists(word)]
            continue
        with contextlib.redirect_stderr(None):
            try:
                cli._arguments(words[names.index("setup_overlay.py") + 1 :])
            except (SystemExit, cli.OverlayError):
                wrong.append((page, words))
    assert wrong == []


def outside_of_fences(document):
    blocks = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
    return blocks.sub("", document.read_text())


def anchors(document):
    """The fragments that GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.+)$", outside_of_fences(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


@each(DOCUMENTS)
def test_links_lead_somewhere(document):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", outside_of_fences(document)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    assert broken == []


@each(DOCUMENTS)
def test_named_files_exist(document):
    missing = []
    for words in re.findall(r"`([^`\n]+)`", outside_of_fences(document)):
        for word in words.split():
            top, slash, _ = word.partition("/")
            if not slash or top not in OURS:
                continue
            path = word.split("::")[0].rstrip("/")
            if not any(ROOT.glob(path)) and not (STOCK / path).exists():
                missing.append(word)
    assert missing == []


def test_files_of_packages_are_all_described():
    """In the first columns of the tables."""
    files = [*(ROOT / "torch/optim").glob("_muon_*/**/*.py")]
    text = (ROOT / "docs/engine.md").read_text()
    cells = " ".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
    described = {*re.findall(r"`([\w/]+\.py)`", cells)}
    assert described == {path.name for path in files} - {"__init__.py"}


def defined():
    found = set()
    for folder in ("test", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            found.update(re.findall(r"^\s*(?:def|class) (\w+)", text, re.MULTILINE))
    return found


def test_named_tests_exist():
    """In the documents and the blueprint, and in requirements.txt, where each requirement has tests or recipes."""
    known = defined()
    for document in [*DOCUMENTS, ROOT / "examples/blueprint.py"]:
        mark = r"\| (?=test_)" if document.suffix == ".py" else r"`(?:\w+::)?(?=test_)"
        named = re.findall(rf"{mark}(\w+)[ `]", document.read_text())
        assert set(named) <= known, document
    text = (ROOT / "test" / "overlay" / "requirements.txt").read_text()
    shown = dict(row.split("\t") for row in text.splitlines() if "\t" in row)
    assert len(shown) > 100
    for requirement, found in shown.items():
        assert found and set(found.split()) <= known, requirement


def signature_of(name):
    """Parameter -> default of a public name, in words."""
    found = attrgetter(name)(muon)
    if not callable(found):
        return {}
    parameters = inspect.signature(found).parameters.values()
    return {
        p.name: "" if p.default is p.empty else repr(p.default)
        for p in parameters
        if p.name != "self"
    }


def test_api_is_that_of_the_code():
    """Each section has a table of the arguments and their defaults."""
    text = (ROOT / "docs" / "api.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    titles = {section.partition("\n")[0].strip("`"): section for section in sections}
    assert {*muon.__all__, "Muon"} <= titles.keys()
    patch = (ROOT / "patches" / "0001-docs-distributed-muon.patch").read_text()
    assert set(muon.__all__) <= set(re.findall(r"^\+    (\w+)$", patch, re.MULTILINE))
    public = {name for name in vars(muon.Muon) if not name.startswith("_")}
    inherited = {"state_dict", "load_state_dict", "add_param_group"}
    assert {f"Muon.{name}" for name in public - inherited} <= titles.keys()
    for title, section in titles.items():
        rows = re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\|", section, re.MULTILINE)
        assert dict(rows) == signature_of(title), title


def test_quoted_costs_are_those_of_the_data():
    page = (ROOT / "docs" / "performance.md").read_text()
    page = page.partition("## At real sizes")[2]
    data = (ROOT / "docs" / "data" / "scale.md").read_text()
    rows = [re.split("  +", row) for row in data.splitlines()]
    quoted = re.findall(r"^\| (.+, .+%.+) \|$", page, re.MULTILINE)
    assert len(quoted) > 4
    for row in quoted:
        assert row.split(" | ") in rows


@pytest.mark.parametrize(
    ("page", "end", "source", "least"),
    [
        ("troubleshooting.md", "## A step hangs", ROOT / "torch" / "optim", 10),
        ("install.md", "A fork's own changes of files", ROOT / "tools" / "overlay", 7),
    ],
)
def test_quoted_errors_are_those_of_the_code(page, end, source, least):
    """The quotations in the first columns of a page's tables, before the section ``end``."""
    text = "".join(path.read_text() for path in source.rglob("*.py"))
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # a text in several literals
    tables, _, _ = (ROOT / "docs" / page).read_text().partition(end)
    quoted = []
    for cell in re.findall(r"^\| ([^|]+) \|", tables, re.MULTILINE):
        quoted += re.findall(r'"([^"]+)"', cell)
    assert len(quoted) >= least
    for quotation in quoted:
        for piece in re.split(r"\(.*?\)|\d+", quotation):
            assert piece.strip(" ,") in text, quotation
