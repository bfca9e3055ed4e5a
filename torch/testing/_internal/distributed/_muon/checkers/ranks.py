"""One rank of a world whose other ranks never answer, with the matrices and the Muon of a program."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, NamedTuple, TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate
from torch.optim import Muon
from torch.optim._muon_engine import plan
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore


if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def _new_group(common: Any, options: Any) -> Any:
    made = FakeProcessGroup._create_internal
    return made(common.group_rank, common.group_size, options)


# With the backend "fake", the engine leaves out exchanges in which it sends nothing.
dist.Backend.register_backend(
    "alone", _new_group, extended_api=True, devices=["cpu", "lazy"]
)


class PlacedMatrices(NamedTuple):
    """``count`` matrices on a mesh of some of the ranks."""

    mesh: Any
    placements: tuple[Placement, ...] = (Replicate(),)
    shape: tuple[int, int] = (8, 8)
    count: int = 4
    dtype: torch.dtype = torch.float32
    offloaded: bool = False


class Program(NamedTuple):
    """The matrices and the config of all ranks of a world, and the limits of the plan."""

    world: int
    placed: tuple[PlacedMatrices, ...] = ()
    prefetch: int = 1
    parallel: bool = True
    limits: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


# DTensor's caches confuse equal meshes of different worlds.
_names = map(str, itertools.count())


class Rank(contextlib.ExitStack):
    """One rank of a program. A context manager: the rank's world, alone, with the program's limits."""

    def __init__(self, program: Program, number: int, device: str = "cpu") -> None:
        super().__init__()
        self.program, self.number, self.device = program, number, device
        self.params: list[torch.nn.Parameter] = []
        self.grads: list[DTensor] = []

    def __enter__(self) -> Any:
        self._store = FakeStore()
        dist.init_process_group(
            "alone",
            store=self._store,
            rank=self.number,
            world_size=self.program.world,
        )
        self.callback(dist.destroy_process_group)
        limits = dict(self.program.limits)
        self.enter_context(mock.patch.dict(vars(plan), limits))
        kind = torch.device(self.device).type
        meshes = {}
        for matrices in self.program.placed:
            if matrices.mesh not in meshes:
                ranks = torch.tensor(matrices.mesh)
                names = tuple(itertools.islice(_names, ranks.ndim))
                meshes[matrices.mesh] = DeviceMesh(kind, ranks, mesh_dim_names=names)
        if kind != "cpu":
            self.enter_context(FakeTensorMode())
        for matrices in self.program.placed:
            mesh = meshes[matrices.mesh]
            if mesh.get_coordinate() is None:
                continue
            for _ in range(matrices.count):
                self.params.append(torch.nn.Parameter(self._tensor(matrices, mesh)))
                self.grads.append(self._tensor(matrices, mesh))
        return self

    def _tensor(self, matrices: PlacedMatrices, mesh: DeviceMesh) -> DTensor:
        whole = torch.ones(matrices.shape, dtype=matrices.dtype, device=self.device)
        tensor = distribute_tensor(whole, mesh, matrices.placements, src_data_rank=None)
        if not matrices.offloaded:
            return tensor
        # As FSDP2 makes them: DTensor.from_local() would move the local tensor.
        local = torch.ones(tensor.to_local().shape, dtype=matrices.dtype)
        return DTensor(local, tensor._spec, requires_grad=False)

    def build(self) -> Muon:
        program = self.program
        options = dict(program.options)
        if options.get("lr") == "on the device":
            options["lr"] = torch.tensor(0.02, device=self.device)
        config = create_dtensor_config(program.parallel, program.prefetch)
        self.muon = Muon(self.params, distributed_config=config, **options)
        return self.muon

    def step(self) -> None:
        for param, grad in zip(self.params, self.grads):
            param.grad = grad
        self.muon.step()
