"""`rebuild`: a wheel's compiled parts, and upstream's editable build."""

import json
import os
import sys

import pytest
from tools.overlay import interpreter, parts, rebuild
from tools.overlay.checkout import find_checkout
from tools.overlay.errors import Refused, WorkFailed, WrongTarget
from tools.overlay.repo import ROOT
from tools.overlay.wheel import find_wheel


@pytest.fixture(scope="module")
def tree(stock_tree, tmp_path_factory, wheel):
    """A checkout of all Python sources; every test leaves it clean."""
    place = tmp_path_factory.mktemp("wheel") / "pytorch"
    return stock_tree(place, wheel.torch_dir.rglob("*.py"))


def without_bytecode(files):
    return {rel: text for rel, text in files.items() if "__pycache__" not in rel}


class TestWheel:
    def test_contributors_day(
        self, tree, wheel, tool, shell, git_status, snapshot, overlay, monkeypatch, capsys,
        tmp_path,
    ):  # fmt: skip
        before = without_bytecode(snapshot(tree))
        exclude = (tree / ".git/info/exclude").read_text()

        def day(command, *args):
            done = tool(command, "--checkout", tree, *args, root=overlay)
            assert (done.code, done.err) == (0, ""), done
            return done.out

        assert "committed as" in day("apply", "--commit")
        shown = day("rebuild", "--mode", "wheel", "--python", sys.executable)
        assert f"import torch gives {tree}/torch/__init__.py" in shown
        assert git_status(tree) == ""
        # Not one gigabyte was copied.
        library = next((tree / "torch/lib").glob("libtorch_cpu.*"))
        assert library.is_symlink() or library.stat().st_nlink > 1
        with monkeypatch.context() as patch:
            patch.setattr(rebuild, "_import_from", lambda *args: "seen above")
            rebuild.from_wheel(find_checkout(tree), wheel)
        assert "in place already" in capsys.readouterr().out

        # The line that was printed runs the tests there, with what is edited there.
        module = tree / "torch/optim/muon.py"
        module.write_text(module.read_text() + "print('edited', __file__)\n")
        (line,) = (ln for ln in shown.splitlines() if ln.endswith("test_muon.py"))
        one = "TestDTensorConfig.test_dtensor_config_creation"
        # Under CI, upstream's runner leaves reports in the tree.
        there = {name: text for name, text in os.environ.items() if name != "CI"}
        done = shell("sh", "-c", f"{line} {one}", env=there)
        assert f"edited {module}\n" in done.out
        assert "Ran 1 test" in done.err

        refused = tool("apply", "--checkout", tree, root=overlay)
        assert (refused.code, "  torch/optim/muon.py\n" in refused.err) == (3, True)
        assert f"pull --checkout {tree}" in refused.err
        assert "took torch/optim/muon.py\n" in day("pull")
        edited = (overlay / "torch/optim/muon.py").read_bytes()
        assert edited == module.read_bytes()
        assert "nothing to do" in day("apply")
        state = json.loads(day("status", "--json"))
        assert (state["state"], state["compiled_parts"] > 100) == ("current", True)

        assert "not committed" in day("revert")
        assert without_bytecode(snapshot(tree)) == before
        assert "committed as" in day("revert", "--commit")
        assert (tree / ".git/info/exclude").read_text() == exclude
        assert day("export", "--out", tmp_path / "series").endswith("/series/*.patch\n")
        shell("git", "checkout", "-q", "-b", "fresh", cwd=tree)
        shell("git", "am", *sorted((tmp_path / "series").iterdir()), cwd=tree)
        assert module.read_bytes() == edited
        shell("git", "checkout", "-q", "main", cwd=tree)
        assert git_status(tree) == ""
        assert without_bytecode(snapshot(tree)) == before

    def test_without_the_overlay_nothing_of_it_leaks(self, tree, wheel, git_status):
        """The interpreter's torch has the overlay; the checkout shall stay stock."""
        there = find_checkout(tree)
        lacking = parts.lacking(there.tree, wheel)
        assert any(rel.startswith("torch/_C.") for rel in lacking)
        assert "torch/version.py" in lacking
        assert not [rel for rel in lacking if "muon" in rel]

    def test_deleted_files_stay_deleted(self, tree, wheel, shell):
        (tree / "torch/optim/sgd.py").unlink()
        there = find_checkout(tree)
        assert "torch/optim/sgd.py" not in parts.lacking(there.tree, wheel)
        shell("git", "checkout", "-q", "--", "torch/optim/sgd.py", cwd=tree)

    def test_tree_that_cannot_be_imported_is_left_as_it_was(
        self, tree, tool, shell, git_status
    ):
        init = tree / "torch/__init__.py"
        init.write_text("raise ImportError('broken on purpose')\n")
        done = tool(
            "rebuild", "--checkout", tree, "--mode", "wheel", "--python", sys.executable
        )
        assert done.code == 1
        assert "broken on purpose" in done.err
        assert not (tree / "torch/lib").exists()
        shell("git", "checkout", "-q", "--", "torch/__init__.py", cwd=tree)
        assert git_status(tree) == ""


