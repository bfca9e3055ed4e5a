"""The overlay next to an installed torch. No file of torch changes."""

import os
import shutil
import sys

import pytest
from overlay.conftest import (
    append,
    C10D,
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
    def call(name, *words, code=0, says=()):
        before = snapshot(installed.site)
        done = tool(
            ours, name, "--python", installed.python, *words, code=code, says=says
        )
        assert not code or snapshot(installed.site) == before
        return done

    return call


def muon_of(installed, **options):
    return run(installed.python, "-c", WHERE, **options)


def test_day(on, installed, ours, tmp_path):
    site, layer = installed.site, installed.site / NAME
    before = snapshot(site)
    assert "holds no overlay" in on("status").out
    on("apply", says=["of no release that this overlay knows", "is before it now"])
    after = snapshot(site)
    assert {path: after[path] for path in before} == before
    # A program in a folder with a torch of its own has that, as without the overlay.
    assert muon_of(installed, cwd=tmp_path).out == f"{layer / MUON}\n"
    assert "_local_sync_group_name" in (layer / C10D).read_text()
    assert (
        layer / "torch/.muon_overlay/original/optim/_muon.py"
    ).read_text() == "# stock\n"
    assert (layer / "torch/nn").resolve() == installed.torch / "nn"
    assert "as in this repository" in on("status").out
    on("apply", says=["nothing to do"])
    append(ours / OWN, "# newer\n")
    assert "of another torch or commit" in on("status").out
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


def remove_file(installed):
    (installed.site / NAME / OWN).unlink()


def remove_record(installed):
    (installed.site / NAME / "record.json").unlink()


def remove_pth(installed):
    (installed.site / "distributed_muon_torch.pth").unlink()


def leave_halves(installed):
    for end in ("new", "old"):
        put(installed.site, {f"{NAME}.{end}/half": ""})


@pytest.mark.parametrize(
    "change", [remove_file, remove_record, remove_pth, leave_halves]
)
def test_half_of_a_layer_is_mended(on, installed, change):
    on("apply")
    whole = snapshot(installed.site)
    change(installed)
    on("apply")
    assert snapshot(installed.site) == whole
    change(installed)
    on("revert")
    assert NAME not in " ".join(os.listdir(installed.site))


def test_upgraded_and_uninstalled_torch(on, installed):
    on("apply")
    put(installed.torch, {"version.py": "__version__ = '2.14.0'\n"})
    done = muon_of(installed)
    assert done.out == f"{installed.site / MUON}\n"
    assert "torch has changed since the overlay was applied" in done.err
    assert "of another torch or commit" in on("status").out
    on("apply")
    assert NAME in muon_of(installed).out
    shutil.rmtree(installed.torch)
    assert run(installed.python, "-c", "").err == ""
    on("apply", code=2, says=["(uninstalled)"])
    on("revert")
    assert NAME not in " ".join(os.listdir(installed.site))


def test_versions_patches_and_former_overlays(on, installed):
    put(installed.torch, {"version.py": "__version__: str = '2.16.0.dev1'\n"})
    on("apply", code=2, says=["untested"])
    leads_on(on("apply", code=2).err)
    on("revert")
    put(installed.torch, {"version.py": "__version__ = '2.13.0'\n"})
    put(installed.site, {C10D: "changed\n"})
    on("apply", code=2, says=[f"does not fit {C10D}"])
    put(installed.torch, {".muon_overlay/manifest.json": '{"overlay": "1234-dirty"}'})
    on("apply", code=3, says=["1234", "replaced files"])


def test_wrong_interpreters(tool, ours, fork, installed, tmp_path):
    put(
        tmp_path,
        {
            "no": "#!/bin/sh\nexit 3\n",
            "bare": f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n',
        },
    )
    for name in ("no", "bare"):
        (tmp_path / name).chmod(0o755)
    put(installed.site, {"fork.pth": f"{fork}\n"})
    shutil.rmtree(installed.torch)
    for python, says in {
        tmp_path / "missing": "no such interpreter",
        tmp_path / "no": "exit code 3",
        tmp_path / "bare": "has no torch",
        installed.python: "has the torch of a checkout",
    }.items():
        tool(ours, "apply", "--python", python, code=2, says=[says])


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
    """The overlay was applied for the run: a read-only torch had no tests."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    # Its packages, but no torch.
    code = "import expecttest, numpy, os, pytest; print(os.path.dirname(os.path.dirname(pytest.__file__)))"
    python, site = installed.python, installed.site
    if kind == "overlaid":
        on("apply")
        append(ours / OWN, "# newer\n")
    packages = run(sys.executable, "-c", code).out.strip()
    for name in os.listdir(packages):
        if "torch" not in name and not (site / name).exists():
            (site / name).symlink_to(os.path.join(packages, name))
    if kind == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
        shutil.move(installed.torch, tmp_path / "elsewhere/torch")
    put(tmp_path / "tests", {"pytest.ini": "[pytest]\n", "test_it.py": SHOWS})
    times = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("torch/nn/**/*")}
    words = (
        "-p",
        "no:cacheprovider",
        "-c",
        tmp_path / "tests/pytest.ini",
        tmp_path / "tests",
    )
    done = tool(ours, "test", "--python", python, *words)
    assert "1 passed" in done.out
    assert times == {p: p.lstat().st_mtime_ns for p in tmp_path.rglob("torch/nn/**/*")}
    tool(ours, "test", "--python", python, *words, "-k", "nothing", code=5)


def test_missing_packages_are_named(tool, ours, installed):
    says = ["-m pip install pytest expecttest numpy"]
    tool(ours, "test", "--python", installed.python, code=2, says=says)


def test_current_folder_is_not_imported(on, installed, tmp_path, monkeypatch):
    put(
        tmp_path,
        {"json.py": "1 / 0\n", "site.py": "1 / 0\n", "torch/__init__.py": "1 / 0\n"},
    )
    monkeypatch.chdir(tmp_path)
    on("apply")
