"""Processes over gloo, with one thread each, that run one function and return its results."""

import logging
import multiprocessing
import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.multiprocessing.spawn import ProcessException


class Failed(Exception):
    """A process raised or ended."""


def run(
    work: Callable[[int, int, Any], Any], job: Any, world: int, seconds: float
) -> list[Any]:
    """The results of ``work(rank, world, job)`` on ``world`` ranks, by rank.

    Raises:
        Failed: with the traceback of the first rank that failed. A collective fails after ``seconds``.
    """
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", __name__])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        job = world, folder, seconds, work, job
        how = {"daemon": True, "start_method": "forkserver"}
        try:
            start_processes(_rank, job, world, **how)
        except ProcessException as error:
            raise Failed(str(error)) from None
        answers = [Path(folder, str(rank)) for rank in range(world)]
        return [pickle.loads(answer.read_bytes()) for answer in answers]


def _rank(
    rank: int,
    world: int,
    folder: str,
    seconds: float,
    work: Callable[[int, int, Any], Any],
    job: Any,
) -> None:
    torch.set_num_threads(1)
    # DTensor warns about slow redistributions of stock Muon, once per rank.
    torch._logging.set_logs(all=logging.ERROR)
    if "lo" in (name for _, name in socket.if_nameindex()):
        # gloo may be unable to resolve the name of this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=Path(folder, "rendezvous").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    Path(folder, str(rank)).write_bytes(pickle.dumps(work(rank, world, job)))
    dist.barrier()  # No rank leaves while another one still needs it.
    dist.destroy_process_group()
