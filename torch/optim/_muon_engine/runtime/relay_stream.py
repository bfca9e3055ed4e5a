"""Relays during Newton-Schulz: accelerators run them on a stream of their own.

A relay waits for other ranks. On the stream of Newton-Schulz, each wait would hold up the matrices of the next bucket.
Therefore everything that a bucket with relays does after its scatter has a stream: its updates are applied and packed
there, and its relays start and end there. The host launches all of it before the next bucket's Newton-Schulz.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..schedule.order import Action, LocalOperation
from .executor import Compute, Executor, LabelledOperation, Progress
from .memory import Memory


# The operations that follow a scatter.
_BESIDE = (
    Action.AWAIT_SCATTER,
    Action.APPLY,
    Action.RELAY,
    Action.AWAIT_RELAY,
    Action.APPLY_RELAYED,
)


def new_stream(device: torch.device) -> torch.Stream | None:
    """A stream for relays; None if ``device`` has none."""
    has_streams = device.type not in ("cpu", "meta", "mps")
    if has_streams and torch.accelerator.is_available():
        return torch.Stream(device)
    return None


class RelayExecutor(Executor):
    """Runs what follows the scatters of buckets with relays on ``stream``."""

    def __init__(
        self,
        operations: Sequence[LocalOperation],
        compute: Compute,
        memory: Memory,
        progress: Progress,
        stream: torch.Stream,
    ) -> None:
        super().__init__(operations, compute, memory, progress)
        self._stream = stream
        # The ranks of a bucket -> the end of what was applied last, which frees a slot.
        self._applied: dict[Any, torch.Event] = {}
        # Whether this step has work on the stream. A graph that captures the step refuses a stream without any.
        self._is_used = False

    def _run(self, operations: Sequence[LabelledOperation], inputs: Any) -> None:
        self._applied.clear()
        self._is_used = False
        try:
            for labelled in operations:
                self._run_one(labelled, inputs)
        finally:
            # After an error, too, later work of this thread comes after that on the stream.
            if self._is_used:
                self._current_stream().wait_stream(self._stream)

    def _run_one(self, labelled: LabelledOperation, inputs: Any) -> None:
        action, bucket, _ = labelled.operation
        if action in _BESIDE and bucket.bucket.relayed:
            # The first one waits for the scatter, which was launched behind the results of this rank's own matrices.
            self._is_used = True
            inputs.is_beside = True
            with self._stream:
                super()._run([labelled], inputs)
            inputs.is_beside = False
            if action is Action.APPLY:
                self._applied[bucket.ranks] = self._stream.record_event()
            return
        if action is Action.GATHER and bucket.ranks in self._applied:
            # It takes the memory of a bucket that was applied.
            self._current_stream().wait_event(self._applied[bucket.ranks])
        super()._run([labelled], inputs)

    def _current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.memory.device)
