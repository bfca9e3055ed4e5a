"""The three functions of a factory's config, and a step through functions that the user replaced.

A user may replace or wrap ``gather_fn`` or ``redistribute_fn``, or write a config from scratch. Each parameter
is then a bucket of its own, whose exchange calls these functions. A factory's own one asks the reader.
"""

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._newton_schulz import NS_DTYPE
from .config import DistributedConfig
from .layouts import dtensor, Layout, matrix_shape
from .layouts.groups import Reader
from .process_groups import counters_of, process_rank, ranks_per_node
from .runtime import Param
from .runtime.compute import accumulate
from .runtime.pipeline import run_in_turn
from .schedule.owners import assign_owners


# Entries of a config's state: the layouts while an engine calls an ``assign_fn``, the step that calls the
# other functions, and the reader of functions that are called outside of a step.
LAYOUTS, _STEP, _READER = "_layouts", "_step", "_reader"


@contextmanager
def lent(state: dict[str, Any], entries: Mapping[str, Any]) -> Iterator[None]:
    """Gives ``state`` the ``entries`` while functions are called: an engine of another world must not find them."""
    before = {key: state[key] for key in entries if key in state}
    state.update(entries)
    try:
        yield
    finally:
        for key in entries:
            state.pop(key, None)
        state.update(before)


def reader_of(config: DistributedConfig, takes_stacks: bool = False) -> Reader | None:
    """A new reader; None if the user wrote the config from scratch, or for another framework."""
    is_elsewhere = "rank" in config.state and not dist.is_initialized()
    moves_nothing = len(own_functions(config)) == 2
    if not _is_factorys(config.state) or (is_elsewhere and moves_nothing):
        return None
    return Reader(config.state, takes_stacks)


def choose_owners(
    params: Sequence[Tensor], layouts: Sequence[Layout]
) -> tuple[list[int], dict[int, list[int]]]:
    """One owner per layout, and the parameter indices of each rank that shares one with this rank."""
    per_node = ranks_per_node()
    owners = assign_owners(layouts, lambda g: counters_of(g).first_owner, per_node)
    sharing = {layout.holders for layout in layouts}
    owned: dict[int, list[int]] = {rank: [] for ranks in sharing for rank in ranks}
    # A parameter counts for its first matrix. A rank that holds no matrix of a stack lists it as its own.
    owner_of: dict[int, int] = {}
    for layout, owner in zip(layouts, owners, strict=True):
        owner_of.setdefault(layout.key.index, owner)
    for index in range(len(params)):
        owned.setdefault(owner_of.get(index, process_rank()), []).append(index)
    return owners, dict(sorted(owned.items()))


def assign(params: list[Tensor], state: dict[str, Any]) -> dict[int, list[int]]:
    """Gives each parameter to a rank that holds a piece of it. Fills ``state["param_metadata"]``."""
    layouts = state.get(LAYOUTS)
    if layouts is None:
        # An earlier reader describes other parameters.
        state.pop(_READER, None)
        reader = _reader(state)
        layouts = reader.read(params)
        reader.describe_state(state)
    return choose_owners(params, layouts)[1]


def gather(tensor: Tensor, rank: int, state: dict[str, Any]) -> Tensor | None:
    """The whole tensor of ``state["current_param_idx"]`` (default: 0) on every caller, whoever owns it."""
    index = state.get("current_param_idx", 0)
    return _reader(state).whole(tensor, index, in_step=_STEP in state)


def redistribute(tensor: Tensor | None, rank: int, state: dict[str, Any]) -> Tensor:
    """This rank's piece of the whole ``tensor``; in ``step()``, of the owner's."""
    index, reader = state.get("current_param_idx", 0), _reader(state)
    if tensor is not None:
        reader.check_tp_dim(tensor, index)
    if _STEP in state:
        tensor = state[_STEP].broadcast(index, tensor, reader.shape_of(index))
    if tensor is None:
        raise ValueError(
            "redistribute_fn was given None outside of step(), where it receives nothing: pass the full matrix"
        )
    return reader.piece(tensor, index, rank)


_FACTORYS = {"assign": assign, "gather": gather, "redistribute": redistribute}


def factory_config(
    state: dict[str, Any],
    async_gpu_parallelism: bool = True,
    prefetch_count: int = 1,
    owners_per_matrix: int | str = 1,
    keep_buffers: bool = False,
) -> DistributedConfig:
    """A config with the factory's functions. Raises ValueError if an option is invalid."""
    owners = owners_per_matrix
    if owners != "auto" and (type(owners) is not int or owners < 1):
        raise ValueError(f'owners_per_matrix is {owners!r}, not "auto" or an int >= 1')
    state = {"reader": "dtensor", "is_dtensor": True, "param_metadata": {}, **state}
    state |= {"owners_per_matrix": owners, "keep_buffers": keep_buffers}
    return DistributedConfig(
        assign, gather, redistribute, state, async_gpu_parallelism, prefetch_count
    )


