"""One step through functions that a user wrote, or wrapped: parameter by parameter, in index order."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim._muon import (
    _apply_update,
    _blend,
    _NS_DTYPE,
    _orthogonalize,
    _update_momentum,
    _Work,
)
from torch.optim._muon_engine.apply import apply_piece
from torch.optim._muon_engine.layouts import Region
from torch.optim._muon_engine.local import (
    as_dtensor_if_imported,
    like_param,
    local_gradient,
    local_part,
    new_momentum_buffer,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch.optim._muon_engine.config import DistributedConfig


class FunctionStep:
    """Calls ``gather_fn`` and ``redistribute_fn`` of ``config`` for every parameter.

    The sequence of calls is the same on every rank: a parameter without a gradient brings a zero
    piece, and its update is not applied. ``order`` lists the parameters' indices as all ranks that
    share some do: in ascending order, but experts after the others and by their ids.
    """

    def __init__(
        self,
        config: DistributedConfig,
        work: Sequence[_Work],
        owners: Sequence[int],
        describe: Sequence[str],
        held: Mapping[int, tuple[tuple[int, int], tuple[Region, ...]]],
        groups: Mapping[int, tuple[int, ...]],
        order: Sequence[int],
        rank: int,
        keep: Callable[[int, Tensor], None],
        refused: Collection[int],
    ) -> None:
        self.config = config
        self.work = work
        self.owners = owners
        self.describe = describe
        # Where this rank's pieces stand in their matrices, as far as that is known.
        self.held = held
        # Which ranks share a matrix, as far as that is known.
        self.groups = groups
        self.order = order
        self.rank = rank
        self.keep = keep
        # Indices whose holders turn out to be at odds, as the built functions find out.
        self.refused = refused
        self.gathered: dict[int, Tensor | None] = {}

    def run(self) -> None:
        state = self.config.state
        outside = state.get("current_param_idx")
        try:
            self._run(max(0, self.config.prefetch_count))
        finally:
            state.pop("current_owner", None)
            state.pop("current_param_idx", None)
            if outside is not None:
                state["current_param_idx"] = outside

    def _run(self, ahead: int) -> None:
        for index in range(len(self.work)):
            self.update_momentum(index)
        # Ranks of a group may hold other parameters beside: each looks ahead among the group's own.
        waiting: dict[tuple[int, ...] | None, list[int]] = {}
        for index in self.order:
            waiting.setdefault(self.groups.get(index), []).append(index)
        first = {index for queue in waiting.values() for index in queue[: ahead + 1]}
        for index in self.order:
            if index in first:
                self.gather(index)
        for queue in waiting.values():
            del queue[: ahead + 1]
        for index in self.order:
            whole = self.gathered.pop(index)
            update = self.redistribute(index, self.orthogonalized(index, whole))
            following = waiting[self.groups.get(index)]
            if following:
                self.gather(following.pop(0))
            self.apply(index, update, whole)

    def update_momentum(self, index: int) -> None:
        param, grad, buffer, hyper = self.work[index]
        if grad is None:
            return
        if buffer is None:
            buffer = new_momentum_buffer(param)
            self.keep(index, buffer)
            self.work[index] = self.work[index]._replace(momentum_buffer=buffer)
        _update_momentum(
            local_part(buffer), local_gradient(param, grad), hyper.momentum
        )

    def announce(self, index: int) -> int:
        owner = self.owners[index]
        self.config.state["current_param_idx"] = index
        self.config.state["current_owner"] = owner
        return owner

    def gather(self, index: int) -> None:
        piece = self.piece(index)
        owner = self.announce(index)
        whole = self.config.gather_fn(piece, owner, self.config.state)
        if whole is None and owner == self.rank:
            raise RuntimeError(
                f"gather_fn returned None for {self.describe[index]} on its owner, rank {owner}; there it has to "
                "return the whole matrix"
            )
        self.gathered[index] = whole

    def piece(self, index: int) -> Tensor:
        """A copy of this rank's part of what is to be orthogonalized, of the parameter's type."""
        param, grad, buffer, hyper = self.work[index]
        if grad is None or buffer is None:
            return like_param(param, torch.zeros_like(local_part(param)))
        momentum = local_part(buffer)
        local = _blend(momentum, local_gradient(param, grad), hyper)
        return like_param(param, local.clone() if local is momentum else local)

    def orthogonalized(self, index: int, whole: Tensor | None) -> Tensor | None:
        if whole is None:
            return None
        if self.owners[index] != self.rank:
            return whole.new_zeros(whole.shape, dtype=_NS_DTYPE)
        (update,) = _orthogonalize(local_part(whole)[None], self.work[index].hyper)
        # A tall matrix comes as a transpose, which some collectives would send in its memory's order.
        return update.contiguous()

    def redistribute(self, index: int, update: Tensor | None) -> Tensor:
        owner = self.announce(index)
        piece = self.config.redistribute_fn(update, owner, self.config.state)
        if not isinstance(piece, Tensor):
            raise RuntimeError(
                f"redistribute_fn returned {type(piece).__name__} for {self.describe[index]}; it has to return this "
                "rank's piece of the update"
            )
        piece, local = local_part(piece), local_part(self.work[index].param)
        if piece.shape != local.shape:
            raise RuntimeError(
                f"redistribute_fn returned a piece of shape {tuple(piece.shape)} for {self.describe[index]}, whose "
                f"local part has shape {tuple(local.shape)}"
            )
        return piece

    def apply(self, index: int, update: Tensor, whole: Tensor | None) -> None:
        param, grad, _, hyper = self.work[index]
        if grad is None or index in self.refused:
            return
        local = local_part(param)
        shape, regions = self.held.get(index, (None, ()))
        if shape is None:
            shape = tuple(self.global_shape(index, whole))
            if shape != local.shape:
                # Where in the matrix this piece stands is the framework's secret.
                _apply_update(local, update, hyper, shape)
                return
            regions = (Region(0, 0, *shape, 0, shape[1]),)
        for region in regions:
            apply_piece(
                region.of_local(local), region.of_local(update), hyper, shape, region
            )

    def global_shape(self, index: int, whole: Tensor | None) -> Sequence[int]:
        """What the learning rate is scaled by: never the shape of a shard, where that is known."""
        if whole is not None:
            return whole.shape
        param = self.work[index].param
        if as_dtensor_if_imported(param) is not None:
            return param.shape
        known = self.config.state.get("global_shapes", {})
        if index not in known:
            warnings.warn(
                f"gather_fn returned None for {self.describe[index]} on a rank that is not its owner, so the learning "
                f"rate is scaled by the shape of the local tensor. If that is a shard, give the whole shape in "
                f"config.state['global_shapes'][{index}]",
                stacklevel=2,
            )
        return known.get(index, param.shape)
