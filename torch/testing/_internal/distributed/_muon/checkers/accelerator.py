"""A model of an accelerator's queues: streams, events, communicators and the allocator of its memory."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from functools import partial
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor
from torch.testing._internal.distributed._muon.checkers.recorder import (
    Call,
    Clock,
    Comm,
    HOST,
    joined,
    Recorder,
)
from torch.utils._pytree import tree_leaves


if TYPE_CHECKING:
    from torch import Tensor


# Operations whose result the host needs.
READING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked", "unique")


COMPUTE = "compute"


def fake_tensors(tree: Any) -> list[FakeTensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, FakeTensor)]


class Accelerator(Recorder):
    """Also finds waits of the host, and communicators that are first used while others are in flight.

    The host, each stream and each communicator are queues of work. Events, streams and handles add the
    only order between them.
    """

    def __init__(self, stumbles: int = 0) -> None:
        super().__init__(stumbles=stumbles)
        self.current = [COMPUTE]
        self.at: int | None = None  # the device that the engine chose
        self.operations: list[Any] = []
        self._used: set[tuple[Comm, str, int]] = set()
        self._pinned: set[int] = set()
        # Bytes of each storage, the stream that it was allocated on, and those that it was recorded on.
        self._sizes: dict[int, int] = {}
        self._home: dict[int, Any] = {}
        self._recorded_on: dict[int, set[Any]] = defaultdict(set)
        # By stream: storages that were freed, and what the allocator waits for before it gives them out.
        self._free: dict[Any, list[tuple[int, Clock]]] = defaultdict(list)
        self.live = self.peak = 0
        # The host may wait for this in a step, and for anything while the engine is built.
        self._began: Clock | None = None

    def begin(self) -> None:
        super().begin()
        self._began = joined(*self.clocks.values())
        self.operations, self.peak = [], self.live

    def __enter__(self) -> Any:
        found, self._mode = super().__enter__(), detect_fake_mode()

        def record_stream(tensor: Tensor, stream: Stream) -> None:
            self._recorded_on[self.number_of(tensor)].add(stream.queue)

        def synchronize(*_: Any) -> None:
            self.host_waits(joined(*self.clocks.values()), "the device")

        for owner, name, stand_in in (
            (torch, "Stream", type("Stream", (Stream,), {"model": self})),
            (torch, "Event", type("Event", (Event,), {"model": self})),
            (torch.accelerator, "current_stream", lambda *_: self.stream()),
            (torch.accelerator, "current_device_index", lambda: 0),
            (torch.accelerator, "device_index", partial(mock.patch.object, self, "at")),
            (torch.accelerator, "is_available", lambda: True),
            (torch.accelerator, "synchronize", synchronize),
            (torch.Tensor, "record_stream", record_stream),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, stand_in))
        return found

    def stream(self) -> Stream:
        found = torch.Stream()
        found.queue = self.current[-1]
        return found

    def host_waits(self, clock: Clock, reason: str) -> None:
        """It may wait for what comes before the step."""
        before = self._began if self._began is not None else clock
        for queue, place in clock.items():
            if place > before.get(queue, 0):
                self.problems.append(f"the host waits for {reason}")
                break
        self.add(HOST, clock)

    def launched(self, call: Call) -> None:
        key = call.comm, call.name, call.nbytes
        if call.name == "all_gather" and not call.is_fake and self.at is None:
            self.problems.append("ranks exchange objects on any device")
        others = [other for other in self.flying if other.comm != call.comm]
        if key not in self._used and others:
            self.problems.append(f"{call} is the first, while {others[0]} is in flight")
        self._used.add(key)
        super().launched(call)

    def allocated(self, storage: int, size: int) -> None:
        self._sizes[storage] = size
        if storage in self._home:
            self._made(storage)

    def _made(self, storage: int) -> None:
        """The allocator may give out memory again in the order of its stream."""
        queue = self._home[storage] = self.current[-1]
        blocks = self._free.pop(queue, ())
        clock = self.add(queue, *(used for _, used in blocks))
        for block, _ in blocks:
            self.given_out(block, clock)
        self.live += self._sizes[storage]
        self.peak = max(self.peak, self.live)

    def freed(self, storage: int) -> None:
        queue = self._home.get(storage, HOST)
        if queue == HOST:
            super().freed(storage)
        elif self._sizes[storage]:
            used = map(self.clocks.__getitem__, self._recorded_on.pop(storage, ()))
            self._free[queue].append((storage, joined(*used)))
            self.live -= self._sizes[storage]
            self._sizes[storage] = 0

    def run(self, func: Any, args: Any, kwargs: Any, reads: list, writes: list) -> Any:
        name = func.__name__
        given = fake_tensors((args, kwargs))
        kinds = {tensor.device.type for tensor in given}
        waits = name.startswith(READING) and kinds - {"cpu"}
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
        before = set(map(self.number_of, given))
        made = fake_tensors(found)
        made = [tensor for tensor in made if self.number_of(tensor) not in before]
        kinds |= {tensor.device.type for tensor in made}
        queue = self.current[-1] if kinds - {"cpu"} else HOST
        for number in set(map(self.number_of, made)):
            self._home[number] = HOST
            if queue != HOST:
                self._made(number)
        if kwargs.get("pin_memory") and made:
            self._pinned.add(self.number_of(made[0]))
        if name.startswith(("copy_", "_to_copy")) and len(kinds) > 1:
            waits = not self._is_late_copy(given, args, kwargs)
        # Nothing is written into memory that is only allocated.
        filled = [] if name.startswith(("empty", "new_empty")) else made
        if kinds and (reads or writes or filled):
            shapes = [tensor.shape for tensor in reads + writes]
            self.operations.append((func, shapes))
            fake_writes = fake_tensors(writes) + filled
            self.accessed(func, fake_tensors(reads), fake_writes, queue)
        if waits:
            self.host_waits(self.clocks[queue], f"{func}")
        return found

    def _is_late_copy(self, given: list[FakeTensor], args: Any, kwargs: Any) -> bool:
        """Whether the host goes on during a copy between devices: its own memory must be pinned."""
        is_late = kwargs.get("non_blocking") or args[2:3] == (True,)
        for tensor in given:
            is_on_host = tensor.device.type == "cpu"
            if is_on_host and self.number_of(tensor) not in self._pinned:
                return False
        return bool(is_late)


class Stream:
    model: Accelerator

    def __init__(self, *_: Any, **__: Any) -> None:
        self.queue: Any = object()

    def __enter__(self) -> None:
        self.model.current.append(self.queue)

    def __exit__(self, *exception: Any) -> None:
        self.model.current.pop()

    def wait_stream(self, other: Stream) -> None:
        self.model.add(self.queue, self.model.clocks[other.queue])

    def wait_event(self, event: Event) -> None:
        self.model.add(self.queue, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or torch.Event()
        event.record(self)
        return event


class Event:
    model: Accelerator

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """Without a stream, on the current device, which need not be that of the tensors."""
        self.clock = {} if stream is None else self.model.clocks[stream.queue]

    def synchronize(self) -> None:
        self.model.host_waits(self.clock, "an event")
