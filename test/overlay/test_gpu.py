"""The script for machines with a GPU, as far as it can be tried without one."""

import subprocess
import sys
from collections import Counter

import pytest
from tools.gpu import cli, machine, summary
from tools.gpu.machine import Machine


REPORT = """<testsuites><testsuite>
<testcase classname="distributed.optim.test_muon.TestMuonFSDPOnGPUs" name="test_a"/>
<testcase classname="distributed.optim.test_muon.TestMuonFSDPOnGPUs" name="test_b">
  <skipped message="Need at least 2 CUDA devices"/></testcase>
<testcase classname="optim.test_muon.TestMuonCore" name="test_c"><failure/></testcase>
<testcase classname="optim.test_muon.TestMuonCore" name="test_d"><error/></testcase>
<testcase classname="optim.test_muon.TestOther" name="test_e"><skipped/></testcase>
</testsuite></testsuites>
"""


def test_summary(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    found = summary.read(tmp_path / "report.xml")
    assert found.total == Counter(passed=1, failed=2, skipped=2)
    lines = summary.text(found).splitlines()
    assert lines[1].split() == ["TestMuonFSDPOnGPUs", "1", "0", "1"]
    assert lines[2].split() == ["all", "other", "tests", "0", "2", "1"]
    assert lines[4:] == [
        "skipped 1: Need at least 2 CUDA devices",
        "skipped 1: no reason",
        "failed: TestMuonCore::test_c",
        "failed: TestMuonCore::test_d",
    ]


def test_this_interpreter():
    pytest.importorskip("torch")
    found = machine.look(sys.executable)
    assert not found.missing
    assert found.torch in found.words()


def test_interpreter_without_torch(tmp_path, make_script, capsys):
    python = tmp_path / "python"
    make_script(python, f'exec "{sys.executable}" -S "$@"\n')
    assert cli.main(["--python", str(python)]) == 2
    assert "has no torch" in capsys.readouterr().err


MACHINE = Machine("2.13.0", "3.12.1", "13.0", ["a GPU"], "2.27", [])


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (MACHINE._replace(gpus=[]), "no GPU here"),
        (MACHINE._replace(missing=["pytest", "numpy"]), "pip install pytest numpy"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_touched(
    monkeypatch, capsys, found, words
):
    monkeypatch.setattr(machine, "look", lambda python: found)
    monkeypatch.setattr(cli, "find_wheel", None)
    assert cli.main([]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("was_there", [False, True])
def test_overlay_is_taken_off_again(
    monkeypatch, capsys, tmp_path, installed, was_there, interrupted
):
    """On a small installed torch, with a pytest that only writes a report."""
    target = cli.find_wheel(installed)
    muon = target.root / "torch/optim/muon.py"
    if was_there:
        cli.apply.apply(target, cli.ROOT)
    monkeypatch.setattr(machine, "look", lambda python: MACHINE)
    seen = []

    popen = subprocess.Popen

    def start(command, *, cwd, env):
        (path,) = (w.partition("=")[2] for w in command if w.startswith("--junitxml"))
        with open(path, "w") as file:
            file.write(REPORT)
        seen.append((env["MUON_TEST_SHARE_GPU"], command[-2:], muon.exists()))
        if interrupted:
            raise KeyboardInterrupt
        return popen(["false"])

    monkeypatch.setattr(cli.subprocess, "Popen", start)
    # Restores the handler that is set for SIGTERM.
    monkeypatch.setattr(cli.signal, "signal", lambda *given: None)
    monkeypatch.setattr(cli, "find_wheel", lambda python: target)
    report = tmp_path / "report.txt"
    args = ["--python", str(installed), "--report", str(report), "test/optim", "-x"]
    assert cli.main(args) == (130 if interrupted else 1)
    assert seen == [("1", ["test/optim", "-x"], True)]
    assert muon.exists() == was_there
    if interrupted:
        return
    assert "a GPU; torch 2.13.0" in report.read_text()
    assert report.read_text() in capsys.readouterr().out


def test_another_overlay_is_left_alone(monkeypatch, capsys, installed, overlay):
    target = cli.find_wheel(installed)
    (overlay / "torch/optim/muon.py").write_text("# of another time\n")
    cli.apply.apply(target, overlay)
    monkeypatch.setattr(machine, "look", lambda python: MACHINE)
    monkeypatch.setattr(cli, "find_wheel", lambda python: target)
    monkeypatch.setattr(cli.signal, "signal", lambda *given: None)
    assert cli.main(["--python", str(installed)]) == 3
    assert "an overlay that is outdated" in capsys.readouterr().err
    text = (target.root / "torch/optim/muon.py").read_text()
    assert text == "# of another time\n"
