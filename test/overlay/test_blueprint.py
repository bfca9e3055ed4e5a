"""The blueprint tutorial runs, proves what it says, and its notebook is its script."""

import json
import os
import re
import subprocess
import sys

import jupytext
import pytest
from overlay.example_runs import ENVIRONMENT
from tools.overlay.repo import ROOT


EXAMPLES = ROOT / "examples"
SCRIPT, NOTEBOOK = EXAMPLES / "blueprint.py", EXAMPLES / "blueprint.ipynb"
ENGINE = ROOT / "torch" / "optim" / "_muon_engine"
SECONDS = 300
MATRICES, RANKS = 24, range(8)
WAYS = ("engine, prefetch_count=0", "engine, prefetch_count=1", "the long way")


def cells_of(script):
    """The cells that the notebook of ``script`` has."""
    return jupytext.reads(script.read_text(encoding="utf-8"), fmt="py:percent").cells


def first_cells():
    """What brings the overlay where it is not, and what finds the notebook's files."""
    code = [cell.source for cell in cells_of(SCRIPT) if cell.cell_type == "code"]
    return "\n".join(code[:2])


def run(*command, cwd=EXAMPLES, **environ):
    """Exit code and output. A process that the script left behind would hold its output open."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **ENVIRONMENT, **environ},
    )
    return done.returncode, done.stdout, done.stderr


def chapter(out, number):
    """The lines of a chapter, without its heading."""
    found = re.search(rf"^{number}\. .*\n\n((?:    .*\n|\n)*)", out, re.MULTILINE)
    return found[1].splitlines()


def rows_of(lines, pattern):
    return [match.groups() for line in lines if (match := re.fullmatch(pattern, line))]


def numbers(lines, row):
    (words,) = rows_of(lines, rf" *{re.escape(row)}((?: +[\d.]+)+)")
    return [float(word) for word in words[0].split()]


def test_script():
    code, out, err = run(SCRIPT)
    assert code == 0, err
    assert err == ""
    for way in WAYS:
        assert re.search(rf"^    {way} +bitwise equal: yes$", out, re.MULTILINE)
    assert "what was foreseen has come about: yes" in out
    assert "in the same order: yes" in out
    assert not re.search(r"\bNO\b", out)
    assert max(map(len, out.splitlines())) <= 100

    placed = rows_of(chapter(out, 1), r" +(\d) +\((\d), (\d)\) +([\d ]+?)  +([\d ]+)")
    assert [int(rank) for rank, *_ in placed] == list(RANKS)
    for rank, row, column, dp_group, tp_group in placed:
        assert int(rank) == 2 * int(row) + int(column)
        assert dp_group.split() == [str(r) for r in RANKS if r % 2 == int(column)]
        assert tp_group.split() == [str(r) for r in RANKS if r // 2 == int(row)]

    # The owners of chapter 3 are those of the buckets in chapter 4, each matrix once.
    kinds = ("qkv", "out", "up", "down")
    owners = rows_of(chapter(out, 3), r" +block (\d) +(\d) +(\d) +(\d) +(\d)")
    owner_of = {
        f"{block}.{kind}": int(rank)
        for block, *ranks in owners
        for kind, rank in zip(kinds, ranks, strict=True)
    }
    assert len(owner_of) == MATRICES
    taken = rows_of(chapter(out, 4), r" +rank (\d)((?:  +\d\.\w+)+)")
    named = [(name, int(rank)) for rank, names in taken for name in names.split()]
    assert len(named) == MATRICES
    assert dict(named) == owner_of

    gathers, scatters, total, least, more = numbers(chapter(out, 4), "all")
    assert (total, more) == (gathers + scatters, 0)
    assert total == least

    measured = chapter(out, 7)
    steps = [line.split("->")[0].strip() for line in measured if "->" in line]
    assert steps == ["DP gather", "TP gather", "run math", "TP shard", "DP shard"]
    calls, busiest, sent, ratio, collectives = numbers(measured, "the engine")
    assert (calls, busiest, collectives) == (MATRICES, 3, 2 * 3)
    assert sent == total
    assert ratio == 1
    long_way = numbers(measured, "the long way")
    assert long_way[0] > 2 * MATRICES
    assert long_way[2] > 2 * total
    assert numbers(measured, "the long way, cut by rows")[0] == 8 * MATRICES

    in_short = rows_of(chapter(out, 8), r" +rank (\d)  (G0 .*)")
    assert len(in_short) == len(RANKS)
    for rank, events in in_short:
        orthogonalized = re.findall(r"<(.*?)>", events)
        assert [owner_of[name] for name in orthogonalized] == [int(rank)] * 3
        # One more bucket travels while one is computed.
        assert re.match(r"G0 G1 g0 <\S+> S0 G2 g1", events)


def test_difference_is_found(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(EXAMPLES)
    from blueprint_processes import first_difference

    right = {"0.qkv": (torch.ones(2), torch.zeros(2))}
    wrong = {"0.qkv": (torch.ones(2), torch.tensor([0.0, 0.5]))}
    assert first_difference(right, right) == ""
    assert first_difference(wrong, right) == "0.qkv: momentum differs by up to 0.5"


def test_without_the_overlay(tmp_path):
    (tmp_path / "torch" / "optim").mkdir(parents=True)
    for folder in ("torch", "torch/optim"):
        (tmp_path / folder / "__init__.py").touch()
    code, out, err = run(SCRIPT, PYTHONPATH=str(tmp_path))
    assert (code, out) == (2, "")
    assert "`python3 setup_overlay.py env`" in err
    assert "Traceback" not in err

    code, _, err = run("-c", first_cells(), PYTHONPATH=str(tmp_path))
    assert code == 1
    assert "`.venv/bin/python -m pip install jupyterlab`" in err


def test_notebook_is_up_to_date():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    there = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert there == [(cell.cell_type, cell.source) for cell in cells_of(SCRIPT)]
    assert not any(cell.get("outputs") for cell in cells)


def test_notebook_finds_its_files_from_the_root():
    source = first_cells() + "\nprint(sys.path[0])"
    code, out, err = run("-c", source, cwd=ROOT)
    assert code == 0, err
    assert out.strip() == str(EXAMPLES)


def test_chapters_of_script_and_notebook_are_the_same():
    script = SCRIPT.read_text()
    told = re.findall(r"^# ## (\d+)\. (.*)$", script, re.MULTILINE)
    printed = re.findall(r'^    chapter\((\d+), "(.*)"\)$', script, re.MULTILINE)
    assert [int(number) for number, _ in told] == list(range(1, len(told) + 1))
    assert printed == told


def test_terms_say_where_they_live():
    tables = (EXAMPLES / "blueprint_tables.py").read_text()
    places = re.findall(r"([\w/]+\.py): (\w+)", tables)
    assert len(places) >= 10
    for file, name in places:
        assert re.search(rf"\b{name}\b", (ENGINE / file).read_text()), (file, name)


def test_fixes_name_tests_that_exist():
    tables = (EXAMPLES / "blueprint_tables.py").read_text()
    named = set(re.findall(r'"(test_\w+)"', tables))
    texts = [path.read_text() for path in (ROOT / "test").rglob("*.py")]
    assert len(named) >= 6
    for test in named:
        assert any(f"def {test}(" in text for text in texts), test
