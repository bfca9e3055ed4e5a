"""The matrices of a plan on one rank: each parameter as it is placed, and its twin in one process."""

from __future__ import annotations

import functools
import itertools
import math
from datetime import timedelta
from typing import Any, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard, Placement
from torch.testing._internal.distributed._muon import common_config, common_muon
from torch.testing._internal.distributed._muon.checkers.fuzz_plans import (
    Matrix,
    Mesh,
    Plan,
    WORLD,
)
from torch.testing._internal.distributed._muon.common_muon import full, local, sizes_of


if TYPE_CHECKING:
    from torch.optim import Muon


def strided_order(placements: tuple[int | str, ...]) -> list[tuple[int, int]]:
    """(Mesh dimension, tensor dimension) of each shard, in the order in which they cut."""
    plain = [(i, p) for i, p in enumerate(placements) if isinstance(p, int)]
    words = [(i, p) for i, p in enumerate(placements) if isinstance(p, str)]
    return plain + [(i, int(p[1:])) for i, p in words if p.startswith("/")]


# Of a collective that pairs up with none.
TIMEOUT = timedelta(seconds=20)


@functools.cache
def control_group() -> dist.ProcessGroup:
    """The one over which ranks tell each other of problems. It outlives broken ones."""
    return dist.new_group(timeout=3 * TIMEOUT)


_meshes = itertools.count()


@functools.cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Made once, by all ranks together; equal meshes would get mixed up in DTensor's caches."""
    number = next(_meshes)
    names = tuple(f"m{number}d{dim}" for dim in range(len(mesh.sizes)))
    ranks = torch.tensor(mesh.ranks).reshape(mesh.sizes)
    made = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    for group in made.get_all_groups() if made.get_coordinate() is not None else ():
        # The default is half an hour, whatever the timeout of the world.
        _set_pg_timeout(TIMEOUT, group)
    if mesh.kept and made.get_coordinate() is not None:
        return made[tuple(names[dim] for dim in mesh.kept)]
    return made


def renew_groups() -> None:
    """The next plan makes all groups again, because a plan with problems may have broken these."""
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    store = dist.PrefixStore("renewed", store)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT
    )
    control_group.cache_clear()
    device_mesh.cache_clear()


def placement(placements, sizes, at: int) -> Placement:
    """That of dimension ``at`` of a mesh."""
    word = placements[at]
    if word in ("R", "P"):
        return Replicate() if word == "R" else Partial()
    if isinstance(word, int):
        return Shard(word)
    # Later dimensions of the mesh cut before this one does.
    dim = int(word[1:])
    later = [sizes[i] for i in range(at + 1, len(sizes)) if placements[i] == dim]
    return _StridedShard(dim, split_factor=math.prod(later))


class Share:
    """The elements of one parameter that a rank holds."""

    def __init__(self, plan: Plan, matrix: Matrix, rank: int) -> None:
        self.plan, self.matrix, self.rank = plan, matrix, rank

    def piece(self, whole: torch.Tensor, placements: Any = None) -> torch.Tensor:
        """This rank's part of a matrix, cut without a look at the framework's rules."""
        if self.matrix.mesh is not None:
            mesh = self.matrix.mesh
            sizes, place = mesh.shape, mesh.place_of(self.rank)
            for mesh_dim, dim in strided_order(placements or self.matrix.placements):
                parts = sizes_of(whole.shape[dim], sizes[mesh_dim], "chunk")
                whole = whole.split(parts, dim)[place[mesh_dim]]
            return whole
        config = self.plan.config
        if config.mesh is None:
            return whole
        for kind, dim in (("tp", self.matrix.tp_dim), ("fsdp", 0)):
            for along in config.dims_of(kind):
                if dim is not None:
                    groups = config.mesh.groups((along,))
                    # A process group has its ranks in their own order, not in the mesh's.
                    (group,) = (sorted(g) for g in groups if self.rank in g)
                    parts = sizes_of(whole.shape[dim], len(group), self.matrix.how)
                    whole = whole.split(parts, dim)[group.index(self.rank)]
        return whole

    def elements_here(self) -> list[torch.Tensor]:
        """For each matrix in the parameter, 1 where this rank holds an element, else 0."""
        here = torch.zeros(self.matrix.shape)
        numbers = torch.arange(here.numel()).view(here.shape)
        here.view(-1)[self.piece(numbers).flatten()] = 1
        form = dict(self.matrix.form)
        is_stack = here.ndim > 2 and "flatten" not in form
        if self.matrix.mesh is None and is_stack and here.any():
            # A rank numbers the matrices in its own piece of a plain stack.
            here = here.flatten(0, -3)
            here = here[here.flatten(1).any(1)]
        return common_config.parts_of(here, **form)

    def holds_of_gradients(self) -> list[bool]:
        """For each gradient in the parameter, whether this rank holds an element of its matrices. The parts of a
        fused weight have one gradient.
        """
        split = dict(self.matrix.form).get("split")
        sizes = split["sizes"] if isinstance(split, dict) else split or (None,)
        counts = [int(here.sum()) for here in self.elements_here()]
        starts = range(0, len(counts), len(sizes))
        return [any(counts[at : at + len(sizes)]) for at in starts]


