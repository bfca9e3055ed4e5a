"""Plays a plan of the property-based tests on one rank, next to one process with whole matrices.

After each event, parameters and momentum must equal those of the one process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import re
import time
import traceback
import warnings
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard, Placement
from torch.optim import Muon
from torch.optim._muon_engine.schedule import buckets, packs
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.distributed._muon import common_config, common_muon
from torch.testing._internal.distributed._muon.common_muon import full, local, sizes_of
from torch.testing._internal.distributed._muon.checkers.rules import Call, Recorder


WORLD = 4


class Mesh(NamedTuple):
    """A device mesh of some of the ranks, row-major; with ``kept``, its slices along these dimensions."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    kept: tuple[int, ...] = ()

    def groups(self, dims: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The ranks that differ along ``dims`` only, for each such set."""
        found: dict[tuple[int, ...], list[int]] = {}
        places = itertools.product(*map(range, self.sizes))
        for rank, place in zip(self.ranks, places, strict=True):
            fixed = tuple(0 if dim in dims else at for dim, at in enumerate(place))
            found.setdefault(fixed, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    @property
    def dims(self) -> tuple[int, ...]:
        return self.kept or tuple(range(len(self.sizes)))

    def place_of(self, rank: int) -> tuple[int, ...]:
        places = itertools.product(*map(range, self.sizes))
        place = dict(zip(self.ranks, places, strict=True))[rank]
        return tuple(place[dim] for dim in self.dims)

    @property
    def in_order(self) -> bool:
        """Whether DTensor's own collectives are right: process groups sort their ranks, meshes do not."""
        groups = [g for dim in range(len(self.sizes)) for g in self.groups((dim,))]
        return all(group == tuple(sorted(group)) for group in groups)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[dim] for dim in self.dims)

    @property
    def holders(self) -> list[tuple[int, ...]]:
        """The ranks of each mesh that a matrix is placed on."""
        return self.groups(self.dims)


class Matrix(NamedTuple):
    """A parameter, by default a DTensor.

    ``placements`` are tensor dimensions for shards, and "R"; "/0" is a shard of dimension 0 that a
    later dimension of the mesh cuts first, as fully_shard leaves after tensor parallelism. Without
    ``mesh`` it is a plain tensor: each rank's own, or the piece of it that the config's groups give the
    rank, where tensor parallelism cuts ``tp_dim`` and ``how`` says into what sizes. ``form`` has the options
    that say which matrices it is.
    """

    shape: tuple[int, ...]
    mesh: Mesh | None = None
    placements: tuple[int | str, ...] = ()
    dtype: str = "float32"
    group: int = 0
    turned: bool = False
    frozen: bool = False
    tp_dim: int | None = None
    how: str = "chunk"
    expert: bool = False
    form: tuple[tuple[str, Any], ...] = ()
    # The gradients' dtype, if it is not the parameter's.
    grad_dtype: str | None = None


class Config(NamedTuple):
    """Arguments for create_dtensor_config, the word "auto", or create_auto_config with groups.

    ``kinds`` says what each dimension of ``mesh`` is given as; None for a dimension that is not given, as
    that of a pipeline. ``functions`` are "built", "assigned" (an assign_fn of the user's) or "wrapped".
    ``tp_dim`` is the dimension that tensor parallelism cuts of all plain matrices; None if each has its own.
    """

    kind: str = "dtensor"
    asynchronous: bool = True
    prefetch: int = 1
    functions: str = "built"
    mesh: Mesh | None = None
    kinds: tuple[str | None, ...] = ()
    tp_dim: int | None = None

    def dims_of(self, *kinds: str) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.kinds) if kind in kinds)


# Values of options that groups hardly have.
OTHER = {
    "lr": 0.7,
    "weight_decay": 0.7,
    "momentum": 0.7,
    "nesterov": 2,
    "ns_coefficients": (3.0, -4.0, 2.0),
    "ns_steps": 7,
    "eps": 0.7,
    "adjust_lr_fn": "other",
    "ns_algorithm": "symmetric",
}
SHARING = ("fsdp", "tp", "ddp", "cp")


# An action is the name of a method of the Player and its arguments. Those of a step are the kinds of
# gradients that matrices get; "full" where it says nothing.
STEP = ("step", ())


