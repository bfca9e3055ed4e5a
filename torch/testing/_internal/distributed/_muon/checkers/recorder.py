"""Records the collectives of a rank, and finds what touches their memory before they are waited for."""

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


# Collectives that write their first argument. The first ones read the second one, the others the same.
FROM_TO = "all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all_single"  # fmt: skip
IN_PLACE = "all_reduce", "broadcast"
# Operations that look at a tensor and not at its elements.
BLIND = ("device", "empty", "new_empty", "is_pinned", "record", "_record", "zeros_like")


class Comm(NamedTuple):
    """A communicator as its ranks know it: the ranks, and which of the groups over them."""

    ranks: tuple[int, ...]
    number: int


class Bytes(NamedTuple):
    """The part of a storage that some work reads, or also writes."""

    storage: int
    start: int
    end: int
    is_written: bool

    def must_wait_for(self, other: Bytes) -> bool:
        overlap = max(self.start, other.start) < min(self.end, other.end)
        is_written = self.is_written or other.is_written
        return self.storage == other.storage and is_written and overlap


def storage_of(tensor: torch.Tensor) -> int:
    """The key of the memory of ``tensor``, until it is freed."""
    return tensor.untyped_storage()._cdata


def bytes_of(reads: Any, writes: Any) -> list[Bytes]:
    found = []
    for tensors, is_written in ((reads, False), (writes, True)):
        for tensor in tree_leaves(tensors):
            last = 0
            for size, stride in zip(tensor.shape, tensor.stride()):
                last += (size - 1) * stride
            start = tensor.storage_offset()
            end = start + last + 1 if tensor.numel() else start
            itemsize = tensor.element_size()
            at = start * itemsize, end * itemsize
            found.append(Bytes(storage_of(tensor), *at, is_written))
    return found


class Call:
    """A collective. ``said`` is what this rank and each other one must agree on."""

    def __init__(self, name: str, comm: Comm, number: int, given: Mapping) -> None:
        self.name, self.comm, self.number = name, comm, number
        self.source, self.is_finished = given.get("src"), False
        target, *others = given.values()
        read = others[0] if name in FROM_TO else target
        self.is_fake = isinstance(read, FakeTensor)
        self.nbytes, self.itemsize = read.nbytes, read.itemsize
        is_source = self.source == dist.get_rank()
        reads = read if name != "broadcast" or is_source else ()
        self.memory = bytes_of(reads, () if is_source else target)
        # Elements by peer: those sent, and those received.
        self.splits: list[list[int]] = []
        what: tuple[Any, ...] = (name, str(read.dtype), read.numel(), self.source)
        if name == "all_gather":
            # Ranks may send other sizes than each other.
            what = name, str(read.dtype), *[tensor.numel() for tensor in target]
        self.said: dict[int, Any] = dict.fromkeys(comm.ranks, what)
        if name == "all_to_all_single":
            even = [read.numel() // len(comm.ranks)] * len(comm.ranks)
            sent = given["input_split_sizes"] or even
            received = given["output_split_sizes"] or even
            self.splits = [sent, received]
            for peer, out, back in zip(comm.ranks, sent, received, strict=True):
                # The size that the lower of the two ranks sends comes first.
                both = (out, back) if dist.get_rank() < peer else (back, out)
                self.said[peer] = name, str(read.dtype), *both

    def __str__(self) -> str:
        return f"{self.name} {self.number} of ranks {list(self.comm.ranks)}"


class Work:
    """The handle of a collective. Unlike those of backends, it keeps no memory."""

    def __init__(self, recorder: Recorder, call: Call, own: Any) -> None:
        self._recorder, self._call, self._own = recorder, call, own
        weakref.finalize(self, recorder.dropped, call).atexit = False

    def wait(self, *args: Any) -> bool:
        if self._own is not None:
            self._own.wait(*args)
        if not self._call.is_finished:
            self._call.is_finished = True
            self._recorder.waited(self._call)
        return True


class Recorder(TorchDispatchMode):
    """From the launch of a collective to its ``wait()``, nothing may touch its memory, free it, or forget the handle.
    ``log`` has ("launch" | "wait", call) in the order of the program.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, Call]] = []
        self.began = 0
        self.problems: list[str] = []
        self.flying: list[Call] = []
        # Those of frameworks that trace.
        self.functional: list[str] = []
        self._names: dict[tuple[int, ...], list[str]] = defaultdict(list)
        self._counts: dict[Comm, int] = defaultdict(int)

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
        """A step begins at this place of ``log``."""
        self.began = len(self.log)

    def launched(self, call: Call, given: Mapping) -> None:
        self.log.append(("launch", call))
        self.touched(call, call.memory)
        self.flying.append(call)
        for tensor in tree_leaves(tuple(given.values())):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                weakref.finalize(storage, self.freed, call).atexit = False

    def waited(self, call: Call) -> None:
        self.log.append(("wait", call))
        self.flying.remove(call)

    def dropped(self, call: Call) -> None:
        if not call.is_finished:
            self.problems.append(f"nobody waits for {call}")

    def freed(self, call: Call) -> None:
        if not call.is_finished:
            self.problems.append(f"the memory of {call} is freed")

    def touched(self, work: Any, memory: list[Bytes]) -> None:
        for call in self.flying:
            for own in memory:
                if any(own.must_wait_for(other) for other in call.memory):
                    self.problems.append(f"{work} touches the memory of {call}")

    def __enter__(self) -> Any:
        self._patches = contextlib.ExitStack()
        for name in FROM_TO + IN_PLACE:
            # Versions of torch have different ones.
            if hasattr(dist, name):
                stand_in = self._recorded(name, getattr(dist, name))
                self._patches.enter_context(mock.patch.object(dist, name, stand_in))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()
        self.problems += [f"{call} is not waited for" for call in self.flying]

    def _recorded(self, name: str, original: Callable) -> Callable:
        signature = inspect.signature(original)
        is_alone = dist.get_backend() == "alone"

        def recorded(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            comm = self._comm_of(given["group"])
            call = Call(name, comm, self._counts[comm], given)
            self._counts[comm] += 1
            self.launched(call, given)
            is_async, given["async_op"] = given["async_op"], True
            own = None if is_alone else original(*bound.args, **bound.kwargs)
            if is_alone and name == "all_gather" and not call.is_fake:
                # All ranks say the same when they build an engine.
                with _disable_current_modes():
                    for target in given["tensor_list"]:
                        target.copy_(given["tensor"])
            work = Work(self, call, own)
            if is_async:
                return work
            work.wait()
            return None

        return recorded

    def _comm_of(self, group: Any) -> Comm:
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
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for position, argument in enumerate(func._schema.arguments):
            if position < len(args):
                value = args[position]
            else:
                value = kwargs.get(argument.name)
            is_written = argument.alias_info and argument.alias_info.is_write
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    (writes if is_written else reads).append(leaf)
        return self.run(func, args, kwargs, reads, writes)

    def run(self, func: Any, args: Any, kwargs: Any, reads: list, writes: list) -> Any:
        if self.flying:
            self.touched(func, bytes_of(reads, writes))
        return func(*args, **kwargs)
