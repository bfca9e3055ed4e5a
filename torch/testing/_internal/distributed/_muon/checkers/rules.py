"""Checkers of the rules that hold on accelerators. They need no accelerator.

A rank that is alone plays its part of a world: collectives are recorded and move nothing. The ranks play
one after another, and their records are compared. FakeTensors of the device "lazy" take the engine's path for
accelerators, in a model of an accelerator's queues.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import weakref
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple, TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import _mesh_resources, DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Muon
from torch.optim._muon_engine.schedule import buckets, owners, packs
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore
from torch.utils._python_dispatch import _disable_current_modes, TorchDispatchMode
from torch.utils._pytree import tree_leaves


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor


# Collectives that write their first argument. The first ones read the second one, the others the same.
FROM_TO = "all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all_single"  # fmt: skip
IN_PLACE = "all_reduce", "broadcast"
# Operations that look at a tensor and not at its elements.
BLIND = ("device", "empty", "new_empty", "is_pinned", "record", "_record", "zeros_like")


def _new_group(common: Any, options: Any) -> Any:
    made = FakeProcessGroup._create_internal
    return made(common.group_rank, common.group_size, options)


# The engine treats the backend "fake" as a dry run, which leaves out what this one is to show.
dist.Backend.register_backend(
    "alone", _new_group, extended_api=True, devices=["cpu", "lazy"]
)


class Store(FakeStore):
    """The others have come wherever this rank comes, and have left no note."""

    set = wait = lambda *_: None
    check = delete_key = lambda *_: False
    add = lambda *_: 0  # noqa: E731


@contextlib.contextmanager
def alone(rank: int, world: int) -> Iterator[None]:
    """This process is ``rank`` of a world whose other ranks never answer."""
    store = Store()  # Without this name, its methods would be gone.
    dist.init_process_group("alone", store=store, rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Comm(NamedTuple):
    """A communicator as its ranks know it: the ranks, and which of the groups over them."""

    ranks: tuple[int, ...]
    number: int


# How much of the work of each queue is done. Queues are the host, streams and, one each, collectives.
Clock = dict[Any, int]
HOST = "host"


def joined(*clocks: Clock) -> Clock:
    queues = dict.fromkeys(itertools.chain(*clocks))
    return {queue: max(c.get(queue, 0) for c in clocks) for queue in queues}


class Call:
    def __init__(self, name: str, recorder: Recorder, given: Mapping) -> None:
        self.name, self.comm = name, recorder.comm_of(given["group"])
        self.number = recorder.counts[self.comm]
        recorder.counts[self.comm] += 1
        self.source, self.is_finished = given.get("src"), False
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
        if name == "all_to_all_single":
            even = [read.numel() // len(comm.ranks)] * len(comm.ranks)
            sides = "input_split_sizes", "output_split_sizes"
            self.splits = [given[side] or even for side in sides]
            for peer, sent, got in zip(comm.ranks, *self.splits, strict=True):
                both = (sent, got) if dist.get_rank() < peer else (got, sent)
                self.said[peer] = name, str(read.dtype), *both

    @property
    def peers(self) -> set[int]:
        """The ranks that an all-to-all sends something to."""
        sent = self.splits[0] if self.splits else ()
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
        self._stumbles, self._stumbles_now, self.done, self.resizes = stumbles, 0, 0, []
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
        self.add(self.here(call), self.clocks.pop(call))

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
        for (storage, start, end), writes_it in found:
            for (other, *span, wrote), (place, name) in self._accesses[storage].items():
                is_race = (writes_it or wrote) and clock.get(other, 0) < place
                if is_race and max(start, span[0]) < min(end, span[1]):
                    self.problems.append(f"{work} touches the memory of {name}")
        for (storage, start, end), writes_it in found:
            if queue is not HOST:
                key = queue, start, end, writes_it
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
        offset, item = tensor.storage_offset(), tensor.element_size()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        end = offset + last + 1 if tensor.numel() else offset
        return self.number_of(tensor), offset * item, end * item

    def __enter__(self) -> Any:
        self._patches = contextlib.ExitStack()
        self.moves = dist.get_backend() != "alone"
        for name in (n for n in FROM_TO + IN_PLACE if hasattr(dist, n)):
            found = self._recorded(name, getattr(dist, name))
            self._patches.enter_context(mock.patch.object(dist, name, found))
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
            is_async, given["async_op"] = given["async_op"], True
            own = original(*bound.args, **bound.kwargs) if self.moves else None
            if name == "all_gather" and not call.is_fake and not self.moves:
                # All ranks say the same when they build an engine.
                with _disable_current_modes():
                    for target in call.target:
                        target.copy_(call.given)
            work = Work(self, call, own)
            return work if is_async else work.wait() and None

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
        used: tuple[list, list] = [], []
        for at, argument in enumerate(func._schema.arguments):
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            tensors = (t for t in tree_leaves(value) if isinstance(t, torch.Tensor))
            is_written = argument.alias_info and argument.alias_info.is_write
            used[bool(is_written)].extend(tensors)
        self.operate()
        return self.run(func, args, kwargs, *used)

    def run(self, func: Any, args: Any, kwargs: Any, reads: list, writes: list) -> Any:
        if reads or writes:
            self.accessed(func, reads, writes, HOST)
        return func(*args, **kwargs)


Log = list[tuple[str, Call]]


def disagreements(logs: Mapping[int, Log]) -> list[str]:
    """Where the ranks of a communicator launch other collectives, or other sizes."""
    queues: dict[Comm, dict[int, list[Call]]] = defaultdict(dict)
    for rank, log in logs.items():
        for what, call in log:
            if what == "launch":
                queues[call.comm].setdefault(rank, []).append(call)
    found = []
    for comm, of_ranks in queues.items():
        counts = {rank: len(of_ranks.get(rank, ())) for rank in comm.ranks}
        if len(set(counts.values())) > 1:
            found.append(f"{comm}: ranks launch {counts} collectives")
        for a, mine in of_ranks.items():
            for b, its in of_ranks.items():
                for one, other in zip(mine, its, strict=False):
                    if a < b and one.said[b] != other.said[a]:
                        found.append(f"{one}: {one.said[b]} and {other.said[a]}")
    return found


def deadlock(logs: Mapping[int, Log], in_turn: bool = False) -> list[str]:
    """The launch or wait at which each rank is stuck; nothing if all ranks come to their ends.

    A collective finishes when all of its ranks have launched it. With ``in_turn`` a rank launches nothing
    before its last collective has started on all of its ranks, as on a device with one queue.
    """
    at = dict.fromkeys(logs, 0)
    there: dict[tuple[Comm, int], set[int]] = defaultdict(set)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, log in logs.items():
            while at[rank] < len(log):
                what, call = log[at[rank]]
                arrived = there[call.comm, call.number]
                if what == "launch":
                    arrived.add(rank)
                if (what == "wait" or in_turn) and len(arrived) < len(call.comm.ranks):
                    break
                at[rank] += 1
                has_moved = True
    return [
        f"rank {rank} is at the {what} of {call}, to which ranks {there[call.comm, call.number]} have come"
        for rank, log in logs.items()
        for what, call in log[at[rank] : at[rank] + 1]
    ]


_meshes = itertools.count()


class Held(NamedTuple):
    """``count`` matrices, placed on a mesh of some of the ranks; a placement is "R", "P" or a dimension."""

    ranks: tuple[int, ...]
    placements: tuple[str | int, ...] = ("R",)
    shape: tuple[int, int] = (8, 8)
    count: int = 4
    sizes: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    offloaded: bool = False


class Program(NamedTuple):
    """The matrices and the config of all ranks of a world, and the limits of the schedule."""

    world: int
    held: tuple[Held, ...]
    prefetch: int = 1
    owners: int = 1
    parallel: bool = True
    node: int = 1
    limits: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


class Rank(contextlib.ExitStack):
    """One rank of a program. A context manager: the rank's world, alone, with the program's limits."""

    def __init__(self, program: Program, number: int, device: str = "cpu") -> None:
        super().__init__()
        self.program, self.number, self.device = program, number, device

    def __enter__(self) -> Any:
        program, enter = self.program, self.enter_context
        enter(alone(self.number, program.world))
        enter(mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(program.node)))
        enter(mock.patch.object(_mesh_resources, "num_devices_per_host", lambda _: 8))
        for name, value in program.limits:
            of = next(m for m in (owners, buckets, packs) if name in vars(m))
            enter(mock.patch.object(of, name, value))
        self.meshes = {}
        for of in program.held:
            ranks = torch.tensor(of.ranks).view(of.sizes or -1)
            # DTensor's caches confuse equal meshes of different worlds.
            names = tuple(f"m{next(_meshes)}" for _ in range(ranks.ndim))
            if (of.ranks, of.sizes) not in self.meshes:
                kind = self.device.split(":")[0]
                made = DeviceMesh(kind, ranks, mesh_dim_names=names)
                self.meshes[of.ranks, of.sizes] = made
        if self.device != "cpu":
            enter(FakeTensorMode())
        held = [of for of in program.held for _ in range(of.count)]
        held = [of for of in held if self.number in of.ranks]
        self.params = [torch.nn.Parameter(self.tensor(of)) for of in held]
        self.grads = list(map(self.tensor, held))
        return self

    def tensor(self, of: Held) -> DTensor:
        kinds = {"R": Replicate(), "P": Partial()}
        placements = [kinds.get(p) or Shard(p) for p in of.placements]
        mesh = self.meshes[of.ranks, of.sizes]
        with unset_fake_temporarily():
            shape, _ = compute_local_shape_and_global_offset(of.shape, mesh, placements)
        device = "cpu" if of.offloaded else self.device
        local = torch.ones(shape, dtype=of.dtype, device=device)
        meta = TensorMeta(torch.Size(of.shape), (of.shape[1], 1), of.dtype)
        # As FSDP2 makes them: DTensor.from_local() moves an offloaded one.
        spec = DTensorSpec(mesh, tuple(placements), meta)
        return DTensor(local, spec, requires_grad=False)

    def build(self, **flags: Any) -> Muon:
        program = self.program
        options = dict(program.options)
        if options.get("lr") == "on the device":
            options["lr"] = torch.tensor(0.02, device=self.device)
        config = create_dtensor_config(
            async_gpu_parallelism=program.parallel,
            prefetch_count=program.prefetch,
            owners_per_matrix=program.owners,
            **flags,
        )
        self.muon = Muon(self.params, distributed_config=config, **options)
        return self.muon

    def step(self) -> None:
        for param, grad in zip(self.params, self.grads):
            param.grad = grad
        self.muon.step()


# Operations whose result the host needs.
READING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked", "unique")
COMPUTE = "compute"


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

        for of, name, stand_in in (
            (torch, "Stream", type("Stream", (Stream,), {"model": self})),
            (torch, "Event", type("Event", (Event,), {"model": self})),
            (torch.accelerator, "current_stream", lambda *_: self.stream()),
            (torch.accelerator, "current_device_index", lambda: 0),
            (torch.accelerator, "device_index", partial(mock.patch.object, self, "at")),
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

    def host_waits(self, clock: Clock, reason: str) -> None:
        """It may wait for what comes before the step."""
        before = self._began if self._began is not None else clock
        if any(place > before.get(queue, 0) for queue, place in clock.items()):
            self.problems.append(f"the host waits for {reason}")
        self.add(HOST, clock)

    def launched(self, call: Call) -> None:
        key = call.comm, call.name, call.nbytes
        if call.name == "all_gather" and self.at is None:
            self.problems.append("ranks exchange objects on any device")
        others = [one for one in self.flying if one.comm != call.comm]
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
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, FakeTensor)]
        kinds = {t.device.type for t in given}
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
        made = [t for t in tree_leaves(found) if isinstance(t, FakeTensor)]
        made = [t for t in made if self.number_of(t) not in before]
        kinds |= {t.device.type for t in made}
        queue = self.current[-1] if kinds - {"cpu"} else HOST
        for number in set(map(self.number_of, made)):
            self._home[number] = HOST
            if queue != HOST:
                self._made(number)
        if kwargs.get("pin_memory") and made:
            self._pinned.add(self.number_of(made[0]))
        if name.startswith(("copy_", "_to_copy")) and len(kinds) > 1:
            is_late = kwargs.get("non_blocking") or args[2:3] == (True,)
            on_host = (self.number_of(t) for t in given if t.device.type == "cpu")
            waits = not (is_late and self._pinned.issuperset(on_host))
        made = [] if name.startswith(("empty", "new_empty")) else made
        if kinds and (reads or writes or made):
            self.operations.append((func, [t.shape for t in reads + writes]))
            fake = (
                [t for t in some if isinstance(t, FakeTensor)]
                for some in (reads, writes + made)
            )
            self.accessed(func, *fake, queue)
        if waits:
            self.host_waits(self.clocks[queue], f"{func}")
        return found


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