class Plan(NamedTuple):
    """A configuration as plain data: what each rank builds, and what then happens.

    A failing one is printed. So meshes, placements and dtypes are written as numbers and words.
    """

    config: Config
    matrices: tuple[Matrix, ...]
    # Of each group of parameters.
    options: tuple[tuple[tuple[str, Any], ...], ...] = ((),)
    batched: bool = False
    named: bool = False
    # Of the schedule: its limits, smaller than those of real models.
    limits: tuple[tuple[str, int], ...] = ()
    actions: tuple[tuple[Any, ...], ...] = (STEP,)

    def actions_of(self, kind: str) -> list[tuple[Any, ...]]:
        return [given for name, *given in self.actions if name == kind]

    def sharing(self, matrix: Matrix, rank: int) -> tuple[int, ...]:
        """The sorted ranks that share ``matrix`` with ``rank``; () if it holds none of it."""
        if matrix.mesh is not None:
            sets = matrix.mesh.holders
        elif self.config.mesh is not None:
            sets = self.config.mesh.groups(self.config.dims_of(*SHARING))
        else:
            sets = [(r,) for r in range(WORLD)]
        return next((tuple(sorted(s)) for s in sets if rank in s), ())

    def share_all_matrices(self, matrix: Matrix) -> bool:
        """Whether the ranks that share a parameter hold parts of the same matrices of a stack."""
        if dict(matrix.form).get("flatten"):
            return True
        cut = [int(p[-1]) for p in map(str, matrix.placements) if p[-1].isdigit()]
        if matrix.mesh is None:
            cut += [0] * len(self.config.dims_of("fsdp"))
            cut += [] if matrix.tp_dim is None else [matrix.tp_dim % len(matrix.shape)]
        return min(cut, default=len(matrix.shape)) >= len(matrix.shape) - 2

    def shows_tp(self, matrices) -> bool:
        """Whether a DTensor is placed on the ranks of tensor parallelism, and so shows what this cut."""
        if self.config.mesh is None:
            return False
        cut = {frozenset(g) for g in self.config.mesh.groups(self.config.dims_of("tp"))}
        meshes = (matrix.mesh for matrix in matrices if matrix.mesh is not None)
        placed = (
            frozenset(g) for m in meshes for dim in m.dims for g in m.groups((dim,))
        )
        return any(len(group) > 1 and group in cut for group in placed)

    def hear(self, matrix: Matrix, culprit: int, matrices) -> set[int]:
        """The ranks that hear at once of a mismatch in ``matrix``: its holders, and all that share a matrix with
        one of these.
        """
        holders = set(self.sharing(matrix, culprit))
        found = set(holders)
        for other in matrices:
            # The ranks of a stack may share none of its matrices, and so no group.
            has_group = not other.frozen and math.prod(other.shape)
            if has_group and self.share_all_matrices(other):
                sets = (set(self.sharing(other, rank)) for rank in holders)
                found.update(*sets)
        return found

    def links(self, matrices) -> list[tuple[int, ...]]:
        """The sets of ranks that compare what they build."""
        found = [self.sharing(m, r) for m in matrices for r in range(WORLD)]
        if self.config.mesh is not None:
            found += self.config.mesh.groups(self.config.dims_of(*SHARING))
        return [ranks for ranks in found if len(ranks) > 1]

    def linked(self, rank: int, matrices) -> set[int]:
        """``rank``, the ranks that share something with it, those that share with these, and so on."""
        found = {rank}
        for _ in range(WORLD):
            found.update(*(r for r in self.links(matrices) if found & set(r)))
        return found

    def see(self, changed, matrices, count: int = 1) -> bool:
        """Whether each rank linked with a holder of one of ``changed`` holds ``count`` of them."""
        holders = (r for r in range(WORLD) for m in changed if self.sharing(m, r))
        linked = set().union(*(self.linked(rank, matrices) for rank in holders))
        counts = (sum(bool(self.sharing(m, r)) for m in changed) for r in linked)
        return all(found >= count for found in counts)


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


def received_bytes(call: Call, rank: int) -> int:
    """The bytes of an exchange that ``rank`` received from other ranks."""
    if call.name == "all_to_all_single":
        _, sizes = call.splits
        return (sum(sizes) - sizes[call.comm.ranks.index(rank)]) * call.itemsize
    return call.nbytes * (call.name == "broadcast" and call.source != rank)


