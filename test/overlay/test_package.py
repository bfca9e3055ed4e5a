"""The wheel in an environment whose torch has no overlay."""

import os
import re
import sys
import venv
import zipfile

import pytest
from overlay.conftest import append, commit_all, OWN, put, run
from overlay.test_docs import program_of
from packaging.metadata import Metadata
from tools.overlay import layer, package
from tools.overlay.payload import ROOT
from tools.overlay.versions import NEWEST, OLDEST


# Without Muon, too, gloo sometimes aborts a process whose interpreter ends by itself.
END = "\nimport os, sys; sys.stdout.flush(); os._exit(0)\n"
COMBINED, DESCRIPTION = package._COMBINED, package._DESCRIPTION
# Each module imports. Stock Muon and this one load each other's file. A trainer takes one optimizer
# of several.
ALONE = """
import importlib, io, pkgutil, torch, distributed_muon
from distributed_muon import Muon, partition_named_parameters
from distributed_muon.combined import Combined

for module in pkgutil.walk_packages(distributed_muon.__path__, "distributed_muon."):
    importlib.import_module(module.name)

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
weights = [layer.weight for layer in model]

def train(optimizer):
    before = [p.clone() for p in model.parameters()]
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    return [torch.equal(p, b) for p, b in zip(model.parameters(), before)]

def handed_over(old, new):
    file = io.BytesIO()
    torch.save(old.state_dict(), file)
    new.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    for weight in weights:
        momentum = old.state[weight]["momentum_buffer"]
        assert torch.equal(new.state[weight]["momentum_buffer"], momentum)
    train(new)
    return new

muon, stock = Muon(weights, lr=0.1), torch.optim.Muon(weights)
train(muon)
assert handed_over(muon, stock).param_groups[0]["lr"] == 0.1
handed_over(stock, Muon(weights))
matrices, others = partition_named_parameters(model)
one = Combined(Muon(matrices), torch.optim.AdamW(others))
one.load_state_dict(one.state_dict())
assert not any(train(one))
print("passed")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An environment with the package, and with the packages of this one, but no overlay."""
    place = tmp_path_factory.mktemp("package")
    venv.create(place / "venv", symlinks=True)
    python = place / "venv/bin/python"
    site = next((place / "venv/lib").glob("python*/site-packages"))
    # Python reads no .pth file there.
    others = layer.find(sys.executable, ROOT).home
    (site / "others.pth").write_text(f"{others}\n")
    assert "holds no overlay" in layer.find(python, ROOT).status()
    built = package.write(ROOT, place / "out")
    run(python, "-m", "pip", "install", "--no-index", built)
    return python


@pytest.fixture
def torchrun(python, tmp_path):
    script = tmp_path / "train.py"
    others = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env = {**others, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def start(code, processes):
        script.write_text(code + END)
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        words = [python, *words, processes, script]
        return run(*words, cwd=tmp_path, env=env, timeout=300).out

    return start


@pytest.mark.slow
def test_readme_and_description(torchrun):
    for page in ("README.md", DESCRIPTION):
        code = program_of(ROOT / page).code.replace("torch.optim.muon", package.NAME)
        assert torchrun(code, 2).count("owner: parameters") == 2


@pytest.mark.slow
def test_modules_checkpoints_and_several_as_one(torchrun):
    assert torchrun(ALONE, 1) == "passed\n"


def commit_package(ours):
    """Commit all that the package is made of; the commit."""
    put(ours, {name: (ROOT / name).read_text() for name in ("LICENSE", COMBINED)})
    return commit_all(ours)


def test_what_an_index_and_its_readers_need(tmp_path, ours):
    """The version had a local part, which no index takes, and the page would have been empty."""
    commit = commit_package(ours)
    with zipfile.ZipFile(package.write(ours, tmp_path)) as wheel:
        texts = {name: wheel.read(name).decode() for name in wheel.namelist()}
    (info,) = (name.rpartition("/")[0] for name in texts if name.endswith("/METADATA"))
    # It raises an error for fields that no index takes.
    metadata = Metadata.from_email(texts[f"{info}/METADATA"])
    assert metadata.version.local is None
    (licence,) = metadata.license_files
    assert texts[f"{info}/licenses/{licence}"] == (ROOT / "LICENSE").read_text()
    description = (ROOT / DESCRIPTION).read_text()
    assert metadata.description.startswith(description)
    assert commit in metadata.description
    for link in re.findall(r"\]\(([^)]+)\)", description):
        assert link.startswith("https://")  # an index has no other files
    ends = f">={OLDEST[0]}.{OLDEST[1]}", f"<{NEWEST[0]}.{NEWEST[1] + 1}"
    assert {str(each) for each in metadata.requires_dist[0].specifier} == {*ends}


def test_wheel_is_that_of_the_commit(tool, tmp_path, ours):
    """One commit gives the same bytes everywhere, an edit another name."""
    commit = commit_package(ours)
    out, texts = tmp_path / "some/folder", set()
    for _ in range(2):
        tool(ours, "wheel", "--out", out)
        (place,) = out.iterdir()
        texts.add(place.read_bytes())
    assert len(texts) == 1
    assert re.fullmatch(r"distributed_muon-[\d.]+-py3-none-any\.whl", place.name)
    for name in (OWN, COMBINED, DESCRIPTION, "tools/overlay/package.py"):
        before = (ours / name).read_bytes()
        append(ours / name, "# an edit\n")
        tool(ours, "wheel", "--out", out / name)
        (place,) = (out / name).iterdir()
        assert place.name.endswith(f"+g{commit[:12]}.dirty-py3-none-any.whl")
        (ours / name).write_bytes(before)
