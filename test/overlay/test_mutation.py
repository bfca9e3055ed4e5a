"""The check of the tests: its faults fit the sources, and nothing but a failed test counts."""

import ast
import json
import multiprocessing
import re
import time
from pathlib import Path

import pytest
from tools.mutation import cli, pure
from tools.mutation.fault import CannotTry, Fault, make_copy
from tools.mutation.faults import FAULTS
from tools.mutation.trial import (
    check_redirect,
    environment,
    Outcome,
    run_tests,
)
from tools.overlay.repo import ROOT


OPTIM = ROOT / "torch" / "optim"

# The faults


def test_faults_fit_their_files():
    for fault in FAULTS:
        # What does not fit is an error that names the fault.
        compile(fault.edit((OPTIM / fault.file).read_text()), fault.name, "exec")


def named(body, name):
    return [node for node in body if getattr(node, "name", None) == name]


def test_named_tests_exist():
    bodies = {}
    folder = ROOT / "torch" / "testing" / "_internal" / "distributed" / "_muon"
    shared = ast.parse((folder / "common_muon.py").read_text()).body
    for fault in FAULTS:
        assert fault.tests, fault.name
        for test in fault.tests:
            name, *inside = test.split("::")
            bases = []
            if name not in bodies:
                bodies[name] = ast.parse((ROOT / name).read_text()).body
            body = bodies[name]
            for wanted in inside:
                found = named(body, wanted)
                # A class may inherit its tests from another one of the file, or of what files share.
                if not found and bases:
                    found = [one for base in bases for one in named(base.body, wanted)]
                assert len(found) == 1, (fault.name, test)
                # @parametrize gives a test other names.
                decorators = map(ast.unparse, found[0].decorator_list)
                assert not any("parametrize(" in d for d in decorators), test
                body = found[0].body
                bases = [
                    one
                    for base in getattr(found[0], "bases", [])
                    for one in named(
                        [*bodies[name], *shared], getattr(base, "id", None)
                    )
                ]


def test_names_tell_faults_apart():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 15


# The redirection


def where_muon_is(answers):
    import torch.optim.muon

    engine = __import__("torch.optim._muon_engine.schedule.buckets").optim._muon_engine
    files = [torch.optim.muon.__file__, engine.schedule.buckets.__file__]
    answers.put([*files, torch.optim.Muon.__doc__])


def test_spawned_processes_import_the_copy(tmp_path, monkeypatch):
    fault = Fault("doc", "_muon.py", "Implements Muon algorithm.", "Faulty.", ())
    make_copy(OPTIM, tmp_path, fault)
    monkeypatch.setenv("PYTHONPATH", environment(tmp_path)["PYTHONPATH"])
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=where_muon_is, args=(answers,))
    child.start()
    *files, doc = answers.get(timeout=60)
    child.join()
    assert files == [
        str(tmp_path / "optim" / name)
        for name in ("muon.py", "_muon_engine/schedule/buckets.py")
    ]
    assert doc.startswith("Faulty.")
    assert "Implements Muon algorithm." in (OPTIM / "_muon.py").read_text()


# A tree of its own, with a torch that is imported at once


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    sources = {
        "torch/__init__.py": "",
        "torch/optim/__init__.py": "",
        "torch/optim/_muon.py": "LIMIT = 3\nUNUSED = 4\n",
        "torch/optim/_newton_schulz.py": "",
        "torch/optim/muon.py": "",
        "torch/optim/_muon_engine/__init__.py": "",
        "torch/optim/_muon_engine/engine.py": "",
        "test_it.py": "from torch.optim._muon import LIMIT\n\n\n"
        "class TestLimit:\n"
        "    def test_limit(self):\n        assert LIMIT == 3\n\n"
        "    def test_nothing(self):\n        pass\n",
    }
    for name, text in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


SEEN = Fault("limit", "_muon.py", "LIMIT = 3", "LIMIT = 2", ("test_it.py",))
UNSEEN = Fault(
    "unused", "_muon.py", "UNUSED = 4", "UNUSED = 5", ("test_it.py::TestLimit",)
)


