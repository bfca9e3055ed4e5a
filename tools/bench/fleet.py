"""Processes over gloo, one thread each, that run one function and hand back what it returns."""

from __future__ import annotations

import importlib
import logging
from typing import Any, TYPE_CHECKING

from processes import connect, Failed, Processes


if TYPE_CHECKING:
    from processes import Place

__all__ = ["Failed", "run"]


def run(module: str, job: Any, world: int, timeout: float) -> list[Any]:
    """``work(rank, world, job)`` of the bench's ``module`` on ``world`` ranks; the results by rank.

    It goes by its name, since to import it is to import torch, which this process need not.

    Raises:
        Failed: with the first failing rank's traceback. No process is left behind.
    """
    with Processes(world) as ranks:
        return ranks.run(_rank, module, job, timeout, seconds=timeout)


def _rank(place: Place, module: str, job: Any, timeout: float) -> Any:
    import torch
    import torch.distributed as dist

    # DTensor's advice on slow redistributions is about stock Muon, once a rank.
    torch._logging.set_logs(all=logging.ERROR)
    connect(place, timeout)
    work = importlib.import_module(f".{module}", __package__).work
    result = work(place.rank, place.size, job)
    dist.barrier()  # nobody leaves while another still needs it
    return result