def is_from_factory(config: DistributedConfig, name: str) -> bool:
    """Whether the function ``name`` of ``config`` is the one that a factory made."""
    return getattr(config, f"{name}_fn") is _FACTORYS[name]


def own_functions(config: DistributedConfig) -> list[str]:
    """Those of the two functions that move data which are not a factory's."""
    return [n for n in ("gather", "redistribute") if not is_from_factory(config, n)]


def _is_factorys(state: Mapping[str, Any]) -> bool:
    return state.get("reader") in ("dtensor", "process_groups")


def _reader(state: dict[str, Any]) -> Reader:
    if _READER not in state:
        if not _is_factorys(state):
            raise RuntimeError("a factory's functions need the state of their config")
        state[_READER] = Reader(state)
    return state[_READER]


def check_stacks(params: Sequence[Param], layouts: Sequence[Layout]) -> None:
    """Raises ValueError if ranks may hold different matrices of a parameter, and call functions in different orders."""
    counts = Counter(layout.key.index for layout in layouts)
    for index, param in enumerate(params):
        shape, (split, flatten) = param.tensor.shape, param.form
        expected = math.prod(shape[:-2]) * max(1, len(split.sizes))
        if counts[index] != expected and not (flatten and len(shape) > 2):
            raise ValueError(
                f"{param.described} holds {counts[index]} matrices here, which your own functions cannot tell apart; "
                "leave gather_fn and redistribute_fn as the factory made them"
            )


