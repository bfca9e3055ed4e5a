"""Runs recipes, each on as many processes as it asks for.

A set of processes serves all recipes that want as many, one after the other. The process
that started them hands out the names, waits for each one's verdict, and ends a set that is
late or of which a process failed; the recipes that are left get a new one.
"""

import importlib
import os
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import place
import torch.distributed as dist
import torch.multiprocessing as mp
from one_process import OneProcess


MODULES = [
    "single",
    "dtensor",
    "fsdp",
    "ddp",
    "tensor_parallel",
    "hsdp",
    "fsdp_tp",
    "experts",
    "context",
    "pipeline",
    "custom",
    "migration",
    "debugging",
    "tuning",
]

# Of one recipe, after which its processes are ended; a collective gives up before.
SECONDS = 120
COLLECTIVE = timedelta(seconds=60)


class Recipe(NamedTuple):
    function: Callable[[], Any]
    processes: int
    connect: bool

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{self.function.__name__}"


class Wrong(Exception):
    """What a recipe shows does not hold."""


_recipes: dict[str, Recipe] = {}


def recipe(processes: int, connect: bool = True) -> Callable[[Callable], Callable]:
    """Marks a function as a recipe.

    It returns the :class:`OneProcess` that watched it, several of them, or in words what it
    has shown. It raises where that does not hold.

    Args:
        processes: how many run it, all at the same time.
        connect: whether they need a process group.
    """

    def register(function: Callable) -> Callable:
        made = Recipe(function, processes, connect)
        _recipes[made.name] = made
        return function

    return register


def recipes() -> dict[str, Recipe]:
    """All there are, by name."""
    for name in MODULES:
        importlib.import_module(name)
    return _recipes


def check(holds: bool, words: str) -> None:
    if not holds:
        raise Wrong(words)


# In the processes


def work(rank: int, size: int, folder: Path, orders: Connection) -> None:
    """Runs the recipes whose names come through ``orders``, until it is closed."""
    place.settle(place.Place(rank, size, folder))
    try:
        while True:
            orders.send(run_here(recipes()[orders.recv()]))
    except (EOFError, OSError):
        pass  # that process has what it wanted, or is gone
    if dist.is_initialized():
        dist.destroy_process_group()


def run_here(chosen: Recipe) -> dict[str, Any]:
    """This process's verdict."""
    try:
        if chosen.connect and not dist.is_initialized():
            # On a free port that rank 0 tells the others through the folder's file.
            dist.init_process_group(
                place.backend(),
                init_method=(place.here.folder / "rendezvous").as_uri(),
                rank=place.here.rank,
                world_size=place.here.size,
                timeout=COLLECTIVE,
            )
        return verdict_of(chosen.function())
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        where = f"{Path(last.filename).name}:{last.lineno}"
        words = str(error).strip() or "no message"
        return {
            "raised": not isinstance(error, Wrong),
            "problems": [f"{type(error).__name__} at {where}: {words}"],
            "trace": traceback.format_exc(),
        }


def verdict_of(returned: Any) -> dict[str, Any]:
    parts = returned if isinstance(returned, tuple) else (returned,)
    whole: dict[str, Any] = {"proofs": [], "words": [], "problems": []}
    for part in parts:
        if isinstance(part, OneProcess):
            verdict = part.verdict()
            whole["proofs"].append(verdict)
            whole["problems"] += verdict["problems"]
        else:
            whole["words"].append(str(part))
    return whole


# In the process that starts them


class ProcessSet:
    """``size`` processes that run one recipe after the other."""

    def __init__(self, size: int) -> None:
        # Forked from one that has imported torch, which takes seconds, where that can be.
        methods = mp.get_all_start_methods()
        context = mp.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload(
                ["torch.distributed.fsdp", "torch.distributed.pipelining"]
            )
            start_deaf_forkserver()
        self.size = size
        self.folder = tempfile.TemporaryDirectory(prefix="recipes")
        self.pipes: list[Connection] = []
        self.processes = []
        try:
            for rank in range(size):
                here, there = context.Pipe()
                process = context.Process(
                    target=work, args=(rank, size, Path(self.folder.name), there)
                )
                process.daemon = True
                process.start()
                there.close()
                self.pipes.append(here)
                self.processes.append(process)
        except BaseException:
            self.end(seconds=0)
            raise

    def run(self, chosen: Recipe) -> list[dict[str, Any]]:
        """The verdicts, by rank; of a process that gives none, that it does not."""
        verdicts: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + SECONDS
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send(chosen.name)
            except OSError:
                verdicts[rank] = failed("the process is gone")
                del waiting[pipe]
        while waiting and time.monotonic() < until:
            for pipe in wait(list(waiting), timeout=max(0, until - time.monotonic())):
                rank = waiting.pop(pipe)
                try:
                    verdicts[rank] = pipe.recv()
                except (EOFError, OSError):
                    verdicts[rank] = failed("the process ended")
                verdicts[rank]["answered"] = len(verdicts)
            if any(v.get("raised") for v in verdicts.values()):
                # The others may wait for it.
                until = min(until, time.monotonic() + 5)
        for rank in waiting.values():
            verdicts[rank] = failed("no answer in time")
        return [verdicts[rank] for rank in range(self.size)]

    def end(self, seconds: float = 5) -> None:
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


