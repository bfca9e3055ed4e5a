"""Helpers for the multi-process tests of torch.optim.Muon.

Every comparison here is made with one process: the twin of a distributed parameter is a plain one with
the same values and the same gradients, under a Muon without a distributed_config. They are equal bit for
bit; only parameters in bfloat16 may differ by a rounding.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
import re
import traceback
import unittest
import warnings
from datetime import timedelta
from typing import NamedTuple, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_config import is_near, randn


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


# For meshes of up to four: even, uneven, empty local shards, tall, wide, a row, a column, one element.
SHAPES = [(8, 8), (7, 5), (16, 4), (4, 16), (3, 9), (1, 8), (33, 16), (5, 1), (1, 1)]

S0, S1, R = Shard(0), Shard(1), Replicate()


# Where this process's tensors and meshes are. Worker processes of OnGPUs change it.
_device = torch.device("cpu")


def device():
    return _device


class OnGPUs:
    """To be put before MultiProcessTestCase: each rank has a GPU, and NCCL connects them.

    With the backend "gloo", ranks share the GPUs that there are. NCCL refuses two ranks on one GPU.
    """

    world_size: int
    # Where there are fewer, a test starts no process.
    gpus: int
    backend = "nccl"
    recorder = contextlib.nullcontext

    def setUp(self):
        super().setUp()
        if torch.cuda.device_count() < self.gpus:
            self.skipTest(f"Need at least {self.gpus} CUDA devices")
        # CUDA does not start in the fork of a process that has asked it for devices.
        self._start_processes(torch.multiprocessing.get_context("spawn").Process)

    def run_test(self, *args):
        global _device
        _device = torch.device("cuda", self.rank % torch.cuda.device_count())
        torch.cuda.set_device(_device)
        dist.init_process_group(
            self.backend,
            rank=self.rank,
            world_size=self.world_size,
            store=dist.FileStore(self.file_name, self.world_size),
            # Before the test is ended: the error of a collective says more than a trace.
            timeout=timedelta(seconds=0.7 * common_distributed.TIMEOUT_DEFAULT),
        )
        super().run_test(*args)


class Spec(NamedTuple):
    """A matrix and how it is placed; a plain tensor, whole on every rank, without a mesh.

    Gradients may be placed in another way than their parameter.
    """

    shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] | None
    dtype: torch.dtype = torch.float32
    gradients: tuple[Placement, ...] | None = None

    @property
    def is_summed(self):
        return any(placement.is_partial() for placement in self.placements or ())

    def without_sums(self):
        """The same matrix, where each rank holds the sums themselves."""
        placements = [R if p.is_partial() else p for p in self.placements]
        return self._replace(placements=tuple(placements))

    def of_gradient(self):
        return self._replace(placements=self.gradients or self.placements)


class Cut(NamedTuple):
    """A plain matrix, cut by hand into one piece a rank, or whole.

    ``cuts`` are (dimension, sizes of the pieces, which of them is this rank's), made in that order.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, tuple[int, ...], int], ...] = ()
    dtype: torch.dtype = torch.float32
    is_summed = False

    @property
    def placements(self):
        return self.cuts

    def of_gradient(self):
        return self

    def piece(self, tensor):
        for dim, sizes, which in self.cuts:
            tensor = tensor.split(sizes, dim)[which]
        return tensor.contiguous().clone()


def full(seed, shape, dtype=torch.float32):
    """The same full-rank matrix on every rank."""
    return randn(seed, *shape).to(device(), dtype)


def place(tensor, spec):
    """``tensor``, which every rank has whole, placed as ``spec`` says, without communication."""
    if isinstance(spec, Cut):
        return spec.piece(tensor)
    if spec.mesh is None:
        return tensor.clone()
    if spec.is_summed:
        return DTensor.from_local(
            piece_of(_contribution(tensor, spec), spec),
            spec.mesh,
            spec.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return distribute_tensor(
        tensor.clone(), spec.mesh, spec.placements, src_data_rank=None
    )


def _contribution(tensor, spec):
    """Each element is with one of the ranks whose contributions are added, and the others have zero. So the sum is
    exact, in any order.
    """
    number, count = 0, 1
    for dim, placement in enumerate(spec.placements):
        if placement.is_partial():
            number = number * spec.mesh.size(dim) + spec.mesh.get_local_rank(dim)
            count *= spec.mesh.size(dim)
    elements = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    return tensor.where(elements % count == number, 0)


def added(tensor, spec):
    """This rank's piece of ``tensor``; of contributions, their sum."""
    if spec.is_summed:
        tensor = tensor.redistribute(placements=spec.without_sums().placements)
    return local(tensor)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def piece_of(tensor, spec):
    """This rank's piece of ``tensor``, which every rank has whole."""
    if spec.is_summed:
        spec = spec.without_sums()
    return local(place(tensor, spec))


def placed(tensor):
    """How ``tensor`` is stored, but for its strides."""
    stored = type(tensor), tensor.dtype, tensor.shape
    if isinstance(tensor, DTensor):
        return *stored, tensor.placements, tensor.device_mesh
    return stored


def is_exact():
    """Whether a product has the same bits for all strides, alignments and sizes of a batch."""
    return device().type == "cpu"


def equal(a, b):
    """Compares results of single elements. A GPU may fuse a product with a sum, and round once less."""
    if is_exact():
        return torch.equal(a, b)
    step = 8 * torch.finfo(a.dtype).eps
    return a.shape == b.shape and torch.allclose(a, b, rtol=step, atol=step)


def moved_alike(a, b, steps=1, start=None, piece=lambda whole: whole, summed=False):
    """Whether ``a`` is the ``piece`` of ``b`` after ``steps`` from ``start``.

    Bit for bit, but for parameters of 16 bits: ATen's loop over a CPU tensor rounds ``param + alpha * update`` once
    for most elements and twice for the remainder, and which elements are the remainder depends on the shape of the
    tensor. So each step may differ by the rounding of its last addition. So may a sum of contributions, of which one
    takes the update.
    """
    expected = piece(b)
    if not is_exact():
        return is_near(a, expected, b - start)
    half = torch.finfo(a.dtype).bits == 16
    if not half and not summed:
        return torch.equal(a, expected)
    if a.shape != expected.shape:
        return False
    # Half a unit in the last place of a parameter, and of a move of at most one half.
    unit = torch.finfo(a.dtype).eps / 2
    rounding = unit * (expected.double().abs() + 0.25)
    difference = (a.double() - expected.double()).abs()
    return bool((difference <= 2 * steps * rounding).all())


def as_on_an_accelerator(optimizer):
    """From now on, ``optimizer`` looks for mismatches where a step on an accelerator does. Steps also accumulate
    the gradients of a bucket together. The buffers are on the CPU.
    """
    optimizer._engine.runner.is_cpu = False
    for statuses in optimizer._engine.statuses:
        statuses.device = torch.device("cuda")
        # Only the first step waits for its statuses.
        statuses.awaits = optimizer._engine.steps == 0


def everyone(value, group=None):
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def wrap_functions(config, *names):
    for name in names:
        setattr(config, name, functools.partial(getattr(config, name)))


def all_placements(mesh):
    return list(itertools.product((S0, S1, R), repeat=mesh.ndim))


def specs(mesh, placements, shapes=SHAPES):
    """A matrix of each shape for each of ``placements``."""
    every = itertools.product(placements, shapes)
    return [Spec(shape, mesh, of_mesh) for of_mesh, shape in every]


# Meshes are made once: equal ones with groups of their own get mixed up in DTensor's caches, and
# differently so on ranks that went through different errors. Ranks that are threads have worlds of their own.


@functools.cache
def _mesh(world, shape, names):
    return init_device_mesh(device().type, shape, mesh_dim_names=tuple(names))


def mesh_of(size):
    """This rank's one-dimensional mesh of ``size`` ranks, of which the world has several."""
    count = dist.get_world_size() // size
    return _mesh(dist.group.WORLD, (count, size), "cr")["r"]


def grid_of(*shape):
    """The mesh of all ranks, with dimensions "a", "b" and so on."""
    return _mesh(dist.group.WORLD, shape, "abcd"[: len(shape)])


def sizes_of(size, count, how):
    """How ``size`` rows or columns are cut into ``count`` pieces."""
    if how == "last":
        return (0,) * (count - 1) + (size,)
    sizes = [0] * count
    if how == "balanced":
        for line in range(size):
            sizes[line % count] += 1
    else:
        # As torch.chunk: all but the last pieces have the same size.
        step = math.ceil(size / count)
        for line in range(size):
            sizes[line // step] += 1
    return tuple(sizes)


class Strategy:
    """A mesh, each of whose dimensions is one kind of parallelism: "fsdp", "tp", "ddp" or "cp"."""

    def __init__(self, mesh, *kinds):
        self.mesh, self.kinds = mesh, kinds

    def group(self, kind):
        return self.mesh.get_group(self.kinds.index(kind))

    def config(self, **options):
        groups = {f"{kind}_process_group": self.group(kind) for kind in self.kinds}
        return create_auto_config(**{**groups, **options})

    def cut(self, shape, tp_dim=None, how="chunk"):
        """TP cuts first, and FSDP the rows of its piece."""
        sizes, cuts = list(shape), []
        for kind, dim in (("tp", tp_dim), ("fsdp", 0)):
            if kind not in self.kinds or dim is None:
                continue
            # A group has its ranks in their own order, not in the mesh's.
            which = self.group(kind).rank()
            parts = sizes_of(sizes[dim], self.group(kind).size(), how)
            # A dimension may count from the end.
            cuts.append((dim % len(shape), parts, which))
            sizes[dim] = parts[which]
        return Cut(tuple(shape), tuple(cuts))


class Twins:
    """Distributed parameters with their optimizer, and the same on one process.

    ``groups`` are lists of indices with the options of that group. Ranks that share a matrix have its seed
    in common, one of ``seeds``.
    """

    def __init__(
        self,
        specs,
        config=None,
        groups=None,
        seeds=None,
        grad_dtype=None,
        is_named=False,
        **options,
    ):
        self.specs = list(specs)
        self.grad_dtype = grad_dtype
        self.seeds = list(seeds or range(len(self.specs)))
        self.params, self.singles, self.starts = [], [], {}
        for number, spec in zip(self.seeds, self.specs, strict=True):
            whole = full(number, spec.shape, spec.dtype)
            single = torch.nn.Parameter(whole.clone())
            self.singles.append(single)
            self.starts[single] = whole.clone()
            self.params.append(self.new_param(whole, spec))
            if grad_dtype is not None:
                single.grad_dtype = self.params[-1].grad_dtype = grad_dtype
        if groups is None:
            groups = [(range(len(self.specs)), {})]
        grouped, grouped_singles = [], []
        for indices, own in groups:
            params = [self.params[index] for index in indices]
            if is_named:
                names = [f"v{self.seeds[index]}" for index in indices]
                params = list(zip(names, params))
            singles = [self.singles[index] for index in indices]
            grouped.append({"params": params, **copy.deepcopy(own)})
            grouped_singles.append({"params": singles, **copy.deepcopy(own)})
        self.config = create_dtensor_config() if config is None else config
        self.single = Muon(grouped_singles, **options)
        self.optimizer = Muon(grouped, distributed_config=self.config, **options)
        self.steps = 0

    def new_param(self, whole, spec):
        return torch.nn.Parameter(place(whole, spec))

    def set_gradients(self, missing=()):
        """New, equal gradients for both, but none for the indices ``missing``."""
        self.steps += 1
        for index, spec in enumerate(self.specs):
            param, single = self.params[index], self.singles[index]
            if index in missing:
                param.grad = single.grad = None
                continue
            seed = self.seeds[index] + 1000 * self.steps
            gradient = full(seed, spec.shape, self.grad_dtype or spec.dtype)
            single.grad = gradient
            param.grad = place(gradient, spec.of_gradient())

    def step(self, missing=()):
        self.set_gradients(missing)
        self.single.step()
        self.optimizer.step()

    def problems(self):
        """How parameters and momentum differ from those of one process."""
        found = []
        for index, spec in enumerate(self.specs):
            param, single = self.params[index], self.singles[index]
            name = f"{index}: {spec.shape} {spec.placements} {spec.dtype}"
            start = self.starts.get(single)
            cut = functools.partial(piece_of, spec=spec)
            mine, its = added(param.detach(), spec), single.detach()
            if not moved_alike(mine, its, self.steps, start, cut, spec.is_summed):
                found.append(f"parameter {name}")
            mine = self.optimizer.state.get(param, {}).get("momentum_buffer")
            its = self.single.state.get(single, {}).get("momentum_buffer")
            if not self.has_momentum_of(param, mine, its, spec):
                found.append(f"momentum {name}: {mine}")
        return found

    def has_momentum_of(self, param, mine, its, spec):
        """Whether a buffer is this rank's piece of ``its``, that of one process."""
        if its is None:
            # All buffers are made in the first step, so that checkpoints are the same on all ranks.
            return mine is None or not local(mine).any()
        expected = placed(param.data.to(its.dtype))
        if mine is None or mine.requires_grad or placed(mine) != expected:
            return False
        return equal(added(mine, spec), piece_of(its, spec))


class ParityAssertions:
    @contextlib.contextmanager
    def subTest(self, name="", **case):
        """Names the case in an error. unittest's own says nothing on a rank, where no runner listens."""
        try:
            yield
        except Exception as error:
            words = [name] if name else []
            words += [f"{key}={value}" for key, value in case.items()]
            error.args = (f"{error}\nThe case is: {', '.join(words)}", *error.args[1:])
            raise

    @contextlib.contextmanager
    def assertWarnsOnce(self, pattern=None, ranks=(0,)):
        """Each of ``ranks`` warns once of ``pattern``, and no other rank does; no rank without a pattern."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
        texts = [str(warning.message) for warning in warned]
        if pattern is None:
            is_right = not texts
        else:
            found = [text for text in texts if re.search(pattern, text)]
            is_right = len(found) == (1 if self.rank in ranks else 0)
        problems = [] if is_right else texts or ["none"]
        self.assertEverywhere(problems, f"warnings of {pattern}")

    def assertEverywhere(self, problems, message=""):
        """Fails on every rank if one rank has a problem, so that none waits for the others."""
        count = torch.tensor(len(problems), device=device())
        dist.all_reduce(count)
        if not count:
            return  # the usual case, for which objects are slow
        found = {rank: some for rank, some in enumerate(everyone(problems)) if some}
        self.assertFalse(found, f"{message}: {found}")

    @contextlib.contextmanager
    def everywhere(self, message=""):
        """For assertions about what one rank has: those of the other ranks fail with it."""
        problems = []
        try:
            yield
        except Exception:
            problems.append(traceback.format_exc())
        self.assertEverywhere(problems, message)

    def assertRaisesEverywhere(self, call, kind=ValueError, pattern="", ranks=None):
        """``call`` raises on each of ``ranks``, and on no other rank; on all ranks by default."""
        with self.everywhere(pattern):
            if ranks is None or self.rank in ranks:
                with self.assertRaisesRegex(kind, pattern):
                    call()
            else:
                call()

    def assertParity(self, twins, message=""):
        self.assertGreater(twins.steps, 0)
        self.assertEverywhere(twins.problems(), message)

    def assertTrainsAlike(self, twins, steps=2, message=""):
        before = [param.detach().clone() for param in twins.singles]
        for step in range(steps):
            twins.step()
            self.assertParity(twins, f"{message} step {step}")
        # Nothing is shown by two optimizers that both do nothing.
        for old, new in zip(before, twins.singles, strict=True):
            # A single low-precision element may come back to where it was.
            if old.numel() > 1:
                self.assertFalse(torch.equal(old, new.detach()), message)


@common_distributed.requires_gloo()
class OnCPU(ParityAssertions, common_distributed.MultiProcContinuousTest):
    """Methods run on every rank, over gloo. A failed test does not make torch skip the ones after it."""

    world_size = 4
    timeout = timedelta(seconds=60)
    recorder = Recorder

    def setUp(self):
        cls = type(self)
        if cls.poison_pill:
            # They may be in the middle of a collective.
            for process in cls.processes:
                process.kill()
                process.join()
            os.remove(cls.rdvz_file)
            cls._spawn_processes(cls.world_size)
            cls.poison_pill = False
        super().setUp()

    def assertRaisesRegex(self, *args, **kwargs):
        # torch's TestCase ignores the pattern on devices that it does not know. Here, ``device_type`` is a
        # method, and so no known device.
        return unittest.TestCase.assertRaisesRegex(self, *args, **kwargs)

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        # Equal bits need equal sums, and so as many threads here as in the single process.
        torch.set_num_threads(1)
        super()._init_pg(rank, world_size, rdvz_file)


class OnThreads(ParityAssertions, common_distributed.MultiThreadedTestCase):
    """Methods run on every rank, and ranks are threads of one process, so that there can be many. Collectives that do
    not match, and the order of asynchronous ones, go unnoticed. A patch of a test is for all ranks.
    """

    world_size = 8
    # A recorder would see the collectives of all ranks.
    recorder = contextlib.nullcontext

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def perThreadSetUp(self):
        torch.set_num_threads(1)
