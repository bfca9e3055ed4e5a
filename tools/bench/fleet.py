"""Processes, with one thread or one accelerator each, that run one function and return its results."""

import logging
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


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
    ends = time.monotonic() + seconds
    # A fork cannot use CUDA if an import has asked the server for its devices.
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    context.set_forkserver_preload(["torch.distributed.fsdp", __name__])
    found = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        context.Pool(world) as pool,
    ):
        of_rank = partial(_rank, work, job, world, folder, seconds, device)
        # All ranks wait for each other, so each process takes one.
        results = pool.imap_unordered(of_rank, range(world))
        try:
            while len(found) < world:
                rank, result = results.next(max(0, ends - time.monotonic()))
                found[rank] = result
        except multiprocessing.TimeoutError:
            raise Failed(f"the ranks took more than {seconds:.0f} s") from None
        except Exception as error:
            raise Failed("".join(traceback.format_exception(error))) from None
    return [found[rank] for rank in range(world)]


def _rank(
    work: Callable[[int, int, Any], Any],
    job: Any,
    world: int,
    folder: str,
    seconds: float,
    device: str,
    rank: int,
) -> tuple[int, Any]:
    torch.set_num_threads(1)
    # DTensor warns about slow redistributions of stock Muon, once per rank.
    torch._logging.set_logs(all=logging.ERROR)
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
    dist.barrier()  # No rank leaves while another one still needs it.
    dist.destroy_process_group()
    return rank, result


def synchronize(device: str) -> None:
    """Waits until this rank's accelerator is idle."""
    if device != "cpu":
        torch.accelerator.synchronize()