class Held(Share):
    """One parameter on this rank, and its twin in one process."""

    def __init__(self, plan: Plan, matrix: Matrix, number: int, rank: int) -> None:
        super().__init__(plan, matrix, rank)
        self.number = number
        self.dtype = getattr(torch, matrix.dtype)
        self.grad_dtype = getattr(torch, matrix.grad_dtype or matrix.dtype)
        self.sharing = plan.sharing(matrix, rank)
        self.seed, self.steps = number, 0
        # Until a step its momentum may be another parameter's, or placed as a checkpoint had it.
        self.is_new = False
        if matrix.mesh is None and plan.config.mesh is None:
            # Nobody else's business.
            self.seed += 1000 * rank
        self.expert = None
        if matrix.expert:
            (dim,) = plan.config.dims_of("ep")
            self.expert = plan.config.mesh.place_of(rank)[dim]
            self.seed += 100 * (self.expert + 1)
        self.set_params(self.values(0))

    def values(self, step: int) -> torch.Tensor:
        """The gradient of a step, or the first values of the parameter."""
        dtype = self.grad_dtype if step else self.dtype
        return full(self.seed + 7919 * step, self.matrix.shape).to(dtype)

    def set_params(self, whole: torch.Tensor) -> None:
        """Makes the parameter and its twin, of the values ``whole``."""
        self.single = torch.nn.Parameter(whole)
        self.param = torch.nn.Parameter(self.cut(whole, self.matrix.turned))
        self.param.requires_grad_(not self.matrix.frozen)
        if self.matrix.grad_dtype is not None:
            self.single.grad_dtype = self.param.grad_dtype = self.grad_dtype

    def cut(self, whole: torch.Tensor, turned: bool = False) -> torch.Tensor:
        piece = self.piece(whole).mT if turned else self.piece(whole)
        piece = piece.clone(memory_format=torch.contiguous_format)
        return self.wrap(
            piece.mT if turned else piece, whole.shape, self.matrix.placements
        )

    def wrap(self, piece: torch.Tensor, shape, placements) -> torch.Tensor:
        """A DTensor where the parameter is one."""
        if self.matrix.mesh is None:
            return piece
        sizes = self.matrix.mesh.shape
        return DTensor.from_local(
            piece,
            device_mesh(self.matrix.mesh),
            [placement(placements, sizes, at) for at in range(len(sizes))],
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )

    def set_gradient(self, step: int, kind: str) -> None:
        self.single.grad = self.param.grad = None
        if kind == "none" or not self.param.requires_grad:
            return
        mesh, whole = self.matrix.mesh, self.values(step)
        if kind == "expanded":
            whole = torch.full_like(whole, 0.5)
            shape = local(self.param).shape
            flat = torch.tensor(0.5, dtype=self.grad_dtype).expand(shape)
            gradient = self.wrap(flat, whole.shape, self.matrix.placements)
        elif kind == "replicated" and mesh is not None:
            everywhere = ("R",) * len(self.matrix.placements)
            gradient = self.wrap(whole.clone(), whole.shape, everywhere)
        elif kind == "summed" and mesh is not None and mesh.in_order:
            # All of it on the first rank along each dimension.
            terms = ("P",) * len(self.matrix.placements)
            mine = whole * (not any(mesh.place_of(self.rank)))
            gradient = self.wrap(mine, whole.shape, terms)
        else:
            if kind == "zero":
                whole = torch.zeros_like(whole)
            gradient = self.cut(whole, turned=kind == "turned")
        # A rank with an empty shard may have none, but all take part in a sum.
        if local(gradient).numel() or kind == "summed" or (step + self.rank) % 2:
            self.param.grad = gradient
        # Stock Muon divides by the number of elements.
        self.single.grad = whole if whole.numel() else None

    def problems(self, optimizer: Muon, single: Muon) -> list[str]:
        name = f"{self.number}: {self.matrix}"
        expected, found = self.piece(self.single.detach()), local(self.param.detach())
        alike = common_muon.moved_alike(found, expected, self.steps)
        wrong = [] if alike else [f"parameter {name}: {found} instead of {expected}"]
        mine = its = None
        if not self.is_new:
            mine = optimizer.state.get(self.param, {}).get("momentum_buffer")
            its = single.state.get(self.single, {}).get("momentum_buffer")
        if mine is None:
            return wrong if its is None else [*wrong, f"no momentum {name}"]
        if its is None:
            its = torch.zeros(self.matrix.shape, dtype=self.grad_dtype)
        # One process casts what load_state_dict() left in the next step that has a gradient.
        its = its.to(self.grad_dtype)
        alike = (mine.dtype, mine.shape) == (self.grad_dtype, self.param.shape)
        alike = alike and common_muon.equal(local(mine), self.piece(its))
        return wrong if alike else [*wrong, f"momentum {name}: {mine} instead of {its}"]