def test_noticed_fault(tree, capsys):
    assert cli.main([], [SEEN], tree) == 0
    printed = capsys.readouterr().out
    assert "pass without a fault" in printed
    assert "test_it.py: test_limit" in printed
    assert "1 of 1 faults noticed" in printed
    assert "LIMIT = 3" in (tree / "torch/optim/_muon.py").read_text()


def test_fault_that_nothing_notices(tree, capsys):
    assert cli.main(["--no-baseline"], [SEEN, UNSEEN], tree) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 faults noticed" in printed
    assert "not noticed: unused" in printed


def test_choice(tree, capsys):
    for word in ("2", "unus"):
        assert cli.main(["--list", word], [SEEN, UNSEEN], tree) == 0
        assert capsys.readouterr().out == "  2 unused (_muon.py)\n"
    assert cli.main(["--list", "other"], [SEEN, UNSEEN], tree) == 2
    assert "there is no fault 'other'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (("test_other.py",), "pytest ended with 4"),
        (("test_broken.py",), "pytest ended with 2"),
        (("test_setup.py",), "pytest ended with 1"),
    ],
)
def test_broken_selection_is_no_success(tree, capsys, tests, message):
    (tree / "test_broken.py").write_text("import nothing_of_this_name\n")
    # An error before the test itself begins.
    (tree / "test_setup.py").write_text("def test_it(missing):\n    pass\n")
    fault = SEEN._replace(tests=tests)
    assert cli.main(["--no-baseline"], [fault], tree) == 2
    assert message in capsys.readouterr().err


def test_baseline_has_to_pass(tree, capsys):
    assert cli.main([], [SEEN._replace(tests=("test_other.py",))], tree) == 2
    assert "do not even pass" in capsys.readouterr().err
    (tree / "torch/optim/_muon.py").write_text("LIMIT = 3\nUNUSED = 4\nLIMIT = 1\n")
    assert cli.main([], [UNSEEN], tree) == 2
    assert "test_it.py::TestLimit::test_limit" in capsys.readouterr().err


def test_fault_whose_place_is_gone_or_one_of_several(tree, capsys):
    for text in ("LIMIT = 4", "="):
        assert cli.main([], [SEEN._replace(old=text)], tree) == 2
        assert "has to be written anew" in capsys.readouterr().err


def test_copy_that_is_not_imported(tree, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    make_copy(tree / "torch" / "optim", folder)
    check_redirect(folder, tree)
    (folder / "sitecustomize.py").write_text("")
    with pytest.raises(CannotTry, match="not import Muon from the copy"):
        check_redirect(folder, tree)


def test_hang_is_ended_with_its_processes(tree, tmp_path):
    (tree / "test_hang.py").write_text(
        "import subprocess, sys\n\n\ndef test_hang():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "    assert child.wait() == 0\n"
    )
    make_copy(tree / "torch" / "optim", tmp_path / "copy")
    outcome = run_tests(
        tree, tmp_path / "copy", ["test_hang.py"], first=True, seconds=5
    )
    assert outcome.code is None and outcome.notice == "a hang"
    until = time.monotonic() + 20
    while is_there(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_there(pid):
    """Whether it runs. Nobody may wait for a killed orphan, which then stays as a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_only_a_failed_test_notices():
    assert not Outcome(0, (), 1.0, "").noticed
    assert Outcome(1, ("a.py::A::test_a",), 1.0, "").notice == "a.py: test_a"
    with pytest.raises(CannotTry):
        Outcome(-9, (), 1.0, "").noticed


def test_pure_modules_are_there():
    """What cosmic-ray is told to change, and what to run."""
    text = pure.CONFIG.read_text()
    places = json.loads(re.search(r"(?m)^module-path = (.*)$", text)[1])
    tests = re.findall(r"test/\S+\.py", text)
    assert places and tests
    assert all((ROOT / "torch" / place).exists() for place in places)
    assert all((ROOT / test).exists() for test in tests)
