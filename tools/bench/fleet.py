"""Processes, with one thread or one accelerator each, that run one function and return its results."""

import logging
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.multiprocessing.spawn import ProcessException


# A collective fails after this share of a run's seconds, so that a traceback names it.
COLLECTIVES = 0.8


class Failed(Exception):
    """A process raised, ended, or took too long."""


def run(
    work: Callable[[int, int, Any], Any],
    job: Any,
    world: int,
    seconds: float,
    device: str = "cpu",
) -> list[Any]:
    """The results of ``work(rank, world, job)`` on ``world`` ranks, by rank.

    Args:
        device: the type of device. Each rank has one, and the device's own backend.

    Raises:
        Failed: with the traceback of the first rank that failed; or the ranks took more than ``seconds``.
    """
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", __name__])
    # A fork cannot use CUDA if an import has asked the server for its devices.
    start_method = "forkserver" if device == "cpu" else "spawn"
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        ranks = start_processes(
            _rank,
            (world, folder, seconds, device, work, job),
            world,
            join=False,
            daemon=True,
            start_method=start_method,
        )
        try:
            while not ranks.join(ends - time.monotonic()):
                if time.monotonic() > ends:
                    raise Failed(f"the ranks took more than {seconds:.0f} s")
        except ProcessException as error:
            raise Failed(str(error)) from None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        results = []
        for rank in range(world):
            answer = Path(folder, str(rank))
            results.append(pickle.loads(answer.read_bytes()))
        return results


def _rank(
    rank: int,
    world: int,
    folder: str,
    seconds: float,
    device: str,
    work: Callable[[int, int, Any], Any],
    job: Any,
) -> None:
    torch.set_num_threads(1)
    # DTensor warns about slow redistributions of stock Muon, once per rank.
    torch._logging.set_logs(all=logging.ERROR)
    interfaces = [name for _, name in socket.if_nameindex()]
    if "lo" in interfaces:
        # gloo may be unable to resolve the name of this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    accelerator = None
    if device != "cpu":
        accelerator = torch.device(device, rank)
        torch.accelerator.set_device_index(accelerator)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=Path(folder, "rendezvous").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVES * seconds),
        device_id=accelerator,
    )
    result = work(rank, world, job)
    answer = Path(folder, str(rank))
    answer.write_bytes(pickle.dumps(result))
    dist.barrier()  # No rank leaves while another one still needs it.
    dist.destroy_process_group()


def synchronize(device: str) -> None:
    """Waits until this rank's accelerator is idle."""
    if device != "cpu":
        torch.accelerator.synchronize()
