"""Processes over gloo, one thread each, that run one function and hand back what it returns."""

from __future__ import annotations

import datetime
import importlib
import logging
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess


GRACE_SECONDS = 5


class Failed(Exception):
    """A rank raised, died or did not come back in time."""


def run(module: str, job: Any, world: int, timeout: float) -> list[Any]:
    """``work(rank, world, job)`` of the bench's ``module`` on ``world`` ranks; the results by rank.

    It goes by its name, since to import it is to import torch, which this process need not.

    Raises:
        Failed: with the first failing rank's traceback. No process is left behind.
    """
    context = multiprocessing.get_context("spawn")
    # Read by the maths libraries when they load, before set_num_threads can be called.
    os.environ["OMP_NUM_THREADS"] = "1"
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank,
                    args=(module, job, rank, world, folder, timeout, theirs),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collect(pipes, timeout)
        finally:
            _end(processes, pipes)


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        missing = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(missing, deadline - time.monotonic())
        if not ready:
            late = [rank for rank in range(len(pipes)) if rank not in results]
            raise Failed(f"ranks {late} did not finish within {timeout:.0f} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, result = pipe.recv()
            except EOFError:
                raise Failed(f"rank {rank} died") from None
            if not ok:
                raise Failed(f"rank {rank}:\n{result}")
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


def _end(processes: list[BaseProcess], pipes: list[Connection]) -> None:
    for pipe in pipes:
        pipe.close()  # what a rank waits for before it goes, or goes at once
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _rank(
    module: str,
    job: Any,
    rank: int,
    world: int,
    folder: str,
    timeout: float,
    pipe: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # DTensor's advice on slow redistributions is about stock Muon, once a rank.
    torch._logging.set_logs(all=logging.ERROR)
    done = threading.Event()
    threading.Thread(target=_die_with_parent, args=(pipe, done), daemon=True).start()
    try:
        # A file needs no port; the timeout ends a rank whose peers are gone.
        dist.init_process_group(
            "gloo",
            init_method=Path(folder, "rendezvous").as_uri(),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout),
        )
        work = importlib.import_module(f".{module}", __package__).work
        answer = (True, work(rank, world, job))
        dist.barrier()  # nobody leaves while another still needs it
        dist.destroy_process_group()
    except Exception:
        answer = (False, traceback.format_exc())
    done.set()
    pipe.send(answer)


def _die_with_parent(pipe: Connection, done: threading.Event) -> None:
    """The parent never sends anything: what can be read is the end of the pipe."""
    wait([pipe])
    if not done.is_set():
        os._exit(1)
