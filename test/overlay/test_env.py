"""The environment, and the commands that begin with it.

pip and venv are the real ones; what pip installs is a handful of small wheels that
the test makes, so that nothing comes from the network.
"""

import json
import os
import re
import signal
import subprocess
import sys
import zipfile

import pytest
from overlay.conftest import commit_all, fails, git, METADATA, OWN, run, script
from tools.overlay import env, package, tests
from tools.overlay.payload import ROOT
from tools.overlay.wheel import find_wheel, record_hash


def make_wheel(folder, name, version, files):
    info = f"{name}-{version}.dist-info"
    texts = {**files, f"{info}/METADATA": METADATA.format(name, version)}
    texts[f"{info}/WHEEL"] = package._WHEEL
    rows = [f"{r},{record_hash(t.encode())},{len(t)}\n" for r, t in texts.items()]
    texts[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in texts.items():
            wheel.writestr(path, text)


# Each package as a wheel's file name spells it, and the version that is asked for.
MODULES: dict[str, str] = {}
for wanted in env.PACKAGES:
    # Without the machines that need it.
    requirement, _, _ = wanted.partition(";")
    module = re.split("[<=>]", requirement)[0].replace("-", "_")
    _, _, exact_version = requirement.partition("==")
    MODULES[module] = exact_version or "1.0"


@pytest.fixture(scope="module")
def offline(tmp_path_factory, stock_muon):
    """Variables with which pip sees a folder of wheels, and nothing else."""
    folder = tmp_path_factory.mktemp("shelf")
    torch = dict.fromkeys(["torch/__init__.py", "torch/optim/__init__.py"], "")
    torch["torch/optim/_muon.py"] = stock_muon.decode()
    make_wheel(folder, "torch", "2.13.0", torch)
    for name, version in MODULES.items():
        make_wheel(folder, name, version, {f"{name}.py": ""})
    others = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    return others | own | {"PIP_CONFIG_FILE": os.devnull}


def listen_to_interrupts():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_interrupted_made_found_and_updated(overlay, tool, offline, tmp_path):
    venv = overlay / ".venv"
    command = [sys.executable, "-u", overlay / "setup_overlay.py", "env"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # The tests may run in the background, where a shell has them ignore a Ctrl-C.
    how["preexec_fn"] = listen_to_interrupts
    with subprocess.Popen(command, env=offline, **how) as process:
        while process.stdout.readline() != f"venv {venv} ...\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert "no environment" in tool("status", root=overlay, env=offline).err

    made = tool("env", root=overlay, env=offline, timeout=300)
    assert made.code == 0, made.out + made.err
    # It says where and how large, before pip begins, and no list of packages.
    words = [f"making {venv}: torch 2.13.0", "0.3 GB", "pip install ...", "torch-2.13"]
    places = [made.out.index(word) for word in words]
    assert places == sorted(places)
    assert "hypothesis" not in made.out
    site = find_wheel(env.python_of(venv))
    assert site.root.is_relative_to(venv)
    assert site.status(overlay)["state"] == "current"
    for name in MODULES:
        assert (site.root / f"{name}.py").is_file()

    found = tool("env", root=overlay, env=offline)
    assert found.code == 0
    assert re.search("found .*in place already", found.out, re.DOTALL)
    (overlay / OWN).write_text("# newer\n")
    changed = tool("env", root=overlay, env=offline)
    assert (changed.code, "files changed: 1" in changed.out) == (0, True)
    assert site.read(OWN) == b"# newer\n"

    # Other packages: they are installed into it, and it is not made again.
    env.mark(venv, ["another"])
    # With a target pip does not count what that interpreter has.
    nowhere = {"PIP_FIND_LINKS": str(tmp_path), "PIP_TARGET": str(tmp_path)}
    done = tool("env", root=overlay, env={**offline, **nowhere})
    assert done.code == 1
    assert "No matching distribution found for torch==2.13.0" in done.err
    assert "pip install failed with exit code 1" in done.err
    assert not env.is_ready(venv)


def test_somebody_elses_folder_is_left_alone(overlay, face):
    precious = overlay / ".venv" / "precious"
    precious.parent.mkdir()
    precious.write_text("mine")
    fails(face("env", root=overlay), 3, "was not made by this tool")
    assert precious.read_text() == "mine"


@pytest.fixture
def ready(overlay, installed):
    """A copy of the repository with a stand-in environment that records its calls."""
    record = overlay / "called.json"
    code = f"import json, sys; print(json.dumps(sys.argv[1:]), file=open({str(record)!r}, 'a'))"
    script(
        overlay / ".venv/bin/python",
        f'[ "$1" = -c ] && exec "{installed}" "$@"\n'
        f'"{sys.executable}" -c "{code}" "$@"\n'
        '[ "$2" = tools.coverage ] && exit ${COVERAGE_EXIT:-0}\n'
        "exit ${PYTEST_EXIT:-0}\n",
    )
    env.mark(overlay / ".venv", list(env.PACKAGES))
    return overlay


PYTEST, COVERAGE = ["-m", "pytest"], ["-m", "coverage", "run", "-m", "pytest"]
SHOWN = ["-m", "tools.coverage"]
WORKERS = ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
# A command, how pytest and the limits of coverage end, how it ends, and what it runs.
RUNS = [
    ("test --torch 2.13 -k slow -q", 5, 0, 5, [[*PYTEST, "-k", "slow", "-q"]]),
    ("test", 0, 0, 0, [[*COVERAGE, *WORKERS], SHOWN]),
    ("test", 0, 1, 1, [[*COVERAGE, *WORKERS], SHOWN]),
    ("test", 1, 0, 1, [[*COVERAGE, *WORKERS], [*SHOWN, "--no-limits"]]),
    ("test --coverage -x", 0, 0, 0, [[*COVERAGE, "-x"], [*SHOWN, "--no-limits"]]),
    ("test --frameworks -x", 0, 0, 0, [[*PYTEST, "test/frameworks", "-x"]]),
    ("test --frameworks test/frameworks/a.py", 0, 0, 0, [[*PYTEST, "test/frameworks/a.py"]]),
    ("verify --out a --step 4", 0, 0, 0, [["-u", "compare_gpt.py", "--out", "a", "--step", "4"]]),
    ("verify", 1, 0, 1, [["-u", "compare_gpt.py"]]),
    ("gpu --out /page -x", 3, 0, 3,
        [["-m", "tools.bench.gpu", "/page", "--overlay", "(no git)", "-x"]]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "failed", "uncovered", "code", "expected"), RUNS)
def test_what_runs_in_the_environment(
    ready, face, monkeypatch, words, failed, uncovered, code, expected
):
    if "--frameworks" in words:
        (ready / ".venv").rename(ready / ".venv-frameworks")
        env.mark(ready / ".venv-frameworks", [*env.PACKAGES, *env.FRAMEWORKS])
    monkeypatch.setenv("PYTEST_EXIT", str(failed))
    monkeypatch.setenv("COVERAGE_EXIT", str(uncovered))
    done = face(*words.split(), root=ready)
    lines = (ready / "called.json").read_text().splitlines()
    made = [json.loads(line.replace(f"{ready}/examples/", "")) for line in lines]
    assert (done.code, made) == (code, expected)
    assert (ready / ".venv").exists() != ("--frameworks" in words)
    assert (f"running all tests: {tests.TIME}\n" in done.out) == (words == "test")
    assert tests.TIME in " ".join((ROOT / "README.md").read_text().split())
    if "verify" in words:
        end = "verify failed with exit code 1\n" if failed else "\nverify passed: "
        assert end in done.out


def test_status_defaults_to_the_environment_and_revert_does_not(
    ready, face, tmp_path, monkeypatch
):
    """`revert` without a target took the overlay out of .venv."""
    monkeypatch.chdir(tmp_path)
    face("env", root=ready)
    for command in ("apply", "revert"):
        fails(face(command, root=ready), 2, "--checkout DIR or --python EXE")
    assert "as in this repository" in face("status", root=ready).out


def test_environment_that_its_user_upgraded(ready, face, installed):
    """`env --torch 2.13.0` said "found", and had another torch."""
    site = find_wheel(installed).root
    info = (site / "torch-2.13.0+cpu.dist-info").rename(site / "torch-2.14.0.dist-info")
    (info / "METADATA").write_text(METADATA.format("torch", "2.14.0"))
    fails(face("env", "--torch", "2.13.0", root=ready), 3, "has torch 2.14.0 now")


# `--checkout ""` was the current folder, and `--torch=` the default version.
EMPTY = [
    "env --torch=", "test --python=", "apply --checkout=", "export --checkout=x --out=",
]  # fmt: skip
WRONG = {
    **dict.fromkeys(EMPTY, "the value is empty"),
    "": "a command is missing",
    "nonsense": "invalid choice: 'nonsense'",
    "apply --python a --checkout b": "one target at a time",
    "apply --check x": "unknown arguments: --check x",
    "env --nonsense": "usage: setup_overlay.py env ",
    "test --torch": "expected one argument",
    "test --coverage=yes": "ignored explicit argument",
    "test --torch=2.13.0 --python=x": "go without other options",
    "rebuild --mode both": "invalid choice: 'both'",
    "env --torch 2.10.0": "torch 2.10.0 is not supported: 2.11 to 2.15",
    "test --torch nightly": "'nightly' is not a torch version",
}


def test_wrong_usage_is_named_and_makes_nothing(overlay, face):
    for words, said in WRONG.items():
        fails(face(*words.split(), root=overlay), 2, said)
    assert list(overlay.glob(".venv*")) == []


def test_version(face, ours):
    commit = git(ours, "rev-parse", "HEAD")
    for name in commit, f"{commit}-dirty":
        done = face("--version", root=ours)
        assert (done.code, f" {name}," in done.out) == (0, True)
        (ours / OWN).write_text("# edited\n")


def test_old_python_is_told_so(tool, overlay):
    path = overlay / "setup_overlay.py"
    # Nothing above the check may fail to parse or import on an old Python.
    before, check, rest = path.read_text().partition("if sys.version_info")
    assert re.findall(r"(?m)^(?:import|from) .*", before) == ["import os", "import sys"]
    path.write_text(f"{before}sys.version_info = (3, 9)\n{check}{rest}")
    fails(tool("env", root=overlay), 2, "3.10 or later")


def test_hosted_notebook(tmp_path, overlay, offline):
    """The notebook's first cell, where neither this repository nor a torch is there."""
    (overlay / "examples").mkdir()
    (overlay / "examples" / "blueprint.py").touch()
    commit_all(overlay)
    run(sys.executable, "-m", "venv", tmp_path / "hosted")
    python = env.python_of(tmp_path / "hosted")
    notebook = json.loads((ROOT / "examples" / "blueprint.ipynb").read_text())
    first = next(c["source"] for c in notebook["cells"] if c["cell_type"] == "code")
    cwd = tmp_path / "content"
    cwd.mkdir()

    def execute(**more):
        words = (python, "-c", "".join(first))
        return run(*words, cwd=cwd, env={**offline, **more}, check=False)

    assert "Write this repository's address into REPOSITORY" in execute().err
    assert list(cwd.iterdir()) == []
    there = execute(MUON_REPOSITORY=overlay.as_uri())
    assert there.code == 0, there.err
    assert find_wheel(python).status(overlay)["state"] == "current"
