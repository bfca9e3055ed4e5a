"""The matrices of a plan on one rank: each parameter as it is placed, and its twin in one process."""

from __future__ import annotations

import functools
import itertools
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
from torch.testing._internal.distributed._muon.common_groups import sizes_of
from torch.testing._internal.distributed._muon.common_muon import full, local


if TYPE_CHECKING:
    from torch.optim import Muon


def strided_order(placements: tuple[int | str, ...]) -> list[tuple[int, int]]:
    """(Mesh dimension, tensor dimension) of each shard, in the order in which they cut."""
    plain, strided = [], []
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, int):
            plain.append((mesh_dim, placement))
        elif placement.startswith("/"):
            strided.append((mesh_dim, int(placement[1:])))
    return plain + strided


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


def placement_of(placements: Any, sizes: tuple[int, ...], mesh_dim: int) -> Placement:
    """That of one dimension of a mesh."""
    word = placements[mesh_dim]
    if word == "R":
        return Replicate()
    if word == "P":
        return Partial()
    if isinstance(word, int):
        return Shard(word)
    # Later dimensions of the mesh cut before this one does.
    dim, split_factor = int(word[1:]), 1
    for later in range(mesh_dim + 1, len(sizes)):
        if placements[later] == dim:
            split_factor *= sizes[later]
    return _StridedShard(dim, split_factor=split_factor)


class Share:
    """The elements of one parameter that a rank holds."""

    def __init__(self, plan: Plan, matrix: Matrix, rank: int) -> None:
        self.plan, self.matrix, self.rank = plan, matrix, rank

    def piece(self, whole: torch.Tensor, placements: Any = None) -> torch.Tensor:
        """This rank's part of a matrix, cut without a look at the framework's rules."""
        if self.matrix.mesh is not None:
            return self.piece_on_mesh(whole, placements or self.matrix.placements)
        if self.plan.config.mesh is not None:
            return self.piece_of_groups(whole)
        return whole

    def piece_on_mesh(self, whole: torch.Tensor, placements: Any) -> torch.Tensor:
        mesh = self.matrix.mesh
        place = mesh.place_of(self.rank)
        for mesh_dim, dim in strided_order(placements):
            sizes = sizes_of(whole.shape[dim], mesh.shape[mesh_dim], "chunk")
            whole = whole.split(sizes, dim)[place[mesh_dim]]
        return whole

    def piece_of_groups(self, whole: torch.Tensor) -> torch.Tensor:
        config = self.plan.config
        for kind, dim in (("tp", self.matrix.tp_dim), ("fsdp", 0)):
            if dim is None:
                continue
            for mesh_dim in config.dims_of(kind):
                (group,) = (
                    ranks
                    for ranks in config.mesh.groups((mesh_dim,))
                    if self.rank in ranks
                )
                # A process group has its ranks in their own order, not in the mesh's.
                position = sorted(group).index(self.rank)
                sizes = sizes_of(whole.shape[dim], len(group), self.matrix.how)
                whole = whole.split(sizes, dim)[position]
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
        if split is None:
            parts = 1
        elif isinstance(split, dict):
            parts = len(split["sizes"])
        else:
            parts = len(split)
        holds = [bool(here.any()) for here in self.elements_here()]
        starts = range(0, len(holds), parts)
        return [any(holds[start : start + parts]) for start in starts]


class HeldMatrix(Share):
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
        """This rank's part of ``whole``; ``turned``, with the strides of a transpose."""
        piece = self.piece(whole)
        if turned:
            copied = piece.mT.clone(memory_format=torch.contiguous_format)
            piece = copied.mT
        else:
            piece = piece.clone(memory_format=torch.contiguous_format)
        return self.wrap(piece, whole.shape, self.matrix.placements)

    def wrap(self, piece: torch.Tensor, shape, placements) -> torch.Tensor:
        """A DTensor where the parameter is one."""
        if self.matrix.mesh is None:
            return piece
        sizes = self.matrix.mesh.shape
        on_dims = []
        for mesh_dim in range(len(sizes)):
            on_dims.append(placement_of(placements, sizes, mesh_dim))
        return DTensor.from_local(
            piece,
            device_mesh(self.matrix.mesh),
            on_dims,
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
            is_first = not any(mesh.place_of(self.rank))
            term = whole if is_first else torch.zeros_like(whole)
            gradient = self.wrap(term, whole.shape, terms)
        else:
            if kind == "zero":
                whole = torch.zeros_like(whole)
            gradient = self.cut(whole, turned=kind == "turned")
        # A rank with an empty shard may have none, but all take part when a collective brings it to its placement. A
        # replicated gradient may be empty, too.
        moves = kind in ("summed", "replicated")
        if local(gradient).numel() or moves or (step + self.rank) % 2:
            self.param.grad = gradient
        # Stock Muon divides by the number of elements.
        self.single.grad = whole if whole.numel() else None

    def problems(self, optimizer: Muon, single: Muon) -> list[str]:
        """How the parameter and its momentum differ from those of the twin."""
        name = f"{self.number}: {self.matrix}"
        problems = []
        expected = self.piece(self.single.detach())
        found = local(self.param.detach())
        if not common_muon.moved_alike(found, expected, self.steps):
            problems.append(f"parameter {name}: {found} instead of {expected}")
        mine = its = None
        if not self.is_new:
            mine = optimizer.state.get(self.param, {}).get("momentum_buffer")
            its = single.state.get(self.single, {}).get("momentum_buffer")
        if mine is None:
            if its is not None:
                problems.append(f"no momentum {name}")
            return problems
        if its is None:
            its = torch.zeros(self.matrix.shape, dtype=self.grad_dtype)
        # One process casts what load_state_dict() left in the next step that has a gradient.
        its = its.to(self.grad_dtype)
        is_alike = mine.dtype == self.grad_dtype
        is_alike = is_alike and mine.shape == self.param.shape
        if not (is_alike and common_muon.equal(local(mine), self.piece(its))):
            problems.append(f"momentum {name}: {mine} instead of {its}")
        return problems