@pytest.mark.parametrize("copy", [False, True])
def test_libraries_are_linked_and_text_is_copied(there, small_wheel, git_status, copy):
    """An editor that writes the checkout's version.py in place changed the installed one."""
    count = parts.lend(there.tree, small_wheel, copy=copy)
    assert git_status(there.root) == ""
    for rel in ("torch/_C.so", "torch/lib/sub/x", "torch/v.pyi", "torch/version.py"):
        linked = (there.root / rel).samefile(small_wheel.root / rel)
        assert linked == (rel.endswith(".so") and not copy)
    installed = (small_wheel.root / "torch/version.py").read_text()
    (there.root / "torch/version.py").write_text("edited")
    assert (small_wheel.root / "torch/version.py").read_text() == installed
    assert parts.remove(there.tree) == count - 1
    assert not (there.root / "torch/lib").exists()


def test_symbolic_links_across_file_systems(there, small_wheel, monkeypatch):
    def other_device(*args, **kwargs):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(parts.os, "link", other_device)
    count = parts.lend(there.tree, small_wheel)
    assert (there.root / "torch/_C.so").is_symlink()
    # The environment is removed, or made again.
    (small_wheel.root / "torch/_C.so").unlink()
    (small_wheel.root / "torch/lib/libtorch.so").write_text("of another installation")
    assert parts.remove(there.tree) == count
    assert not os.path.lexists(there.root / "torch/_C.so")


def test_failure_half_way_takes_everything_out(
    there, small_wheel, snapshot, monkeypatch
):
    before = snapshot(there.root)
    real = parts._lend_one

    def full(source, place, copy):
        if source.name == "libtorch.so":
            raise OSError(28, "No space left on device", str(place))
        real(source, place, copy)

    monkeypatch.setattr(parts, "_lend_one", full)
    with pytest.raises(WorkFailed, match="No space left on device"):
        parts.lend(there.tree, small_wheel)
    assert snapshot(there.root) == before


def test_files_built_since_stay(there, small_wheel):
    parts.lend(there.tree, small_wheel, copy=True)
    rebuilt = there.root / "torch/_C.so"
    rebuilt.write_text("built from source since")
    parts.remove(there.tree)
    assert rebuilt.read_text() == "built from source since"
    assert not (there.root / "torch/lib").exists()


def test_own_build_is_not_mixed_with_a_wheels(there, small_wheel):
    (there.root / "torch/_C.cpython-311.so").write_text("mine")
    with pytest.raises(Refused, match="build of its own"):
        parts.lend(there.tree, small_wheel)
    assert not (there.root / "torch/lib").exists()


def test_wheel_of_another_version(there, make_installed):
    other = find_wheel(make_installed("2.12.0", "older"))
    with pytest.raises(WrongTarget, match="not the same version"):
        rebuild.from_wheel(there, other)


def test_refused_revert_leaves_the_parts(there, small_wheel, face, snapshot):
    """The refusal came after the compiled parts were gone."""
    face("apply", "--checkout", there.root)
    parts.lend(there.tree, small_wheel)
    (there.root / "torch/optim/_muon.py").write_text("# edited\n")
    before = snapshot(there.root)
    done = face("revert", "--checkout", there.root)
    assert (done.code, "Nothing was touched" in done.err) == (3, True)
    assert snapshot(there.root) == before


def test_pth_is_not_for_this_repositorys_environment(
    there, small_wheel, monkeypatch, snapshot
):
    """`env`, `test` and a second `rebuild` would find the checkout there."""
    monkeypatch.setattr(rebuild, "ROOT", small_wheel.root.parent)
    before = snapshot(there.root)
    with pytest.raises(WrongTarget, match="this repository's own environment"):
        rebuild.from_wheel(there, small_wheel, pth=True)
    assert snapshot(there.root) == before
    assert not list(small_wheel.root.glob("*.pth"))


