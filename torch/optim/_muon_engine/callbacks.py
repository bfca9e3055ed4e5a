"""The three functions of a factory's config, and a step through functions that the user replaced.

A user may replace or wrap ``gather_fn`` or ``redistribute_fn``, or write a config from scratch. The step
then goes parameter by parameter, in index order. A factory's function in it is the reader's round trip.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim._muon_engine.config import DistributedConfig
from torch.optim._muon_engine.layouts import dtensor, Layout, process_rank
from torch.optim._muon_engine.layouts.groups import ParallelGroups, Reader
from torch.optim._muon_engine.process_groups import first_owner
from torch.optim._muon_engine.runtime.pipeline import accumulate
from torch.optim._muon_engine.schedule.owners import assign_owners, by_rank
from torch.optim._newton_schulz import NS_DTYPE


# ``split`` and ``flatten`` of the parameters of an engine that calls an ``assign_fn``.
forms_of_engine: ContextVar[Sequence[Any]] = ContextVar("muon_forms", default=())
# The step that calls a config's functions.
_running: ContextVar["CallbackStep | None"] = ContextVar("muon_step", default=None)


def reader_of(state: Mapping[str, Any], takes_stacks: bool = False) -> Reader | None:
    """A new reader for a config's ``state``; None if the user wrote the config from scratch."""
    if state.get("reader") not in ("dtensor", "process_groups"):
        return None
    return Reader(ParallelGroups(state), takes_stacks)


def choose_owners(
    params: Sequence[Tensor], layouts: Sequence[Layout], ranks_per_node: int = 1
) -> tuple[list[int], dict[int, list[int]]]:
    """One owner per layout, and the parameter indices of each rank that shares one with this rank."""
    # Frozen parameters take no time. They must not move the owners of the others.
    owners = [layout.group[0] for layout in layouts]
    chosen = [
        i for i, l in enumerate(layouts) if not dtensor.is_frozen(params[l.key.index])
    ]
    found = assign_owners((layouts[i] for i in chosen), first_owner, ranks_per_node)
    for i, owner in zip(chosen, found, strict=True):
        owners[i] = owner
    owned = by_rank([layout.key.index for layout in layouts], owners)
    ranks = {rank for group in {l.group for l in layouts} for rank in group}
    # This rank may hold no matrix of a stack. It then lists the stack as its own.
    held = {layout.key.index for layout in layouts}
    none = [index for index in range(len(params)) if index not in held]
    if none:
        me = process_rank()
        ranks.add(me)
        owned[me] = sorted([*owned.get(me, []), *none])
    return owners, {rank: owned.get(rank, []) for rank in sorted(ranks)}


class ConfigFunctions:
    """The three functions of a factory's config.

    Called directly, they are a plain round trip, over a reader of their own.
    """

    def __init__(self) -> None:
        self._reader: Reader | None = None

    def assign(
        self, params: list[Tensor], state: dict[str, Any]
    ) -> dict[int, list[int]]:
        """Gives each parameter to a rank that holds a piece of it. Fills ``state["param_metadata"]``."""
        takes_stacks = any(param.ndim > 2 for param in params)
        self._reader = reader = _reader(state, takes_stacks)
        layouts = reader.read(params, [None] * len(params), forms_of_engine.get())
        reader.describe_state(state)
        return choose_owners(params, layouts)[1]

    def gather(self, tensor: Tensor, rank: int, state: dict[str, Any]) -> Tensor | None:
        """The whole matrix of ``state["current_param_idx"]`` (default: 0) on every caller, whoever owns it."""
        index = state.get("current_param_idx", 0)
        return self._reader_for(state).whole(tensor, index)

    def redistribute(
        self, tensor: Tensor | None, rank: int, state: dict[str, Any]
    ) -> Tensor:
        """This rank's piece of the whole matrix ``tensor``; in ``step()``, of the owner's."""
        index = state.get("current_param_idx", 0)
        reader = self._reader_for(state)
        if tensor is not None:
            reader.groups.check_tp_dim(tensor, index)
        if "current_owner" in state:
            step = _running.get()
            if step is None:
                raise RuntimeError(
                    "redistribute_fn was called with current_owner outside of step()"
                )
            tensor = step.broadcast(index, tensor)
        if tensor is None:
            raise ValueError(
                "redistribute_fn was given None outside of step(), where it receives nothing: pass the full matrix"
            )
        return reader.piece(tensor, index, rank)

    def _reader_for(self, state: dict[str, Any]) -> Reader:
        step = _running.get()
        if "current_owner" in state and step is not None and step.reader is not None:
            return step.reader
        if self._reader is None:
            self._reader = _reader(state)
        return self._reader


