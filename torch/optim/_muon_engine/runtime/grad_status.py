"""Whether a parameter has a gradient: said by each holder, summed up by the owner, looked at last.

Gradients never decide which collectives run. Each holder sends a status of each matrix along with its
shard; the owner sends a summary back along with the result. A rank acts on its own status. Where the
holders of a matrix differ, all of them raise once the last bucket is through.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.optim._muon_engine.layouts import Key, Layout
    from torch.optim._muon_engine.runtime.buffers import PackedBuffer


class GradStatus(IntEnum):
    """What one holder says of one matrix."""

    ABSENT = 0
    PRESENT = 1
    # The holder's shard is empty, so it cannot know.
    EMPTY = 2
    # There is a gradient, of a kind that the holder cannot use.
    UNUSABLE = 3

    @property
    def applies(self) -> bool:
        """Whether the holder applies the update that comes back."""
        return self in (GradStatus.PRESENT, GradStatus.EMPTY)


class Summary(IntFlag):
    """What the owner makes of all statuses of one matrix."""

    SOME_PRESENT = 1
    SOME_ABSENT = 2
    SOME_UNUSABLE = 4
    OUT_OF_STEP = 8

    @property
    def is_mismatch(self) -> bool:
        both = Summary.SOME_PRESENT | Summary.SOME_ABSENT
        return bool(self & (Summary.SOME_UNUSABLE | Summary.OUT_OF_STEP)) or (
            self & both == both
        )


# With each status goes a tag of the step and bucket. Ranks in different steps would otherwise have
# their pieces orthogonalized together where sizes happen to match. Beside four statuses or sixteen
# summaries, bfloat16 counts by ones up to 256.
_STATUSES, _SUMMARIES = 4, 16

_MESSAGES = (
    (
        Summary.OUT_OF_STEP,
        "the ranks are not in the same step: one of them left a step() that the others made, or made one more. Found "
        "when these were exchanged: ",
    ),
    (
        Summary.SOME_UNUSABLE,
        "a rank that holds these has a gradient that it cannot use. That rank says what is wrong: ",
    ),
    (
        Summary.SOME_PRESENT | Summary.SOME_ABSENT,
        "some of the ranks that hold these have a gradient for them and some have none. All holders need one, zeros if "
        "need be (an unused expert, a branch that one rank skips), or none of them: ",
    ),
)


class GradStatuses:
    """Writes and reads the statuses of one rank, and keeps the summaries until they are looked at."""

    def __init__(self) -> None:
        self._step = 0
        self._pending: list[tuple[Sequence[Layout], Tensor, torch.Event | None]] = []

    def begin(self, step: int) -> None:
        """``step`` counts this rank's calls of ``step()``."""
        self._step = step

    def _tag(self, bucket: int, values: int) -> int:
        """Differs between neighbouring steps and buckets; repeats, at the earliest after 16 steps."""
        return (5 * self._step + bucket + values) % (256 // values)

    def send(
        self, buffer: PackedBuffer, bucket: int, statuses: Sequence[GradStatus]
    ) -> None:
        """Writes ``statuses``, in the order of ``buffer.matrices``, for the owners."""
        if statuses:
            values = torch.tensor(
                statuses, dtype=torch.int32, device=buffer.flat.device
            )
            buffer.write_flags(values + _STATUSES * self._tag(bucket, _STATUSES))

    def summarize(
        self,
        received: PackedBuffer,
        returned: PackedBuffer,
        bucket: int,
        own: Sequence[GradStatus],
    ) -> Tensor:
        """On the owner: sums up all statuses, and writes that for the holders."""
        statuses = torch.tensor(own, dtype=torch.int32, device=received.flat.device)
        statuses = statuses[:, None]
        strayed = torch.zeros_like(statuses, dtype=torch.bool)
        if received.matrices:
            flags = received.read_flags().to(statuses.dtype)
            strayed = flags // _STATUSES != self._tag(bucket, _STATUSES)
            statuses = torch.cat([statuses, flags % _STATUSES], dim=1)
        found = (
            (Summary.SOME_PRESENT, statuses == GradStatus.PRESENT),
            (Summary.SOME_ABSENT, statuses == GradStatus.ABSENT),
            (Summary.SOME_UNUSABLE, statuses == GradStatus.UNUSABLE),
            (Summary.OUT_OF_STEP, strayed),
        )
        summary = torch.zeros_like(statuses[:, 0])
        for bit, which in found:
            summary += int(bit) * which.any(dim=1)
        returned.write_flags(summary + _SUMMARIES * self._tag(bucket, _SUMMARIES))
        return summary

    def say_nothing(self, returned: PackedBuffer, bucket: int) -> None:
        """On an owner that was told no statuses: writes a summary without any."""
        nothing = torch.zeros(len(returned.matrices), dtype=torch.int32)
        tag = _SUMMARIES * self._tag(bucket, _SUMMARIES)
        returned.write_flags(nothing.to(returned.flat.device) + tag)

    def receive(
        self, buffer: PackedBuffer, bucket: int, layouts: Sequence[Layout]
    ) -> None:
        """On a holder of ``layouts``: takes the owners' summaries."""
        if buffer.matrices:
            flags = buffer.read_flags()[:, 0].to(torch.int32)
            strayed = flags // _SUMMARIES != self._tag(bucket, _SUMMARIES)
            strange = int(Summary.OUT_OF_STEP)
            self.keep(layouts, torch.where(strayed, strange, flags % _SUMMARIES))

    def keep(self, layouts: Sequence[Layout], summary: Tensor) -> None:
        """Has ``summary``, one entry a layout, looked at by :meth:`mismatch`."""
        if summary.device.type == "cpu":
            self._pending.append((layouts, summary, None))
            return
        # The host does not wait for what the device has not computed yet.
        host = torch.empty_like(summary, device="cpu", pin_memory=True)
        host.copy_(summary, non_blocking=True)
        copied = torch.Event(summary.device)
        copied.record()
        self._pending.append((layouts, host, copied))

    def mismatch(self) -> str:
        """What the holders differ in, as far as it was not looked at before; "" where in nothing."""
        pending, self._pending = self._pending, []
        found: dict[Key, tuple[Layout, Summary]] = {}
        for layouts, summaries, copied in pending:
            if copied is not None:
                copied.synchronize()
            for layout, value in zip(layouts, summaries.tolist(), strict=True):
                if Summary(value).is_mismatch:
                    found[layout.key] = layout, Summary(value)
        for bits, text in _MESSAGES:
            named = [
                layout.describe()
                for _, (layout, summary) in sorted(
                    found.items(), key=lambda item: item[0][:2]
                )
                if summary & bits == bits
            ]
            if named:
                return text + ", ".join(named)
        return ""

    def forget(self) -> None:
        """After an error: what came of a step that broke off says nothing."""
        self._pending = []
