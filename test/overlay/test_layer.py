"""The overlay next to an installed torch. No file of torch changes."""

import os
import shutil
import sys

import pytest
from overlay.conftest import (
    append,
    C10D,
    commands,
    leads_on,
    MUON,
    OWN,
    put,
    run,
    snapshot,
)
from tools.overlay.layer import NAME


WHERE = "import torch.optim._muon as muon; print(muon.__file__)"


@pytest.fixture
def on(tool, ours, installed):
    return commands(tool, ours, installed.site, "--python", installed.python)


def muon_of(installed, **options):
    return run(installed.python, "-c", WHERE, **options)


def test_day(on, installed, ours, tmp_path):
    site, layer = installed.site, installed.site / NAME
    before = snapshot(site)
    on("status", says=["holds no overlay"])
    on("apply", says=["of no release that this overlay knows", "is before it now"])
    # Others may read it.
    assert layer.stat().st_mode == installed.torch.stat().st_mode
    after = snapshot(site)
    assert {path: after[path] for path in before} == before
    # A program in a folder with a torch of its own has that, as without the overlay.
    assert muon_of(installed, cwd=tmp_path).out == f"{layer / MUON}\n"
    assert "_local_sync_group_name" in (layer / C10D).read_text()
    assert (layer / "torch/nn").resolve() == installed.torch / "nn"
    on("status", says=["as in this repository"])
    on("apply", says=["nothing to do"])
    append(ours / OWN, "# newer\n")
    on("status", says=["of another torch or commit"])
    on("apply")
    assert (layer / OWN).read_text().endswith("# newer\n")
    on("revert")
    assert muon_of(installed).out == f"{site / MUON}\n"
    assert snapshot(site) == before
    on("revert", says=["nothing to do"])


def test_edits_are_refused(on, installed):
    on("apply")
    append(installed.site / NAME / OWN, "# mine\n")
    put(installed.site / NAME, {"torch/optim/mine.py": "mine\n"})
    for command in ("apply", "status", "revert"):
        refused = on(command, code=3, says=["mine.py", OWN]).err
    leads_on(refused)
    on("apply", says=["is before it now"])


@pytest.mark.parametrize("missing", [f"{NAME}/{OWN}", "distributed_muon_torch.pth"])
def test_half_of_a_layer_is_mended(on, installed, missing):
    on("apply")
    whole = snapshot(installed.site)
    (installed.site / missing).unlink()
    on("apply")
    assert snapshot(installed.site) == whole
    (installed.site / missing).unlink()
    on("revert")
    assert "muon" not in " ".join(os.listdir(installed.site))


def test_upgraded_and_uninstalled_torch(on, installed):
    on("apply")
    put(installed.torch, {"version.py": "__version__ = '2.14.0'\n"})
    done = muon_of(installed)
    assert done.out == f"{installed.site / MUON}\n"
    assert "torch has changed since the overlay was applied" in done.err
    on("status", says=["of another torch or commit"])
    on("apply")
    assert NAME in muon_of(installed).out
    shutil.rmtree(installed.torch)
    assert run(installed.python, "-c", "").err == ""
    on("apply", code=2, says=["(uninstalled)"])
    on("revert")
    assert "muon" not in " ".join(os.listdir(installed.site))


def test_untested_torch_takes_force(on, installed):
    version = "2.16.0.dev1"
    texts = {"torch/version.py": f"__version__: str = '{version}'\n", C10D: "changed\n"}
    put(installed.site, texts)
    on("apply", code=2, says=[f"{version} is untested", f"does not fit {C10D}"])
    on("apply", "--force")
    assert NAME in muon_of(installed).out


def test_wrong_interpreters(tool, ours, tmp_path):
    bare = f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n'
    put(tmp_path, {"no": "#!/bin/sh\nexit 3\n", "bare": bare})
    tool(ours, "apply", "--python", "missing", code=2, says=["no such interpreter"])
    for name, says in ("no", "exit code 3"), ("bare", "has no torch"):
        (tmp_path / name).chmod(0o755)
        tool(ours, "apply", "--python", tmp_path / name, code=2, says=[says])


SHOWS = f"""
import importlib.util, pathlib, torch.nn

def test_overlay_is_there():
    place = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    assert (place / "optim/muon.py").read_text() == pathlib.Path({OWN!r}).read_text()
"""


@pytest.mark.parametrize("kind", ["plain", "overlaid", "PYTHONPATH"])
def test_tests_elsewhere_write_nothing(
    tool, ours, on, installed, tmp_path, kind, monkeypatch
):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    python, site = installed.python, installed.site
    if kind == "overlaid":
        on("apply")
        append(ours / OWN, "# newer\n")
    # The packages of this environment. Its torch comes second.
    packages = os.path.dirname(os.path.dirname(pytest.__file__))
    put(site, {"others.pth": packages})
    if kind == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
        shutil.move(installed.torch, tmp_path / "elsewhere/torch")
    put(tmp_path / "tests", {"pytest.ini": "[pytest]\n", "test_it.py": SHOWS})
    tests = tmp_path / "tests"
    words = ("-p", "no:cacheprovider", "-c", tests / "pytest.ini", tests)
    tool(ours, "test", "--python", python, *words, says=["1 passed"])
    assert [*tmp_path.rglob("torch/nn/*")] == [*tmp_path.rglob("torch/nn/__init__.py")]
    tool(ours, "test", "--python", python, *words, "-k", "nothing", code=5)


def test_current_folder_is_not_imported(on, tmp_path, monkeypatch):
    broken = ("json.py", "site.py", "torch/__init__.py")
    put(tmp_path, dict.fromkeys(broken, "1 / 0\n"))
    monkeypatch.chdir(tmp_path)
    on("apply")
