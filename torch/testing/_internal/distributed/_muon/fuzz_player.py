"""Plays a plan of the property-based tests on one rank, next to one process with whole matrices.

After each event the ranks tell each other, over a group of their own, whether it raised. All linked ranks
must agree. Parameters and momentum must then equal those of the one process; after an error, those from
before it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import traceback
import warnings
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Muon
from torch.optim._muon_engine.schedule import buckets, packs
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.distributed._muon.common_muon import (
    equal,
    full,
    local,
    moved_alike,
    sizes_of,
)
from torch.testing._internal.distributed._muon.fuzz_plans import (
    Add,
    Flags,
    Freeze,
    Matrix,
    Mesh,
    Options,
    Plan,
    Reload,
    Replace,
    split_factor,
    Step,
    strided_order,
    Twist,
    WORLD,
)


# The errors that may refuse a configuration.
REFUSALS = (ValueError, AssertionError, IndexError, TypeError, NotImplementedError)
# Of a collective that pairs up with none.
TIMEOUT = timedelta(seconds=20)
IDLE, WENT_ON, REFUSED, FAILED = range(4)


@functools.cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Made once, by all ranks together; equal meshes would get mixed up in DTensor's caches."""
    number = device_mesh.cache_info().misses
    names = tuple(f"m{number}d{dim}" for dim in range(len(mesh.sizes)))
    ranks = torch.tensor(mesh.ranks).reshape(mesh.sizes)
    made = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    for group in made.get_all_groups() if made.get_coordinate() is not None else ():
        # The default is half an hour, whatever the timeout of the world.
        _set_pg_timeout(TIMEOUT, group)
    if mesh.kept and made.get_coordinate() is not None:
        return made[tuple(names[dim] for dim in mesh.kept)]
    return made


def chunk(tensor: torch.Tensor, count: int, at: int, dim: int) -> torch.Tensor:
    parts = tensor.chunk(count, dim)
    return parts[at] if at < len(parts) else tensor.narrow(dim, 0, 0)


