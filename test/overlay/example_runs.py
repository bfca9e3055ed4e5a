"""Runs an example as torchrun would, on processes that are forked after torch is imported."""

import importlib.util
import os
import runpy
import sys
import warnings
from typing import NamedTuple

import pytest
from examples.processes import Processes


if importlib.util.find_spec("torch") is None:
    pytest.skip("there is no torch", allow_module_level=True)


SECONDS = 120
# What every example gets: the CPU, and words on whatever it does that is not right.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "always"}


class Run(NamedTuple):
    code: int
    out: str
    err: str


def run_example(script, *options, processes=4, patch=None):
    """Exit code and output of all processes. ``patch`` is called in each before ``script`` is run."""
    argv = [str(script), *map(str, options)]
    with Processes(processes) as started:
        answers = started.answers(_run, argv, patch, seconds=SECONDS)
    codes = [answer.result.code if answer.result else 1 for answer in answers]
    runs = [answer.result or Run(1, "", answer.error) for answer in answers]
    return Run(max(codes), "".join(r.out for r in runs), "".join(r.err for r in runs))


def _run(place, argv, patch):
    os.environ.update(ENVIRONMENT)
    if place.size > 1:
        _be_a_rank(place)
    warnings.simplefilter("always")
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    outputs = [place.folder / f"{name}{place.rank}" for name in ("out", "err")]
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
    sys.stdout.reconfigure(line_buffering=True)
    code = 0
    try:
        if patch is not None:
            patch(place)
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code or 0
    return Run(code, *(path.read_text() for path in outputs))


def _be_a_rank(place):
    """Makes this process one of those that torchrun has started."""
    import torch.distributed as dist

    meeting = dist.FileStore(str(place.folder / "meeting"), place.size)
    if place.rank == 0:
        # Kept, since it serves the others.
        _be_a_rank.store = dist.TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False
        )
        meeting.set("port", str(_be_a_rank.store.port))
    os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.size)}
    os.environ |= {"LOCAL_RANK": str(place.rank), "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = meeting.get("port").decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