class FunctionStep:
    """One step that calls ``gather_fn`` and ``redistribute_fn`` of ``config`` for every parameter. Each rank
    makes the same calls: a parameter without a gradient brings a zero piece, and its update is not applied.
    Ranks that share parameters go through them in one order: ascending, but experts last and by their ids.
    """

    # This rank raises its own problem after all calls, because the other ranks wait for them.
    awaits_statuses = False

    def __init__(self, engine: Any) -> None:
        self.engine, self.config, self.rank = engine, engine.config, engine.rank
        self.device = engine.device if engine.reader is not None else None
        # By parameter index. Without a reader, there are no layouts.
        self.owners = {i: r for r, owned in engine.assignments.items() for i in owned}
        self.layouts: dict[int, list[Layout]] = defaultdict(list)
        for layout in engine.schedule.layouts:
            self.layouts[layout.key.index].append(layout)
        self.where = ""

    def share_statuses(self, step: int) -> str:
        """Has no side channel, so ranks never differ here."""
        return ""

    def run(self) -> None:
        """Makes a step. Raises RuntimeError if a function returns something of another shape."""
        # Ranks of a group may also hold other parameters, so each group prefetches its own.
        tasks: dict[Any, list[Iterator[None]]] = {}
        order, reader = [], self.engine.reader
        for param in self.engine.ordered:
            self.where = f"placement of the gradient of {param.described}"
            param.place_gradient()
            layouts = self.layouts[param.key.index]
            if not param.frozen and (layouts or reader is None):
                order.append(layouts[0].holders if layouts else None)
                tasks.setdefault(order[-1], []).append(self._process(param))
        entries = {_STEP: self, "current_owner": None, "current_param_idx": None}
        if reader is not None:
            ranks = {"rank": self.rank, "world_size": self.engine.world_size}
            entries = {**entries, **ranks, _READER: reader}
        with lent(self.config.state, entries):
            run_in_turn(order, tasks, self.config.prefetch_count)

    def _process(self, param: Param) -> Iterator[None]:
        """Brings one parameter from its gradient to its update, as the pipeline does for a bucket."""
        self.where = f"accumulate of {param.described}"
        accumulate([param])
        whole = self.gather(param)
        yield
        piece = self.redistribute(param, self.orthogonalized(param, whole))
        yield
        if param.user_grad is not None and not param.problem:
            self.apply(param, piece, whole)

    def _call(self, function: str, tensor: Tensor | None, param: Param) -> Any:
        self.where = f"{function} of {param.described}"
        state, owner = self.config.state, self.owners[param.key.index]
        state["current_param_idx"], state["current_owner"] = param.key.index, owner
        return getattr(self.config, function)(tensor, owner, state)

    def gather(self, param: Param) -> Tensor | None:
        """Calls ``gather_fn`` with this rank's piece: zeros without a gradient."""
        # A copy, so that a function that writes to its piece does not change the momentum.
        if param.grad is None:
            piece = torch.zeros_like(param.momentum)
        else:
            (piece,) = param.formulas.prepare([param.momentum], [param.grad])
            piece = piece.clone() if piece is param.momentum else piece
        piece = dtensor.like_param(param.tensor, piece)
        whole = self._call("gather_fn", piece, param)
        if whole is None and self.owners[param.key.index] == self.rank:
            raise RuntimeError(
                f"gather_fn returned None for {param.described} on its owner, which needs the whole matrix"
            )
        return whole

    def orthogonalized(self, param: Param, whole: Tensor | None) -> Tensor | None:
        """The update, of the shape of ``whole``, on its owner; elsewhere zeros of this shape, or None."""
        if whole is None:
            return None
        self.where = f"orthogonalize of {param.described}"
        formulas = param.formulas
        if self.owners[param.key.index] != self.rank:
            return whole.new_zeros(whole.shape, dtype=NS_DTYPE)
        # Some versions gather uneven shards into a view of padded memory.
        whole = dtensor.local_part(whole).contiguous()
        update = torch.empty_like(whole, dtype=NS_DTYPE)
        for matrix, out in zip(formulas.matrices(whole), formulas.matrices(update)):
            out.copy_(formulas.update_of(matrix))
        return update

    def redistribute(self, param: Param, update: Tensor | None) -> Tensor:
        """This rank's piece of the update, of the parameter's local shape."""
        owner = self.owners[param.key.index]
        piece = self._call("redistribute_fn", update, param)
        # Only once, because reading a value waits for an accelerator.
        is_same = piece is update and self.engine.steps == 1
        if is_same and update is not None and owner != self.rank and not update.any():
            warnings.warn(
                f"redistribute_fn returned the zeros that it was given for {param.described} on rank {self.rank}. Only its "
                f"owner, rank {owner}, updates it, so replicas diverge: broadcast the update",
                stacklevel=2,
            )
        kind, shape = type(piece).__name__, tuple(param.local.shape)
        if isinstance(piece, Tensor):
            piece = dtensor.local_part(piece)
            kind = f"shape {tuple(piece.shape)}"
        if not isinstance(piece, Tensor) or piece.shape != shape:
            raise RuntimeError(
                f"redistribute_fn returned {kind} for {param.described}, but this rank's piece of the update has shape {shape}"
            )
        return piece

    def broadcast(self, index: int, update: Tensor | None, shape: torch.Size) -> Tensor:
        """The owner's ``update`` of ``shape`` on every holder, for a factory's ``redistribute_fn``."""
        owner, param = self.owners[index], self.engine.params[index]
        if update is None or update.shape != shape:
            if owner == self.rank:
                given = "None" if update is None else tuple(update.shape)
                text = f"redistribute_fn was given {given} for {param.described}"
                raise RuntimeError(f"{text} on its owner")
            update = param.local.new_empty(shape, dtype=NS_DTYPE)
        group = self.engine.groups[self.layouts[index][0].holders]
        # A wrapper may have changed the owner's dtype. The other ranks receive this one.
        update = update.to(self.device, NS_DTYPE).contiguous()
        if group is not None:
            dist.broadcast(update, owner, group=group)
        return update

    def apply(self, param: Param, update: Tensor, whole: Tensor | None) -> None:
        """Applies this rank's piece of the update, of the parameter's local shape."""
        self.where = f"apply of {param.described}"
        if not param.local.numel():
            # The learning rate of a matrix without columns cannot be scaled.
            return
        update = update.to(param.local.device).contiguous()
        formulas, layouts = param.formulas, self.layouts[param.key.index]
        for layout in layouts:
            for region in layout.shards.of(self.rank):
                local, part = region.of_local(param.local), region.of_local(update)
                formulas.apply([local], [part], layout.full_shape)
        if not layouts:
            split, flatten = param.form
            shape = matrix_shape(self._global_shape(param, whole), flatten)
            cut = formulas.matrices
            for local, part in zip(cut(param.local), cut(update)):
                joined = split.joined_shape(local.shape) if split.sizes else shape
                formulas.apply([local], [part], joined)

    def _global_shape(self, param: Param, whole: Tensor | None) -> Sequence[int]:
        """The shape that scales the learning rate: not the shard's, if another one is known."""
        if whole is not None:
            return whole.shape
        index, shapes = param.key.index, self.config.state.get("global_shapes", {})
        if index not in shapes and not dtensor.is_dtensor(param.tensor):
            warnings.warn(
                f"gather_fn returned None for {param.described}, so the shape of the local tensor scales the learning "
                f"rate. If that is a shard, put the whole shape into config.state['global_shapes'][{index}]",
                stacklevel=2,
            )
        return shapes.get(index, param.tensor.shape)
