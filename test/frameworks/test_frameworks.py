"""The recipes for training frameworks run, and each Muon step in them is that of one process.

`setup_overlay.py test --frameworks` makes an environment that has the frameworks.
"""

import copy
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from overlay.conftest import run
from overlay.example_runs import run_example
from overlay.test_docs import programs
from overlay.test_package import make_environment
from tools.overlay import env
from tools.overlay.payload import ROOT


torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
RECIPES = ROOT / "examples" / "frameworks"
# Of two Llama layers: four of attention, three of the MLP.
LLAMA = 2 * 7
# Of two layers of nn.TransformerEncoderLayer: in_proj, out_proj, linear1, linear2.
ENCODER = 2 * 4
# Query, key and value are one matrix.
TITAN = 2 * 5
STEPS = 3


def needs(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    how = "is not installed: run `setup_overlay.py test --frameworks`"
    return pytest.mark.skipif(bool(missing), reason=f"{missing} {how}")


def start(*words, stand_in=None, processes=2, **environ):
    """Exit code, output and errors of a checked program."""
    options = [] if stand_in is None else ["--stand-in", stand_in]
    script = HERE / "checked.py"
    run = run_example(script, *options, *words, processes=processes, **environ)
    return run.code, run.out, run.err


def assert_checked(done, matrices, steps=STEPS):
    """Each rank compared ``matrices`` matrices in each of ``steps`` steps."""
    code, out, err = done
    assert code == 0, err[-4000:]
    lines = re.findall(r"^rank (\d): (\d+) matrices, (\d+) steps$", out, re.MULTILINE)
    expected = [(rank, str(matrices * steps), str(steps)) for rank in "01"]
    assert sorted(lines) == expected


STAND_IN = {"stand_in": "accelerate"}


@needs("accelerate", "transformers")
def test_tensor_parallel_recipe():
    assert_checked(start(RECIPES / "tp_plan.py"), LLAMA)


# LoRA's A and B for each matrix.
ADAPTERS = 2 * LLAMA
# Where checkpoints are: after the first step, where a run looks for its last one, and after the last step.
NUMBERS = "1", "1", "3"
TRAINERS = "checkpoint-1", "checkpoint-1", "checkpoint-3"
# It counts the steps of both optimizers.
LIGHTNINGS = "epoch=0-step=2.ckpt", "last.ckpt", "epoch=2-step=6.ckpt"
# A recipe and its strategy, its options, its matrices, its checkpoints, and the steps from step 1 on. Under FSDP2
# one more has a learning rate of 0: it makes the state that a checkpoint is loaded into.
RESUMED = [
    ("with_accelerate ddp", {}, LLAMA, NUMBERS, 2),
    ("with_accelerate fsdp2", STAND_IN, LLAMA, NUMBERS, 3),
    ("with_trainer ddp", {}, LLAMA, TRAINERS, 2),
    ("with_trainer fsdp2", STAND_IN, LLAMA, TRAINERS, 3),
    ("with_trl", {}, ADAPTERS, TRAINERS, 2),
    ("with_fabric ddp", {}, ENCODER, NUMBERS, 2),
    ("with_fabric fsdp2", {}, ENCODER, NUMBERS, 3),
    ("with_lightning ddp", {}, ENCODER, LIGHTNINGS, 2),
    ("with_lightning fsdp2", {}, ENCODER, LIGHTNINGS, 3),
]


def weights_in(checkpoint):
    """The bytes of the weights in a checkpoint, by their names or files."""
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=False)
        weights = saved.get("model") or saved["state_dict"]
        return {name: value.numpy().tobytes() for name, value in weights.items()}
    files = [*checkpoint.rglob("*.safetensors"), *checkpoint.rglob("*.distcp")]
    return {path.relative_to(checkpoint): path.read_bytes() for path in files}


@needs("accelerate", "transformers", "trl", "peft", "lightning")
@pytest.mark.parametrize(("recipe", "options", "matrices", "places", "left"), RESUMED)
def test_recipe_goes_on_from_its_checkpoint(
    recipe, options, matrices, places, left, tmp_path
):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    name, *strategy = recipe.split()
    script = RECIPES / f"{name}.py"
    first, resumed, last = places
    assert_checked(start(script, whole, *strategy, **options), matrices)
    expected = weights_in(whole / last)
    assert expected and expected != weights_in(whole / first)
    broken.mkdir()
    copy_all = shutil.copytree if (whole / first).is_dir() else shutil.copyfile
    copy_all(whole / first, broken / resumed)
    assert_checked(start(script, broken, *strategy, **options), matrices, steps=left)
    assert weights_in(broken / last) == expected