def _reader(state: Mapping[str, Any], takes_stacks: bool = False) -> Reader:
    reader = reader_of(state, takes_stacks)
    if reader is None:
        raise RuntimeError(
            "the functions of a factory's config need the state of that config: replace functions on the config that "
            "the factory returned, or pass its state on"
        )
    return reader


def are_factorys(config: DistributedConfig, *names: str) -> bool:
    """Whether the functions ``names`` of ``config`` are those that a factory made."""
    return all(
        isinstance(
            getattr(getattr(config, f"{name}_fn"), "__self__", None), ConfigFunctions
        )
        for name in names
    )


class CallbackStep:
    """One step that calls ``gather_fn`` and ``redistribute_fn`` of ``config`` for every parameter.

    Each rank makes the same calls: a parameter without a gradient brings a zero piece, and its update is
    not applied. Ranks that share parameters go through them in one order: ascending, but experts last
    and by their ids.

    Args:
        engine: whose config, reader (None if the user wrote the config from scratch), parameters,
            assignments, layouts and groups this step uses.
    """

    def __init__(self, engine: Any) -> None:
        self.config, self.reader = engine.config, engine.reader
        self.params, self.groups, self.rank = engine.params, engine.groups, engine.rank
        owned = engine.assignments.items()
        # By parameter index.
        self.owners = {i: rank for rank, indices in owned for i in indices}
        self.layouts: dict[int, list[Layout]] = {}
        for layout in engine.schedule.layouts:
            self.layouts.setdefault(layout.key.index, []).append(layout)
        order = list(self.layouts) or range(len(self.params))
        self.order = [index for index in order if not self.params[index].frozen]
        self.gathered: dict[int, Tensor | None] = {}
        # The phase that is running or failed.
        self.where = ""

    # The other ranks wait for this one's calls, so it raises after them.
    knows_before = False

    def begin(self, step: int) -> str:
        return ""

    def run(self) -> None:
        state = self.config.state
        outside = state.get("current_param_idx")
        token = _running.set(self)
        try:
            self._run(self.config.prefetch_count)
        finally:
            _running.reset(token)
            self.gathered = {}
            state.pop("current_owner", None)
            state.pop("current_param_idx", None)
            if outside is not None:
                state["current_param_idx"] = outside
        self.where = ""

    def _run(self, prefetch_count: int) -> None:
        for index in self.order:
            self.where = f"accumulate of {self.params[index].described}"
            accumulate([self.params[index]])
        # Ranks of a group may also hold other parameters, so each group prefetches its own.
        waiting: dict[tuple[int, ...] | None, list[int]] = {}
        group_of: dict[int, tuple[int, ...] | None] = {}
        for index in self.order:
            group = self.layouts[index][0].group if index in self.layouts else None
            group_of[index] = group
            waiting.setdefault(group, []).append(index)
        first = {i for queue in waiting.values() for i in queue[: prefetch_count + 1]}
        for index in self.order:
            if index in first:
                self.gather(index)
        for queue in waiting.values():
            del queue[: prefetch_count + 1]
        for index in self.order:
            whole = self.gathered.pop(index)
            update = self.redistribute(index, self.orthogonalized(index, whole))
            following = waiting[group_of[index]]
            if following:
                self.gather(following.pop(0))
            if self.params[index].has_grad:
                self.apply(index, update, whole)

    def _announce(self, index: int, what: str) -> int:
        self.where = f"{what} of {self.params[index].described}"
        owner = self.owners[index]
        self.config.state["current_param_idx"] = index
        self.config.state["current_owner"] = owner
        return owner

    def gather(self, index: int) -> None:
        param = self.params[index]
        # A copy, so that a function that writes to its piece does not change the momentum.
        if param.grad is None:
            piece = torch.zeros_like(param.local)
        else:
            (piece,) = param.formulas.prepare([param.momentum], [param.grad])
            piece = piece.clone() if piece is param.momentum else piece
        owner = self._announce(index, "gather_fn")
        piece = dtensor.like_param(param.tensor, piece)
        whole = self.config.gather_fn(piece, owner, self.config.state)
        if whole is None and owner == self.rank:
            raise RuntimeError(
                f"gather_fn returned None for {param.described} on its owner, rank {owner}. There it must return the "
                "whole matrix"
            )
        self.gathered[index] = whole

    def orthogonalized(self, index: int, whole: Tensor | None) -> Tensor | None:
        if whole is None:
            return None
        self.where = f"orthogonalize of {self.params[index].described}"
        formulas = self.params[index].formulas
        if self.owners[index] != self.rank:
            return whole.new_zeros(whole.shape, dtype=NS_DTYPE)
        # Some versions gather uneven shards into a view of padded memory.
        whole = dtensor.local_part(whole).contiguous()
        update = torch.empty_like(whole, dtype=NS_DTYPE)
        for matrix, out in zip(formulas.matrices(whole), formulas.matrices(update)):
            out.copy_(formulas.orthogonalize(matrix))
        return update

    def redistribute(self, index: int, update: Tensor | None) -> Tensor:
        owner = self._announce(index, "redistribute_fn")
        piece = self.config.redistribute_fn(update, owner, self.config.state)
        local = self.params[index].local
        found = type(piece).__name__
        if isinstance(piece, Tensor):
            piece = dtensor.local_part(piece)
            found = f"shape {tuple(piece.shape)}"
        if not isinstance(piece, Tensor) or piece.shape != local.shape:
            raise RuntimeError(
                f"redistribute_fn returned {found} for {self.params[index].described}. It must return this rank's piece of "
                f"the update, of shape {tuple(local.shape)}"
            )
        return piece

    def broadcast(self, index: int, update: Tensor | None) -> Tensor:
        """The owner's ``update`` on every holder, for a factory's ``redistribute_fn``."""
        layout, param = self.layouts[index][0], self.params[index]
        owner, reader = self.owners[index], self.reader
        shape = param.tensor.shape if reader is None else reader.shape_of(index)
        fits = update is not None and update.shape == shape
        if owner == self.rank and not fits:
            found = "None" if update is None else tuple(update.shape)
            raise RuntimeError(
                f"redistribute_fn was given {found} for {param.described} on its owner"
            )
        if update is None or not fits:
            update = param.local.new_empty(shape, dtype=NS_DTYPE)
        group = self.groups[layout.group]
        if group is not None:
            update = update.contiguous()
            dist.broadcast(update, owner, group=group)
        return update

    def apply(self, index: int, update: Tensor, whole: Tensor | None) -> None:
        param = self.params[index]
        self.where = f"apply of {param.described}"
        if not param.local.numel():
            # The learning rate of a matrix without columns cannot be scaled.
            return
        update = update.to(param.local.device).contiguous()
        moves = []
        for layout in self.layouts.get(index, ()):
            for r in layout.shards.of(self.rank):
                moves.append(
                    (r.of_local(param.local), r.of_local(update), layout.shape)
                )
        if index not in self.layouts:
            split, flatten = param.form
            shape = dtensor.matrix_shape(self._global_shape(index, whole), flatten)
            parts = map(param.formulas.matrices, (param.local, update))
            moves = [(p, u, p.shape if split else shape) for p, u in zip(*parts)]
        for local, part, shape in moves:
            param.formulas.apply([local], [part], shape)

    def _global_shape(self, index: int, whole: Tensor | None) -> Sequence[int]:
        """The shape that scales the learning rate: not the shard's, if another one is known."""
        tensor = self.params[index].tensor
        if whole is not None:
            return whole.shape
        if dtensor.is_dtensor(tensor):
            return tensor.shape
        known = self.config.state.get("global_shapes", {})
        if index not in known:
            warnings.warn(
                f"gather_fn returned None for {self.params[index].described} on a rank that is not its owner, so the "
                "learning rate is scaled by the shape of the local tensor. If that is a shard, put the whole shape into "
                f"config.state['global_shapes'][{index}]",
                stacklevel=2,
            )
        return known.get(index, tensor.shape)
