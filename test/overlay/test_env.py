"""The environment, and the commands that begin with it.

pip and venv are the real ones; what pip installs is a handful of small wheels that
the test makes, so that nothing comes from the network.
"""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile

import pytest
from tools.overlay import cli, env, frameworks, payload, progress
from tools.overlay.errors import WorkFailed
from tools.overlay.repo import ROOT
from tools.overlay.wheel import find_wheel, record_hash


def make_wheel(folder, name, version, files):
    info = f"{name}-{version}.dist-info"
    texts = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
            "Tag: py3-none-any\n"
        ),
    }
    record = ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in texts.items():
            data = text.encode()
            wheel.writestr(path, data)
            record += f"{path},{record_hash(data)},{len(data)}\n"
        wheel.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")


# Each package as a wheel's file name spells it, and the version that is asked for.
MODULES = {
    re.split("[<=>]", name)[0].replace("-", "_"): (name.split("==") + ["1.0"])[1]
    for name in env.PACKAGES
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory, stock_muon):
    """A folder of wheels that is all that pip may see."""
    folder = tmp_path_factory.mktemp("shelf")
    torch = {
        "torch/__init__.py": "",
        "torch/optim/__init__.py": "",
        "torch/optim/_muon.py": stock_muon.decode(),
    }
    make_wheel(folder, "torch", "2.13.0", torch)
    for name, version in MODULES.items():
        make_wheel(folder, name, version, {f"{name}.py": ""})
    return folder


@pytest.fixture(scope="module")
def offline(shelf):
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("PIP_")},
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(shelf),
        "PIP_CONFIG_FILE": os.devnull,
    }


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_interrupted_made_found_and_brought_up_to_date(overlay, tool, offline):
    venv = overlay / ".venv"
    marker = venv / env.MARKER
    # ctrl-C while it is being made
    process = subprocess.Popen(
        [sys.executable, overlay / "setup_overlay.py", "env"],
        env=offline,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for(marker.exists)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(marker.read_text())["state"] == "making"
    assert "no environment" in tool("status", root=overlay, env=offline).err

    made = tool("env", root=overlay, env=offline)
    assert made.code == 0, made.out + made.err
    assert "half made" in made.out
    # It says where and how large, before pip begins.
    assert made.out.index(f"making {venv}: torch 2.13.0") < made.out.index(
        "pip install"
    )
    assert "0.3 GB" in made.out
    assert "pip install torch==2.13.0: done" in made.out
    assert "hypothesis" not in made.out
    assert json.loads(marker.read_text())["state"] == "ready"
    site = find_wheel(env.python_of(venv))
    assert site.root.is_relative_to(venv)
    assert site.status(overlay)["state"] == "current"
    assert site.copy_of("torch/optim/_muon.py").is_file()
    for name in MODULES:
        assert (site.root / f"{name}.py").is_file()

    found = tool("env", root=overlay, env=offline)
    assert found.code == 0
    assert "found" in found.out
    assert "in place already" in found.out

    (overlay / "torch/optim/muon.py").write_text("# newer\n")
    changed = tool("env", root=overlay, env=offline)
    assert (changed.code, "files changed: 1" in changed.out) == (0, True)
    assert site.read("torch/optim/muon.py") == b"# newer\n"


def test_failing_installation(overlay, tool, offline, tmp_path, make_script):
    # An environment whose packages changed: it is installed into, and not made again.
    python = env.python_of(overlay / ".venv")
    make_script(python, f'exec "{sys.executable}" "$@"\n')
    env._write_marker(overlay / ".venv", state="ready", packages=[])
    (tmp_path / "empty").mkdir()
    # With a target pip does not count what that interpreter has.
    nowhere = {"PIP_FIND_LINKS": str(tmp_path / "empty"), "PIP_TARGET": str(tmp_path)}
    done = tool("env", root=overlay, env={**offline, **nowhere})
    assert done.code == 1
    assert "No matching distribution found for torch==2.13.0" in done.err
    assert "install.log" in done.err
    assert env._state(overlay / ".venv") == "partial"


@pytest.mark.parametrize(
    ("command", "version"),
    [("env", "2.10.0"), ("verify", "2.16.0"), ("test", "nightly")],
)
def test_unsupported_version_makes_nothing(overlay, tool, offline, command, version):
    done = tool(command, "--torch", version, root=overlay, env=offline)
    assert (done.code, "2.11 to 2.15" in done.err) == (2, True)
    assert version in done.err
    assert list(overlay.glob(".venv*")) == []


def test_somebody_elses_folder_is_left_alone(overlay, tool, offline):
    precious = overlay / ".venv" / "precious"
    precious.parent.mkdir()
    precious.write_text("mine")
    done = tool("env", root=overlay, env=offline)
    assert done.code == 3
    assert "was not made by this tool" in done.err
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_python_without_venv(overlay, tool, offline, tmp_path, module):
    # As on Debian without python3-venv: the module cannot be found.
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; sys.modules[{module!r}] = None\n"
    )
    done = tool("env", root=overlay, env={**offline, "PYTHONPATH": str(tmp_path)})
    assert done.code == 2
    assert f"has no {module}" in done.err
    assert "apt install" in done.err
    assert not (overlay / ".venv").exists()


