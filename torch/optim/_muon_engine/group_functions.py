"""The functions of ``create_auto_config``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim._muon_engine.dtensor_functions import DTensorFunctions


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup
    from torch.optim._muon_engine.layout import Layout


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups that this rank is in, one for each kind of parallelism."""

    fsdp: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    ddp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    tp_dims: Mapping[int, int] = field(default_factory=dict)
    tp_dim_default: int | None = None

    def shared_over(self) -> dict[str, ProcessGroup]:
        """The groups whose ranks share matrices; experts and stages share none."""
        named = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name in ("fsdp", "tp", "ddp", "cp")
        }
        return {name: group for name, group in named.items() if group is not None}

    def tp_dim(self, index: int) -> int | None:
        """The dimension that TP cuts parameter ``index`` along; None where it does not."""
        return self.tp_dims.get(index, self.tp_dim_default)


class GroupFunctions(DTensorFunctions):
    """Process groups say who shares a plain tensor; a DTensor still speaks for itself."""

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__()
        self.groups = groups

    def read(
        self, params: Sequence[Tensor], names: Sequence[str | None]
    ) -> list[Layout]:
        for index, param in enumerate(params):
            self.check_tp_dim(param, index)
        shared = self._shared_by_plain_tensors(params)
        if shared:
            raise ValueError(
                f"plain tensors shared over process groups ({', '.join(shared)}) are not supported yet: use DTensor "
                "parameters (fully_shard, parallelize_module, distribute_tensor) with create_dtensor_config()"
            )
        return super().read(params, names)

    def _shared_by_plain_tensors(self, params: Sequence[Tensor]) -> list[str]:
        if not any(not self.is_dtensor(param) for param in params):
            return []
        return [
            name
            for name, group in self.groups.shared_over().items()
            if torch.distributed.get_world_size(group) > 1
        ]

    def check_tp_dim(self, tensor: Tensor, index: int) -> None:
        """Raises IndexError where the TP dimension of ``tensor`` is none of its dimensions."""
        dim = self.groups.tp_dim(index)
        if dim is not None and not -tensor.ndim <= dim < tensor.ndim:
            raise IndexError(
                f"tp_dim_per_param says dimension {dim} for parameter {index} of shape {tuple(tensor.shape)}, which "
                f"has dimensions 0 to {tensor.ndim - 1}"
            )

    def gather(self, tensor: Tensor, rank: int, state: dict[str, Any]) -> Tensor | None:
        self.check_tp_dim(tensor, state.get("current_param_idx", 0))
        return super().gather(tensor, rank, state)

    def redistribute(
        self, tensor: Tensor | None, rank: int, state: dict[str, Any]
    ) -> Tensor:
        if tensor is not None:
            self.check_tp_dim(tensor, state.get("current_param_idx", 0))
        return super().redistribute(tensor, rank, state)
