"""A slow wire: each ``all_to_all_single`` of ``torch.distributed`` completes later than its peers have sent.

On one machine the transfer is lost in noise, so that overlapping it cannot show.
"""

from __future__ import annotations

import functools
import threading
import time
from contextlib import contextmanager
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch.distributed as dist


if TYPE_CHECKING:
    from collections.abc import Iterator


class Late:
    """A work handle that is done ``seconds`` later than the one it stands for.

    A thread waits, so that the clock runs while the caller computes.
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


@contextmanager
def delayed(seconds: float) -> Iterator[None]:
    """Every ``dist.all_to_all_single`` within ends later. The engine starts them asynchronously."""
    original = dist.all_to_all_single

    @functools.wraps(original)
    def late(*args: Any, **kwargs: Any) -> Late:
        return Late(original(*args, **kwargs), seconds)

    with mock.patch.object(dist, "all_to_all_single", late):
        yield
