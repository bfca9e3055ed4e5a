"""One step on this rank: a loop over its operations. It knows buckets and collectives, but no formulas."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

# The public profiler range costs tens of microseconds even when no profiler runs.
from torch._C._profiler import _RecordFunctionFast

from ..process_groups import listed
from ..schedule.order import Action, LocalOperation
from .memory import Memory
from .transport import InFlight


class Compute(Protocol):
    """An optimizer's work on a bucket, in the words of upstream's proposal for executors."""

    def prepare(self, bucket: Any, inputs: Any) -> None: ...

    def compute(self, bucket: Any, batch: Any, inputs: Any) -> None: ...

    def apply_updates(self, bucket: Any, inputs: Any) -> None: ...

    def apply_relayed(self, bucket: Any, relay: Any, inputs: Any) -> None: ...


class Progress:
    """Which phase of a step is running, and for which matrices or parameters; ("", ()) between steps."""

    def __init__(self) -> None:
        self.now: tuple[str, Sequence[Any]] = ("", ())

    def __str__(self) -> str:
        """For errors."""
        phase, subjects = self.now
        described = [subject.described for subject in subjects]
        return f"{phase} of {listed(described)}" if phase else ""


class LabelledOperation(NamedTuple):
    """An operation, what a profiler calls it, and what errors say if it fails."""

    operation: LocalOperation
    label: str
    progress: tuple[str, Sequence[Any]]

    @classmethod
    def of(cls, operation: LocalOperation) -> "LabelledOperation":
        phase = operation.action.value
        flight = operation.bucket
        if isinstance(operation.item, InFlight):
            flight = operation.item
        return cls(operation, f"Muon {phase}, {flight.name}", (phase, flight.matrices))


class Executor:
    """Runs ``operations`` with the functions of ``compute``, over ``memory`` that keeps its addresses.

    ``progress`` is told the phase and the matrices of each operation before it runs; ``compute`` may tell it finer ones.
    """

    def __init__(
        self,
        operations: Sequence[LocalOperation],
        compute: Compute,
        memory: Memory,
        progress: Progress,
    ) -> None:
        self.memory = memory
        self._compute = compute
        self._progress = progress
        self._operations = [LabelledOperation.of(o) for o in operations]

    def run(self, inputs: Any) -> None:
        """Makes a step."""
        if self.memory.frees_between_steps:
            self.memory.allocate()
        self._run(self._operations, inputs)
        if self.memory.frees_between_steps:
            self.memory.free()

    def _run(self, operations: Sequence[LabelledOperation], inputs: Any) -> None:
        compute = self._compute
        for (action, bucket, item), label, progress in operations:
            self._progress.now = progress
            with _RecordFunctionFast(label):
                if action is Action.GATHER:
                    compute.prepare(bucket, inputs)
                    bucket.start_gather()
                elif action is Action.AWAIT_GATHER or action is Action.AWAIT_SCATTER:
                    bucket.wait()
                elif action is Action.COMPUTE:
                    compute.compute(bucket, item, inputs)
                elif action is Action.SCATTER:
                    bucket.start_scatter()
                elif action is Action.APPLY:
                    compute.apply_updates(bucket, inputs)
                    if bucket.relays:
                        bucket.pack_relays()
                elif action is Action.RELAY:
                    item.start()
                elif action is Action.AWAIT_RELAY:
                    item.wait()
                elif action is Action.APPLY_RELAYED:
                    compute.apply_relayed(bucket, item, inputs)


def drain(flights: Sequence[InFlight]) -> None:
    """After an error, waits for everything in flight."""
    for flight in flights:
        # A wait forgets a collective even if it failed.
        while flight.works:
            # The error that led here is the one to report.
            with suppress(Exception):
                flight.wait()
