"""A plan of the property-based tests: a configuration of all ranks and what then happens, as plain data."""

from __future__ import annotations

import functools
import itertools
from datetime import timedelta
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout


if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


WORLD = 4
# Of a collective that pairs up with none.
TIMEOUT = timedelta(seconds=20)


class Mesh(NamedTuple):
    """A device mesh of some of the ranks, row-major."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def ascends(self) -> bool:
        """Whether DTensor's own collectives are right: process groups sort their ranks, meshes do not."""
        ranks = torch.tensor(self.ranks).view(self.sizes)
        return all(bool((ranks.diff(dim=dim) > 0).all()) for dim in range(ranks.ndim))


_names = map("m{}".format, itertools.count())


@functools.cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Made once, by all ranks together. Equal meshes would get mixed up in DTensor's caches."""
    names = tuple(next(_names) for _ in mesh.sizes)
    ranks = torch.tensor(mesh.ranks).view(mesh.sizes)
    made = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    if made.get_coordinate() is None:
        return made
    for group in made.get_all_groups():
        # The default is half an hour, whatever the timeout of the world.
        _set_pg_timeout(TIMEOUT, group)
    return made


class Matrix(NamedTuple):
    """A parameter: a DTensor on a mesh, or a plain tensor, which is each rank's own, or the piece that the groups of the
    config give the rank. Tensor parallelism cuts its dimension ``tp_dim``, and ``how`` says into what sizes.
    """

    shape: tuple[int, ...]
    mesh: Mesh | None = None
    placements: tuple[Placement, ...] = ()
    # Those of gradients, if they are others.
    gradients: tuple[Placement, ...] | None = None
    dtype: torch.dtype = torch.float32
    tp_dim: int | None = None
    how: str = "chunk"
    is_expert: bool = False
    # Whether it and its gradients have the strides of a transpose.
    is_turned: bool = False
    # Those of its parameter group.
    options: tuple[tuple[str, Any], ...] = ()


class Config(NamedTuple):
    """``kinds`` are those of the dimensions of ``mesh``, whose groups the config gets.
    ``functions`` are "built in" or "wrapped".
    """

    is_async: bool = True
    prefetch: int = 1
    functions: str = "built in"
    mesh: Mesh | None = None
    kinds: tuple[str, ...] = ()


class Event(NamedTuple):
    """The name of a method of the Player, which then makes a step."""

    action: str
    argument: Any = None
    # The matrices that the action is about, and those without gradients in the step: matrix m has bit m % 8.
    changed: int = 0
    missing: int = 0


def has(matrices: int, number: int) -> bool:
    return bool(matrices >> number % 8 & 1)


class Plan(NamedTuple):
    """A configuration as plain data: what each rank builds, and what then happens. A failing one is printed."""

    config: Config
    matrices: tuple[Matrix, ...]
    events: tuple[Event, ...] = ()
    takes_stacks: bool = False
    is_named: bool = False
    grad_dtype: torch.dtype | None = None
    # Of the engine's plan: smaller ones than those of real models.
    limits: tuple[tuple[str, int], ...] = ()

    def holds(self, matrix: Matrix, rank: int) -> bool:
        mesh = self.config.mesh if matrix.mesh is None else matrix.mesh
        return mesh is None or rank in mesh.ranks
