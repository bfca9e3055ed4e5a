"""`rebuild`: a wheel's compiled parts, and upstream's editable build."""

import os
import shutil
import sys

import pytest
from overlay.conftest import append, BINARY, fails, git, git_status, OWN, run, script
from overlay.conftest import snapshot
from tools.overlay import parts
from tools.overlay.errors import Refused, WrongTarget
from tools.overlay.payload import ROOT


@pytest.fixture(scope="module")
def tree(stock_tree, tmp_path_factory, wheel):
    """A checkout of all sources."""
    place, built = tmp_path_factory.mktemp("wheel") / "pytorch", {"lib", *BINARY}
    paths = [
        path
        for path in wheel.torch_dir.rglob("*")
        if path.is_file() and path.relative_to(wheel.torch_dir).parts[0] not in built
    ]
    return stock_tree(place, [p for p in paths if p.suffix not in (".so", ".pyc")])


@pytest.mark.slow
def test_contributors_day(tree, tool, overlay):
    def day(command, *args):
        done = tool(command, "--checkout", tree, *args, root=overlay)
        assert (done.code, done.err) == (0, ""), done
        return done.out

    def files():
        others = git(tree, "ls-files", "--others", "-x", "__pycache__")
        return git(tree, "rev-parse", "HEAD^{tree}"), others

    before = files()
    assert "committed as" in day("apply", "--commit")
    shown = day("rebuild", "--mode", "wheel", "--python", sys.executable)
    assert f"import torch gives {tree}/torch/__init__.py" in shown
    assert git_status(tree) == ""
    # Not one gigabyte was copied.
    assert next((tree / "torch/lib").glob("libtorch_cpu.*")).stat().st_nlink > 1

    # The line that was printed runs the tests there, with what is edited there.
    module = tree / OWN
    append(module, "print('edited', __file__)\n")
    (line,) = (ln for ln in shown.splitlines() if ln.endswith("test_muon.py"))
    one = "TestDTensorConfig.test_dtensor_config_creation"
    # Under CI, upstream's runner leaves reports in the tree.
    there = {name: text for name, text in os.environ.items() if name != "CI"}
    done = run("sh", "-c", f"{line} {one}", env=there)
    assert f"edited {module}\n" in done.out
    assert "Ran 1 test" in done.err

    assert f"took {OWN}\n" in day("pull")
    assert (overlay / OWN).read_bytes() == module.read_bytes()
    assert "committed as" in day("apply")  # git has the edit now
    assert "committed as" in day("revert", "--commit")
    assert files() == before


@pytest.fixture(autouse=True)
def imported(monkeypatch):
    """The small wheels cannot be imported."""
    monkeypatch.setattr(parts, "ask_python", lambda *_: "")


@pytest.mark.parametrize("across", [False, True])
def test_libraries_are_linked_and_text_is_copied(
    there, small_wheel, across, monkeypatch
):
    """An editor that writes the checkout's version.py in place changed the installed one."""
    before = snapshot(there.root)
    if across:  # to another file system
        monkeypatch.setattr(parts.os, "link", raising)
    # Neither a file that the overlay added to the wheel comes, nor one deleted here.
    small_wheel.apply(ROOT)
    (there.root / "torch/optim/__init__.py").unlink()
    parts.lend(there.tree, small_wheel)
    git(there.root, "restore", "torch/optim")
    assert git_status(there.root) == ""
    brought = ["_C.so", "lib/libtorch.so", "lib/sub/x", "v.pyi", "version.py"]
    assert set(snapshot(there.root)) - {*before} == {f"torch/{rel}" for rel in brought}
    for rel in brought:
        linked = (there.torch_dir / rel).samefile(small_wheel.torch_dir / rel)
        assert linked == (rel.endswith(".so") and not across)
    # A second run has the files of a newer build.
    (small_wheel.root / "torch/later.pyi").write_text("later")
    parts.lend(there.tree, small_wheel)
    (there.root / "torch/version.py").write_text("built from source since")
    assert (small_wheel.root / "torch/version.py").read_text() == "torch/version.py"
    there.revert(ROOT)
    assert set(snapshot(there.root)) - {*before} == {"torch/version.py"}


