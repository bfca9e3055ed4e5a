"""A slow wire: collectives that finish later than the loopback lets them.

On one machine the transfer is lost in noise, so that overlapping it cannot show. Here each
``all_to_all_single`` of ``torch.distributed`` completes later than its peers have sent: by a latency, and by what
its bytes take on this rank's link.
"""

from __future__ import annotations

import functools
import threading
import time
from contextlib import contextmanager
from typing import Any, TYPE_CHECKING

import torch.distributed as dist


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup


class Link:
    """This rank's own: latencies of several transfers overlap, their bytes go one after the other.

    Args:
        latency: seconds.
        bandwidth: bytes a second in each direction; None is without limit.
    """

    def __init__(self, latency: float, bandwidth: float | None = None) -> None:
        self.latency = latency
        self.bandwidth = bandwidth
        self._free = 0.0
        self._lock = threading.Lock()

    def carry(self, nbytes: int) -> float:
        """Seconds from now until ``nbytes`` are there."""
        with self._lock:
            now = time.perf_counter()
            begin = max(now, self._free)
            self._free = begin + (nbytes / self.bandwidth if self.bandwidth else 0.0)
            return self._free + self.latency - now


class Late:
    """A work handle that is done later than the one it stands for.

    A thread waits, so that the clock runs while the caller computes.
    """

    def __init__(self, work: dist.Work, link: Link, nbytes: int = 0) -> None:
        self.work = work
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._finish, args=(link, nbytes))
        self.thread.start()

    def _finish(self, link: Link, nbytes: int) -> None:
        try:
            self.work.wait()
        except BaseException as error:
            self.error = error
        time.sleep(link.carry(nbytes))

    def wait(self, timeout: Any = None) -> bool:
        self.thread.join()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return not self.thread.is_alive()


@contextmanager
def delayed(milliseconds: float, bandwidth: float | None = None) -> Iterator[None]:
    """Every ``dist.all_to_all_single`` within goes over a slow link. Zero changes nothing."""
    original = dist.all_to_all_single
    if not (milliseconds or bandwidth):
        yield
        return
    link = Link(milliseconds / 1000, bandwidth)

    @functools.wraps(original)
    def late(*args: Any, async_op: bool = False, **kwargs: Any) -> Late | None:
        work = original(*args, async_op=True, **kwargs)
        work = Late(work, link, travelling(*args, **kwargs))
        if async_op:
            return work
        work.wait()
        return None

    dist.all_to_all_single = late
    try:
        yield
    finally:
        dist.all_to_all_single = original


def travelling(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> int:
    """The bytes of the busier direction; what stays on this rank does not travel."""
    here, size = dist.get_rank(group), dist.get_world_size(group)

    def away(side: Tensor, splits: Sequence[int] | None) -> int:
        own = splits[here] if splits else len(side) // size
        return (len(side) - own) * (side.nbytes // max(1, len(side)))

    return max(away(output, output_split_sizes), away(input, input_split_sizes))
