"""A model of an accelerator's queues, and what the engine must not do on an accelerator.

FakeTensors of the device "lazy" take the engine's path for accelerators; an operation on them is recorded,
and :class:`Replay` carries it out on a CPU.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from contextlib import nullcontext
from typing import Any, NamedTuple, TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed._muon.common_rules import (
    Bytes,
    Call,
    Comm,
    Recorder,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor


# Operations whose result the host needs.
READING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked", "unique")
# Operations that only make a tensor, or say what it is.
NO_WORK = ("empty", "new_empty", "device", "is_pinned", "record", "_record")
COMPUTE, HOST = "compute", "host"


def is_on_host(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.device.type == "cpu"


class Node(NamedTuple):
    """Work in a queue. It starts after the node before it in the queue, and after ``needs``."""

    queue: Any
    needs: set[int]
    work: Any


class Accelerator(Recorder):
    """Finds waits of the host and communicators that are first used too late. Models streams.

    The host, each stream and each communicator are queues of nodes. Events, streams and handles add the
    only edges between them. :class:`Replay` runs the nodes in any order that the edges allow.
    """

    def __init__(self, stumbles: int = 0) -> None:
        super().__init__(stumbles=stumbles)
        self.nodes: list[Node] = []
        self.operations: list[Any] = []
        # Bytes of each storage, now and at most.
        self.sizes: dict[int, int] = {}
        self.most: dict[int, int] = defaultdict(int)
        self.current: list[Any] = [COMPUTE]
        self._last: dict[Any, int] = {}
        self._used: set[tuple[Comm, str]] = set()
        self._pinned: set[int] = set()
        # Of a storage: the stream that it was allocated on, and those that it was recorded on.
        self._home: dict[int, Any] = {}
        self.live = self.peak = 0
        self._recorded_on: dict[int, set[Any]] = defaultdict(set)
        self._free: dict[Any, list[tuple[int, set[int]]]] = defaultdict(list)
        # Of a storage: the last node of each queue that uses it.
        self._users: dict[int, dict[Any, int]] = defaultdict(dict)
        # Nodes whose results are on their way to the host, by storage.
        self._arriving: dict[int, int] = {}
        # The first node of the step; none while the engine is built.
        self._began: int | None = None

    def begin(self) -> None:
        super().begin()
        self._began = len(self.nodes)
        self.operations, self.peak = [], self.live

    def __enter__(self) -> Any:
        found, self._mode = super().__enter__(), detect_fake_mode()

        def record_stream(tensor: Tensor, stream: Stream) -> None:
            number = self.number_of(tensor.untyped_storage())
            self._recorded_on[number].add(stream.queue)

        def synchronize(*_: Any) -> None:
            self.host_waits(set(self._last.values()), "the device")

        for of, name, stand_in in (
            (torch, "Stream", type("Stream", (Stream,), {"model": self})),
            (torch, "Event", type("Event", (Event,), {"model": self})),
            (torch.accelerator, "current_stream", lambda *_: self.stream()),
            (torch.accelerator, "current_device_index", lambda: 0),
            (torch.accelerator, "is_available", lambda: True),
            (torch.accelerator, "synchronize", synchronize),
            (torch.Tensor, "record_stream", record_stream),
        ):
            self._patches.enter_context(mock.patch.object(of, name, stand_in))
        return found

    def stream(self) -> Stream:
        found = torch.Stream()
        found.queue = self.current[-1]
        return found

    # Edges

    def add(self, queue: Any, work: Any = None, needs: set[int] | None = None) -> int:
        before = {self._last.get(of, -1) for of in (queue, HOST)}
        self.nodes.append(Node(queue, (needs or set()) | (before - {-1}), work))
        self._last[queue] = len(self.nodes) - 1
        return self._last[queue]

    def here(self, queue: Any = None) -> set[int]:
        found = self._last.get(queue or self.current[-1])
        return set() if found is None else {found}

    def host_waits(self, needs: set[int], reason: str) -> None:
        """It may wait for what comes before the step."""
        if self._began is not None and max(needs, default=-1) >= self._began:
            self.problems.append(f"the host waits for {reason}")
        self.add(HOST, None, needs)

    def _uses(self, node: int, storages: Iterable[int]) -> None:
        for storage in storages:
            self._users[storage][self.nodes[node].queue] = node

    def _precedes(self, one: int, other: int) -> bool:
        """Whether the node is done when the other one is."""
        todo, seen = [other], set()
        while todo:
            at = todo.pop()
            if at >= one and at not in seen:
                seen.add(at)
                todo += self.nodes[at].needs
        return one in seen

    def launched(self, call: Call) -> None:
        key = call.comm, call.name
        others = [one for one in self.flying if one.comm != call.comm]
        if key not in self._used and others:
            self.problems.append(f"{call} is the first, while {others[0]} is in flight")
        self._used.add(key)
        super().launched(call)
        if call.is_fake:
            call.node = self.add(call.comm, call, self.here())
            self._uses(call.node, (one.storage for one in call.reads + call.writes))

    def waited(self, call: Call) -> None:
        super().waited(call)
        if call.is_fake:
            self.add(self.current[-1], None, {call.node})

    # Memory

    def allocated(self, storage: int, size: int) -> None:
        self.sizes[storage] = size
        self.most[storage] = max(size, self.most[storage])
        if storage in self._home:
            self._made(storage)

    def _made(self, storage: int) -> None:
        """The allocator may give out memory again in the order of its stream."""
        queue = self._home[storage] = self.current[-1]
        blocks = [*self._free.pop(queue, ()), (storage, set())]
        needs = set().union(*(needs for _, needs in blocks))
        node = self.add(queue, [storage for storage, _ in blocks], needs)
        for user in {n for of, _ in blocks for n in self._users.pop(of, {}).values()}:
            if not self._precedes(user, node):
                work = self.nodes[user].work
                name = work[0] if isinstance(work, tuple) else work
                self.problems.append(f"memory is given out that {name} uses")
        self.live += self.sizes[storage]
        self.peak = max(self.peak, self.live)

    def freed(self, storage: int) -> None:
        super().freed(storage)
        queue = self._home.get(storage, HOST)
        if queue != HOST and self.sizes[storage]:
            used = set().union(*map(self.here, self._recorded_on.pop(storage, ())))
            self._free[queue].append((storage, used))
            self.live -= self.sizes[storage]
            self.sizes[storage] = 0

    # Operations

    def operated(self, func: Any, reads: list[Bytes], writes: list[Bytes]) -> None:
        super().operated(func, reads, writes)
        if isinstance(func, torch._ops.OpOverload):
            self.operations.append((func, [one.view[1] for one in reads + writes]))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        kinds = {t.device.type for t in given if isinstance(t, FakeTensor)}
        waits = name.startswith(READING) and kinds - {"cpu"}
        if name.startswith("_local_scalar_dense") and kinds:
            found = args[0].dtype == torch.bool
        else:
            # An engine is built without FakeTensors, but for the parameters.
            is_real = not kinds and kwargs.get("device") in (None, torch.device("cpu"))
            with nullcontext() if is_real else self._mode:
                found = func(*args, **kwargs)
        made = [t for t in tree_leaves(found) if isinstance(t, FakeTensor)]
        there = {t.device.type for t in made}
        if kwargs.get("pin_memory") and there:
            self._pinned.add(self.number_of(made[0].untyped_storage()))
        if name.startswith(("copy_", "_to_copy")) and len(kinds | there) > 1:
            is_late = kwargs.get("non_blocking") or args[2:3] == (True,)
            on_host = filter(is_on_host, given)
            numbers = [self.number_of(t.untyped_storage()) for t in on_host]
            waits = not (is_late and self._pinned.issuperset(numbers))
        if kinds | there:
            self._trace(func, args, kwargs, given, found, made, bool(waits))
        return found

    def _trace(self, func, args, kwargs, given, found, made, waits):
        kinds = {t.device.type for t in given + made if isinstance(t, FakeTensor)}
        before, after = (
            {
                self.number_of(t.untyped_storage())
                for t in some
                if isinstance(t, FakeTensor)
            }
            for some in (given, made)
        )
        is_new = after - before
        queue = HOST if kinds == {"cpu"} else self.current[-1]
        for number in is_new:
            if queue == HOST:
                self._home[number] = HOST
            else:
                self._made(number)
        name = func.__name__
        if (func.is_view and "lift" not in name) or name.startswith(NO_WORK):
            return
        for number in before & self._arriving.keys() if queue == HOST else ():
            if not self._precedes(self._arriving[number], self._last.get(HOST, -1)):
                self.problems.append(f"{func} on the host is too early")
        kept = {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs
        kept = {**kept, "pin_memory": False} if "pin_memory" in kept else kept
        work = tree_map(self._described, (args, kept, found if is_new else None))
        node = self.add(queue, (func, *work))
        self._uses(node, before | after)
        if len(kinds) > 1 and queue != HOST:
            for tensor in filter(is_on_host, (*args[:1], *made)):
                self._arriving[self.number_of(tensor.untyped_storage())] = node
        if waits:
            self.host_waits({node}, f"{func}")

    def _described(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return self.bytes_of(value)
        if isinstance(value, torch.Tensor):
            with _disable_current_modes():
                return value.clone()
        return value


class Stream:
    model: Accelerator

    def __init__(self, *_: Any, **__: Any) -> None:
        self.queue: Any = object()

    def __enter__(self) -> None:
        self.model.current.append(self.queue)

    def __exit__(self, *exception: Any) -> None:
        self.model.current.pop()

    def wait_stream(self, other: Stream) -> None:
        self.model.add(self.queue, None, self.model.here(other.queue))

    def wait_event(self, event: Event) -> None:
        self.model.add(self.queue, None, event.needs)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or torch.Event()
        event.record(self)
        return event


class Event:
    model: Accelerator

    def __init__(self, *_: Any, **__: Any) -> None:
        self.needs: set[int] = set()

    def record(self, stream: Stream | None = None) -> None:
        self.needs = self.model.here(stream and stream.queue)

    def synchronize(self) -> None:
        self.model.host_waits(self.needs, "an event")


class Replay:
    """The nodes of all ranks with real data, in an order that the edges allow.

    Args:
        parts: what each rank recorded.
        inputs: what memory that no rank made has, by rank and storage.
        seed: chooses which queues come late; None for the order of the programs.
    """

    def __init__(self, parts: Mapping[int, Accelerator], inputs: Any, seed: int | None):
        self.parts = parts
        self.memory = {
            (rank, storage): torch.full(
                (size + 16 - size % 16,), 255, dtype=torch.uint8
            )
            for rank, part in parts.items()
            for storage, size in part.most.items()
        }
        for rank, found, values in inputs:
            self.tensor(rank, found).copy_(values)
        random_ = random.Random(seed)
        slow: dict[Any, float] = defaultdict(random_.random)
        # A collective is one node of all its ranks.
        nodes: dict[Any, list[tuple[int, Node]]] = defaultdict(list)
        name: dict[tuple[int, int], Any] = {}
        for rank, part in parts.items():
            for at, node in enumerate(part.nodes):
                call = node.work
                is_call = isinstance(call, Call)
                key = (call.comm, call.number) if is_call else (rank, at)
                name[rank, at] = key
                nodes[key].append((rank, node))
        left = dict.fromkeys(nodes, 0)
        after: dict[Any, list[Any]] = defaultdict(list)
        for key, of_ranks in nodes.items():
            for rank, node in of_ranks:
                for need in node.needs:
                    left[key] += 1
                    after[name[rank, need]].append(key)
        in_order = sorted(name, key=lambda one: one[::-1])
        places = {name[one]: place for place, one in enumerate(in_order)}

        def turn(key):
            rank, node = nodes[key][0]
            late = 0 if seed is None else slow[rank, node.queue] + random_.random() / 4
            return late, places[key]

        ready = [(*turn(key), key) for key, count in left.items() if not count]
        heapq.heapify(ready)
        done = 0
        while ready:
            *_, key = heapq.heappop(ready)
            self._run(nodes[key])
            done += 1
            for following in after[key]:
                left[following] -= 1
                if not left[following]:
                    heapq.heappush(ready, (*turn(following), following))
        if done < len(nodes):
            raise RuntimeError(f"{len(nodes) - done} nodes never start")

    def tensor(self, rank: int, found: Bytes) -> Tensor:
        dtype, *view = found.view
        return self.memory[rank, found.storage].view(dtype).as_strided(*view)

    def _run(self, of_ranks: list[tuple[int, Node]]) -> None:
        rank, node = of_ranks[0]
        if isinstance(node.work, list):
            for storage in node.work:
                self.memory[rank, storage].fill_(255)
        elif isinstance(node.work, Call):
            self._collective({rank: node.work for rank, node in of_ranks})
        elif node.work is not None:
            func, *work = node.work

            def real(value):
                return self.tensor(rank, value) if isinstance(value, Bytes) else value

            args, kwargs, outs = tree_map(real, work)
            found = func(*args, **kwargs)
            if outs is not None:
                for out, value in zip(tree_leaves(outs), tree_leaves(found)):
                    out.copy_(value)

    def _collective(self, calls: dict[int, Call]) -> None:
        first = next(iter(calls.values()))
        ranks = first.comm.ranks
        reads = {r: [self.tensor(r, b) for b in calls[r].reads] for r in ranks}
        writes = {r: [self.tensor(r, b) for b in calls[r].writes] for r in ranks}
        if first.name == "all_to_all_single":
            sent = {r: reads[r][0].clone().split(calls[r].splits[0]) for r in ranks}
            for at, rank in enumerate(ranks):
                parts = writes[rank][0].split(calls[rank].splits[1])
                for part, other in zip(parts, ranks, strict=True):
                    part.copy_(sent[other][at])
            return
        if first.name == "all_reduce":
            every = torch.stack([reads[r][0] for r in ranks])
            is_max = first.operation == dist.ReduceOp.MAX
            found = [every.amax(0) if is_max else every.sum(0)]
        elif first.name == "broadcast":
            found = reads[first.source]
        else:
            found = [reads[r][0].clone() for r in ranks]
            if first.name != "all_gather":
                found = [torch.cat([one.flatten() for one in found])]
        for target in writes.values():
            for one, value in zip(target, found):
                one.copy_(value.view(one.shape))
