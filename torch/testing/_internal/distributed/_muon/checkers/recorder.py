"""Records the collectives of a rank, and finds accesses to memory that nothing orders."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import defaultdict
from typing import Any, NamedTuple, TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes, TorchDispatchMode
from torch.utils._pytree import tree_leaves


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


# Collectives that write their first argument. The first ones read the second one, the others the same.
FROM_TO = "all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all_single"  # fmt: skip


IN_PLACE = "all_reduce", "broadcast"


# Operations that look at a tensor and not at its elements.
BLIND = ("device", "empty", "new_empty", "is_pinned", "record", "_record", "zeros_like")


class Comm(NamedTuple):
    """A communicator as its ranks know it: the ranks, and which of the groups over them."""

    ranks: tuple[int, ...]
    number: int


# How much of the work of each queue is done. Queues are the host, streams and, one each, collectives.
Clock = dict[Any, int]


HOST = "host"


def joined(*clocks: Clock) -> Clock:
    """The work that is done after all of these clocks."""
    latest: Clock = {}
    for clock in clocks:
        for queue, place in clock.items():
            latest[queue] = max(place, latest.get(queue, 0))
    return latest


class Call:
    def __init__(self, name: str, recorder: Recorder, given: Mapping) -> None:
        self.name = name
        self.comm = recorder.comm_of(given["group"])
        self.number = recorder.counts[self.comm]
        recorder.counts[self.comm] += 1
        self.source, self.is_finished = given.get("src"), False
        # Its end, once somebody has waited for it.
        self.over: Clock = {}
        self.target, *others = given.values()
        self.given = others[0] if name in FROM_TO else self.target
        comm, read = self.comm, self.given
        self.is_fake = isinstance(read, FakeTensor)
        self.nbytes, self.itemsize = read.nbytes, read.itemsize
        is_source = self.source == dist.get_rank()
        self.reads = read if name != "broadcast" or is_source else ()
        self.writes = () if is_source else self.target
        # Elements by peer: those sent, and those received.
        self.splits: list[list[int]] = []
        what = name, str(read.dtype), read.numel(), self.source
        # The ranks of each pair must agree on this.
        self.said: dict[int, Any] = dict.fromkeys(comm.ranks, what)
        if name == "all_gather":
            # Ranks may send other sizes than each other.
            sizes = tuple(tensor.numel() for tensor in self.target)
            self.said = dict.fromkeys(comm.ranks, (name, str(read.dtype), sizes))
        if name == "all_to_all_single":
            even = [read.numel() // len(comm.ranks)] * len(comm.ranks)
            sent = given["input_split_sizes"] or even
            received = given["output_split_sizes"] or even
            self.splits = [sent, received]
            for peer, out, back in zip(comm.ranks, sent, received, strict=True):
                # The size that the lower of the two ranks sends comes first.
                both = (out, back) if dist.get_rank() < peer else (back, out)
                self.said[peer] = name, str(read.dtype), *both

    @property
    def peers(self) -> set[int]:
        """The ranks that an all-to-all sends something to."""
        if not self.splits:
            return set()
        sent, _ = self.splits
        return {rank for rank, count in zip(self.comm.ranks, sent) if count}

    def __str__(self) -> str:
        return f"{self.name} {self.number} of ranks {list(self.comm.ranks)}"


class Work:
    """The handle of a collective, which keeps its memory as backends' handles do."""

    def __init__(self, recorder: Recorder, call: Call, own: Any) -> None:
        self._recorder, self._call, self._own = recorder, call, own
        self._kept = call.given, call.target
        call.given = call.target = call.reads = call.writes = None
        weakref.finalize(self, recorder.dropped, call).atexit = False

    def wait(self, *args: Any) -> bool:
        if self._own is not None:
            self._own.wait(*args)
        if not self._call.is_finished:
            self._call.is_finished = True
            self._recorder.waited(self._call)
        else:
            self._recorder.waited_again(self._call)
        self._kept = None, None
        return True