def test_rebuild_twice_with_pth(there, small_wheel, make_script, tmp_path, monkeypatch):
    """The wheel is found behind the checkout that --pth put before it."""
    monkeypatch.setattr(rebuild, "_import_from", lambda *args: "not tried")
    site = small_wheel.root
    python = make_script(
        tmp_path / "with-site",
        f'exec "{sys.executable}" -S -E -c "import site, sys; site.addsitedir({str(site)!r}); '
        'exec(sys.argv[1])" "$2"\n',
    )
    wheel = find_wheel(python)
    assert wheel.root == site
    rebuild.from_wheel(there, wheel, pth=True)
    assert interpreter.origin(python) == there.root / "torch/__init__.py"
    again = find_wheel(python)
    assert again.root == site
    rebuild.from_wheel(there, again, pth=True)
    parts.remove(there.tree)
    assert interpreter.origin(python) == site / "torch/__init__.py"


def test_second_wheel_has_more_files(there, small_wheel, git_status):
    """Files of a second run are hidden, too."""
    parts.lend(there.tree, small_wheel)
    (small_wheel.root / "torch/later.pyi").write_text("later")
    assert parts.lend(there.tree, small_wheel) == 1
    assert (there.root / "torch/later.pyi").is_file()
    assert git_status(there.root) == ""


def test_linked_work_trees_hide_their_own(
    there, small_wheel, shell, git_status, tmp_path, face
):
    """`revert` in one does not uncover what lies in the other."""
    place = tmp_path / "linked"
    shell("git", "worktree", "add", "-q", "--detach", place, cwd=there.root)
    other = find_checkout(place)
    for tree in (there, other):
        face("apply", "--checkout", tree.root, "--commit")
        parts.lend(tree.tree, small_wheel)
    assert face("revert", "--checkout", there.root, "--commit").code == 0
    assert git_status(place) == ""
    shell("git", "add", "--all", cwd=place)
    assert git_status(place) == ""
    assert face("revert", "--checkout", place, "--commit").code == 0
    assert "muon" not in there.tree.exclude.read_text()


@pytest.fixture
def builders(tmp_path, make_script):
    """A folder for PATH: a python that records how it is called, cmake, ninja."""
    folder = tmp_path / "bin"
    record = tmp_path / "called.json"
    code = (
        "import json, os, sys; json.dump({'argv': sys.argv[1:], 'cwd': os.getcwd(), "
        "'use': {k: v for k, v in os.environ.items() if k.startswith('USE_')}}, "
        f"open({str(record)!r}, 'w'))"
    )
    make_script(
        folder / "python",
        # -c is the tool's own question where torch is; everything else is the build.
        f'[ "$1" = -c ] && exec "{sys.executable}" -S -E "$@"\n'
        f'"{sys.executable}" -S -E -c "{code}" "$@"\n'
        "echo compiling; echo error: no compiler >&2; exit ${BUILD_EXIT:-0}\n",
    )
    for name in ("cmake", "ninja", "g++"):
        make_script(folder / name, "exit 0\n")
    return folder, record


def source(tool, checkout, folder, **env):
    plain = {k: v for k, v in os.environ.items() if not k.startswith("USE_")}
    path = f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"
    return tool(
        "rebuild", "--checkout", checkout, "--mode", "source",
        env={**plain, "PATH": path, **env},
    )  # fmt: skip


def test_source_runs_upstreams_command(checkout, tool, builders, git_status):
    folder, record = builders
    done = source(tool, checkout, folder, USE_CUDA="0", USE_DISTRIBUTED="1")
    assert done.code == 0, done.err
    called = json.loads(record.read_text())
    assert called["argv"] == [
        *("-m", "pip", "install", "--no-build-isolation", "-v", "-e", ".")
    ]
    assert called["cwd"] == str(checkout)
    assert called["use"] == {"USE_CUDA": "0", "USE_DISTRIBUTED": "1"}
    assert "USE_CUDA=0" in done.out
    assert git_status(checkout) == ""


def test_source_that_fails_shows_the_end_of_its_log(checkout, tool, builders):
    folder, record = builders
    done = source(tool, checkout, folder, BUILD_EXIT="7")
    assert done.code == 1
    assert "exit code 7\nerror: no compiler\n" in done.err
    assert "error: no compiler" in done.err
    log = checkout / ".git/muon_overlay/source-build.log"
    assert str(log) in done.err
    assert "compiling" in log.read_text()


