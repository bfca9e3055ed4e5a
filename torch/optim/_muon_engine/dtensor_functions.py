"""The functions of ``create_dtensor_config``."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim._muon_engine.functions import (
    BuiltFunctions,
    process_rank,
    whole_layout,
)
from torch.optim._muon_engine.layouts import Key, Layout
from torch.optim._muon_engine.local import as_dtensor_if_imported


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from torch.optim._muon_engine.layouts.dtensor import DTensorReader


class DTensorFunctions(BuiltFunctions):
    """DTensors know where their pieces are; a plain tensor is this rank's own affair."""

    def __init__(self) -> None:
        super().__init__()
        self._metadata: dict[int, dict[str, Any]] = {}
        # What redistribute cuts an index into: as it was read, or last gathered.
        self._placed: dict[int, tuple[Layout, dict[str, Any]]] = {}
        self._own_reader: DTensorReader | None = None

    def read(
        self,
        params: Sequence[Tensor],
        names: Sequence[str | None],
        error: BaseException | None = None,
    ) -> list[Layout]:
        self._forget()
        layouts = []
        for index, (param, name) in enumerate(zip(params, names, strict=True)):
            dtensor = as_dtensor_if_imported(param)
            key = Key(index, 0, name)
            if dtensor is None:
                layouts.append(whole_layout(key, param))
            else:
                layouts.append(self.read_dtensor(key, dtensor))
        return layouts

    def _forget(self) -> None:
        self._metadata = {}
        self._placed = {}
        # Equal placements are read once, but another mesh may come to stand at a former one's address.
        self._own_reader = None

    def read_dtensor(self, key: Key, dtensor: DTensor) -> Layout:
        """The layout of one DTensor, whose metadata is noted down under its index."""
        self._own_reader = self._own_reader or self._reader()
        layout = self._own_reader.read(key, dtensor)
        self._metadata[key.index] = _metadata(dtensor)
        self._placed[key.index] = (layout, self._metadata[key.index])
        return layout

    @staticmethod
    def _reader() -> DTensorReader:
        # Only now: plain tensors are no reason to import torch.distributed.tensor.
        from torch.optim._muon_engine.layouts.dtensor import DTensorReader

        return DTensorReader()

    def describe_state(self, layouts: Sequence[Layout], state: dict[str, Any]) -> None:
        state["param_metadata"] = self._metadata

    @staticmethod
    def is_dtensor(param: Tensor) -> bool:
        return as_dtensor_if_imported(param) is not None

    def sharing(
        self, params: Sequence[Tensor]
    ) -> dict[tuple[int, ...], list[ProcessGroup]]:
        shared: dict[tuple[int, ...], list[ProcessGroup]] = {}
        for param in params:
            dtensor = as_dtensor_if_imported(param)
            if dtensor is None or dtensor.device_mesh.get_coordinate() is None:
                shared.setdefault((process_rank(),), [])
                continue
            mesh = dtensor.device_mesh
            groups = shared.setdefault(tuple(sorted(mesh.mesh.flatten().tolist())), [])
            groups += [g for g in mesh.get_all_groups() if g not in groups]
        return shared

    def device_of(self, params: Sequence[Tensor]) -> torch.device:
        kinds: dict[str, torch.device] = {}
        for param in params:
            dtensor = as_dtensor_if_imported(param)
            if dtensor is not None:
                kinds.setdefault(
                    dtensor.device_mesh.device_type, dtensor._local_tensor.device
                )
        if len(kinds) > 1:
            raise ValueError(
                f"the parameters are on meshes of different device types: {sorted(kinds)}; give each type its own Muon"
            )
        for kind, device in kinds.items():
            # Offloaded parameters live on the CPU, but their mesh talks between accelerators.
            return device if device.type == kind else torch.device(kind)
        return params[0].device if len(params) else torch.device("cpu")

    def whole(self, tensor: Tensor, index: int) -> Tensor:
        dtensor = as_dtensor_if_imported(tensor)
        if dtensor is None:
            return tensor
        self._placed[index] = (
            self._reader().read(Key(index), dtensor),
            _metadata(dtensor),
        )
        return dtensor.full_tensor()

    def piece(self, full: Tensor, index: int) -> Tensor:
        if index not in self._placed:
            return full
        from torch.optim._muon_engine.layouts.dtensor import from_local

        layout, metadata = self._placed[index]
        local = full.new_zeros(metadata["local_shape"])
        rank = process_rank()
        if layout.contribution_of(rank) == 0:
            for region in layout.shard_of(rank):
                region.of_local(local).copy_(region.of_matrix(full))
        return from_local(local, metadata)


def _metadata(dtensor: DTensor) -> dict[str, Any]:
    return {
        "device_mesh": dtensor.device_mesh,
        "placements": dtensor.placements,
        "shape": dtensor.shape,
        "stride": dtensor.stride(),
        "local_shape": dtensor._local_tensor.shape,
    }