class Recorder(TorchDispatchMode):
    """Records collectives, and finds accesses to memory that nothing orders: those of the host and of a
    collective between launch and ``wait()``. Memory must not be freed, nor a handle forgotten, before that.

    ``log`` has ("launch" | "wait", call) in the order of the program.

    Args:
        stumbles: the operation, from :meth:`begin` on, that raises an error; 0 for none.
    """

    def __init__(self, stumbles: int = 0) -> None:
        super().__init__()
        self._stumbles, self._stumbles_now = stumbles, 0
        # The operations since begin(), and the numbers of those that resized memory.
        self.done, self.resizes = 0, []
        self.log: list[tuple[str, Call]] = []
        self.problems: list[str] = []
        self.flying: list[Call] = []
        # Those of frameworks that trace.
        self.functional: list[str] = []
        self._names: dict[tuple[int, ...], list[str]] = defaultdict(list)
        self.counts: dict[Comm, int] = defaultdict(int)
        self._numbers: dict[int, int] = {}
        self._count = 0
        # Of each queue: what is done after its last work.
        self.clocks: dict[Any, Clock] = defaultdict(dict)
        # Where this rank's operations go.
        self.current: list[Any] = [HOST]
        # By storage: queue, bytes and whether they are written -> the work's place in the queue, and what it is.
        self._accesses: dict[int, dict[tuple, tuple[int, Any]]] = defaultdict(dict)

    @property
    def calls(self) -> list[Call]:
        return [call for event, call in self.log if event == "launch"]

    @property
    def names(self) -> list[str]:
        """The names of all collectives, whoever starts them and however."""
        return self.functional + [call.name for call in self.calls]

    @property
    def launches(self) -> list[tuple[Comm, dict[int, Any]]]:
        """The communicator and the arguments of each call, to compare programs."""
        return [(call.comm, call.said) for call in self.calls]

    def begin(self) -> None:
        """From here on, ``log`` is of interest."""
        self.log.clear()
        self.done, self.resizes, self._stumbles_now = 0, [], self._stumbles

    def operate(self) -> None:
        self.done += 1
        if self.done == self._stumbles_now:
            raise ArithmeticError("stumbled")

    def add(self, queue: Any, *needs: Clock) -> Clock:
        """Work starts after the work before it in its queue, what the host has awaited, and ``needs``."""
        clock = joined(self.clocks[queue], self.clocks[HOST], *needs)
        # The host does its own at once, before all that follows.
        if queue is not HOST:
            clock[queue] = clock.get(queue, 0) + 1
        self.clocks[queue] = clock
        return clock

    def here(self, call: Call) -> Any:
        return self.current[-1] if call.is_fake else HOST

    def launched(self, call: Call) -> None:
        self.log.append(("launch", call))
        self.operate()
        reads, writes = tree_leaves(call.reads), tree_leaves(call.writes)
        self.accessed(call, reads, writes, call, self.clocks[self.here(call)])
        self.flying.append(call)

    def waited(self, call: Call) -> None:
        self.log.append(("wait", call))
        self.flying.remove(call)
        call.over = self.clocks.pop(call)
        self.add(self.here(call), call.over)

    def waited_again(self, call: Call) -> None:
        """On another stream, for which the first wait does not count."""
        self.add(self.here(call), call.over)

    def dropped(self, call: Call) -> None:
        if not call.is_finished:
            self.problems.append(f"nobody waits for {call}")

    def accessed(
        self, work: Any, reads: list, writes: list, queue: Any, *needs: Clock
    ) -> None:
        """``work`` in ``queue`` reads and writes these tensors."""
        if queue is HOST and not any(self._accesses.values()):
            return
        clock = self.clocks[HOST] if queue is HOST else self.add(queue, *needs)
        found = [(self.bytes_of(tensor), False) for tensor in reads]
        found += [(self.bytes_of(tensor), True) for tensor in writes]
        for (storage, start, end), is_write in found:
            for key, (place, name) in self._accesses[storage].items():
                other, its_start, its_end, was_write = key
                is_unordered = clock.get(other, 0) < place
                overlaps = max(start, its_start) < min(end, its_end)
                if (is_write or was_write) and is_unordered and overlaps:
                    self.problems.append(f"{work} touches the memory of {name}")
        if queue is HOST:
            return
        for (storage, start, end), is_write in found:
            key = queue, start, end, is_write
            self._accesses[storage][key] = clock[queue], work

    def allocated(self, storage: int, size: int) -> None:
        """The storage is new here, or was resized."""

    def freed(self, storage: int) -> None:
        """The last reference to the storage is gone, or it was resized."""
        # Allocators of the host know of copies to and from its memory.
        self.given_out(storage, self.clocks[HOST], Call)

    def given_out(self, storage: int, clock: Clock, kind: type = object) -> None:
        """Others may use the memory after ``clock``. ``kind``: of the queues that must be done with it."""
        for (queue, *_), (place, name) in self._accesses.pop(storage, {}).items():
            if isinstance(queue, kind) and clock.get(queue, 0) < place:
                self.problems.append(f"the memory of {name} is freed")

    def number_of(self, tensor: Tensor) -> int:
        """The number of a storage: this recorder counts them, because addresses come again."""
        return self._number(tensor.untyped_storage())

    def _number(self, storage: Any) -> int:
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = self._count
            self._count += 1
            weakref.finalize(storage, self._forget, key).atexit = False
            self.allocated(self._numbers[key], storage.nbytes())
        return self._numbers[key]

    def _forget(self, key: int) -> None:
        self.freed(self._numbers.pop(key))

    def bytes_of(self, tensor: Tensor) -> tuple[int, int, int]:
        """The storage of a tensor, and the bytes in it between which it lies."""
        offset, itemsize = tensor.storage_offset(), tensor.element_size()
        end = offset
        if tensor.numel():
            # One after the last element.
            end += 1
            for size, stride in zip(tensor.shape, tensor.stride()):
                end += (size - 1) * stride
        return self.number_of(tensor), offset * itemsize, end * itemsize

    def __enter__(self) -> Any:
        self._patches = contextlib.ExitStack()
        self.moves = dist.get_backend() != "alone"
        for name in FROM_TO + IN_PLACE:
            # Versions of torch have different ones.
            if hasattr(dist, name):
                stand_in = self._recorded(name, getattr(dist, name))
                self._patches.enter_context(mock.patch.object(dist, name, stand_in))
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            number, before = self._number(storage), storage.nbytes()
            if size < before:
                self.freed(number)
            else:
                self.operate()
                self.resizes.append(self.done)
            found = resize(storage, size)
            if size > before:
                self.allocated(number, size)
            return found

        patch = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._patches.enter_context(patch)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()
        self.problems += [f"{call} is not waited for" for call in self.flying]

    def _recorded(self, name: str, original: Callable) -> Callable:
        signature = inspect.signature(original)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            call = Call(name, self, given)
            self.launched(call)
            is_async = given["async_op"]
            given["async_op"] = True
            own = original(*bound.args, **bound.kwargs) if self.moves else None
            if name == "all_gather" and not call.is_fake and not self.moves:
                # All ranks say the same when they build an engine.
                with _disable_current_modes():
                    for target in call.target:
                        target.copy_(call.given)
            work = Work(self, call, own)
            if is_async:
                return work
            work.wait()
            return None

        return recorded

    def comm_of(self, group: Any) -> Comm:
        group = group or dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(group))
        names = self._names[ranks]
        if group.group_name not in names:
            names.append(group.group_name)
        return Comm(ranks, names.index(group.group_name))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func.__name__
        if func.namespace == "_c10d_functional" and not name.startswith("wait"):
            self.functional.append(name)
        is_view = func.is_view and "lift" not in name
        if is_view or func.namespace == "c10d" or name.startswith(BLIND):
            return self.run(func, args, kwargs, [], [])
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for position, argument in enumerate(func._schema.arguments):
            if position < len(args):
                value = args[position]
            else:
                value = kwargs.get(argument.name)
            is_written = argument.alias_info and argument.alias_info.is_write
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    (writes if is_written else reads).append(leaf)
        self.operate()
        return self.run(func, args, kwargs, reads, writes)

    def run(self, func: Any, args: Any, kwargs: Any, reads: list, writes: list) -> Any:
        if reads or writes:
            self.accessed(func, reads, writes, HOST)
        return func(*args, **kwargs)