@needs("accelerate", "transformers")
def test_recipe_takes_the_package_where_torch_is_not_patched(tmp_path):
    without_patch = make_environment(tmp_path)
    find = "import torch.optim.muon"
    assert "No module" in run(without_patch, "-c", find, check=False).err
    dropped = ("PYTHONPATH", "COVERAGE_PROCESS_CONFIG")
    environ = {name: text for name, text in os.environ.items() if name not in dropped}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    words.append(RECIPES / "with_accelerate.py")
    weights = []
    for number, python in enumerate((sys.executable, without_patch)):
        folder = tmp_path / f"checkpoints{number}"
        options = {"cwd": tmp_path, "env": environ, "timeout": 300}
        done = run(python, *words, folder, "ddp", **options)
        assert len(re.findall("step .*loss", done.out)) == STEPS
        weights.append(weights_in(folder / str(STEPS)))
    assert weights[0] and weights[0] == weights[1]


@needs("accelerate", "transformers")
def test_accelerate_has_no_fsdp_on_cpus(tmp_path):
    """Each process trained alone, or under DDP."""
    code, out, err = start(RECIPES / "with_accelerate.py", tmp_path)
    assert code == 1
    assert err.count("Without accelerators, Accelerate would ignore") == 2, err
    assert "loss" not in out


DOCUMENTED = [program for program in programs() if program.needs_frameworks]


@needs("accelerate", "transformers")
@pytest.mark.parametrize("program", DOCUMENTED, ids=[p.name for p in DOCUMENTED])
@pytest.mark.parametrize("processes", [1, 2])
def test_documented_program(program, processes, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(program.code)
    done = start(script, processes=processes)
    if processes == 1:
        assert done[0] == 0, done[2]
        return
    # The Trainer has three epochs of two steps.
    assert_checked(done, LLAMA, steps=6)
    losses = re.findall(r"'loss': '([\d.]+)'", done[1])
    assert float(losses[-1]) < float(losses[0])


@needs("transformers")
def test_experts():
    # Of two layers: attention, and four experts with gate, up and down.
    assert_checked(start(RECIPES / "moe_fsdp2.py"), 2 * (4 + 4 * 3))


@pytest.fixture
def combined(monkeypatch):
    monkeypatch.syspath_prepend(RECIPES)
    return importlib.import_module("combined").Combined


def make(combined):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    inner = torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1)
    return model, combined(*inner), inner


def train(model, *optimizers):
    for inputs in torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(inputs).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_steps_and_checkpoints_are_those_of_the_parts(combined):
    model, optimizer, _ = make(combined)
    train(model, optimizer)
    weights, saved = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    again, loaded, inner = make(combined)
    again.load_state_dict(weights)
    saved["param_groups"][0]["lr"] = 0.05
    loaded.load_state_dict(saved)
    assert [each.param_groups[0]["lr"] for each in inner] == [0.05, 0.1]
    optimizer.param_groups[0]["lr"] = 0.05
    expected = train(model, optimizer)
    for found, value in zip(train(again, *inner), expected):
        assert torch.equal(found, value)


def test_schedulers_and_exchanged_parameters_reach_the_parts(combined):
    model, optimizer, inner = make(combined)
    optimizer.load_state_dict(optimizer.state_dict())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [each.param_groups[0]["lr"] for each in inner] == [0.05, 0.05]
    other = torch.nn.Parameter(torch.zeros(6, 4))
    optimizer.param_groups[0]["params"][0] = other
    assert inner[0].param_groups[0]["params"][0] is other


@needs("torchtitan")
def test_torchtitan_goes_on_from_its_checkpoint(tmp_path):
    def train(folder, *more):
        words = ["--module", "titan", "--config", "tiny", "--dump-folder", folder]
        words += more
        done = start("torchtitan.train", *words, stand_in="torchtitan")
        # A step -> its loss.
        found = re.findall(r"step: +(\d+) .*?loss: +([\d.]+)", done[1] + done[2])
        return done, dict(found)

    done, straight = train(tmp_path / "straight")
    assert_checked(done, TITAN, steps=4)
    assert sorted(straight) == ["1", "2", "3", "4"]
    middle = Path("checkpoint", "step-2")
    shutil.copytree(tmp_path / "straight" / middle, tmp_path / "resumed" / middle)
    done, resumed = train(tmp_path / "resumed")
    # Of the three one is torchtitan's, with lr=0, so that there is state to load into.
    assert_checked(done, TITAN, steps=3)
    assert resumed == {step: straight[step] for step in ("3", "4")}
    done, further = train(tmp_path / "resumed", "--training.steps", 6)
    assert_checked(done, TITAN, steps=3)
    assert sorted(further) == ["5", "6"]


def test_versions_are_written_down():
    text = (ROOT / "docs" / "frameworks.md").read_text()
    for package in env.FRAMEWORKS[:-1]:
        name = package.partition(";")[0].replace("==", " ")
        assert name in " ".join(text.split())
    for recipe in RECIPES.glob("*.py"):
        assert f"../examples/frameworks/{recipe.name}" in text
