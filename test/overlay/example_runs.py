"""Runs an example as torchrun would, on processes that are forked after torch is imported."""

import importlib.util
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import pytest


if importlib.util.find_spec("torch") is None:
    pytest.skip("there is no torch", allow_module_level=True)


SECONDS = 120
# Every example runs on the CPU, and shows its warnings.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "always"}
PRELOADED = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
]


class Run(NamedTuple):
    code: int
    out: str
    err: str


def run_example(script, *options, processes):
    """The largest exit code, and the output of all processes. Ends all of them if one fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as name:
        folder, argv = Path(name), [str(script), *map(str, options)]
        started = [
            context.Process(target=_run, args=(rank, processes, folder, argv))
            for rank in range(processes)
        ]
        for process in started:
            process.start()
        until = time.monotonic() + SECONDS
        running = set(started)
        while running and not any(process.exitcode for process in started):
            if not wait([p.sentinel for p in running], until - time.monotonic()):
                break  # too late
            running = {process for process in running if process.is_alive()}
        time.sleep(1 if running else 0)  # for the errors of the others
        for process in started:
            process.kill()
            process.join()
        texts = (
            "".join(path.read_text() for path in sorted(folder.glob(f"{kind}*")))
            for kind in ("out", "err")
        )
        return Run(max(abs(process.exitcode) for process in started), *texts)


def _run(rank, size, folder, argv):
    import torch
    import torch.distributed as dist

    outputs = ((sys.stdout, "out"), (sys.stderr, "err"))
    for stream, name in outputs:
        descriptor = os.open(folder / f"{name}{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    # torchrun's agent serves the store.
    meeting = dist.FileStore(str(folder / "meeting"), size)
    if rank == 0:
        _run.store = dist.TCPStore("localhost", 0, is_master=True)
        meeting.set("port", str(_run.store.port))
    port = meeting.get("port").decode()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, **ENVIRONMENT}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    warnings.simplefilter("always")
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")
