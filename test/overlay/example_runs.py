"""Runs an example as torchrun would, on processes that are forked after torch is imported."""

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
from tools.overlay.payload import ROOT


torch = pytest.importorskip("torch")


SECONDS = 300
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
    outs: list[str]
    err: str

    @property
    def out(self):
        return "".join(self.outs)


def run_example(script, *options, processes, **environ):
    """The largest exit code, and the output of all processes. Ends all of them if one fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # As torchrun's agent, this process serves the store.
    store = torch.distributed.TCPStore("localhost", 0, is_master=True)
    environ = {
        **ENVIRONMENT,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Lightning knows torchrun by it.
        "TORCHELASTIC_RUN_ID": "one",
        **environ,
    }
    with tempfile.TemporaryDirectory() as name:
        folder, argv = Path(name), [str(script), *map(str, options)]
        started = [
            context.Process(target=_run, args=(str(rank), folder, argv, environ))
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
        for process in started:
            process.join(5)  # for the errors of the others
            process.kill()
            process.join()
        outs, errs = (
            [path.read_text() for path in sorted(folder.glob(f"{kind}*"))]
            for kind in ("out", "err")
        )
        code = max(abs(process.exitcode) for process in started)
        return Run(code, outs, "".join(errs))


def _run(rank, folder, argv, environ):
    os.chdir(folder)
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        os.dup2(os.open(f"{name}{rank}", os.O_CREAT | os.O_WRONLY), stream.fileno())
    sys.stdout.reconfigure(line_buffering=True)
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, **environ}
    warnings.simplefilter("always")
    sys.argv = argv
    sys.path[:0] = [str(Path(argv[0]).parent), str(ROOT)]
    runpy.run_path(argv[0], run_name="__main__")
