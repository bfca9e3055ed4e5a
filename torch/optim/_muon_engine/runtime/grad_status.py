"""Whether a parameter has a gradient: said by each holder, summed up by the owner, looked at last.

Gradients never decide which collectives run. Each holder sends a status of each matrix along with its
shard; the owner sends a summary back along with the result. A rank acts on its own status. Where the
holders of a matrix differ, all of them raise once the last bucket is through.

Where only one of many replicas exchanges a shard with the owner, it speaks for all of them: what they say
is put together first, by one small all-reduce a step.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NamedTuple, TYPE_CHECKING

import torch
import torch.distributed as dist


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
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

    @property
    def summary(self) -> Summary:
        """Of this holder alone."""
        return _SAID.get(self, Summary(0))


class Summary(IntFlag):
    """What several holders say of one matrix, and at last all of them."""

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


_SAID = {
    GradStatus.PRESENT: Summary.SOME_PRESENT,
    GradStatus.ABSENT: Summary.SOME_ABSENT,
    GradStatus.UNUSABLE: Summary.SOME_UNUSABLE,
}

# With each summary goes a tag of the step and bucket. Ranks in different steps would otherwise have
# their pieces orthogonalized together where sizes happen to match. Beside sixteen summaries there is room
# for sixteen tags: bfloat16 counts by ones up to 256.
_SUMMARIES = _TAGS = 16

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


def _bits(device: torch.device) -> Tensor:
    return 1 << torch.arange(len(Summary), dtype=torch.int32, device=device)


def _rows(matrices: Sequence[int], some: Sequence[int]) -> slice | list[int]:
    """Where ``some`` of ``matrices`` stand among them."""
    if list(matrices) == list(some):
        return slice(None)
    place = {matrix: row for row, matrix in enumerate(matrices)}
    return [place[matrix] for matrix in some]


class Joining(NamedTuple):
    """An all-reduce under way: a row of bits for each matrix, then one of the step and its negative."""

    values: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        """What all replicas say, shape (matrices,)."""
        self.work.wait()
        summaries = self.values[:-1].sum(dim=1, dtype=torch.int32)
        strayed = (self.values[-1].sum() != 0).to(summaries.dtype)
        return summaries | int(Summary.OUT_OF_STEP) * strayed


class GradStatuses:
    """Writes and reads the statuses of one rank, and keeps the summaries until they are looked at."""

    def __init__(self) -> None:
        self._step = 0
        self._pending: list[tuple[Sequence[Layout], Tensor, torch.Event | None]] = []

    def begin(self, step: int) -> None:
        """``step`` counts this rank's calls of ``step()``."""
        self._step = step

    def _tag(self, bucket: int, back: bool) -> int:
        """Differs between neighbouring steps and buckets; repeats, at the earliest after 16 steps."""
        return (5 * self._step + bucket + 7 * back) % _TAGS

    def said(self, statuses: Sequence[GradStatus], device: torch.device) -> Tensor:
        """What this rank says of its matrices: a summary of each, shape (matrices,)."""
        summaries = [status.summary for status in statuses]
        return torch.tensor(summaries, dtype=torch.int32, device=device)

    def start_joining(self, said: Tensor, group: ProcessGroup | None) -> Joining:
        """Puts together what all ranks of ``group``, replicas of each other, say of their matrices."""
        bits = said[:, None] & _bits(said.device)
        # The largest of both agree where all are in one step.
        step = torch.tensor([[self._step, -self._step, 0, 0]], dtype=torch.int32)
        values = torch.cat([bits, step.to(said.device)])
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group, async_op=True)
        return Joining(values, work)

    def send(self, buffer: PackedBuffer, bucket: int, said: Tensor) -> None:
        """Writes ``said``, in the order of ``buffer.matrices``, for the owners."""
        buffer.write_flags(said + _SUMMARIES * self._tag(bucket, back=False))

    def summarize(
        self,
        received: PackedBuffer,
        returned: Sequence[PackedBuffer],
        bucket: int,
        matrices: Sequence[int],
        own: Tensor,
    ) -> Tensor:
        """On the owner of ``matrices``, which says ``own``: sums up, and writes that for the holders."""
        said = own[:, None] & _bits(own.device)
        if received.matrices:
            flags = received.read_flags().to(own.dtype)
            strayed = flags // _SUMMARIES != self._tag(bucket, back=False)
            strange = int(Summary.OUT_OF_STEP) * strayed.to(own.dtype)
            flags = (flags % _SUMMARIES) | strange
            # Of some matrices nobody else had anything to say.
            rows = _rows(matrices, received.matrices)
            theirs = (flags[:, :, None] & _bits(own.device)).amax(dim=1)
            said[rows] = torch.maximum(said[rows], theirs)
        summary = said.sum(dim=1, dtype=own.dtype)
        for buffer in returned:
            self._write_summary(
                buffer, bucket, summary[_rows(matrices, buffer.matrices)]
            )
        return summary

    def say_nothing(self, returned: PackedBuffer, bucket: int) -> None:
        """On an owner that was told no statuses: writes a summary without any."""
        nothing = torch.zeros(len(returned.matrices), dtype=torch.int32)
        self._write_summary(returned, bucket, nothing.to(returned.flat.device))

    def _write_summary(
        self, buffer: PackedBuffer, bucket: int, summary: Tensor
    ) -> None:
        buffer.write_flags(summary + _SUMMARIES * self._tag(bucket, back=True))

    def receive(
        self, buffer: PackedBuffer, bucket: int, layouts: Sequence[Layout]
    ) -> None:
        """On a holder of ``layouts``: takes the owners' summaries."""
        if buffer.matrices:
            flags = buffer.read_flags()[:, 0].to(torch.int32)
            strayed = flags // _SUMMARIES != self._tag(bucket, back=True)
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
