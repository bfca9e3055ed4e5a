"""Each requirement of the documents is shown by something, and the page says by what."""

import json
import re

import pytest
from tools.overlay.repo import ROOT
from tools.requirements import check, cli, page
from tools.requirements.catalog import all_ids, NAMED_TESTS, SECTIONS
from tools.requirements.tags import methods, read_tree, Shown, shown_in


SOURCE = '''\
"""A file."""
# Shows: a/whole


class Base:
    def test_one(self):
        """Words."""
        # Shows: a/one, a/two,
        # a/three
        return "# Shows: a/none"


class TestThat(Base):
    # Shows: a/class
    def test_two(self):
        def inner():
            # Shows: a/inner
            pass
'''


@pytest.fixture(scope="module")
def tree():
    return read_tree(ROOT)


def test_nothing_is_missing(tree):
    assert check.holes(*tree) == []


def test_page_is_up_to_date(tree):
    assert cli.PAGE.read_text() == page.page(*tree)


def imported(path):
    """The files beside ``path`` that it imports, and those that they do."""
    found = {path}
    for name in re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE):
        beside = path.with_name(f"{name}.py")
        if beside.exists():
            found |= {beside, *imported(beside)}
    return found


def test_examples_shown_are_run_by_a_test(tree):
    runners = [p.read_text() for p in (ROOT / "test/overlay").glob("*.py")]
    run = set()
    for path in (ROOT / "examples").glob("*.py"):
        # As a path is put together there: EXAMPLES / "train_gpt.py".
        if any(f'"{path.name}"' in text for text in runners):
            run |= imported(path)
    for one in tree[0]:
        folder, _, name = one.path.rpartition("/")
        if folder == "examples":
            assert ROOT / one.path in run, one
        elif folder.startswith("examples/"):
            # test_recipes.py compares what is defined with what was run.
            assert folder == "examples/recipes"


def test_ids_are_there_once():
    assert len(all_ids()) == len(set(all_ids()))


def test_comments_belong_to_the_innermost_definition():
    assert shown_in("x.py", SOURCE) == [
        Shown("x.py", "", 1, ("a/whole",)),
        Shown("x.py", "Base::test_one", 6, ("a/one", "a/two", "a/three")),
        Shown("x.py", "TestThat", 13, ("a/class",)),
        Shown("x.py", "TestThat::test_two::inner", 16, ("a/inner",)),
    ]


def test_inherited_methods_count():
    names = {"Base::test_one", "TestThat::test_one", "TestThat::test_two"}
    assert methods(SOURCE) == names


def test_holes_are_found(tree):
    shown, tests = tree
    rest = [one for one in shown if "testing/matrix" not in one.ids]
    assert "testing/matrix is shown by nothing" in check.holes(rest, tests)
    more = [*shown, Shown("x.py", "f", 7, ("testing/p0/fdsp",))]
    assert check.holes(more, tests) == [
        "x.py:7: no requirement is called 'testing/p0/fdsp'"
    ]
    group, (name, *_) = next(iter(NAMED_TESTS.items()))
    fewer = {key: files for key, files in tests.items() if key != f"{group}::{name}"}
    assert check.holes(shown, fewer) == [f"there is no test {group}::{name}"]
    assert "| **nothing** |" in page.page(rest, tests)


def made_up_documents(folder):
    for document in {s.document for s in SECTIONS if s.blocks}:
        (section,) = (s for s in SECTIONS if s.blocks and s.document == document)
        text = "```python\nx = 1\n```\n" * len(section.requirements)
        (folder / document).write_text(text)
    tests = [name for names in NAMED_TESTS.values() for name in names]
    (folder / "TESTING.md").write_text(
        "".join(f"    def {name}(self):\n" for name in tests)
        + "### P0: x\n- **a**\n## b\n"
    )


def test_comparison_with_the_documents(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "BLOCKS", tmp_path / "blocks.json")
    made_up_documents(tmp_path)
    check.accept(tmp_path)
    assert check.against_documents(tmp_path) == []
    text = (tmp_path / "EXAMPLES.md").read_text()
    (tmp_path / "EXAMPLES.md").write_text(text.replace("x = 1", "x = 2", 1))
    assert check.against_documents(tmp_path) == ["examples/0a: its block has changed"]
    (tmp_path / "EXAMPLES.md").write_text(text)
    with (tmp_path / "PROJECT.md").open("a") as file:
        file.write("1. a\n   ```python\n   y = 2\n   ```\n")
    with (tmp_path / "TESTING.md").open("a") as file:
        file.write("def test_other(self):\n")
    assert check.against_documents(tmp_path) == [
        "PROJECT.md has 6 Python blocks, the catalogue 5",
        "TESTING.md names test_other, the catalogue not",
    ]
    assert cli.main(["--check", "--documents", str(tmp_path / "none")]) == 1
    assert "EXAMPLES.md: No such file" in capsys.readouterr().out


def test_each_block_has_been_read():
    blocks = json.loads(check.BLOCKS.read_text())
    assert set(blocks) == {r.id for s in SECTIONS if s.blocks for r in s.requirements}
