"""The functions of ``create_auto_config``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, TYPE_CHECKING

import torch
from torch import nn, Tensor
from torch.optim._muon_engine.dtensor_functions import DTensorFunctions
from torch.optim._muon_engine.functions import process_rank
from torch.optim._muon_engine.layouts.groups import _ranks, PieceReader
from torch.optim._muon_engine.layouts import Key, Layout
from torch.optim._muon_engine.local import as_dtensor_if_imported, local_part


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.layouts.merge import Piece


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups that this rank is in, one for each kind of parallelism."""

    fsdp: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    ddp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    # The dimension that TP cuts a parameter along, by its index; None where nothing was said.
    tp_dims: Mapping[int, int] | None = None
    tp_dim_default: int | None = None
    experts: Mapping[int, int] = field(default_factory=dict)
    # An FSDP1 model, which alone knows what its original parameters are slices of.
    module: nn.Module | None = None

    def shared_over(self) -> dict[str, ProcessGroup]:
        """The groups of several ranks that share matrices; experts and stages share none."""
        given = {"fsdp": self.fsdp, "tp": self.tp, "ddp": self.ddp, "cp": self.cp}
        return {
            name: group
            for name, group in given.items()
            if group is not None and torch.distributed.get_world_size(group) > 1
        }

    def tp_dim(self, index: int) -> int | None:
        """The dimension that TP cuts parameter ``index`` along; None where it does not."""
        return (self.tp_dims or {}).get(index, self.tp_dim_default)

    def ep_ranks(self) -> tuple[int, ...]:
        if self.ep is None:
            return (process_rank(),)
        return tuple(torch.distributed.get_process_group_ranks(self.ep))


