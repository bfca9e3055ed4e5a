"""Where a step of ours spends its time, by wrapping the engine's functions from outside."""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from contextlib import contextmanager
from typing import Any, TYPE_CHECKING

import torch.distributed as dist


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


PIPELINE, BUFFERS, GRAD_STATUS = (
    f"_muon_engine.runtime.{name}" for name in ("pipeline", "buffers", "grad_status")
)
OTHER = "everything else"
LAUNCH, WAIT_GATHER, WAIT_SCATTER = (
    "start collectives",
    "wait for gather",
    "wait for scatter",
)
STATUSES = "grad statuses and bookkeeping"

# Where (module below torch.optim, dotted name) -> phase. A function's time is its own, without that of listed ones
# that it calls.
PHASES: dict[tuple[str, str], str] = {
    (PIPELINE, "Pipeline.accumulate"): "momentum",
    (PIPELINE, "MatrixState.prepared"): "prepare",
    (BUFFERS, "BucketBuffers.pack"): "pack",
    (PIPELINE, "Pipeline.gather"): STATUSES,
    (GRAD_STATUS, "GradStatuses.send"): STATUSES,
    (GRAD_STATUS, "GradStatuses.summarize"): STATUSES,
    (GRAD_STATUS, "GradStatuses.keep"): STATUSES,
    (GRAD_STATUS, "GradStatuses.receive"): STATUSES,
    (GRAD_STATUS, "GradStatuses.mismatch"): STATUSES,
    (BUFFERS, "BucketBuffers.start_gather"): LAUNCH,
    (BUFFERS, "BucketBuffers.start_scatter"): LAUNCH,
    (BUFFERS, "BucketBuffers.assemble"): "assemble",
    ("_muon", "_MuonFormulas.orthogonalize"): "Newton-Schulz",
    (BUFFERS, "BucketBuffers.pack_update"): "pack update",
    (PIPELINE, "Pipeline.apply"): "apply",
}
# Its phase depends on what was started last on the same buffers.
WAIT = (BUFFERS, "BucketBuffers.wait")


class Clock:
    """Adds up exclusive times: entering a phase stops the one around it.

    Two clocks run: the wall's and the calling thread's own, which stops while it waits or while
    another program has the core.
    """

    def __init__(self) -> None:
        self.spent: dict[str, tuple[float, float]] = {}
        self._stack: list[str] = []
        self._since = (0.0, 0.0)

    def enter(self, phase: str) -> None:
        self._book()
        self._stack.append(phase)

    def leave(self) -> None:
        self._book()
        self._stack.pop()

    def take(self) -> dict[str, tuple[float, float]]:
        """What was added up since the last call."""
        spent, self.spent = self.spent, {}
        return spent

    def _book(self) -> None:
        now = (time.perf_counter(), time.thread_time())
        if self._stack:
            phase = self._stack[-1]
            before = self.spent.get(phase, (0.0, 0.0))
            self.spent[phase] = tuple(
                b + n - s for b, n, s in zip(before, now, self._since, strict=True)
            )
        self._since = now


def measure(step: Callable[[], object], reps: int) -> dict[str, Any]:
    """Milliseconds by phase on this rank, the median over ``reps`` steps of each."""
    clock = Clock()
    steps: list[dict[str, tuple[float, float]]] = []
    with wrapped(clock) as missing:
        for _ in range(reps):
            dist.barrier()
            clock.enter(OTHER)
            step()
            clock.leave()
            steps.append(clock.take())
    names = list(dict.fromkeys([*PHASES.values(), WAIT_GATHER, WAIT_SCATTER, OTHER]))

    def median_ms(name: str, clock: int) -> float:
        return 1e3 * statistics.median(s.get(name, (0.0, 0.0))[clock] for s in steps)

    return {
        "ms": {name: median_ms(name, 0) for name in names},
        "cpu_ms": {name: median_ms(name, 1) for name in names},
        "whole_ms": 1e3
        * statistics.median(sum(wall for wall, _ in s.values()) for s in steps),
        "not_found": missing,
    }


@contextmanager
def wrapped(clock: Clock) -> Iterator[list[str]]:
    """Times the listed functions; yields the names of those that the engine does not have."""
    undo: list[tuple[Any, str, Any]] = []
    missing: list[str] = []
    started: dict[int, str] = {}

    def replace(module: str, name: str, phase_of: Callable[[tuple], str]) -> None:
        owner: Any = importlib.import_module("torch.optim." + module)
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        original = getattr(owner, last, None)
        if original is None:
            missing.append(f"{module}.{name}")
            return

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            clock.enter(phase_of(args))
            try:
                return original(*args, **kwargs)
            finally:
                clock.leave()

        undo.append((owner, last, original))
        setattr(owner, last, timed)

    def launch(kind: str) -> Callable[[tuple], str]:
        def phase(args: tuple) -> str:
            started[id(args[0])] = kind
            return LAUNCH

        return phase

    for (module, name), phase in PHASES.items():
        if phase == LAUNCH:
            kind = WAIT_GATHER if name.endswith("gather") else WAIT_SCATTER
            replace(module, name, launch(kind))
        else:
            replace(module, name, lambda args, phase=phase: phase)
    replace(*WAIT, lambda args: started.get(id(args[0]), WAIT_GATHER))
    try:
        yield missing
    finally:
        for owner, name, original in reversed(undo):
            setattr(owner, name, original)
