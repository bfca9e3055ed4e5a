"""One rank of a world whose other ranks never answer, with the matrices and the Muon of a program."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, NamedTuple, TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import _mesh_resources, DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Muon
from torch.optim._muon_engine import plan
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore


if TYPE_CHECKING:
    from collections.abc import Iterator


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


_meshes = itertools.count()


class PlacedMatrices(NamedTuple):
    """``count`` matrices, placed on a mesh of some of the ranks; a placement is "R", "P" or a dimension."""

    ranks: tuple[int, ...]
    placements: tuple[str | int, ...] = ("R",)
    shape: tuple[int, int] = (8, 8)
    count: int = 4
    sizes: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    offloaded: bool = False


class Program(NamedTuple):
    """The matrices and the config of all ranks of a world, and the limits of the plan."""

    world: int
    placed: tuple[PlacedMatrices, ...]
    prefetch: int = 1
    parallel: bool = True
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
        enter(mock.patch.object(_mesh_resources, "num_devices_per_host", lambda _: 8))
        for name, value in program.limits:
            enter(mock.patch.object(plan, name, value))
        self.meshes: dict[Any, DeviceMesh] = {}
        for matrices in program.placed:
            self.make_mesh(matrices)
        if self.device != "cpu":
            enter(FakeTensorMode())
        self.params: list[torch.nn.Parameter] = []
        self.grads: list[DTensor] = []
        for matrices in program.placed:
            if self.number not in matrices.ranks:
                continue
            for _ in range(matrices.count):
                self.params.append(torch.nn.Parameter(self.tensor(matrices)))
                self.grads.append(self.tensor(matrices))
        return self

    def make_mesh(self, matrices: PlacedMatrices) -> None:
        key = matrices.ranks, matrices.sizes
        if key in self.meshes:
            return
        ranks = torch.tensor(matrices.ranks).view(matrices.sizes or -1)
        # DTensor's caches confuse equal meshes of different worlds.
        names = tuple(f"m{next(_meshes)}" for _ in range(ranks.ndim))
        device_type = torch.device(self.device).type
        self.meshes[key] = DeviceMesh(device_type, ranks, mesh_dim_names=names)

    def tensor(self, matrices: PlacedMatrices) -> DTensor:
        """One of ``matrices``, of ones."""
        words = {"R": Replicate(), "P": Partial()}
        placements = []
        for placement in matrices.placements:
            if isinstance(placement, str):
                placements.append(words[placement])
            else:
                placements.append(Shard(placement))
        mesh = self.meshes[matrices.ranks, matrices.sizes]
        with unset_fake_temporarily():
            local_shape, _ = compute_local_shape_and_global_offset(
                matrices.shape, mesh, placements
            )
        device = "cpu" if matrices.offloaded else self.device
        local = torch.ones(local_shape, dtype=matrices.dtype, device=device)
        _, columns = matrices.shape
        meta = TensorMeta(torch.Size(matrices.shape), (columns, 1), matrices.dtype)
        # As FSDP2 makes them: DTensor.from_local() moves an offloaded one.
        spec = DTensorSpec(mesh, tuple(placements), meta)
        return DTensor(local, spec, requires_grad=False)

    def build(self) -> Muon:
        program = self.program
        options = dict(program.options)
        if options.get("lr") == "on the device":
            options["lr"] = torch.tensor(0.02, device=self.device)
        config = create_dtensor_config(
            async_gpu_parallelism=program.parallel,
            prefetch_count=program.prefetch,
        )
        self.muon = Muon(self.params, distributed_config=config, **options)
        return self.muon

    def step(self) -> None:
        for param, grad in zip(self.params, self.grads):
            param.grad = grad
        self.muon.step()
