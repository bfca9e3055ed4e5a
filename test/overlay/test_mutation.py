"""The faults fit the sources, and only a failed test counts as a notice."""

import sys

import pytest
from overlay.conftest import run as execute
from tools.mutation import run
from tools.mutation.fault import CannotTry, copied, Fault
from tools.mutation.faults import FAULTS
from tools.overlay.payload import ROOT


def test_faults_fit_their_files():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 71
    for fault in FAULTS:
        source = (ROOT / "torch" / "optim" / fault.file).read_text()
        # A text that is not there raises an error that names the fault.
        compile(fault.edit(source), fault.name, "exec")


def test_named_tests_exist():
    """pytest collects each, by the name that it or its class inherits or @parametrize makes."""
    named = sorted({test for fault in FAULTS for test in fault.tests})
    done = execute(
        sys.executable, "-m", "pytest", "--collect-only", "-q", *named, cwd=ROOT
    )
    assert "ERROR" not in done.out


@pytest.fixture
def tree(tmp_path):
    """A repository with a torch that imports at once."""
    optim = tmp_path / "torch" / "optim"
    (optim / "_muon_engine").mkdir(parents=True)
    empty = ["../__init__", "__init__", "_newton_schulz", "muon", "_muon_partition"]
    for name in [*empty, "_muon_engine/__init__", "_muon_engine/engine"]:
        (optim / f"{name}.py").touch()
    (optim / "_muon.py").write_text("LIMIT = 3\nUNUSED = 4\n")
    (tmp_path / "test_it.py").write_text(
        "from torch.optim._muon import LIMIT\n\n\n"
        "class TestLimit:\n    def test_limit(self):\n        assert LIMIT == 3\n"
    )
    return tmp_path


SEEN = Fault("limit", "_muon.py", "LIMIT = 3", "LIMIT = 2", ("test_it.py",))
UNSEEN = SEEN._replace(name="unused", old="UNUSED = 4", new="UNUSED = 5")


def test_report(tree, capsys):
    assert run.main([], [SEEN, UNSEEN], tree) == 1
    printed = capsys.readouterr().out
    assert "limit" in printed and "| test_it.py: test_limit |" in printed
    assert "1 of 2 faults noticed\nnot noticed: unused" in printed
    assert "LIMIT = 3" in (tree / "torch/optim/_muon.py").read_text()


def test_choice(tree, capsys):
    for word in ("2", "unus"):
        assert run.main(["--list", word], [SEEN, UNSEEN], tree) == 0
        assert capsys.readouterr().out == "  2 unused (_muon.py)\n"
    assert run.main(["--list", "other"], [SEEN, UNSEEN], tree) == 2
    assert "there is no fault 'other'" in capsys.readouterr().err


BROKEN = {
    "pytest ended with 4": SEEN._replace(tests=("test_other.py",)),
    "pytest ended with 2": SEEN._replace(tests=("test_broken.py",)),
    "pytest ended with 1": SEEN._replace(tests=("test_setup.py",)),
    "rewrite 'limit': its text occurs 0 times": SEEN._replace(old="LIMIT = 4"),
    "rewrite 'limit': its text occurs 2 times": SEEN._replace(old=" = "),
    "without a fault: test_red.py: test_red": SEEN._replace(tests=("test_red.py",)),
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_cannot_be_tried_is_no_success(tree, capsys, message):
    (tree / "test_broken.py").write_text("import nothing_of_this_name\n")
    (tree / "test_setup.py").write_text("def test_it(missing):\n    pass\n")
    (tree / "test_red.py").write_text("def test_red():\n    assert False\n")
    assert run.main([], [BROKEN[message]], tree) == 2
    assert message in capsys.readouterr().err


def test_copy_that_is_not_imported(tree):
    with copied(tree / "torch" / "optim") as folder:
        run.check_redirect(tree, folder)
        (folder / "sitecustomize.py").write_text("")
        with pytest.raises(CannotTry, match="not import Muon from the copy"):
            run.check_redirect(tree, folder)


def test_hang_is_a_notice(tree, monkeypatch):
    (tree / "test_hang.py").write_text(
        "import time\n\n\ndef test_hang():\n    time.sleep(99)\n"
    )
    monkeypatch.setattr(run, "SECONDS", 5)
    with copied(tree / "torch" / "optim") as folder:
        assert run.run_tests(tree, folder, ["test_hang.py"]) == "a hang"