def whole_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Small ones, which add up to the same in any order."""
    return tensor.mul_(4).round_()


def apart(found: torch.Tensor, expected: torch.Tensor) -> str:
    """How much two tensors differ, in a line."""
    if found.shape != expected.shape:
        return f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
    far = (found.double() - expected.double()).abs()
    most = far.max().item() if far.numel() else 0
    return f"{(far != 0).sum()} of {far.numel()} elements differ, by up to {most}"


class Held:
    """One parameter on this rank, and its twin in one process."""

    def __init__(self, plan: Plan, matrix: Matrix, number: int, rank: int) -> None:
        self.plan, self.matrix, self.number, self.rank = plan, matrix, number, rank
        self.dtype = getattr(torch, matrix.dtype)
        self.placements = matrix.placements
        self.sharing = plan.sharing(matrix, rank)
        self.seed = number
        self.steps, self.path = 0, 0.0
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
        # Of a Partial parameter: each contribution, and the one that this rank holds.
        self.contributions: dict[tuple[int, ...], torch.Tensor] = {}
        self.mine: tuple[int, ...] = ()
        if matrix.partial:
            self.mine = self.contribution_of(rank)
            self.contributions = {
                self.contribution_of(r): self.values(0, self.contribution_of(r))
                for r in self.sharing
            }
        self.single = torch.nn.Parameter(self.values(0, self.mine))
        self.param = self.new_param()

    def values(self, step: int, contribution: tuple[int, ...] = ()) -> torch.Tensor:
        """The parameter's, or with ``step`` its gradient's."""
        found = full(self.seed + 7919 * step, self.matrix.shape)
        if self.matrix.partial:
            seed = self.seed + 7919 * step + 77 * sum(contribution)
            found = whole_numbers(full(seed, self.matrix.shape))
        return found.to(self.dtype)

    def new_param(self) -> torch.nn.Parameter:
        whole = self.contributions.get(self.mine, self.single.detach())
        param = torch.nn.Parameter(self.cut(whole, self.matrix.turned))
        return param.requires_grad_(not self.matrix.frozen)

    # Where this rank's part is

    def place(self) -> tuple[int, ...]:
        """Of this rank in the mesh of a DTensor."""
        return self.place_of(self.rank)

    def place_of(self, rank: int) -> tuple[int, ...]:
        mesh = self.matrix.mesh
        place = mesh.place_of(rank)
        return tuple(place[dim] for dim in mesh.kept) if mesh.kept else place

    def contribution_of(self, rank: int) -> tuple[int, ...]:
        place = self.place_of(rank)
        return tuple(at for at, p in zip(place, self.placements) if p == "P")

    def piece(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a matrix, cut without a look at the framework's rules."""
        if self.matrix.mesh is not None:
            sizes, place = self.matrix.mesh.shape, self.place()
            for mesh_dim, dim in strided_order(self.placements):
                whole = chunk(whole, sizes[mesh_dim], place[mesh_dim], dim)
            return whole
        config = self.plan.config
        if config.mesh is None:
            return whole
        place = config.mesh.place_of(self.rank)
        for kind, dim in (("tp", self.matrix.tp_dim), ("fsdp", 0)):
            for along in config.dims_of(kind):
                if dim is not None:
                    count = config.mesh.sizes[along]
                    parts = sizes_of(whole.shape[dim], count, self.matrix.how)
                    whole = whole.split(parts, dim)[place[along]]
        return whole

    def cut(self, whole: torch.Tensor, turned: bool = False) -> torch.Tensor:
        piece = self.piece(whole)
        piece = (
            piece.mT.clone(memory_format=torch.contiguous_format).mT
            if turned
            else piece.clone(memory_format=torch.contiguous_format)
        )
        return self.wrap(piece, whole.shape, self.placements)

    def wrap(self, piece: torch.Tensor, shape, placements) -> torch.Tensor:
        """A DTensor where the parameter is one."""
        if self.matrix.mesh is None:
            return piece
        sizes = self.matrix.mesh.shape
        found = []
        for at, placement in enumerate(placements):
            if placement == "R":
                found.append(Replicate())
            elif placement == "P":
                found.append(Partial())
            elif isinstance(placement, int):
                found.append(Shard(placement))
            else:
                factor = split_factor(placements, sizes, at)
                found.append(_StridedShard(int(placement[1:]), split_factor=factor))
        return DTensor.from_local(
            piece,
            device_mesh(self.matrix.mesh),
            found,
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )

    # Gradients

    def set_gradient(self, step: int, kind: str) -> None:
        self.single.grad = self.param.grad = None
        if kind == "none" or not self.param.requires_grad:
            return
        mesh, whole = self.matrix.mesh, self.values(step)
        if self.matrix.partial:
            terms = [self.values(step, c) for c in self.contributions]
            whole = sum(terms[1:], terms[0])
            mine = self.values(step, self.mine)
            if kind == "zero":
                whole, mine = torch.zeros_like(whole), torch.zeros_like(mine)
            gradient = self.cut(mine)
        elif kind == "expanded":
            whole = torch.full_like(whole, 0.5)
            shape = local(self.param).shape
            flat = torch.tensor(0.5, dtype=self.dtype).expand(shape)
            gradient = self.wrap(flat, whole.shape, self.placements)
        elif kind == "replicated" and mesh is not None:
            everywhere = ("R",) * len(self.placements)
            gradient = self.wrap(whole.clone(), whole.shape, everywhere)
        elif kind == "summed" and mesh is not None and mesh.in_order:
            # All of it on the first rank along each dimension.
            terms = ("P",) * len(self.placements)
            mine = whole.clone() if not any(self.place()) else torch.zeros_like(whole)
            gradient = self.wrap(mine, whole.shape, terms)
        else:
            if kind == "zero":
                whole = torch.zeros_like(whole)
            gradient = self.cut(whole, turned=kind == "turned")
        self.param.grad = gradient
        # Stock Muon divides by the number of elements.
        self.single.grad = whole if whole.numel() else None

    # One process

    def before_single_step(self, owner: int) -> None:
        """Has the twin of a sum be the contribution that takes the update."""
        if self.matrix.partial:
            self.updated = self.contribution_of(owner)
            self.single.data.copy_(self.contributions[self.updated])

    def after_single_step(self, old: torch.Tensor, group: dict[str, Any]) -> None:
        self.steps += 1
        self.is_new = self.is_new and not self.param.requires_grad
        self.path += (self.single.detach().double() - old.double()).norm().item()
        if self.matrix.partial:
            if self.single.grad is not None:
                decay = 1 - group["lr"] * group["weight_decay"]
                for each in self.contributions.values():
                    each.mul_(decay)
            self.contributions[self.updated] = self.single.detach().clone()

    def problems(self, optimizer: Muon | None, single: Muon, loose: bool) -> list[str]:
        name = f"{self.number}: {self.matrix}"
        whole = self.contributions.get(self.mine, self.single.detach())
        expected, found = self.piece(whole), local(self.param.detach())
        if loose:
            far = (found.double() - expected.double()).norm().item()
            rounding = torch.finfo(self.dtype).eps * (1 + whole.double().norm().item())
            alike = far <= 0.5 * self.path + self.steps * rounding
        else:
            alike = moved_alike(found, expected, self.steps)
        wrong = [] if alike else [f"parameter {name}: {apart(found, expected)}"]
        mine = its = None
        if optimizer is not None and not self.is_new:
            mine = optimizer.state.get(self.param, {}).get("momentum_buffer")
            its = single.state.get(self.single, {}).get("momentum_buffer")
        if mine is None:
            return wrong if its is None else [*wrong, f"no momentum {name}"]
        if its is None:
            its = torch.zeros(self.matrix.shape, dtype=self.dtype)
        if mine.dtype != self.dtype or mine.shape != self.param.shape:
            wrong.append(f"momentum {name}: {mine.dtype} {mine.shape}")
        elif self.matrix.partial:
            if self.matrix.mesh.in_order and not torch.equal(mine.full_tensor(), its):
                wrong.append(f"momentum {name}")
        elif not equal(local(mine), self.piece(its)):
            wrong.append(f"momentum {name}: {apart(local(mine), self.piece(its))}")
        return wrong


