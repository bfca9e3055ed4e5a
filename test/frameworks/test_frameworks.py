"""The recipes for training frameworks run, and each Muon step in them is that of one process.

`setup_overlay.py test --frameworks` makes an environment that has the frameworks.
"""

import copy
import importlib.util
import re
import shutil
from pathlib import Path

import pytest
from overlay.example_runs import run_example
from overlay.test_docs import program_of
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
    script = HERE / "checked.py"
    environ["STAND_IN"] = stand_in or ""
    run = run_example(script, *words, processes=processes, **environ)
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
    ("with_lightning ddp", {}, ENCODER, LIGHTNINGS, 2),
    ("with_lightning fsdp2", {}, ENCODER, LIGHTNINGS, 3),
]


def weights_in(checkpoint):
    """The bytes of the weights in a checkpoint, by their names or files."""
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=False)
        weights = saved["state_dict"]
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
def test_accelerate_has_no_fsdp_on_cpus(tmp_path):
    """Each process trained alone, or under DDP."""
    code, out, err = start(RECIPES / "with_accelerate.py", tmp_path)
    assert code == 1
    assert err.count("Without accelerators, Accelerate would ignore") == 2, err
    assert "loss" not in out


@needs("accelerate", "transformers")
@pytest.mark.parametrize("processes", [1, 2])
def test_documented_program(processes, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(program_of(ROOT / "docs/frameworks.md").code)
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


def test_combined(monkeypatch):
    """Schedulers and checkpoints reach the parts, which take the steps."""
    monkeypatch.syspath_prepend(RECIPES)
    combined = importlib.import_module("combined").Combined

    def make():
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 6)
        inner = (
            torch.optim.Muon([layer.weight], lr=0.1),
            torch.optim.AdamW([layer.bias], lr=0.1),
        )
        return layer, combined(*inner), inner

    def train(layer, *optimizers):
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
        for optimizer in optimizers:
            optimizer.step()

    layer, optimizer, _ = make()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    train(layer, optimizer)
    again, loaded, inner = make()
    again.load_state_dict(layer.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [each.param_groups[0]["lr"] for each in inner] == [0.05, 0.05]
    train(layer, optimizer)
    train(again, *inner)
    assert torch.equal(again.weight, layer.weight)
    assert torch.equal(again.bias, layer.bias)


@needs("torchtitan")
def test_torchtitan_goes_on_from_its_checkpoint(tmp_path):
    def train(folder):
        words = ["--module", "titan", "--config", "tiny", "--dump-folder", folder]
        done = start("torchtitan.train", *words, stand_in="torchtitan")
        # A step -> its loss.
        found = re.findall(r"step: +(\d+) .*?loss: +([\d.]+)", done[1] + done[2])
        return done, dict(found)

    done, straight = train(tmp_path / "straight")
    assert_checked(done, TITAN, steps=4)
    middle = Path("checkpoint", "step-2")
    shutil.copytree(tmp_path / "straight" / middle, tmp_path / "resumed" / middle)
    done, resumed = train(tmp_path / "resumed")
    # Of the three one is torchtitan's, with lr=0, so that there is state to load into.
    assert_checked(done, TITAN, steps=3)
    assert resumed == {step: straight[step] for step in ("3", "4")}


def test_versions_are_written_down():
    text = (ROOT / "docs" / "frameworks.md").read_text()
    for package in env.FRAMEWORKS:
        name = package.replace("==", " ")
        assert name in " ".join(text.split())
    for recipe in RECIPES.glob("*.py"):
        assert f"../examples/frameworks/{recipe.name}" in text