class GroupFunctions(DTensorFunctions):
    """Process groups say who shares a plain tensor; a DTensor still speaks for itself."""

    takes_flat_params = True

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__()
        self.groups = groups
        # Ranks that share a matrix, as last read, and their groups.
        self._sharing: dict[tuple[int, ...], list[ProcessGroup]] = {}
        self._holders: dict[Tensor, set[tuple[int, ...]]] = {}
        # What redistribute cuts a plain tensor into: its layout and the shape of this rank's part.
        self._cut: dict[int, tuple[Layout, torch.Size]] = {}

    def read(
        self,
        params: Sequence[Tensor],
        names: Sequence[str | None],
        error: BaseException | None = None,
    ) -> list[Layout]:
        self._forget()
        self._sharing, self._holders, self._cut = {}, {}, {}
        pieces: list[Piece] = []
        try:
            if error is None:
                pieces = self._pieces(params, names)
        except Exception as found:
            # Told to the others before it is raised: they are on their way into the exchange.
            error = found
        layouts = self._discover(pieces, error)
        for piece, layout in zip(pieces, layouts, strict=True):
            index = layout.key.index
            self._holders.setdefault(params[index], set()).add(layout.group)
            groups = self._sharing.setdefault(layout.group, [])
            groups += [c.group for c in piece.crossings if c.group not in groups]
            if not self.is_dtensor(params[index]):
                self._cut[index] = (layout, local_part(params[index]).shape)
        # Ranks may hold the same experts in other orders, and all that share some count them alike.
        return sorted(
            layouts, key=lambda l: -1 if l.key.expert is None else l.key.expert
        )

    def _pieces(
        self, params: Sequence[Tensor], names: Sequence[str | None]
    ) -> list[Piece]:
        reader = PieceReader(self.groups, len(params))
        pieces: list[Piece] = []
        for index, (param, name) in enumerate(zip(params, names, strict=True)):
            key = Key(index, 0, name, self.groups.experts.get(index))
            dtensor = as_dtensor_if_imported(param)
            if dtensor is None:
                pieces.extend(reader.of_plain(key, param))
            else:
                layout = self.read_dtensor(key, dtensor)
                pieces.append(reader.of_dtensor(layout, dtensor))
        for text in reader.warnings:
            warnings.warn(text, stacklevel=2)
        return pieces

    def _discover(
        self, pieces: Sequence[Piece], error: BaseException | None
    ) -> list[Layout]:
        from torch.optim._muon_engine.layouts.merge import discover

        layouts, texts = discover(
            pieces, self.groups.shared_over().items(), self.groups.ep_ranks(), error
        )
        for text in texts:
            warnings.warn(text, stacklevel=2)
        return layouts

    def sharing(
        self, params: Sequence[Tensor]
    ) -> dict[tuple[int, ...], list[ProcessGroup]]:
        shared = super().sharing(params)
        if not self._sharing:
            return shared
        found = {ranks for param in params for ranks in self._holders[param]}
        # A DTensor's replicas along other groups make its own mesh one of several parts.
        return {
            ranks: [
                *(
                    g
                    for mesh in shared
                    if set(mesh) <= set(ranks)
                    for g in shared[mesh]
                ),
                *self._sharing[ranks],
            ]
            for ranks in found
        }

    def meeting(
        self, params: Sequence[Tensor]
    ) -> dict[tuple[int, ...], list[ProcessGroup]]:
        # Sizes are told over all groups, whichever parameter changed.
        groups = self.groups.shared_over().values()
        return {
            **super().sharing(params),
            **{tuple(sorted(_ranks(group))): [group] for group in groups},
        }

    def device_of(self, params: Sequence[Tensor]) -> torch.device:
        device = super().device_of(params)
        for groups in self._sharing.values():
            for group in groups:
                kinds = {torch.device(kind).type for kind in group._device_types}
                if device.type not in kinds:
                    # Offloaded parameters, of which only another device's copies can travel.
                    return torch.device(min(kinds))
        return device

    # The round trip outside of step()

    def gather(self, tensor: Tensor, rank: int, state: dict[str, Any]) -> Tensor | None:
        self._check_tp_dim(tensor, state.get("current_param_idx", 0))
        return super().gather(tensor, rank, state)

    def redistribute(
        self, tensor: Tensor | None, rank: int, state: dict[str, Any]
    ) -> Tensor:
        if tensor is not None:
            self._check_tp_dim(tensor, state.get("current_param_idx", 0))
        return super().redistribute(tensor, rank, state)

    def _check_tp_dim(self, tensor: Tensor, index: int) -> None:
        PieceReader.check_tp_dim(self.groups.tp_dim(index), tensor, index)

    def whole(self, tensor: Tensor, index: int) -> Tensor:
        if self.is_dtensor(tensor):
            return super().whole(tensor, index)
        layout = self._layout_of(tensor, index)
        if len(layout.ranks) == 1:
            return tensor
        from torch.optim._muon_engine.process_groups import spanning_group

        group = spanning_group(layout.group, self.groups.shared_over().values())
        full = tensor.new_empty(layout.shape)
        for rank, local in _everyones(tensor.detach(), group).items():
            for region in layout.shard_of(rank):
                region.of_matrix(full).copy_(region.of_local(local))
        return full

    def _layout_of(self, tensor: Tensor, index: int) -> Layout:
        """What is known of parameter ``index``, else what the ranks find out about ``tensor``."""
        matrices = [layout for layout in self._layouts if layout.key.index == index]
        if len(matrices) > 1:
            raise ValueError(
                f"parameter {index} is a flat one of {len(matrices)} matrices, which gather_fn and redistribute_fn "
                "cannot hand over as one; they work where every FSDP unit holds a single matrix"
            )
        layout, shape = self._cut.get(index, (None, None))
        if layout is None or shape != tensor.shape:
            reader = PieceReader(self.groups, None)
            (layout,) = self._discover([*reader.of_plain(Key(index), tensor)], None)
            self._cut[index] = (layout, tensor.shape)
        return layout

    def piece(self, full: Tensor, index: int) -> Tensor:
        if index not in self._cut:
            return super().piece(full, index)
        layout, shape = self._cut[index]
        local = full.new_zeros(shape)
        for region in layout.shard_of(process_rank()):
            region.of_local(local).copy_(region.of_matrix(full))
        return local


def _everyones(local: Tensor, group: ProcessGroup) -> dict[int, Tensor]:
    """Each rank's local part, by rank; pieces differ in size, and so travel padded."""
    import torch.distributed as dist

    shapes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shapes, tuple(local.shape), group=group)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    padded = local.new_zeros(max(sizes))
    padded[: local.numel()].copy_(local.reshape(-1))
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    ranks = dist.get_process_group_ranks(group)
    return {
        rank: flat[:size].view(shape)
        for rank, flat, size, shape in zip(ranks, gathered, sizes, shapes, strict=True)
    }