def start_deaf_forkserver() -> None:
    """Starts what forks the processes, if it does not run yet.

    Ctrl-C goes to all processes of a terminal. These ones are deaf to it, as a mask is
    inherited: the process that started them ends them.
    """
    resource_tracker.ensure_running()  # which would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def failed(words: str) -> dict[str, Any]:
    return {"raised": True, "problems": [words]}


def run_all(chosen: list[Recipe]) -> int:
    """Runs ``chosen`` on processes of its own, and prints a line each.

    Returns the exit code: 1 if one of them does not hold.
    """
    holds = True
    for size in sorted({recipe.processes for recipe in chosen}):
        group = None
        try:
            for each in sorted(chosen, key=lambda r: r.connect):
                if each.processes != size:
                    continue
                group = group or ProcessSet(size)
                verdicts = group.run(each)
                holds &= report(each, verdicts)
                if any(v.get("raised") for v in verdicts):
                    group.end()
                    group = None
            if group is not None:
                group.end()
        except BaseException:
            if group is not None:
                group.end(seconds=0)
            raise
    return 0 if holds else 1


def report(done: Recipe, verdicts: list[dict[str, Any]]) -> bool:
    problems = list(dict.fromkeys(problems_of(verdicts)))
    words = problems[0] if problems else "; ".join(words_of(verdicts))
    start = f"{'FAIL' if problems else 'ok':4}  {done.name:36} {counted(done):>12}"
    print(f"{start}, {words}", flush=True)
    for problem in problems[1:]:
        print(f"        {problem}", file=sys.stderr)
    for trace in {v["trace"] for v in verdicts if "trace" in v}:
        print(textwrap.indent(trace, "        "), file=sys.stderr)
    return not problems


def counted(recipe: Recipe) -> str:
    return f"{recipe.processes} process{'es' if recipe.processes > 1 else ''}"


def problems_of(verdicts: list[dict[str, Any]]) -> Iterator[str]:
    # Whoever answered first knows why; the others may only have lost it.
    late = len(verdicts) + 1
    ranks = range(len(verdicts))
    for rank in sorted(ranks, key=lambda r: verdicts[r].get("answered", late)):
        for problem in verdicts[rank]["problems"]:
            yield f"rank {rank}: {problem}"
    for proofs in zip(*(v.get("proofs", []) for v in verdicts)):
        names = {name for proof in proofs for name in proof["names"]}
        due, made = len(names) * proofs[0]["steps"], sum(p["calls"] for p in proofs)
        if proofs[0]["once"] and made != due:
            yield f"{made} Newton-Schulz calls instead of {due}"
        known: dict[str, int] = {}
        for proof in proofs:
            for what, digest in proof["digests"].items():
                if known.setdefault(what, digest) != digest:
                    yield f"{what} differs between ranks"


def words_of(verdicts: list[dict[str, Any]]) -> Iterator[str]:
    yield from verdicts[0]["words"]
    counts, first = [], None
    for proofs in zip(*(v["proofs"] for v in verdicts)):
        first = first or proofs[0]
        counts.append(str(len({name for proof in proofs for name in proof["names"]})))
    if first is not None:
        once = ", each orthogonalized once" if first["once"] else ""
        yield f"{' + '.join(counts)} matrices bitwise equal, {first['steps']} steps{once}"


def run_as_one_of(chosen: list[Recipe]) -> int:
    """As one of the processes that torchrun started; recipes for others are left out.

    Returns the exit code: 1 if one does not hold, 2 if none was run.
    """
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    place.settle(place.Place(rank, size, Path(tempfile.gettempdir())))
    dist.init_process_group(place.backend(), timeout=COLLECTIVE)
    holds = True
    here = [each for each in chosen if each.processes == size and each.connect]
    if rank == 0:
        for each in chosen:
            if each not in here:
                wants = counted(each) + ("" if each.connect else " without torchrun")
                print(f"left out  {each.name}: it wants {wants}", flush=True)
    for each in here:
        verdicts: list[Any] = [None] * size
        dist.all_gather_object(verdicts, run_here(each))
        if rank == 0:
            report(each, verdicts)
        holds &= not list(problems_of(verdicts))
    # torchrun ends the others when the first of them leaves with an error.
    dist.barrier()
    dist.destroy_process_group()
    if not here and rank == 0:
        print("recipes: none was run", file=sys.stderr)
    return 2 if not here else 0 if holds else 1
