"""The environment, the commands that run in it, and the command line.

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
from overlay.conftest import append, commit_all, git, MUON, OWN, put, run
from tools.overlay import cli, env, package
from tools.overlay.payload import ROOT


METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"


def make_wheel(folder, name, version, files):
    info = f"{name}-{version}.dist-info"
    texts = {**files, f"{info}/METADATA": METADATA.format(name, version)}
    texts[f"{info}/WHEEL"] = package._WHEEL
    texts[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in texts)
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
def offline(tmp_path_factory):
    """Variables with which pip sees a folder of wheels, and nothing else."""
    folder = tmp_path_factory.mktemp("shelf")
    texts = dict.fromkeys(["torch/__init__.py", "torch/optim/__init__.py", MUON], "")
    texts["torch/version.py"] = "__version__ = '2.13.0'\n"
    make_wheel(folder, "torch", "2.13.0", texts)
    for name, version in MODULES.items():
        make_wheel(folder, name, version, {f"{name}.py": ""})
    others = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    return others | own | {"PIP_CONFIG_FILE": os.devnull}


def listen_to_interrupts():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_interrupted_made_found_and_updated(ours, tool, offline, tmp_path):
    venv = ours / ".venv"
    python = env.python_of(venv)
    command = [sys.executable, "-u", ours / "setup_overlay.py", "env"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # The tests may run in the background, where a shell has them ignore a Ctrl-C.
    how["preexec_fn"] = listen_to_interrupts
    for number, code in (signal.SIGINT, 130), (signal.SIGTERM, 143):
        with subprocess.Popen(command, env=offline, **how) as process:
            while process.stdout.readline() != f"venv {venv} ...\n":
                assert process.poll() is None
            process.send_signal(number)
            process.communicate(timeout=30)
        assert process.returncode == code
        assert env.packages_of(venv) == ""

    made = tool(ours, "env", env=offline, timeout=300)
    # It says where and how large, before pip begins, and no list of packages.
    words = [f"making {venv}: torch 2.13.0", "0.3 GB", "pip install ...", "torch-2.13"]
    places = [made.out.index(word) for word in words]
    assert places == sorted(places)
    assert "hypothesis" not in made.out
    tool(ours, "status", "--python", python, says=["as in this repository"])
    modules = "; ".join(f"import {name}" for name in MODULES)
    where = "import torch.optim.muon as muon; print(open(muon.__file__).read())"
    assert "# newer" not in run(python, "-c", f"{modules}; {where}").out
    # An edit counts at once; a new file does after the next command.
    append(ours / OWN, "# newer\n")
    assert "# newer" in run(python, "-c", where).out
    tool(ours, "env", env=offline, says=[f"found {venv}", "nothing to do"])
    put(ours, {"torch/optim/_muon_new.py": ""})
    tool(ours, "env", env=offline, says=["applied to"])
    run(python, "-c", "import torch.optim._muon_new")

    # Other packages: they are installed into it, and it is not made again.
    put(venv, {env.MARKER: "another"})
    # With a target pip does not count what that interpreter has.
    nowhere = {"PIP_FIND_LINKS": str(tmp_path), "PIP_TARGET": str(tmp_path)}
    says = ["found", "No matching distribution found", "failed with exit code 1"]
    tool(ours, "env", env={**offline, **nowhere}, code=1, says=says)
    assert env.packages_of(venv) == ""


def test_somebody_elses_folder_is_left_alone(ours, tool):
    put(ours, {".venv/precious": "mine"})
    tool(ours, "env", code=3, says=["was not made by this tool"])
    assert (ours / ".venv/precious").read_text() == "mine"


@pytest.fixture
def ready(ours, installed, tmp_path):
    """A copy of the repository with an environment whose Python records its calls."""
    record = tmp_path / "called.json"
    code = f"import json, sys; print(json.dumps(sys.argv[1:]), file=open({str(record)!r}, 'a'))"
    shell = f'#!/bin/sh\n[ "$1" = -c ] && exec "{installed.python}" "$@"\n'
    shell += f'"{sys.executable}" -c "{code}" "$@"\nexit ${{ENDS:-0}}\n'
    for name, packages in {
        ".venv": env.PACKAGES,
        ".venv-frameworks": env.PACKAGES + env.FRAMEWORKS,
    }.items():
        python = env.python_of(ours / name)
        put(ours / name, {"bin/python": shell, env.MARKER: json.dumps(packages)})
        python.chmod(0o755)
    return ours


# A command, how what it runs ends, and what that is.
RUNS = [
    ("test --torch 2.13 -k slow -q", 5, ["-m", "pytest", "-k", "slow", "-q"]),
    ("test", 0, ["-m", "tools.coverage"]),
    ("test --frameworks -x", 0, ["-m", "pytest", "test/frameworks", "-x"]),
    ("test --frameworks test/frameworks/a.py", 0, ["-m", "pytest", "test/frameworks/a.py"]),
    ("verify --out a --step 4", 0, ["-u", "examples/compare_gpt.py", "--out", "a", "--step", "4"]),
    ("gpu --out /page -x", 3, ["-m", "tools.bench.gpu", "/page", "--overlay", "COMMIT", "-x"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "expected"), RUNS)
def test_what_runs_in_the_environment(ready, tool, tmp_path, words, code, expected):
    ends = {**os.environ, "ENDS": str(code)}
    done = tool(ready, *words.split(), code=code, env=ends)
    line = (tmp_path / "called.json").read_text().replace(f"{ready}/", "")
    assert (
        json.loads(line.replace(git(ready, "rev-parse", "HEAD"), "COMMIT")) == expected
    )
    assert (f"running all tests: {cli.TIME}\n" in done.out) == (words == "test")
    assert cli.TIME in " ".join((ROOT / "README.md").read_text().split())


WRONG = {
    # It was the current folder.
    "apply --checkout=": "the value is empty",
    "": "a command is missing",
    "apply": "--checkout DIR or --python EXE",
    "apply --python a --checkout b": "not allowed with argument",
    "apply --check x": "unknown arguments: --check x",
    "apply --checkout /nowhere": "cannot change to '/nowhere'",
    "env --torch 2.10.0": "torch 2.10.0 is not supported: 2.11 to 2.15",
    "test --torch nightly": "'nightly' is not a torch version",
}


def test_wrong_usage_is_named_and_makes_nothing(ours, tool):
    for words, said in WRONG.items():
        tool(ours, *words.split(), code=2, says=[said])
    assert list(ours.glob(".venv*")) == []


def test_version_closed_pipes_and_old_pythons(ours, tool, fork):
    commit = git(ours, "rev-parse", "HEAD")
    for name in commit, f"{commit}-dirty":
        tool(ours, "--version", says=[f" {name},"])
        append(ours / OWN, "# edited\n")
    # The reader ends first.
    piped = f"{sys.executable} {ours}/setup_overlay.py status --checkout {fork} | true"
    assert run("sh", "-c", piped).err == ""
    path = ours / "setup_overlay.py"
    # Nothing above the check may fail to parse or import on an old Python.
    before, check, rest = path.read_text().partition("if sys.version_info")
    assert re.findall(r"(?m)^(?:import|from) .*", before) == ["import os", "import sys"]
    path.write_text(f"{before}sys.version_info = (3, 9)\n{check}{rest}")
    tool(ours, "env", code=2, says=["3.10 or later"])


def test_hosted_notebook(tmp_path, ours, offline):
    """The notebook's first cell, where neither this repository nor a torch is there."""
    put(ours, {"examples/blueprint.py": ""})
    commit_all(ours)
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
    there = execute(MUON_REPOSITORY=ours.as_uri())
    assert there.code == 0, there.err
    assert "_distributed_muon_torch is before it now" in there.out
