"""Runs recipes, each on as many processes as it asks for.

A set of processes serves all recipes that want as many, one after the other. The process
that started them hands out the names, waits for each one's verdict, and ends a set that is
late or of which a process failed; the recipes that are left get a new one.
"""

import importlib
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import place
import torch.distributed as dist
from one_process import OneProcess
from processes import connect, Processes


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


def work(here: place.Place, name: str) -> dict[str, Any]:
    place.settle(here)
    return run_here(recipes()[name])


def run_here(chosen: Recipe) -> dict[str, Any]:
    """This process's verdict."""
    if chosen.connect and not dist.is_initialized():
        connect(place.here, COLLECTIVE.total_seconds(), place.backend())
    try:
        return verdict_of(chosen.function())
    except Wrong as error:
        return {"problems": [str(error)]}


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


def verdicts_of(processes: Processes, chosen: Recipe) -> list[dict[str, Any]]:
    """By rank; of a process that gives none, that it does not."""
    answers = processes.answers(work, chosen.name, seconds=SECONDS)
    return [
        {"trace": error, "problems": error.strip().splitlines()[-1:], "answered": order}
        if error
        else {**verdict, "answered": order}
        for verdict, error, order in answers
    ]


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
                group = group or Processes(size)
                verdicts = verdicts_of(group, each)
                holds &= report(each, verdicts)
                if any("trace" in v for v in verdicts):
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
