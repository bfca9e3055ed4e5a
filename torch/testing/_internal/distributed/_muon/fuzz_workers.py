"""A few processes that play one plan after the other, for a process that draws plans and shrinks them."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from multiprocessing import connection
from typing import Any, TYPE_CHECKING

import torch
from torch.testing._internal.distributed._muon.fuzz_plans import WORLD
import torch.distributed as dist


if TYPE_CHECKING:
    from torch.testing._internal.distributed._muon.fuzz_plans import Plan


# Seconds after which ranks that have not come back never will.
PATIENCE = 120
# Process groups that meshes brought along cost memory and threads.
PLANS_A_LIFE = 400


def work(rank: int, port: int, pipe: connection.Connection) -> None:
    """One rank: plays what comes through ``pipe`` until that is None."""
    from torch.testing._internal.distributed._muon.fuzz_player import Player, TIMEOUT

    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, WORLD, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT
    )
    control = dist.new_group(timeout=3 * TIMEOUT)
    while (plan := pipe.recv()) is not None:
        try:
            pipe.send(Player(plan, rank, control).run())
        except Exception:
            pipe.send([traceback.format_exc()])
    dist.destroy_process_group()


class Workers:
    """Starts the ranks when there is a plan for them, and others after one that left problems."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pipes: list[connection.Connection] = []
        self.store: dist.TCPStore | None = None
        self.plans = 0

    def play(self, plan: Plan) -> list[list[str]]:
        """The problems of each rank with ``plan``."""
        if self.plans >= PLANS_A_LIFE:
            self.end()
        if not self.processes:
            self.start()
        self.plans += 1
        for pipe in self.pipes:
            pipe.send(plan)
        found: list[list[str]] = []
        for pipe in self.pipes:
            try:
                found.append(pipe.recv() if pipe.poll(PATIENCE) else ["came to no end"])
            except (EOFError, ConnectionError):
                found.append(["died"])
        if any(found):
            self.end(kindly=False)
        return found

    def start(self) -> None:
        if sys.platform != "linux" or multiprocessing.get_start_method() == "fork":
            context = multiprocessing.get_context("spawn")
        else:
            context = multiprocessing.get_context()
        self.store = dist.TCPStore(
            "localhost", 0, WORLD, is_master=True, wait_for_workers=False
        )
        for rank in range(WORLD):
            mine, its = context.Pipe()
            process = context.Process(
                target=work, args=(rank, self.store.port, its), daemon=True
            )
            process.start()
            its.close()
            self.processes.append(process)
            self.pipes.append(mine)
        self.plans = 0

    def end(self, kindly: bool = True) -> None:
        for pipe in self.pipes if kindly else ():
            pipe.send(None)
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            if kindly:
                process.join(60)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self.processes, self.pipes, self.store = [], [], None