class Late(Recorder):
    """A rank behind a slow wire comes to each collective late."""

    def launched(self, call: Any) -> None:
        time.sleep(0.003)
        super().launched(call)


class Player:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.step_number = self.idle = 0
        # By number in the plan, and in the optimizer's order, group by group.
        self.held: dict[int, Held] = {}
        # What the ranks hold after the events so far. Each rank knows the matrices of all.
        self.matrices: list[Matrix] = []
        self.groups: list[list[Held]] = []

    def run(self) -> list[str]:
        limits = {"MAX_PEERS": 512, **dict(self.plan.limits)}
        self.is_late = limits.pop("late", None) == self.rank
        patches = [
            mock.patch.object(packs, "RELAY_BYTES", limits.pop("RELAY_BYTES", 2**20)),
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(limits.pop("node", 4))),
            mock.patch.multiple(buckets, **limits),
        ]
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            self.said = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", module=r"torch\.optim\._muon")
            for event in self.events():
                problems = self.play(event)
                if problems:
                    return problems
        return []

    def events(self):
        # All ranks make all meshes.
        matrices = list(self.plan.matrices)
        for new, _ in self.plan.actions_of("add"):
            matrices += new
        meshes = [self.plan.config.mesh, *(matrix.mesh for matrix in matrices)]
        meshes += [mesh for _, mesh, *_ in self.plan.actions_of("replace")]
        for mesh in dict.fromkeys(meshes):
            if mesh is not None:
                device_mesh(mesh)
        self.hold(self.plan.matrices)
        self.groups = [
            [h for h in self.held.values() if h.matrix.group == number]
            for number in range(len(self.plan.options))
        ]
        yield self.build
        for name, *given in self.plan.actions:
            yield functools.partial(getattr(self, name), *given)

    def play(self, event) -> list[str]:
        """Problems of an event, on all ranks if there is one on any of them."""
        problems: list[str] = []
        self.restarts = False
        if self.held:
            try:
                event()
                texts = [str(warning.message) for warning in self.said]
                problems += [text for text in texts if not self.may_warn(text)]
                problems += self.problems()
            except Exception:
                problems.append(traceback.format_exc())
        self.said.clear()
        told = torch.tensor(len(problems))
        dist.all_reduce(told, group=control_group())
        if not told:
            return []
        found = list(enumerate(common_muon.everyone(problems, control_group())))
        renew_groups()
        return [f"{event}, rank {r}: {text}" for r, texts in found for text in texts]

    def problems(self) -> list[str]:
        """How the parameters and momentum differ from those of one process."""
        order, both = self.order(), (self.optimizer, self.single)
        return [text for held in order for text in held.problems(*both)]

    def may_warn(self, text: str) -> bool:
        """Whether the plan is a reason for a warning of the engine's."""
        present = [held.matrix for held in self.order()]
        is_both = self.plan.config.mesh is not None and any(m.mesh for m in present)
        reasons = {
            "starts at zero": self.restarts,
            "has had a gradient": self.idle >= 3,
            "placements count": is_both,
        }
        return any(part in text and reason for part, reason in reasons.items())

    def hold(self, matrices) -> list[Held]:
        first = len(self.matrices)
        self.matrices += matrices
        new = {
            number: Held(self.plan, matrix, number, self.rank)
            for number, matrix in enumerate(matrices, first)
            if self.plan.sharing(matrix, self.rank)
        }
        self.held.update(new)
        return list(new.values())

    def order(self) -> list[Held]:
        return [held for group in self.groups for held in group]

    def build(self):
        self.single = self.muon("single", {"foreach": False})
        self.build_optimizer()

    def build_optimizer(self):
        self.optimizer = self.muon("param", {}, distributed_config=self.new_config())

    def muon(self, which, own, **options):
        groups = [
            {**self.params_of(group, which), **self.options_of(number), **own}
            for number, group in enumerate(self.groups)
        ]
        return Muon(groups, allow_batched_matrices=self.plan.batched, **options)

    def params_of(self, group, which):
        params = [getattr(held, which) for held in group]
        if not self.plan.named:
            return {"params": params}
        # torch takes the names of all groups, also of those without parameters.
        pairs = [(f"w{held.number}", p) for held, p in zip(group, params)]
        return {"params": pairs} if group else {"params": [], "param_names": []}

    def options_of(self, number: int) -> dict[str, Any]:
        added = [options for _, options in self.plan.actions_of("add")]
        options = dict([*self.plan.options, *added][number])
        if isinstance(options.get("lr"), tuple):
            options["lr"] = torch.tensor(*options["lr"])
        return options

    def new_config(self):
        config = self.plan.config
        if config.kind == "auto":
            return "auto"
        if config.kind == "dtensor":
            made = create_dtensor_config(config.asynchronous, config.prefetch)
        else:
            made = self.new_group_config()
        if config.functions == "assigned":
            made.assign_fn = self.assign
        elif config.functions == "wrapped":
            common_muon.wrap_functions(made, "gather_fn", "redistribute_fn")
        return made

    def new_group_config(self):
        config = self.plan.config
        mesh = device_mesh(config.mesh)
        groups = {
            f"{kind}_process_group": mesh.get_group(dim)
            for dim, kind in enumerate(config.kinds)
            if kind is not None
        }
        dims = {i: held.matrix.tp_dim for i, held in enumerate(self.order())}
        of_each = {i: dim for i, dim in dims.items() if dim is not None}
        experts = {i: held.expert for i, held in enumerate(self.order())}
        return create_auto_config(
            **groups,
            tp_dim_per_param=of_each if config.tp_dim is None else config.tp_dim,
            expert_assignments={i: e for i, e in experts.items() if e is not None},
            async_gpu_parallelism=config.asynchronous,
            prefetch_count=config.prefetch,
        )

    def assign(self, params, state):
        assignments: dict[int, list[int]] = {}
        for index, held in enumerate(self.order()):
            owner = held.sharing[held.number % len(held.sharing)]
            assignments.setdefault(owner, []).append(index)
        return assignments

    def set_gradients(self, gradients):
        self.step_number += 1
        kinds = dict(gradients)
        for held in self.order():
            held.set_gradient(self.step_number, kinds.get(held.number, "full"))
        is_idle = all(held.param.grad is None for held in self.order())
        self.idle = (self.idle + 1) * is_idle

    def step(self, gradients=STEP[1]):
        self.set_gradients(gradients)
        self.step_both()

    def step_both(self):
        """Both optimizers take a step with the gradients that are set."""
        before = list(self.versions())
        seen = Late() if self.is_late else Recorder()
        with seen, common_config.NewtonSchulzCalls() as calls:
            self.optimizer.step()
        problems = seen.problems + self.unexpected(seen, len(calls.shapes))
        for held, tensor, version in before:
            if (held.single.grad is not None) != (tensor._version > version):
                problems.append(f"{held.number} was written, or not, without a reason")
        if problems:
            raise AssertionError(f"{problems}")
        self.single.step()
        for held in self.order():
            held.steps += 1
            held.is_new = held.is_new and not held.param.requires_grad

    def versions(self):
        """The counters by which autograd learns of a step's writes, of tensors that have elements here."""
        for held in self.order():
            state = self.optimizer.state.get(held.param, {})
            # A checkpoint's momentum may have another placement, and makes room for a new tensor.
            kept = () if held.is_new else state.values()
            for tensor in (held.param, *kept):
                if local(tensor).numel():
                    yield held, tensor, tensor._version

    def unexpected(self, seen, count):
        """Matrices that this rank orthogonalizes and bytes that it receives, beyond the lower bound."""
        if self.plan.config.functions == "wrapped":
            return []
        owners, least, most, expected = self.optimizer.matrix_owners, 0, 0, 0
        for index, held in enumerate(self.order()):
            if not held.param.requires_grad:
                continue
            has_grad = held.single.grad is not None
            elements, knows = held.elements_here(), held.holds_of_gradients()
            for sub, here in enumerate(elements):
                owner, own = owners.get((index, sub)), int(here.sum())
                if owner == self.rank:
                    least += has_grad
                    # With an empty shard, it cannot know that a gradient is missing.
                    most += has_grad or not knows[sub * len(knows) // len(elements)]
                    # Each element once, and the update once to each holder; in bfloat16.
                    expected += 2 * (here.numel() - own)
                else:
                    expected += 2 * own
        found = []
        if not least <= count <= most:
            found.append(f"{count} matrices instead of {least} to {most}")
        # In two levels, others' bytes pass through this rank.
        if dict(self.plan.limits).get("MAX_PEERS", 512) == 512:
            received = sum(received_bytes(call, self.rank) for call in seen.calls)
            if received != expected:
                found.append(f"{received} bytes instead of {expected}")
        return found

    def group_of(self, held: Held) -> int:
        return next(i for i, group in enumerate(self.groups) if held in group)

    def mismatch(self, kind, number, culprit):
        """The ranks that share a matrix, and those that share others with these, learn that ``culprit`` differs.
        Nothing moves, and the same step works afterwards.

        It has no gradient, one that does not fit, or another value of the option ``kind``.
        """
        matrix = self.matrices[number]
        hearing = self.plan.hear(matrix, culprit, self.matrices)
        if self.rank not in hearing or not self.is_noticed(matrix, culprit):
            self.step()
            return
        self.set_gradients(())
        mend = (lambda: None) if self.rank != culprit else self.spoil(kind, number)
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if not re.search(self.told(kind, number, culprit), str(error)):
                raise
        else:
            raise AssertionError("no error")
        problems = self.problems()
        if problems:
            raise AssertionError(f"something moved: {problems}")
        mend()
        self.step_both()

    def is_noticed(self, matrix, culprit):
        """Whether other ranks can know of a gradient that ``culprit`` lacks."""
        if matrix.frozen:
            return False
        others = set(self.plan.sharing(matrix, culprit)) - {culprit}
        shares = [Share(self.plan, matrix, rank) for rank in (culprit, *others)]
        holds = [share.holds_of_gradients() for share in shares]
        # A shard without elements needs no gradient, and a matrix of one rank has no other opinion.
        return any(own and any(rest) for own, *rest in zip(*holds))

    def spoil(self, kind, number):
        """Gives this rank the mismatch ``kind``. Returns what mends it."""
        held = self.held[number]
        if kind in OTHER:
            options = self.optimizer.param_groups[self.group_of(held)]
            own = {key: options[key] for key in OTHER}
            options[kind] = OTHER[kind] if own[kind] != OTHER[kind] else "gram"
            return functools.partial(options.update, own)
        gradient = held.param.grad
        if kind == "none":
            held.param.grad = None
        elif kind == "misshapen" and held.matrix.mesh is not None:
            # torch compares the shapes of whole tensors only, so a plain one cannot have such a gradient.
            rows, *others = local(held.param).shape
            longer = torch.ones(rows + 1, *others, dtype=held.grad_dtype)
            placements = held.matrix.placements
            held.param.grad = held.wrap(longer, held.matrix.shape, placements)
        else:
            ones = torch.ones(held.param.shape, dtype=held.grad_dtype)
            held.param._grad = ones.to_sparse()
        return functools.partial(setattr, held.param, "grad", gradient)

    def told(self, kind, number, culprit):
        """The pattern of this rank's error."""
        held, elsewhere = self.held.get(number), "Their error says how"
        if held is None or culprit not in held.sharing:
            # An option differs for all matrices of a group.
            return f"hyperparameters|{elsewhere}" if kind in OTHER else elsewhere
        if kind in OTHER:
            # It may differ for more matrices than are listed.
            return "hyperparameters"
        # A rank names its own parameter, and the others the expert.
        is_own = kind != "none" and self.rank == culprit
        index = self.order().index(held)
        is_expert = held.matrix.expert and not is_own
        where = "expert" if is_expert else rf"parameter {index}\b"
        text = "some have none" if kind == "none" else "cannot use"
        if is_own:
            text = "sparse|here has shape"
        return f"(?=.*({text})).*{where}"

    def change(self, number, **fields):
        """Notes what all ranks know of a matrix that this one may not hold."""
        self.matrices[number] = self.matrices[number]._replace(**fields)
        if number in self.held:
            self.held[number].matrix = self.matrices[number]

    def freeze(self, number, frozen):
        self.change(number, frozen=frozen)
        held = self.held.get(number)
        if held is not None:
            held.param.requires_grad_(not frozen)
            held.param.grad = held.single.grad = None

    def reverse(self, number):
        self.groups[number].reverse()
        for optimizer in (self.single, self.optimizer):
            for key in ("params", "param_names"):
                optimizer.param_groups[number].get(key, []).reverse()
        self.step()

    def rest(self, number):
        """A parameter leaves its group for a step, and keeps its momentum."""
        held = self.held.get(number)
        if held is None:
            # A later group may be of all ranks, which must be in the same step then.
            self.step()
            return self.step()
        number = self.group_of(held)
        at = self.groups[number].index(held)
        lists = [self.groups[number]]
        for optimizer in (self.single, self.optimizer):
            group = optimizer.param_groups[number]
            lists += [group[key] for key in ("params", "param_names") if key in group]
        gone = [each.pop(at) for each in lists]
        saved = self.optimizer.state_dict()["state"]
        if len(saved) > len(self.order()):
            raise AssertionError(f"the momentum of another is saved: {saved.keys()}")
        self.step()
        for each, one in zip(lists, gone):
            each.insert(at, one)
        self.step()

    def change_options(self, group, options):
        for optimizer in (self.single, self.optimizer):
            optimizer.param_groups[group].update(options)

    def add(self, matrices, options):
        number = len(self.groups)
        new = self.hold(matrices)
        self.groups.append(new)
        for optimizer, which, own in (
            (self.optimizer, "param", {}),
            (self.single, "single", {"foreach": False}),
        ):
            group = {**self.options_of(number), **own, **self.params_of(new, which)}
            if new or self.plan.config.mesh is not None:
                optimizer.add_param_group(group)
            else:
                # A rank that holds none of them makes no call, but counts groups in the same way.
                optimizer.param_groups.append({**optimizer.param_groups[0], **group})

    def reload(self, into, placements=None):
        """The state into the same optimizer, into a "new" one, or the "whole" matrices of one process.

        ``placements`` are those that the momentum of a matrix on some mesh has in the state.
        """
        state = self.optimizer.state_dict()
        whole = self.single.state_dict()["state"]
        for index, held in enumerate(self.order()):
            other = dict(placements or ()).get(held.number)
            if held.matrix.mesh is None or index not in whole:
                continue
            if into == "whole" or other is not None:
                held.is_new = True
                value = whole[index]["momentum_buffer"].clone()
                if into != "whole":
                    value = held.wrap(held.piece(value, other), value.shape, other)
                state["state"][index] = {"momentum_buffer": value}
        if into == "new":
            self.build_optimizer()
        self.load(state)

    def load(self, state):
        """Loads ``state`` into the optimizer."""
        self.optimizer.load_state_dict(state)
        of_other_dtype = [h for h in self.order() if h.grad_dtype != h.dtype]
        if of_other_dtype:
            # torch rounds momentum to the dtype of the parameter, in one process as well.
            self.single.load_state_dict(self.single.state_dict())
        for held in of_other_dtype:
            held.is_new = True

    def replace(self, number, mesh, placements, fresh, renamed, saved):
        """Another parameter in the place of one, otherwise placed, on some mesh of the same ranks. Before the next
        step, its state may be ``saved``, and loaded.
        """
        self.change(number, mesh=mesh, placements=placements)
        held = self.held.get(number)
        if held is None:
            return self.step()
        number = self.group_of(held)
        at = self.groups[number].index(held)
        old, former = held.single, held.param
        held.seed += 500 * fresh
        held.set_params(held.values(0) if fresh else old.detach().clone())
        self.single.param_groups[number]["params"][at] = held.single
        self.optimizer.param_groups[number]["params"][at] = held.param
        state = self.single.state.pop(old, None)
        # Without names, a parameter of the same placement is another layer, and starts at zero.
        inherits = common_muon.placed(held.param) != common_muon.placed(former)
        if self.plan.named:
            inherits = not renamed
            if renamed:
                names = self.optimizer.param_groups[number]["param_names"]
                names[at] = f"{names[at]} renamed"
        momentum = self.optimizer.state.get(former, {}).get("momentum_buffer")
        self.restarts = momentum is not None and not inherits
        if state is not None and inherits:
            self.single.state[held.single] = state
            # A checkpoint has the momentum as it was placed before.
            held.is_new = saved is not None or not held.param.requires_grad
        if saved is not None:
            kept = self.optimizer.state_dict()
            entry = kept["state"].get(self.order().index(held), {})
            expected = momentum if inherits else None
            if entry.get("momentum_buffer") is not expected:
                raise AssertionError(f"saved {entry} instead of {expected}")
            if saved == "and loaded":
                self.load(kept)
        self.step()
