"""A slow wire: collectives that finish later than the loopback lets them.

On one machine the transfer is lost in noise, so that overlapping it cannot show. Here each
``all_to_all_single`` of ``torch.distributed`` completes a fixed time after its peers have sent.
"""

from __future__ import annotations

import functools
import threading
import time
from contextlib import contextmanager
from typing import Any, TYPE_CHECKING

import torch.distributed as dist


if TYPE_CHECKING:
    from collections.abc import Iterator


class Late:
    """A work handle that is done ``seconds`` after the one it stands for.

    A thread waits, so that the clock runs while the caller computes, and delays of several
    collectives in flight overlap as latencies do.
    """

    def __init__(self, work: dist.Work, seconds: float) -> None:
        self.work = work
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._finish, args=(seconds,))
        self.thread.start()

    def _finish(self, seconds: float) -> None:
        try:
            self.work.wait()
        except BaseException as error:
            self.error = error
        time.sleep(seconds)

    def wait(self, timeout: Any = None) -> bool:
        self.thread.join()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return not self.thread.is_alive()


@contextmanager
def delayed(milliseconds: float) -> Iterator[None]:
    """Every ``dist.all_to_all_single`` within takes that much longer. Zero changes nothing."""
    original = dist.all_to_all_single
    if not milliseconds:
        yield
        return

    @functools.wraps(original)
    def late(*args: Any, async_op: bool = False, **kwargs: Any) -> Late | None:
        work = Late(original(*args, async_op=True, **kwargs), milliseconds / 1000)
        if async_op:
            return work
        work.wait()
        return None

    dist.all_to_all_single = late
    try:
        yield
    finally:
        dist.all_to_all_single = original