def source_alone(tool, checkout, folder):
    """With a PATH of that folder and git alone: the machine may have a cmake of its own."""
    for name in ("git", "sh"):
        os.symlink(f"/usr/bin/{name}", folder / name)
    return tool(
        "rebuild", "--checkout", checkout, "--mode", "source",
        env={**os.environ, "PATH": str(folder)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("cmake", "cmake on PATH"),
        ("ninja", "ninja on PATH"),
        ("g++", "a C++ compiler on PATH"),
    ],
)
def test_source_without_its_tools(checkout, tool, builders, missing, words, snapshot):
    folder, record = builders
    (folder / missing).unlink()
    before = snapshot(checkout)
    done = source_alone(tool, checkout, folder)
    assert done.code == 2
    assert f"  it needs {words}" in done.err
    assert done.err.count("it needs") == 1
    assert not record.exists()
    assert snapshot(checkout) == before


def test_source_without_submodules_and_packages(checkout, tool, builders):
    folder, record = builders
    (checkout / ".gitmodules").write_text(
        '[submodule "x"]\n\tpath = third_party/x\n\turl = ../x\n'
    )
    (checkout / "third_party/x").mkdir(parents=True)
    (checkout / "requirements-build.txt").write_text(
        "# what the build needs\nsetuptools>=70\nno-such.package_x\ncmake>=3.27\n"
    )
    done = source_alone(tool, checkout, folder)
    assert done.code == 2
    update = f"git -C {checkout} submodule update --init --recursive"
    assert f"  it needs the submodules: {update}\n" in done.err
    # That interpreter runs without its site-packages, so it has no setuptools either.
    assert "  it needs the packages setuptools no-such-package-x: " in done.err
    assert f"pip install -r {checkout}/requirements-build.txt\n" in done.err
    assert not record.exists()


def built(checkout, shell, folder, make_script):
    """Leaves the files of an editable build of this very commit."""
    head = shell("git", "rev-parse", "HEAD", cwd=checkout).out.strip()
    (checkout / ".git/info/exclude").write_text("/torch/version.py\n/torch/lib/\n")
    (checkout / "torch/version.py").write_text(f"git_version = '{head}'\n")
    (checkout / "torch/lib").mkdir()
    (checkout / "torch/lib/libtorch.so").write_text("")
    make_script(
        folder / "python",
        f'[ "$1" = -c ] && PYTHONPATH="{checkout}" exec "{sys.executable}" -S "$@"\n'
        "echo built again; exit 0\n",
    )


def test_existing_build_is_used_again(checkout, tool, shell, builders, make_script):
    folder, record = builders
    built(checkout, shell, folder, make_script)
    assert tool("apply", "--checkout", checkout, "--commit").code == 0
    done = source(tool, checkout, folder)
    assert (done.code, "is used again" in done.out) == (0, True)
    assert "only Python files differ" in done.out


@pytest.mark.parametrize("rel", ["torch/csrc/a.cpp", "setup.py", "torchgen/gen.py"])
def test_native_changes_are_built(checkout, tool, shell, builders, make_script, rel):
    folder, record = builders
    built(checkout, shell, folder, make_script)
    (checkout / rel).parent.mkdir(parents=True, exist_ok=True)
    (checkout / rel).write_text("changed\n")
    done = source(tool, checkout, folder)
    assert done.code == 0
    assert "is used again" not in done.out
    assert "building PyTorch from source: done" in done.out


def test_build_of_another_checkout_is_not_used(
    checkout, tool, shell, builders, make_script, installed
):
    folder, _ = builders
    built(checkout, shell, folder, make_script)
    make_script(  # its torch is not this checkout
        folder / "python",
        f'[ "$1" = -c ] && exec "{installed}" "$@"\necho built again; exit 0\n',
    )
    done = source(tool, checkout, folder)
    assert "building PyTorch from source: done" in done.out


def test_source_takes_a_wheels_parts_out_first(
    checkout, there, small_wheel, tool, builders
):
    parts.lend(there.tree, small_wheel)
    folder, record = builders
    done = source(tool, checkout, folder)
    assert done.code == 0, done.err
    assert "files that came from a wheel" in done.out
    assert not (checkout / "torch/_C.so").exists()


def test_options_of_the_other_mode(checkout, tool):
    done = tool("rebuild", "--checkout", checkout, "--mode", "source", "--copy")
    assert done.code == 2
    done = tool("rebuild", "--checkout", ROOT, "--mode", "wheel")
    assert (done.code, "not a PyTorch checkout" in done.err) == (2, True)
