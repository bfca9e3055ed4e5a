"""What the documents name is there, and what they show runs."""

import re
import struct
import subprocess
import sys

import pytest
from tools.overlay.repo import ROOT


DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FIGURE = ROOT / "docs" / "figures" / "route.py"
# Folders of this repository; what begins otherwise may be anybody's.
OURS = (".ci", "docs", "examples", "patches", "test", "tools", "torch")
# Made in the target, or upstream's.
ELSEWHERE = {"torch/.muon_overlay/"}

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix()
)


def outside_of_fences(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def in_backticks(document):
    return re.findall(r"`([^`\n]+)`", outside_of_fences(document.read_text()))


def anchors(document):
    """The fragments that GitHub makes of the headings."""
    titles = re.findall(
        r"^#+ (.+)$", outside_of_fences(document.read_text()), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def defined_tests():
    names = set()
    for path in (ROOT / "test").rglob("*.py"):
        names.update(
            re.findall(r"^\s*def (test_\w+)\(", path.read_text(), re.MULTILINE)
        )
    return names


def test_there_are_documents():
    names = {path.name for path in DOCUMENTS}
    assert {"README.md", "CONTRIBUTING.md", "engine.md", "differences.md"} <= names


@each_document
def test_links_lead_somewhere(document):
    broken = []
    text = outside_of_fences(document.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    assert broken == []


@each_document
def test_named_files_exist(document):
    missing = []
    for words in in_backticks(document):
        for word in words.split():
            top, slash, _ = word.partition("/")
            if not slash or top not in OURS or word in ELSEWHERE:
                continue
            path = word.split("::")[0].rstrip("/")
            if not any(ROOT.glob(path)):
                missing.append(word)
    assert missing == []


def test_files_of_the_engine_are_all_described():
    engine = ROOT / "torch" / "optim" / "_muon_engine"
    files = {path.relative_to(engine).as_posix() for path in engine.rglob("*.py")}
    there = {name for name in files if (engine / name).stat().st_size} - {"__init__.py"}
    text = (ROOT / "docs" / "engine.md").read_text()
    table = text.partition("## The files")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`([\w/]+\.py)`", " ".join(rows))) == there


@each_document
def test_named_tests_exist(document):
    defined = defined_tests()
    cited = {
        name
        for words in in_backticks(document)
        for name in re.findall(r"^(?:\w+::)?(test_\w+)$", words)
    }
    assert cited - defined == set()
    if document.name in ("engine.md", "differences.md", "reliability.md"):
        assert cited


REQUIREMENTS = ROOT / "docs" / "requirements.md"


def what_shows():
    """Name and file of each test and example in the table of requirements."""
    cell = r"\[(\w+)\]\(\.\./([\w/]+\.py)\)"
    named = r"^\| `(\w+)::(\w+)` \| (.*) \|$"
    text = REQUIREMENTS.read_text()
    yield from re.findall(cell, text)
    for group, name, files in re.findall(named, text, re.MULTILINE):
        for file in re.findall(r"\(\.\./([\w/]+\.py)\)", files):
            yield group, file
            yield name, file


def test_what_shows_a_requirement_exists():
    found = list(what_shows())
    assert len(found) > 150
    assert not re.search(r"\|\s*\|$", REQUIREMENTS.read_text(), re.MULTILINE)
    for name, file in found:
        definition = rf"^ *(?:def|class) {name}\b"
        assert re.search(definition, (ROOT / file).read_text(), re.MULTILINE), (
            f"{file} has no {name}"
        )


@each_document
def test_python_blocks_compile(document):
    text = document.read_text()
    starts = re.finditer(
        r"^```(?:python|py)\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    )
    for found in starts:
        line = text[: found.start()].count("\n") + 1
        # Blank lines before, so that an error names the document's own line.
        compile("\n" * line + found.group(1), str(document), "exec")


def test_figure_is_drawn_again(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "route.png"
    done = subprocess.run(
        [sys.executable, str(FIGURE), str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # 70 elements, of which the owner has 15 (a quarter), or 40 (the larger half) and a replica.
    numbers = re.findall(r"(gather|scatter): (\d+) elements", done.stdout)
    assert numbers == [
        ("gather", "55"),
        ("scatter", "55"),
        ("gather", "30"),
        ("scatter", "100"),
    ]
    assert picture_size(out) == picture_size(FIGURE.with_suffix(".png"))


def picture_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])