class Player:
    """One rank of a plan."""

    def __init__(self, plan: Plan, rank: int, control: dist.ProcessGroup) -> None:
        self.plan, self.rank, self.control = plan, rank, control
        # Ranks that an error of an event reaches, and whether this one takes part in the event.
        self.linked: set[int] = set()
        self.takes_part = True
        self.step_number = 0
        self.optimizer: Muon | None = None
        self.single: Muon | None = None
        self.config = None
        # By number in the plan, and in the optimizer's order, group by group.
        self.held: dict[int, Held] = {}
        self.groups: list[list[Held]] = []
        self.gone = False
        # The first number of each group that was added.
        self.added: set[int] = set()
        self.log: list[str] = []

    def run(self) -> dict[str, Any]:
        problems: list[str] = []
        limits = dict(self.plan.limits)
        patches = [
            mock.patch.object(buckets, "MAX_PEERS", limits.pop("peers", 512)),
            mock.patch.object(packs, "RELAY_BYTES", limits.pop("relay_bytes", 2**20)),
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(limits.pop("node", 4))),
            mock.patch.object(
                buckets,
                "make_schedule",
                functools.partial(buckets.make_schedule, **limits),
            ),
            warnings.catch_warnings(),
        ]
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            warnings.simplefilter("ignore")
            for text, event in self.events():
                problems = self.play(text, event)
                if problems:
                    break
        return {"problems": problems, "log": self.log}

    # Events

    def events(self):
        """The events, each with a function that returns whether it must raise; None if it may."""
        # All ranks make all meshes.
        for mesh in dict.fromkeys(
            m
            for m in [
                self.plan.config.mesh,
                *(x.mesh for x in self.plan.all_matrices()),
            ]
            if m
        ):
            device_mesh(mesh)
        self.hold(self.plan.matrices, 0)
        self.groups = [
            [h for h in self.held.values() if h.matrix.group == number]
            for number in range(len(self.plan.options))
        ]
        if self.plan.twist is not None:
            yield "build with a twist", functools.partial(self.build, self.plan.twist)
        yield "build", self.build
        added = len(self.plan.matrices)
        for action in self.plan.actions:
            if isinstance(action, Add):
                if action.twist is not None:
                    yield (
                        "add with a twist",
                        functools.partial(self.add, action, added, action.twist),
                    )
                yield "add", functools.partial(self.add, action, added, None)
                added += len(action.matrices)
            elif isinstance(action, Flags):
                yield "flags", functools.partial(self.change_flags, action)
            else:
                event = {
                    Step: self.step,
                    Freeze: self.freeze,
                    Options: self.change_options,
                    Reload: self.reload,
                    Replace: self.replace,
                }[type(action)]
                yield repr(action), functools.partial(event, action)

    def play(self, text, event) -> list[str]:
        """Problems of an event, on all ranks if there is one on any of them."""
        problems: list[str] = []
        code = IDLE
        self.link([h.matrix for h in self.held.values()])
        if self.held and not self.gone:
            self.takes_part = True
            try:
                must, error = event()
                code = WENT_ON if error is None else REFUSED
                code = code if self.takes_part else IDLE
                if must is not None and must != (error is not None):
                    problems.append(
                        f"{text}: expected {'an error' if must else 'none'}, found {error!r}"
                    )
                self.log.append(f"{text}: {type(error).__name__ if error else 'ok'}")
            except Exception:
                code = FAILED
                problems.append(f"{text}: {traceback.format_exc()}")
            if code == REFUSED and text == "build":
                self.gone = True
        codes = self.tell(code)
        mine = {codes[rank] for rank in self.linked if codes[rank] != IDLE}
        if len(mine) > 1 and code != IDLE:
            problems.append(f"{text}: linked ranks {self.linked} came to {codes}")
        if not any(self.tell(len(problems))) and code != IDLE:
            try:
                problems += self.differences(text)
            except Exception:
                problems.append(f"{text}: {traceback.format_exc()}")
        if any(self.tell(len(problems))):
            return problems or ["problems of other ranks"]
        return []

    def link(self, matrices) -> None:
        self.linked = self.plan.linked(self.rank, matrices)

    def tell(self, value: int) -> list[int]:
        told = torch.zeros(WORLD, dtype=torch.int64)
        told[self.rank] = value
        dist.all_reduce(told, group=self.control)
        return told.tolist()

    def differences(self, text) -> list[str]:
        found = []
        for number, group in enumerate(self.groups):
            for held in group:
                loose = self.is_batched(number)
                found += [
                    f"after {text}: {problem}"
                    for problem in held.problems(self.optimizer, self.single, loose)
                ]
        return found

    def is_batched(self, number: int) -> bool:
        options = self.plan.options + tuple(
            a.options for a in self.plan.actions if isinstance(a, Add)
        )
        return dict(options[number]).get("foreach") is True

    # Parameters

    def hold(self, matrices, first: int) -> list[Held]:
        new = {
            first + i: Held(self.plan, matrix, first + i, self.rank)
            for i, matrix in enumerate(matrices)
            if self.plan.sharing(matrix, self.rank)
        }
        self.held.update(new)
        return list(new.values())

    def order(self) -> list[Held]:
        return [held for group in self.groups for held in group]

    # Building

    def build(self, twist: Twist | None = None):
        twin_error = None
        groups = list(enumerate(self.groups))
        self.takes_part = twist is None or not self.is_late(twist, self.plan.matrices)
        if not self.takes_part:
            return None, None
        try:
            self.single = Muon(
                [
                    {
                        "params": [h.single for h in group],
                        **self.options_of(number),
                        "foreach": False,
                    }
                    for number, group in groups
                ],
                allow_batched_matrices=self.plan.batched,
            )
        except REFUSALS as error:
            twin_error = error
        must: bool | None = twin_error is not None
        if self.has_stacks() and self.plan.config.functions != "built":
            # Ranks may hold other matrices of a stack each.
            must = None
        if self.has_stacks() and not self.plan.batched:
            must = True
        if twist is not None:
            must = self.is_refused(twist, self.plan.matrices) or None
        self.optimizer = None
        try:
            self.config = self.new_config(twist)
            given = [
                {
                    "params": self.twisted([h.param for h in group], group, twist),
                    **self.options_of(number),
                }
                for number, group in groups
            ]
            self.optimizer = Muon(
                given,
                distributed_config=self.config,
                allow_batched_matrices=self.plan.batched,
            )
        except REFUSALS as error:
            return must, error
        self.flags = self.plan.config.asynchronous, self.plan.config.prefetch
        return must, None

    def has_stacks(self) -> bool:
        return any(held.param.ndim > 2 for held in self.order())

    def options_of(self, number: int) -> dict[str, Any]:
        options = self.plan.options + tuple(
            a.options for a in self.plan.actions if isinstance(a, Add)
        )
        return {
            key: torch.tensor(value[0])
            if isinstance(value, tuple) and key == "lr"
            else value
            for key, value in options[number]
        }

    def new_config(self, twist: Twist | None = None):
        config = self.plan.config
        ahead = config.prefetch
        if twist is not None and twist.kind == "prefetch" and self.hits(twist):
            ahead = config.prefetch + 1
        if config.kind == "auto":
            return "auto"
        if config.kind == "dtensor":
            made = create_dtensor_config(config.asynchronous, ahead)
        else:
            made = self.new_group_config(twist, ahead)
        built = made.gather_fn, made.redistribute_fn
        if config.functions == "assigned":
            made.assign_fn = self.assign
        elif config.functions == "wrapped":
            made.gather_fn = lambda tensor, rank, state: built[0](tensor, rank, state)
            made.redistribute_fn = lambda tensor, rank, state: built[1](
                tensor, rank, state
            )
        if twist is not None and twist.kind == "assign" and self.hits(twist):
            made.assign_fn = functools.partial(self.assign_wrongly, twist.value)
        return made

    def new_group_config(self, twist: Twist | None, ahead: Any):
        config = self.plan.config
        mesh = device_mesh(config.mesh)
        groups = {
            f"{kind}_process_group": mesh.get_group(dim)
            for dim, kind in enumerate(config.kinds)
            if kind is not None
        }
        order = self.order()
        dims: Any = {
            i: h.matrix.tp_dim
            for i, h in enumerate(order)
            if h.matrix.mesh is None and h.matrix.tp_dim is not None
        }
        experts = {i: h.expert for i, h in enumerate(order) if h.expert is not None}
        if config.tp_int:
            dims = next((h.matrix.tp_dim for h in order if h.matrix.mesh is None), 0)
        if twist is not None and self.hits(twist):
            if twist.kind == "tp":
                at = twist.matrix % len(order)
                dims = {**(dims if isinstance(dims, dict) else {}), at: twist.value}
            elif twist.kind == "expert":
                experts[99] = 0
            elif twist.kind == "groups" and "fsdp_process_group" in groups:
                groups["ddp_process_group"] = groups["fsdp_process_group"]
        return create_auto_config(
            **groups,
            tp_dim_per_param=dims,
            expert_assignments=experts,
            async_gpu_parallelism=config.asynchronous,
            prefetch_count=ahead,
        )

    def assign(self, params, state):
        assignments: dict[int, list[int]] = {}
        for index, held in enumerate(self.order()):
            owner = held.sharing[held.number % len(held.sharing)]
            assignments.setdefault(owner, []).append(index)
        return assignments

    def assign_wrongly(self, how, params, state):
        right = self.assign(params, state)
        rank = next(iter(right))
        return {
            "none": None,
            "list": [],
            "missing": {r: own[1:] if r == rank else own for r, own in right.items()},
            "doubled": {r: own + own[:1] for r, own in right.items()},
            "unknown rank": {**right, 7: right.pop(rank)},
            "unknown index": {**right, rank: [*right.get(rank, []), 99]},
            "words": {str(r): own for r, own in right.items()},
            "nothing": dict.fromkeys(right),
            "number": 3,
        }[how]

    # Mistakes

    def hits(self, twist: Twist) -> bool:
        return twist.rank in (-1, self.rank)

    def is_refused(self, twist: Twist, matrices) -> bool:
        """Whether this rank must raise an error for ``twist``."""
        if twist.kind == "groups":
            config = self.plan.config
            sizes = [config.mesh.sizes[dim] for dim in config.dims_of("fsdp")]
            # A stack may have no matrix that the groups could contradict each other about.
            if max(sizes) == 1 or not any(
                h.matrix.mesh is None and math.prod(h.matrix.shape[:-2])
                for h in self.order()
            ):
                return False
        return self.rank in self.plan.finders(twist, matrices)

    def is_late(self, twist: Twist, matrices) -> bool:
        """Whether ranks that are linked with this one learn of ``twist`` at different times."""
        finders = self.plan.finders(twist, matrices)
        linked = self.plan.linked(self.rank, matrices)
        return bool(finders & linked) and not linked <= finders

    def twisted(self, params, group: list[Held], twist: Twist | None):
        """The parameters that this rank gives instead of ``params``, those of ``group``."""
        if twist is None or not self.hits(twist):
            return params
        at = next((i for i, h in enumerate(group) if h.number == twist.matrix), None)
        if at is None:
            return params
        held, params = group[at], list(params)
        if twist.kind == "dtype":
            other = torch.float16 if held.dtype != torch.float16 else torch.float32
            params[at] = torch.nn.Parameter(held.param.detach().to(other))
        elif twist.kind == "shape":
            whole = torch.zeros(*held.matrix.shape[:-1], held.matrix.shape[-1] + 1)
            params[at] = torch.nn.Parameter(held.cut(whole.to(held.dtype)))
        elif twist.kind == "flat":
            piece = torch.zeros(4, dtype=held.dtype)
            everywhere = ("R",) * len(held.placements)
            params[at] = torch.nn.Parameter(held.wrap(piece, (4,), everywhere))
        elif twist.kind == "missing":
            del params[at]
        elif twist.kind == "twice":
            params.append(params[at])
        elif twist.kind == "frozen":
            changed = held.new_param()
            params[at] = changed.requires_grad_(not changed.requires_grad)
        return params

    # Actions

    def step(self, action: Step = Step(), must: bool | None = False):
        self.step_number += 1
        kinds = dict(action.gradients)
        for held in self.order():
            held.set_gradient(self.step_number, kinds.get(held.number, "full"))
        return self.step_both(must)

    def step_both(self, must):
        error = None
        try:
            self.optimizer.step()
        except REFUSALS as found:
            error = found
        # After the step, which may have assigned other owners.
        owners = self.optimizer.matrix_owners
        for index, held in enumerate(self.order()):
            if held.matrix.partial:
                held.before_single_step(owners[index, 0])
        before = self.taken_down()
        try:
            self.single.step()
        except REFUSALS:
            must = True
        if error is not None or must:
            self.put_back(before)
            return must, error
        for number, group in enumerate(self.groups):
            for held in group:
                held.after_single_step(
                    before[held.number][0], self.single.param_groups[number]
                )
        return must, error

    def taken_down(self):
        """The parameters and momentum of the one process, by number."""
        found = {}
        for held in self.order():
            buffer = self.single.state.get(held.single, {}).get("momentum_buffer")
            found[held.number] = (
                held.single.detach().clone(),
                None if buffer is None else buffer.clone(),
            )
        return found

    def put_back(self, before) -> None:
        for held in self.order():
            value, buffer = before[held.number]
            held.single.data.copy_(value)
            state = self.single.state.get(held.single, {})
            if buffer is None:
                state.pop("momentum_buffer", None)
            else:
                state["momentum_buffer"].copy_(buffer)

    def freeze(self, action: Freeze):
        held = self.held.get(action.matrix)
        if held is not None:
            held.param.requires_grad_(not action.frozen)
            held.param.grad = held.single.grad = None
        return False, None

    def change_flags(self, action: Flags):
        """A step refuses flags that differ from those that the optimizer was built with."""
        config = self.optimizer._distributed_config
        flags = action.asynchronous, action.prefetch
        config.async_gpu_parallelism, config.prefetch_count = flags
        found = self.step(must=flags != self.flags)
        config.async_gpu_parallelism, config.prefetch_count = self.flags
        return found

    def change_options(self, action: Options):
        """Of one group; options that make no sense are refused by a step, and changed back."""
        groups = (self.single.param_groups, self.optimizer.param_groups)
        if action.group >= len(self.groups):
            return False, None
        options = dict(action.options)
        nonsense = options.get("ns_steps") == 100 or options.get("ns_algorithm") == "no"
        if nonsense and not self.groups[action.group]:
            # No rank reads the options of an empty group.
            return False, None
        before = [
            {key: of_one[action.group][key] for key in options} for of_one in groups
        ]
        for of_one in groups:
            of_one[action.group].update(options)
        if not nonsense:
            return False, None
        found = self.step(must=True)
        for of_one, old in zip(groups, before):
            of_one[action.group].update(old)
        return found

    def add(self, action: Add, first: int, twist: Twist | None):
        self.takes_part = first not in self.added
        if not self.takes_part:
            # This rank shares nothing with the ranks where something is wrong.
            return None, None
        number = len(self.groups)
        present = self.plan.all_matrices()[: first + len(action.matrices)]
        self.link(present)
        if twist is not None and self.is_late(twist, present):
            self.takes_part = False
            return None, None
        new = self.hold(action.matrices, first)
        self.takes_part = bool(new) or self.plan.config.mesh is not None
        if not self.takes_part:
            # A rank that holds none of them makes no call, but counts groups in the same way.
            if twist is None:
                for optimizer in (self.single, self.optimizer):
                    optimizer.param_groups.append(
                        {
                            **optimizer.param_groups[0],
                            **self.options_of(number),
                            "params": [],
                        }
                    )
                self.groups.append([])
            return None, None
        must = False if twist is None else self.is_refused(twist, present) or None
        options = self.options_of(number)
        self.groups.append(new)
        try:
            params = self.twisted([h.param for h in new], new, twist)
            self.optimizer.add_param_group({"params": params, **options})
        except REFUSALS as error:
            self.groups.pop()
            for held in new:
                del self.held[held.number]
            if len(self.optimizer.param_groups) != number:
                raise RuntimeError("a refused group of parameters stayed") from error
            return must, error
        self.added.add(first)
        options["foreach"] = False
        self.single.add_param_group({"params": [h.single for h in new], **options})
        return must, None

    def reload(self, action: Reload):
        state = self.optimizer.state_dict()
        if action.into == "whole":
            whole = self.single.state_dict()["state"]
            for index, held in enumerate(self.order()):
                if held.matrix.mesh is not None and index in whole:
                    if not held.matrix.partial:
                        held.is_new = True
                        state["state"][index] = {
                            key: value.clone() for key, value in whole[index].items()
                        }
        if action.into == "new":
            groups = [
                {"params": [h.param for h in group], **self.options_of(number)}
                for number, group in enumerate(self.groups)
            ]
            self.config = self.new_config()
            self.optimizer = Muon(
                groups,
                distributed_config=self.config,
                allow_batched_matrices=self.plan.batched,
            )
            self.flags = self.plan.config.asynchronous, self.plan.config.prefetch
        self.optimizer.load_state_dict(state)
        return False, None

    def replace(self, action: Replace):
        held = self.held.get(action.matrix)
        if held is None:
            return False, None
        number = next(i for i, group in enumerate(self.groups) if held in group)
        at = self.groups[number].index(held)
        old, former = held.single, held.param
        held.placements = action.placements
        if action.fresh:
            held.seed += 500
            held.single = torch.nn.Parameter(held.values(0))
        else:
            held.single = torch.nn.Parameter(old.detach().clone())
        held.param = held.new_param().requires_grad_(former.requires_grad)
        for optimizer, new in (
            (self.single, held.single),
            (self.optimizer, held.param),
        ):
            optimizer.param_groups[number]["params"][at] = new
        state = self.single.state.pop(old, None)
        # Without names, a parameter of the same placement is another layer, and starts at zero.
        if state is not None and held.param.placements != former.placements:
            self.single.state[held.single] = state
        return self.step()
