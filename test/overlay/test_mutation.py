"""Drawn faults are where code is, and the listed ones fit their files."""

import pytest


pytest.importorskip("cosmic_ray")

from tools.mutation import draw
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
