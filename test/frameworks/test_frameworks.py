"""The recipes for training frameworks run, and each Muon step in them is that of one process.

`setup_overlay.py test --frameworks` makes an environment that has the frameworks.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tools.overlay import tests
from tools.overlay.repo import ROOT


HERE = Path(__file__).parent
RECIPES = ROOT / "examples" / "frameworks"
SECONDS = 300
# One thread a process: their number changes rounding.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# Of two Llama layers: four of attention, three of the MLP.
LLAMA = 2 * 7
# Of two layers of nn.TransformerEncoderLayer: in_proj, out_proj, linear1, linear2.
ENCODER = 2 * 4
# Query, key and value are one matrix.
TITAN = 2 * 5
STEPS = 3


def needs(name):
    return pytest.mark.skipif(
        importlib.util.find_spec(name) is None,
        reason=f"{name} is not installed: run `setup_overlay.py test --frameworks`",
    )


def start(*words, processes=2, stand_in=None, **environ):
    """Exit code, output and errors of a checked program, no process of which outlives this."""
    command = [sys.executable, HERE / "checked.py"]
    if stand_in is not None:
        command += ["--stand-in", stand_in]
    variables = {**os.environ, **ENVIRONMENT, **environ}
    # Other tests execute the same lines of the optimizer.
    variables.pop("COVERAGE_PROCESS_CONFIG", None)
    with subprocess.Popen(
        [*map(str, [*command, processes, *words])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def assert_checked(done, matrices, steps=STEPS, processes=2):
    """Each rank compared ``matrices`` matrices in each of ``steps`` steps."""
    code, out, err = done
    assert code == 0, err[-4000:]
    lines = re.findall(r"^rank (\d): (\d+) matrices, (\d+) steps$", out, re.MULTILINE)
    expected = [
        (str(rank), str(matrices * steps), str(steps)) for rank in range(processes)
    ]
    assert sorted(lines) == expected


@pytest.mark.parametrize("version", [1, 2])
def test_wrong_step_is_found(version):
    pytest.importorskip("torch")
    program = HERE / "cases" / "wrong.py"
    assert_checked(start(program, version, 0), 1, steps=2)
    code, _, err = start(program, version, 1e-6)
    assert code == 1
    assert "a parameter of (5, 6) differs" in err


CPU = {"ACCELERATE_USE_CPU": "true"}


@needs("accelerate")
@needs("transformers")
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("accelerate_ddp", CPU),
        ("accelerate_fsdp2", {"stand_in": "accelerate"}),
        ("trainer_ddp", {}),
        ("trainer_fsdp1", {"stand_in": "accelerate"}),
        ("trainer_fsdp2", {"stand_in": "accelerate"}),
        ("tp_plan", {}),
    ],
)
def test_transformers_recipe(recipe, options):
    assert_checked(start(RECIPES / f"{recipe}.py", **options), LLAMA)


@needs("lightning")
@pytest.mark.parametrize(
    "recipe", ["lightning_ddp", "lightning_fsdp2", "fabric_ddp", "fabric_fsdp2"]
)
def test_lightning_recipe(recipe):
    assert_checked(start(RECIPES / f"{recipe}.py"), ENCODER)


@needs("accelerate")
@needs("transformers")
@pytest.mark.parametrize("recipe", ["accelerate_fsdp2", "trainer_fsdp2"])
@pytest.mark.parametrize(
    ("config", "ram"), [("dtensor", 0), ("dtensor", 1), ("fsdp", 1)]
)
def test_prepared_after_muon_was_built(recipe, config, ram):
    words = [HERE / "cases" / "variant.py", recipe, "--config", config, "--ram", ram]
    assert_checked(start(*words, stand_in="accelerate"), LLAMA)


@needs("accelerate")
@needs("transformers")
@pytest.mark.parametrize(
    ("fsdp", "order", "config"),
    [(1, "after", "module"), (1, "before", "module"), (2, "after", "dtensor")],
)
def test_accelerate_order(fsdp, order, config):
    words = ["--fsdp", fsdp, "--order", order, "--config", config]
    program = HERE / "cases" / "accelerate_order.py"
    assert_checked(start(program, *words, stand_in="accelerate"), LLAMA)


@needs("accelerate")
@needs("transformers")
@pytest.mark.parametrize("config", ["fsdp", "dtensor"])
def test_fsdp1_says_what_it_needs(config):
    words = ["--fsdp", 1, "--order", "before", "--config", config]
    program = HERE / "cases" / "accelerate_order.py"
    code, out, err = start(program, *words, stand_in="accelerate")
    assert code == 1
    assert err.count("Error: ") == err.count("module=model") == 2, err[-4000:]
    assert "steps" not in out


@needs("accelerate")
@needs("transformers")
def test_accelerate_goes_on_from_its_checkpoint(tmp_path):
    program = HERE / "cases" / "accelerate_checkpoint.py"
    assert_checked(start(program, tmp_path, stand_in="accelerate"), LLAMA, steps=6)


def losses(out):
    return dict(re.findall(r"step: +(\d+) .*?loss: +([\d.]+)", out))


@needs("torchtitan")
def test_torchtitan_goes_on_from_its_checkpoint(tmp_path):
    def train(folder):
        words = ["--module", "titan", "--config", "tiny", "--dump-folder", folder]
        environ = {"stand_in": "torchtitan", "PYTHONPATH": str(RECIPES)}
        done = start("torchtitan.train", *words, **environ)
        return done, losses(done[1] + done[2])

    done, straight = train(tmp_path / "straight")
    assert_checked(done, TITAN, steps=4)
    assert sorted(straight) == ["1", "2", "3", "4"]
    middle = Path("checkpoint", "step-2")
    shutil.copytree(tmp_path / "straight" / middle, tmp_path / "resumed" / middle)
    done, resumed = train(tmp_path / "resumed")
    # Of the three one is torchtitan's, with lr=0, so that there is state to load into.
    assert_checked(done, TITAN, steps=3)
    assert resumed == {step: straight[step] for step in ("3", "4")}


def test_versions_are_written_down():
    text = (ROOT / "docs" / "frameworks.md").read_text()
    for name, version in tests.FRAMEWORKS.items():
        assert f"{name} {version}" in " ".join(text.split())
    for recipe in RECIPES.glob("*.py"):
        assert f"../examples/frameworks/{recipe.name}" in text