@pytest.fixture
def ready(overlay, installed, make_script):
    """A copy of the repository with a stand-in environment that records its calls."""
    record = overlay / "called.json"
    code = f"import json, sys; print(json.dumps(sys.argv[1:]), file=open({str(record)!r}, 'a'))"
    make_script(
        overlay / ".venv/bin/python",
        f'[ "$1" = -c ] && exec "{installed}" "$@"\n'
        f'"{sys.executable}" -c "{code}" "$@"\n'
        '[ "$2" = tools.coverage ] && exit ${COVERAGE_EXIT:-0}\n'
        "exit ${PYTEST_EXIT:-0}\n",
    )
    env._write_marker(
        overlay / ".venv", state="ready", torch="2.13.0", packages=list(env.PACKAGES)
    )
    return overlay, record


def calls(record):
    """The calls of the stand-in environment since the last time."""
    found = [json.loads(line) for line in record.read_text().splitlines()]
    record.unlink()
    return found


def test_test_passes_arguments_and_exit_code_on(ready, tool):
    overlay, record = ready
    args = ["-k", "not slow", "--maxfail=1", "-q", "test/optim"]
    done = tool("test", *args, root=overlay, env={**os.environ, "PYTEST_EXIT": "5"})
    assert done.code == 5
    assert calls(record) == [["-m", "pytest", *args]]


def test_test_frameworks_has_an_environment_of_its_own(ready, tool):
    overlay, record = ready
    (overlay / ".venv").rename(overlay / frameworks.FOLDER)
    packages = [*env.PACKAGES, *frameworks.PACKAGES]
    marker = {"state": "ready", "torch": "2.13.0", "packages": packages}
    env._write_marker(overlay / frameworks.FOLDER, **marker)
    done = tool("test", "--frameworks", "-k", "not slow", root=overlay)
    assert done.code == 0, done.err
    assert not (overlay / ".venv").exists()
    one = f"{frameworks.TESTS}/test_frameworks.py::test_recipe"
    assert tool("test", "--frameworks", one, root=overlay).code == 0
    assert calls(record) == [
        ["-m", "pytest", frameworks.TESTS, "-k", "not slow"],
        ["-m", "pytest", one],
    ]


def test_test_takes_its_own_options(ready, tool):
    overlay, record = ready
    assert tool("test", "--torch", "2.13.0", "-x", root=overlay).code == 0
    assert calls(record) == [["-m", "pytest", "-x"]]
    assert tool("test", "--coverage", "--torch=2.13.0", "-x", root=overlay).code == 0
    assert calls(record) == [
        ["-m", "coverage", "run", "-m", "pytest", "-x"],
        ["-m", "tools.coverage", "--no-limits"],
    ]
    for wrong in (["--torch"], ["--coverage=yes"], ["--torch=2.13.0", "--python=x"]):
        assert tool("test", *wrong, root=overlay).code == 2