def raising(*args, **kwargs):
    """Instead of a function of the file system."""
    raise OSError(28, "No space left on device")


def test_refusals_and_failures_change_nothing(
    there, small_wheel, make_installed, on, monkeypatch
):
    """The refusal of `revert` came after the compiled parts were gone."""
    older = make_installed("2.12.0", "older")
    before = snapshot(there.root)
    words = ("--mode", "wheel", "--python", older)
    on("rebuild", *words, code=2, words=["not of the same version"])
    monkeypatch.undo()
    with pytest.raises(WrongTarget, match="No module named"):
        parts.lend(there.tree, small_wheel)
    # The libraries are linked by then.
    monkeypatch.setattr(parts.shutil, "copy2", raising)
    with pytest.raises(OSError, match="No space left on device"):
        parts.lend(there.tree, small_wheel)
    assert snapshot(there.root) == before
    monkeypatch.undo()
    (there.root / "torch/_C.cpython-311.so").write_text("mine")
    with pytest.raises(Refused, match="build of its own"):
        parts.lend(there.tree, small_wheel)
    (there.root / "torch/_C.cpython-311.so").unlink()
    on("apply")
    monkeypatch.setattr(parts, "ask_python", lambda *_: "")
    parts.lend(there.tree, small_wheel)
    (there.root / "torch/optim/_muon.py").write_text("# edited\n")
    on("revert", code=3)


def test_source_runs_upstreams_command(there, small_wheel, tool, tmp_path):
    parts.lend(there.tree, small_wheel)
    record, command = tmp_path / "called", "-m pip install --no-build-isolation -v -e ."
    body = f'echo "$PWD $USE_CUDA $@" > {record}\necho no gcc >&2\nexit $USE_CUDA\n'
    python = script(tmp_path / "python", body)
    words = ("--checkout", there.root, "--mode", "source", "--python", python)
    for code, ends, said in ("7", 1, "with exit code 7"), ("0", 0, "no gcc"):
        done = tool("rebuild", *words, env={**os.environ, "USE_CUDA": code})
        fails(done, ends, said)
    assert record.read_text() == f"{there.root} 0 {command}\n"
    assert not (there.root / "torch/_C.so").exists()
    assert git_status(there.root) == ""


def test_dry_run_shows_the_command_and_refuses_no_interpreter(
    there, small_wheel, tool, tmp_path
):
    """It printed no command, and took an interpreter that does not exist."""
    parts.lend(there.tree, small_wheel)
    before = snapshot(there.root)
    python = script(tmp_path / "python", "exit 1\n")
    words = ("rebuild", "--checkout", there.root, "--mode", "source")
    shown = tool(*words, "--python", python, "--dry-run").out.splitlines()
    command = f"{python} -m pip install --no-build-isolation -v -e ."
    removes = "would remove the compiled parts of another torch"
    assert shown == [removes, f"would run cd {there.root} && {command}"]
    for mode in ("source", "wheel"):
        for dry in ([], ["--dry-run"]):
            done = tool(*words[:-1], mode, "--python", tmp_path / "missing", *dry)
            fails(done, 2, f"{tmp_path / 'missing'}: no such interpreter")
    assert snapshot(there.root) == before


def test_both_modes_take_python_on_path(
    there, small_wheel, tool, tmp_path, monkeypatch
):
    folder = tmp_path / "active"
    script(folder / "python", f'exec "{small_wheel.python}" "$@"\n')
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "git").symlink_to(shutil.which("git"))
    shown = {}
    for place in (folder, tmp_path / "empty"):
        monkeypatch.setenv("PATH", f"{place}:{tools}")
        for mode in ("source", "wheel"):
            words = ("rebuild", "--checkout", there.root, "--mode", mode, "--dry-run")
            shown[place.name, mode] = tool(*words)
    assert f"{folder}/python -m pip" in shown["active", "source"].out
    assert f"compiled parts of {small_wheel.words}" in shown["active", "wheel"].out
    for mode in ("source", "wheel"):
        fails(shown["empty", mode], 2, "no python on PATH")
