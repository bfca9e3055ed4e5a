"""Whether a parameter has a gradient: said by each holder, summed up by the owner, looked at last.

Gradients never decide which collectives run. Each holder sends a status of each matrix along with its
shard; the owner sends a summary back along with the result. A rank acts on its own status. Where the
holders of a matrix differ, all of them raise once the last bucket is through.

A flag is an integer in the bits of one element of what travels: a :class:`Summary`, a tag of the step
and bucket, and a digest. In the first step that moves a matrix with replicas the digest is of the shard's
values, which replicas have to have alike; else it is of the hyperparameters, which somebody may have changed on some
ranks only.

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
    OTHER_OPTIONS = 16
    OTHER_VALUES = 32

    @property
    def is_mismatch(self) -> bool:
        both = Summary.SOME_PRESENT | Summary.SOME_ABSENT
        return self & both == both or bool(self & ~both)


_SAID = {
    GradStatus.PRESENT: Summary.SOME_PRESENT,
    GradStatus.ABSENT: Summary.SOME_ABSENT,
    GradStatus.UNUSABLE: Summary.SOME_UNUSABLE,
}

# Where a flag has its tag and its digest: 6, 3 and 7 of 16 bits. Without the tag, ranks in different steps
# would have their pieces orthogonalized together where sizes happen to match.
_TAG = 1 << len(Summary)
_TAGS = 8
_DIGEST = _TAG * _TAGS
DIGESTS = (1 << 16) // _DIGEST

_MESSAGES = (
    (
        Summary.OUT_OF_STEP,
        "the ranks are not in the same step: one of them left a step() that the others made, or made one more. Found "
        "when these were exchanged: ",
    ),
    (
        Summary.OTHER_VALUES,
        "ranks that are replicas of each other hold other values of these. Usually they are no replicas: "
        "ZeroRedundancyOptimizer hands each rank matrices of its own, so give it no distributed_config. Else "
        "broadcast the parameters before the first step, as DistributedDataParallel does: ",
    ),
    (
        Summary.OTHER_OPTIONS,
        "the ranks make this step with other hyperparameters for these. A scheduler or a checkpoint changed lr, momentum "
        "or another option on some ranks only; compare param_groups of all of them: ",
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


def meanings(compares_values: Sequence[bool], device: torch.device) -> Tensor:
    """What it means where digests differ, for each matrix: other values, or other hyperparameters."""
    of_values, of_options = int(Summary.OTHER_VALUES), int(Summary.OTHER_OPTIONS)
    found = [of_values if compares else of_options for compares in compares_values]
    return torch.tensor(found, dtype=torch.int32, device=device)


def _rows(matrices: Sequence[int], some: Sequence[int]) -> slice | list[int]:
    """Where ``some`` of ``matrices`` stand among them."""
    if list(matrices) == list(some):
        return slice(None)
    place = {matrix: row for row, matrix in enumerate(matrices)}
    return [place[matrix] for matrix in some]


class Joining(NamedTuple):
    """An all-reduce under way: a row of bits and digests for each matrix, then one of the step.

    Digests and the step stand with their negatives: the largest of both agree where all ranks do.
    """

    values: Tensor
    work: dist.Work
    # What it means where digests differ, shape (matrices,).
    differs: Tensor

    def wait(self) -> Tensor:
        """What all replicas say, shape (matrices,)."""
        self.work.wait()
        bits, digests = self.values.split([len(Summary), 2], dim=1)
        apart, strayed = (
            (digests.sum(dim=1) != 0).to(torch.int32).split([len(self.differs), 1])
        )
        said = bits.sum(dim=1, dtype=torch.int32) + _DIGEST * digests.select(1, 0)
        said = said.narrow(0, 0, len(self.differs)) | self.differs * apart
        return said | int(Summary.OUT_OF_STEP) * strayed


class GradStatuses:
    """Writes and reads the statuses of one rank, and keeps the summaries until they are looked at."""

    def __init__(self) -> None:
        self._step = 0
        # The matrices whose replicas have compared their values: parameter, and place in it.
        self.compared: set[tuple[int, int]] = set()
        self._bits: dict[torch.device, Tensor] = {}
        self._pending: list[tuple[Sequence[Layout], Tensor, torch.Event | None]] = []

    def begin(self, step: int) -> None:
        """Begins this rank's ``step``-th step."""
        self._step = step

    def _tag(self, bucket: int, back: bool) -> int:
        """Differs between neighbouring steps and buckets; repeats, at the earliest after 8 steps."""
        return (5 * self._step + bucket + 7 * back) % _TAGS

    def bits(self, device: torch.device) -> Tensor:
        """One for each member of :class:`Summary`."""
        if device not in self._bits:
            each = torch.arange(len(Summary), dtype=torch.int32, device=device)
            self._bits[device] = 1 << each
        return self._bits[device]

    def said(
        self,
        statuses: Sequence[GradStatus],
        digests: Sequence[int],
        device: torch.device,
        values: Tensor | None = None,
    ) -> Tensor:
        """What this rank says of its matrices: summaries and digests, shape (matrices,).

        Args:
            digests: of each matrix's hyperparameters; 0 where its values are compared.
            values: digests of each matrix's values, on ``device``; 0 where hyperparameters are compared.
        """
        # Together on the host, for one copy to the device. Other bits in each step: what is equal in
        # these by chance is found in the next ones.
        at = 7 * self._step % 28
        said = [
            int(status.summary) + _DIGEST * ((digest >> at) % DIGESTS)
            for status, digest in zip(statuses, digests, strict=True)
        ]
        found = torch.tensor(said, dtype=torch.int32, device=device)
        if values is not None:
            found = found + _DIGEST * (values % DIGESTS).to(torch.int32)
        return found

    def start_joining(
        self, said: Tensor, group: ProcessGroup | None, differs: Tensor
    ) -> Joining:
        """Puts together what all ranks of ``group``, replicas of each other, say of their matrices."""
        bits = said.unsqueeze(1) & self.bits(said.device)
        digests = (said // _DIGEST).unsqueeze(1)
        step = [[0] * len(Summary) + [self._step, -self._step]]
        values = torch.cat(
            [
                torch.cat([bits, digests, -digests], dim=1),
                torch.tensor(step, dtype=torch.int32).to(said.device),
            ]
        )
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group, async_op=True)
        return Joining(values, work, differs)

    def send(self, buffer: PackedBuffer, bucket: int, said: Tensor) -> None:
        """Writes ``said``, in the order of ``buffer.matrices``, for the owners."""
        buffer.write_flags(said + _TAG * self._tag(bucket, back=False))

    def summarize(
        self,
        received: PackedBuffer,
        returned: Sequence[PackedBuffer],
        bucket: int,
        matrices: Sequence[int],
        own: Tensor,
        differs: Tensor,
        equals: Tensor | None = None,
    ) -> Tensor:
        """On the owner of ``matrices``, which says ``own``: sums up, and writes that for the holders.

        Args:
            differs: what it means where digests differ, shape (matrices,).
            equals: where values are compared, for each flag of ``received`` the place of another with
                the same digest, of shape (matrices, peers); the place after the last is the owner's.
        """
        said = own.unsqueeze(1) & self.bits(own.device)
        if received.matrices:
            flags = received.read_flags()
            rows = _rows(matrices, received.matrices)
            strayed = flags // _TAG % _TAGS != self._tag(bucket, back=False)
            mine, digests = (own[rows] // _DIGEST).unsqueeze(1), flags // _DIGEST
            if equals is None:
                apart = digests != mine
            else:
                every = torch.cat([digests, mine], dim=1)
                apart = digests != every.gather(1, equals)
            apart &= ~strayed
            flags = (
                flags
                | int(Summary.OUT_OF_STEP) * strayed.to(flags.dtype)
                | differs[rows].unsqueeze(1) * apart.to(flags.dtype)
            )
            # Of some matrices nobody else had anything to say.
            theirs = (flags.unsqueeze(2) & self.bits(own.device)).amax(dim=1)
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
        buffer.write_flags(summary + _TAG * self._tag(bucket, back=True))

    def receive(
        self, buffer: PackedBuffer, bucket: int, layouts: Sequence[Layout]
    ) -> None:
        """On a holder of ``layouts``: takes the owners' summaries."""
        if buffer.matrices:
            flags = buffer.read_flags().select(1, 0)
            strayed = flags // _TAG != self._tag(bucket, back=True)
            strange = int(Summary.OUT_OF_STEP)
            self.keep(layouts, torch.where(strayed, strange, flags % _TAG))

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