@pytest.mark.parametrize(("tests", "covered"), [(0, 0), (0, 1), (1, 0)])
def test_all_tests_have_to_cover_enough(ready, tool, tests, covered):
    overlay, record = ready
    codes = {"PYTEST_EXIT": str(tests), "COVERAGE_EXIT": str(covered)}
    done = tool("test", root=overlay, env={**os.environ, **codes})
    assert done.code == (tests or covered)
    limits = ["--no-limits"] if tests else []
    workers = ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
    assert calls(record) == [
        ["-m", "coverage", "run", "-m", "pytest", *workers],
        ["-m", "tools.coverage", *limits],
    ]


def test_verify_hands_over(ready, tool):
    overlay, record = ready
    given = ["--out", "here", "--steps", "3", "--step", "4"]
    failing = {**os.environ, "PYTEST_EXIT": "1"}
    done = tool("verify", *given, root=overlay, env=failing)
    assert done.code == 1
    assert calls(record) == [["-u", f"{overlay}/examples/compare_gpt.py", *given]]
    assert "overlay applied" in done.out
    assert done.out.endswith("verify failed with exit code 1\n")
    done = tool("verify", root=overlay)
    assert done.code == 0
    assert done.out.splitlines()[-1].startswith("verify passed: ")


def test_status_defaults_to_the_environment_and_revert_does_not(ready, tool, installed):
    """`revert` without a target took the overlay out of .venv."""
    overlay, _ = ready
    tool("env", root=overlay)
    assert '"state": "current"' in tool("status", "--json", root=overlay).out
    for command in ("apply", "revert"):
        done = tool(command, root=overlay)
        assert (done.code, "--checkout DIR or --python EXE" in done.err) == (2, True)
    assert '"state": "current"' in tool("status", "--json", root=overlay).out
    done = tool("revert", "--python", installed, root=overlay)
    assert (done.code, "wrote torch/optim/_muon.py" in done.out) == (0, True)


def test_environment_that_its_user_upgraded(ready, tool, installed):
    """`env --torch 2.13.0` said "found", and had another torch."""
    overlay, _ = ready
    site = find_wheel(installed).root
    (site / "torch-2.13.0+cpu.dist-info").rename(site / "torch-2.14.0.dist-info")
    metadata = site / "torch-2.14.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("2.13.0+cpu", "2.14.0"))
    done = tool("env", "--torch", "2.13.0", root=overlay)
    assert (done.code, "has torch 2.14.0 now" in done.err) == (3, True)


def test_one_version_has_one_environment(ready, tool):
    """`--torch 2.13` made a second one."""
    overlay, _ = ready
    assert tool("env", "--torch", "2.13", root=overlay).code == 0
    assert [path.name for path in overlay.glob(".venv*")] == [".venv"]


@pytest.mark.parametrize("command", ["env", "verify", "test"])
def test_dry_run_makes_no_environment(overlay, tool, command):
    done = tool(command, "--dry-run", root=overlay)
    assert (done.code, f"making {overlay}/.venv" in done.out) == (0, True)
    assert list(overlay.glob(".venv*")) == []


@pytest.mark.parametrize(
    "words",
    [
        "env --torch=", "test --torch=", "test --python=", "verify --torch=",
        "apply --checkout=", "revert --python=", "pull --checkout=", "status --checkout=",
        "rebuild --mode=wheel --checkout=", "export --checkout=x --out=",
    ],
)  # fmt: skip
def test_empty_values_are_refused(overlay, tool, words):
    """`--checkout ""` was the current folder, and `--torch=` the default version."""
    done = tool(*words.split(), root=overlay)
    assert done.code == 2
    assert "empty" in done.err
    assert list(overlay.glob(".venv*")) == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("aply --checkout x", "apply"),
        ("apply --chekout x", "--checkout"),
        ("apply --check x", "--checkout"),
        ("test --tor 2.13", "--torch"),
        ("test --pyton x", "--python"),
    ],
)
def test_did_you_mean(overlay, tool, words, meant):
    """`test --tor 2.13` made an environment before pytest refused it."""
    done = tool(*words.split(), root=overlay)
    assert (done.code, f"did you mean {meant}?" in done.err) == (2, True)
    assert list(overlay.glob(".venv*")) == []


