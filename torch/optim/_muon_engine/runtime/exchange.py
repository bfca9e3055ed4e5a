"""How a packed buffer travels: by one all-to-all, or by two where a rank would have too many peers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.optim._muon_engine.process_groups import is_dry_run


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.schedule.specs import TwoLevel


def all_to_all(
    recv: Tensor,
    send: Tensor,
    recv_splits: Sequence[int],
    send_splits: Sequence[int],
    group: ProcessGroup | None,
) -> dist.Work | None:
    """Starts an all-to-all of flat buffers. A backend may give up one whose handle nobody keeps."""
    if is_dry_run() and not (recv.numel() and send.numel()):
        return None  # The fake backend refuses an empty side.
    return dist.all_to_all_single(
        recv,
        send,
        output_split_sizes=list(recv_splits),
        input_split_sizes=list(send_splits),
        group=group,
        async_op=True,
    )


class TwoLevelExchange:
    """The gathers and scatters of a bucket through nodes and rails, over the memory of its slot.

    Args:
        outer: where this rank's shards leave from and come back to, in bytes; free between the hops.
        staging: of at least as many bytes as this rank passes on.
    """

    def __init__(
        self,
        groups: Mapping[tuple[int, ...], ProcessGroup | None],
        outer: Tensor,
        staging: Tensor,
    ) -> None:
        self.groups = groups
        self.outer = outer
        self.staging = staging
        # Accelerators do the second hop's part while the first is under way and others compute.
        self.stream = None if outer.device.type == "cpu" else torch.Stream(outer.device)

    def gather(self, hops: TwoLevel, recv: Tensor, send: Tensor) -> dist.Work | None:
        return self._start(hops, recv, send, self.staging, self.outer)

    def scatter(self, hops: TwoLevel, recv: Tensor, send: Tensor) -> dist.Work | None:
        return self._start(hops, recv, send, self.outer, self.staging)

    def _start(
        self,
        hops: TwoLevel,
        recv: Tensor,
        send: Tensor,
        arrive: Tensor,
        leave: Tensor,
    ) -> dist.Work | None:
        """Makes the first hop and starts the second; a CPU waits for the first."""
        arriving, leaving = (
            memory.narrow(0, 0, hops.numel * send.dtype.itemsize).view(send.dtype)
            for memory in (arrive, leave)
        )
        first, passed, second = hops
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(recv.device))
        with self.stream or nullcontext():
            work = all_to_all(
                arriving, send, first.receives, first.sends, self.groups[first.ranks]
            )
            if work is not None:
                work.wait()
            rows = [
                row.split(list(to))
                for row, to in zip(arriving.split(list(first.receives)), passed)
            ]
            # By whom it goes to, then by whom it came from.
            chunks = [chunk for column in zip(*rows) for chunk in column]
            torch.cat([c for c in chunks if c.numel()] or chunks[:1], out=leaving)
            return all_to_all(
                recv, leaving, second.receives, second.sends, self.groups[second.ranks]
            )
