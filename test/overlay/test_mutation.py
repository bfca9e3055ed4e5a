"""Faults are where code is, the tests that execute it run, and only a failed one is a notice."""

import pytest


pytest.importorskip("cosmic_ray")

from coverage import CoverageData
from tools.mutation import __main__ as mutation, draw
from tools.mutation.faults import listed, table
from tools.overlay.payload import ROOT


CODE = {
    "z = x < 3": "z = x >= 3|z = x <= 3|z = x < 2|z = x < 4",
    "z = f(a, b, group=g)": "z = f(b, a, group=g)|z = f(a, b, )",
    "work.wait(u for u in v if u)": "pass|work.wait(u for u in v if not (u))",
    "z = min(a) or b": "z = min(a) and b|z = max(a) or b|z = min(a)|z = b",
    "k = a, (b, c, float32)": "k = a, (b, c, )|k = a, (b, float32)|k = a, ( c, float32)"
    "|k = a, (b, c, bfloat16)",
    "for x in y: x += y": "for x in []: x += y|for x in y: x -= y|for x in y: pass",
}
NOT_CODE = "import torch\nif TYPE_CHECKING: n = 1\nx: dict[str, int | None]\n"
NOT_CODE += 'log.info("%d", 3)\nm = f"{x + 1}" if 2 else f"{y}"\nz = f(strict=True)\n'
FILES = {
    "torch/optim/_muon.py": "LIMIT = 3\ndef f():\n    return LIMIT + 0\n",
    "test_it.py": "import unittest, torch.optim._muon as muon\n"
    "class TestIt(unittest.TestCase):\n    def test_it(self): assert muon.f() == 3\n",
    "build/mutation/tests.xml": '<a><testcase file="test_it.py" name="test_it" time="1" '
    'classname="test_it.TestIt"/></a>',
}
FILES |= {"torch/__init__.py": "", "torch/optim/__init__.py": ""}
FILES["build/mutation/optim/_muon.py"] = FILES["torch/optim/_muon.py"]


@pytest.fixture
def tree(tmp_path):
    """A repository with a torch that imports at once, and the record of its tests."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    data = CoverageData(str(tmp_path / "build" / "mutation" / "data"))
    for context, line in ("", 1), ("", 2), ("test_it.Base.test_it", 3):
        data.set_context(context)
        data.add_lines({"/any/torch/optim/_muon.py": [line]})
    data.write()
    return tmp_path


@pytest.mark.parametrize("code", CODE)
def test_operators(tmp_path, code, monkeypatch):
    (tmp_path / "_muon.py").write_text(NOT_CODE + code + "\n")
    faults = [fault.name.split(" => ") for fault in draw.drawn(tmp_path, 1, 9)]
    assert {old for old, _ in faults} == {code}
    assert {new for _, new in faults} == set(CODE[code].split("|"))
    # Faults that somebody marked are not drawn.
    monkeypatch.setattr(draw, "table", lambda _: [["_muon.py", *faults[0], "a reason"]])
    assert [f.name.split(" => ") for f in draw.drawn(tmp_path, 1, 9)] == faults[1:]


def test_tables_fit_their_files():
    faults = list(listed(optim := ROOT / "torch" / "optim"))
    assert len({fault.name for fault in faults}) == len(faults) <= 25
    for fault in faults:
        compile(fault.source, fault.name, "exec")
    for file, old, _, _ in table("equivalent.txt"):
        assert old in " ".join((optim / file).read_text().split())


def test_report(tree, capsys):
    assert mutation.main(["LIMIT = 3 => LIMIT = 4"], tree) == 0
    noticed = "_muon.py:1: LIMIT = 3 => LIMIT = 4 | test_it.py::TestIt::test_it | "
    assert noticed in capsys.readouterr().out
    # The line was elsewhere when tests were recorded. What is known needs no test.
    source, test = tree / "torch/optim/_muon.py", tree / "test_it.py"
    source.write_text("# New\n" + source.read_text())
    for how, text in ([], test.read_text()), (["--resume"], ""):
        test.write_text(text)
        assert mutation.main([*how, "LIMIT - 0"], tree) == 1
        assert "4: return LIMIT + 0 => return LIMIT - 0 | S" in capsys.readouterr().out
    test.write_text(FILES["test_it.py"].replace("== 3", "== 4"))
    assert mutation.main(["LIMIT - 0"], tree) == 1
    assert "test_it.py::TestIt::test_it fails without" in capsys.readouterr().out


def test_what_cannot_be_tried_is_no_success(tree, capsys):
    for name, message in ("test_it.py", "ended with 4"), (list(FILES)[2], "--record"):
        (tree / name).unlink()
        assert mutation.main([], tree) == 2
        assert message in capsys.readouterr().err


def test_crash_and_hang_are_notices(tree, monkeypatch):
    (tree / "test_it.py").write_text("import os\ndef test_it(): os._exit(3)\n")
    assert mutation.run_tests(tree, None, ["test_it.py"]) == "pytest ended with 3"
    (tree / "test_it.py").write_text("import time\ndef test_it(): time.sleep(99)\n")
    monkeypatch.setattr(mutation, "LIMIT", 3)
    assert mutation.run_tests(tree, None, ["test_it.py"]) == "a hang"