def test_version(tool, ours):
    done = tool("--version", root=ours)
    assert (done.code, payload.name(ours) in done.out) == (0, True)
    (ours / "torch/optim/muon.py").write_text("# edited\n")
    assert f"{payload.name(ours)}," in tool("--version", root=ours).out
    assert payload.name(ours).endswith("-dirty")


def test_no_import_circle():
    """Imports for the type checker count."""
    folder = ROOT / "tools" / "overlay"
    names = {path.stem for path in folder.glob("*.py")}
    imports = {}
    for path in folder.glob("*.py"):
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                found |= {node.module} if node.module else {a.name for a in node.names}
        imports[path.stem] = found & names
    while free := [
        name for name, needs in imports.items() if not needs & imports.keys()
    ]:
        for name in free:
            del imports[name]
    assert imports == {}


def test_help_says_what_an_example_and_the_codes(tool):
    assert tool("--help").code == 0
    for name in cli.COMMANDS:
        done = tool(name, "--help")
        assert f"setup_overlay.py {name}" in done.out.split("example:")[1]
        assert "  3  refused" in done.out
    assert cli.COMMANDS.keys() >= {"env", "verify", "test", "diff", "pull", "export"}


def test_wrong_usage(tool):
    for words in ("", "nonsense", "apply", "apply --python a --checkout b"):
        assert tool(*words.split()).code == 2
    wrong = tool("env", "--nonsense").err
    assert "unknown arguments: --nonsense" in wrong
    assert wrong.startswith("usage: setup_overlay.py env ")


def test_reader_that_leaves_early(shell, ready, tool):
    overlay, _ = ready
    tool("env", root=overlay)
    face = overlay / "setup_overlay.py"
    command = f"'{sys.executable}' '{face}' status --verbose | true"
    assert shell("sh", "-c", command).err == ""


def test_old_python_is_told_so(tool, overlay):
    face = (overlay / "setup_overlay.py").read_text()
    # Nothing above the check may fail to parse or import on an old Python.
    before_check = face.split("if sys.version_info")[0]
    imports = [
        ln for ln in before_check.splitlines() if ln.startswith(("import", "from"))
    ]
    assert imports == ["import sys"]
    (overlay / "setup_overlay.py").write_text(
        face.replace("import sys\n", "import sys\n\nsys.version_info = (3, 9)\n", 1)
    )
    done = tool("env", root=overlay)
    assert (done.code, "3.10 or later" in done.err) == (2, True)


def test_progress_stops_at_its_limit(tmp_path):
    with pytest.raises(WorkFailed, match="stopped after 1 s"):
        progress.run(["sleep", "60"], "sleeping", tmp_path / "log", timeout=1)


def test_hosted_notebook(tmp_path, overlay, shell, offline):
    """The notebook's first cell, where neither this repository nor a torch is there."""
    (overlay / "examples").mkdir()
    notebook = ROOT / "examples" / "blueprint.ipynb"
    (overlay / "examples" / "blueprint.py").touch()
    identity = ("-c", "user.name=one", "-c", "user.email=one@example.org")
    for words in (["init"], ["add", "."], [*identity, "commit", "-m", "All"]):
        shell("git", "-C", overlay, *words)
    shell(sys.executable, "-m", "venv", tmp_path / "hosted")
    python = env.python_of(tmp_path / "hosted")
    (first, *_) = (
        "".join(cell["source"])
        for cell in json.loads(notebook.read_text())["cells"]
        if cell["cell_type"] == "code"
    )
    cwd = tmp_path / "content"
    cwd.mkdir()

    def execute(**more):
        return shell(python, "-c", first, cwd=cwd, env={**offline, **more}, check=False)

    nowhere = execute()
    assert "Write this repository's address into REPOSITORY" in nowhere.err
    assert list(cwd.iterdir()) == []

    there = execute(MUON_REPOSITORY=overlay.as_uri())
    assert find_wheel(python).status(overlay)["state"] == "current"
    assert there.code == 0, there.err
