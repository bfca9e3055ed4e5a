"""The examples run, under torchrun too, and say what they should."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from tools.overlay import verify
from tools.overlay.repo import ROOT


EXAMPLES = ROOT / "examples"
SECONDS = 120
TINY = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "16"]
STEPS = 4

# The example, but its second process sees another gradient than the first one.
PERTURBED = f"""
import os, runpy, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import measure
right = measure.seeded_gradient

def wrong(name, shape, step):
    gradient = right(name, shape, step)
    if os.environ["RANK"] == "1":
        gradient[-1, -1] += 1e-3
    return gradient

measure.seeded_gradient = wrong
runpy.run_path({str(EXAMPLES / "train_moe.py")!r}, run_name="__main__")
"""


# In the place of torchrun: forks its processes after torch is imported, which takes seconds.
FORKS = """
import os, runpy, sys

import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining

count, sys.argv = int(sys.argv[1]), sys.argv[2:]
sys.path[0] = os.path.dirname(sys.argv[0])
children, pipes = [], []
for rank in range(count):
    reads, writes = os.pipe()
    if child := os.fork():
        children.append(child)
        pipes.append(writes)
        continue
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": os.read(reads, 10).decode()}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()

# Not before, since it has threads.
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
for pipe in pipes:
    os.write(pipe, str(store.port).encode())
codes = [os.waitpid(child, 0)[1] for child in children]
sys.exit(1 if any(codes) else 0)
"""


def run_example(script, *options, processes=4, torchrun=False):
    """Exit code and output of an example, no process of which outlives this."""
    command = [sys.executable]
    if processes > 1 and not torchrun:
        command += ["-c", FORKS, str(processes)]
    elif processes > 1:
        # A rendezvous of its own, for runs of the tests beside each other.
        command += ["-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "localhost:0"]
        command += ["--nproc-per-node", str(processes)]
    sizes = [*TINY, "--steps", str(STEPS)]
    with subprocess.Popen(
        [*command, *map(str, [script, *sizes, *options])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**verify.environment(), "PYTHONWARNINGS": "always"},
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except BaseException:
            # torchrun ends its processes, which are in sessions of their own.
            if torchrun:
                process.send_signal(signal.SIGTERM)
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
            raise
    return process.returncode, out, err


def losses_of(path):
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What ``train_gpt.py`` writes on one process."""
    place = tmp_path_factory.mktemp("alone")
    code, _, err = run_example(EXAMPLES / "train_gpt.py", *files(place), processes=1)
    assert code == 0, err
    return place


def files(place):
    return ["--losses", place / "losses", "--save", place / "model.pt"]


# FSDP2 is what the tests of `verify` train with.
@pytest.mark.parametrize("parallel", ["fsdp1", "ddp"])
def test_gpt(alone, tmp_path, parallel):
    torch = pytest.importorskip("torch")
    code, out, err = run_example(
        EXAMPLES / "train_gpt.py",
        "--parallel",
        parallel,
        *files(tmp_path),
        processes=2,
        torchrun=parallel == "ddp",
    )
    assert code == 0, err
    assert "Warning" not in err
    assert "loss on held-out text" in out
    one, many = (losses_of(place / "losses") for place in (alone, tmp_path))
    assert len(many) == STEPS
    assert many == pytest.approx(one, abs=0.01)
    expected, found = (torch.load(p / "model.pt") for p in (alone, tmp_path))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-3, rtol=0)


def numbers(out, row):
    """The numbers of a row of the table."""
    (line,) = re.findall(rf"^  {re.escape(row)}  +(.*)$", out, re.MULTILINE)
    return [float(word) for word in re.findall(r"\d[\d.e-]*", line)]


def assert_table(out, matrices, silent):
    first = numbers(out, "loss, first step")
    assert first[0] == pytest.approx(first[1], abs=1e-3)
    assert numbers(out, "largest difference of loss, any step")[0] < 0.05
    assert numbers(out, "Newton-Schulz calls a step") == [matrices, matrices]
    *each, total = numbers(out, "Newton-Schulz calls, a Muon step")
    assert (len(each), total) == (4, matrices)
    assert min(each) > 0
    assert numbers(out, f"KiB sent over {silent}, a Muon step") == [0] * 5
    # Which would say nothing if nobody could see what is sent over such a group.
    assert min(numbers(out, f"KiB sent over {silent}, a batch")) > 0
    assert f"bitwise equal: yes ({matrices} matrices, 3 steps)" in out


# With four tokens in a batch most experts get none, and some processes not one.
FEW_TOKENS = ["--batch", "4", "--context", "1"]


@pytest.mark.parametrize("options", [[], FEW_TOKENS], ids=["many", "few"])
def test_moe(options):
    code, out, err = run_example(EXAMPLES / "train_moe.py", *options)
    assert code == 0, err
    assert "Warning" not in err
    assert_table(out, 2 * (5 + 8), "ep")
    assert min(numbers(out, "KiB sent over dp (experts), a Muon step")) > 0


def test_pipeline():
    code, out, err = run_example(EXAMPLES / "train_pipeline.py")
    assert code == 0, err
    assert "Warning" not in err
    assert_table(out, 2 * 6, "pp")
    assert min(numbers(out, "KiB sent over dp (replicas of a stage), a Muon step")) > 0


def test_difference_is_found(tmp_path):
    script = tmp_path / "perturbed.py"
    script.write_text(PERTURBED)
    code, out, err = run_example(script, "--ep", "1", processes=2)
    assert code == 1
    assert "bitwise equal: NO, rank " in out
    assert "train_moe: not bitwise equal with identical gradients: rank " in err
