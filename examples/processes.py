"""Starts processes that run functions, hands back what they return, and leaves none behind.

What is imported here is light: whoever only starts processes need not import torch.
"""

import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import (
    get_all_start_methods,
    get_context,
    parent_process,
    resource_tracker,
)
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple


GRACE_SECONDS = 5
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
]


class Failed(Exception):
    """A process raised, ended, or gave no answer in time."""


class Place(NamedTuple):
    """Which one of how many processes this is; they share a folder."""

    rank: int
    size: int
    folder: Path


class Answer(NamedTuple):
    """What a process returned, or why it did not: a traceback, or some words."""

    result: Any = None
    error: str = ""
    # The first answer has the least. Who answers first knows why, if all fail.
    order: int = sys.maxsize


class Processes:
    """``size`` processes that run one function after the other, each with one thread.

    They are forked from one that has imported torch, which takes seconds, where that can be.
    None of them outlives the ``with`` statement, nor this process, however that ends.
    """

    def __init__(self, size: int) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
        methods = get_all_start_methods()
        context = get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload(PRELOADED)
        self.folder = tempfile.TemporaryDirectory(prefix="processes-")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        resource_tracker.ensure_running()  # which would lift the mask
        # Ctrl-C goes to all processes of a terminal. These ones are deaf to it, as a mask is
        # inherited: this process ends them.
        change_mask = getattr(signal, "pthread_sigmask", lambda *_: set())
        mask = change_mask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(size):
                here, there = context.Pipe()
                place = Place(rank, size, Path(self.folder.name))
                # The one that forks has the environment of its own beginning.
                args = (place, there, dict(os.environ))
                process = context.Process(target=_work, args=args, daemon=True)
                process.start()
                there.close()
                self.pipes.append(here)
                self.processes.append(process)
        except BaseException:
            self.end(seconds=0)
            raise
        finally:
            change_mask(signal.SIG_SETMASK, mask)

    def __enter__(self):
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.end(GRACE_SECONDS if kind is None else 0)

    def run(
        self, function: Callable[..., Any], *args: Any, seconds: float
    ) -> list[Any]:
        """What ``function(place, *args)`` returns in each, by rank.

        Raises:
            Failed: with what the first process says that failed.
        """
        answers = self.answers(function, *args, seconds=seconds)
        rank, first = min(
            enumerate(answers), key=lambda a: (not a[1].error, a[1].order)
        )
        if first.error:
            raise Failed(f"rank {rank} of {len(answers)}: {first.error}")
        return [answer.result for answer in answers]

    def answers(
        self, function: Callable[..., Any], *args: Any, seconds: float
    ) -> list[Answer]:
        """As :meth:`run`, but says of each process whether it failed."""
        answers = [Answer(error="no answer in time")] * len(self.pipes)
        until = time.monotonic() + seconds
        waiting: dict[Any, int] = {}
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(pickle.dumps((function, args)))
                waiting[pipe] = rank
            except OSError:
                answers[rank] = Answer(error="the process is gone")
        count = len(waiting)
        while waiting and (left := until - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank, order = waiting.pop(pipe), count - len(waiting)
                try:
                    result, error = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    result, error = None, "the process ended"
                answers[rank] = Answer(result, error, order)
                if error:  # the others may wait for it
                    until = min(until, time.monotonic() + GRACE_SECONDS)
        return answers

    def end(self, seconds: float = GRACE_SECONDS) -> None:
        """Lets them leave for so long, and then ends them."""
        for pipe in self.pipes:
            pipe.close()
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, until - time.monotonic()))
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self.folder.cleanup()


def _work(place: Place, orders: Connection, environ: dict[str, str]) -> None:
    """What a process does: what it is told to, until nobody can tell it any more."""
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    import torch
    import torch.distributed as dist

    # No garbage collection then goes through all that torch is made of, and copies it.
    gc.freeze()
    torch.set_num_threads(1)
    if "lo" in (name for _, name in socket.if_nameindex()):
        # All are on this machine, whose own name gloo may not be able to look up.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        while True:
            function, args = pickle.loads(orders.recv_bytes())
            try:
                answer = (function(place, *args), "")
            except Exception:
                answer = (None, traceback.format_exc())
            orders.send_bytes(pickle.dumps(answer))
    except (EOFError, OSError):
        pass
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_with_parent() -> None:
    wait([parent_process().sentinel])
    os._exit(1)


def connect(place: Place, seconds: float, backend: str = "gloo") -> None:
    """Makes the process group of all, in which a collective gives up after so many seconds."""
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        # On a free port that rank 0 tells the others through the file.
        init_method=(place.folder / "rendezvous").as_uri(),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=seconds),
    )


def leave_on_signals() -> None:
    """Ctrl-C and SIGTERM end this process without a traceback, and by its ``finally`` those
    that it started."""
    signal.signal(signal.SIGINT, _leave)
    # torchrun sends it to processes that wait in a collective, where Python cannot answer.
    if "RANK" not in os.environ:
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
