"""A model of an accelerator: one queue of work, which the host does not wait for, and the memory that it takes."""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor
from torch.testing._internal.distributed._muon.checkers.recorder import (
    Bytes,
    bytes_of,
    Call,
    Comm,
    Recorder,
    storage_of,
)
from torch.utils._pytree import tree_leaves


if TYPE_CHECKING:
    from collections.abc import Mapping


# Operations whose result the host needs.
READING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked", "unique")


def fake_tensors(tree: Any) -> list[FakeTensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, FakeTensor)]


class Accelerator(Recorder):
    """Also finds waits of the host, memory of the host that copies still use, and communicators that are first used
    while others are in flight. Work on the device is numbered in the order in which it is launched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device_index: int | None = None  # that the engine chose
        self.operations: list[Any] = []
        # The number of the last work that was launched, of the last one that the host has waited for, and of the last
        # one that it may wait for: what came before the step, and everything while the engine is built.
        self.queued, self.awaited, self.may_await = 0, 0, float("inf")
        # The memory of the host that copies use, and their numbers.
        self._copied: list[tuple[Bytes, int]] = []
        self._pinned: set[int] = set()
        self._used: set[tuple[Comm, str, int]] = set()
        self.live = self.peak = 0

    def begin(self) -> None:
        super().begin()
        self.may_await, self.operations, self.peak = self.queued, [], self.live

    def __enter__(self) -> Any:
        found, self._mode = super().__enter__(), detect_fake_mode()

        def synchronize(*_: Any) -> None:
            self.host_waits(self.queued, "the device")

        for name, stand_in in (
            ("current_stream", lambda *_: Stream(self)),
            ("current_device_index", lambda: 0),
            ("device_index", partial(mock.patch.object, self, "device_index")),
            ("is_available", lambda: True),
            ("synchronize", synchronize),
        ):
            patch = mock.patch.object(torch.accelerator, name, stand_in)
            self._patches.enter_context(patch)
        return found

    def host_waits(self, number: int, reason: str) -> None:
        if number > self.may_await:
            self.problems.append(f"the host waits for {reason}")
        self.awaited = max(self.awaited, number)

    def launched(self, call: Call, given: Mapping) -> None:
        if call.name == "all_gather" and not call.is_fake and self.device_index is None:
            self.problems.append("ranks exchange objects on any device")
        key = call.comm, call.name, call.nbytes
        others = [other for other in self.flying if other.comm != call.comm]
        if key not in self._used and others:
            self.problems.append(f"{call} is the first, while {others[0]} is in flight")
        self._used.add(key)
        super().launched(call, given)

    def run(self, func: Any, args: Any, kwargs: Any, reads: list, writes: list) -> Any:
        name, given = func.__name__, fake_tensors((args, kwargs))
        kinds = {tensor.device.type for tensor in given}
        waits = name.startswith(READING) and kinds - {"cpu"}
        if name.startswith(("cat", "stack")) and len(kinds) > 1:
            self.problems.append(f"{func} takes tensors of {kinds}")
        if name.startswith("_local_scalar_dense") and kinds:
            found = args[0].dtype == torch.bool
        elif name.startswith("equal") and kinds:
            # The ranks agree. FakeTensors have no values.
            found = True
        else:
            # An engine is built without FakeTensors, but for the parameters.
            is_real = not kinds and kwargs.get("device") in (None, torch.device("cpu"))
            with contextlib.nullcontext() if is_real else self._mode:
                found = func(*args, **kwargs)
        known = set(map(storage_of, given))
        made = [each for each in fake_tensors(found) if storage_of(each) not in known]
        for tensor in made:
            self._count(tensor.untyped_storage())
            if kwargs.get("pin_memory"):
                self._pinned.add(storage_of(tensor))
        kinds |= {tensor.device.type for tensor in made}
        if not kinds:
            return found
        # Nothing is written into memory that is only allocated.
        is_filled = made and not name.startswith(("empty", "new_empty"))
        memory = bytes_of(fake_tensors(reads), fake_tensors(writes))
        self.touched(func, memory)
        if kinds == {"cpu"}:
            self._touched_by_host(func, memory)
        elif memory or is_filled:
            self.queued += 1
            self.operations.append((func, [tensor.shape for tensor in reads + writes]))
        if name.startswith(("copy_", "_to_copy")) and len(kinds) > 1:
            of_host = [tensor for tensor in given if tensor.device.type == "cpu"]
            # The host goes on during a copy if its memory is pinned.
            is_pinned = self._pinned.issuperset(map(storage_of, of_host))
            is_late = kwargs.get("non_blocking") or args[2:3] == (True,)
            waits = not (is_pinned and is_late)
            self._copied += [(each, self.queued) for each in memory]
        if waits:
            self.host_waits(self.queued, f"{func}")
        return found

    def _touched_by_host(self, func: Any, memory: list[Bytes]) -> None:
        for copied, number in self._copied:
            if number > self.awaited:
                if any(own.must_wait_for(copied) for own in memory):
                    self.problems.append(f"{func} touches the memory of a copy")

    def _count(self, storage: Any) -> None:
        """Counts the bytes of a new storage until it is freed, if the device has it."""
        nbytes = 0 if storage.device.type == "cpu" else storage.nbytes()
        weakref.finalize(storage, self._forget, storage._cdata, nbytes).atexit = False
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int, nbytes: int) -> None:
        self.live -= nbytes
        # Another storage may have this key.
        self._pinned.discard(key)
        self._copied = [copy for copy in self._copied if copy[0].storage != key]


class Stream:
    """The queue of the device, and an event in it."""

    def __init__(self, model: Accelerator) -> None:
        self.model, self.number = model, model.queued

    def record_event(self, event: Stream | None = None) -> Stream:
        return Stream(self.model)

    def synchronize(self) -> None:
        self.model.host_waits(self.number, "an event")
