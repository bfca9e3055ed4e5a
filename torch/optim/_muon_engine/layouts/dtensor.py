"""DTensor -> layout."""

from __future__ import annotations

from itertools import product
from typing import Any, TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim._muon_engine.layouts import check_cover, Key, Layout, Region


if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def as_dtensor(tensor: Tensor) -> DTensor | None:
    """``tensor`` where it is a DTensor; ``param.data`` is looked at too, as some users write."""
    if isinstance(tensor, DTensor):
        return tensor
    if isinstance(tensor, torch.nn.Parameter) and isinstance(tensor.data, DTensor):
        return tensor.data
    return None


def from_local(local: Tensor, like: Mapping[str, Any]) -> DTensor:
    """The DTensor of ``like``'s mesh, placements, shape and stride whose local part is ``local``."""
    return DTensor.from_local(
        local,
        like["device_mesh"],
        like["placements"],
        run_check=False,
        shape=like["shape"],
        stride=like["stride"],
    )


class DTensorReader:
    """Reads layouts from DTensors. Equal shapes on equal placements share one calculation."""

    def __init__(self) -> None:
        self._pieces: dict = {}

    def read(self, key: Key, tensor: DTensor) -> Layout:
        """The layout of ``tensor``.

        Raises:
            ValueError: the mesh lacks this rank, a placement is of a kind that cannot be read, or the
                local tensor is not of the size that the placements say.
        """
        mesh = tensor.device_mesh
        where = (
            f"{key.describe(tensor.shape)}, placements {tensor.placements} on {mesh}"
        )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"{where}: this rank is not in the mesh; give this optimizer only the parameters that the rank holds"
            )
        source = f"placements {tuple(map(str, tensor.placements))} on mesh {tuple(mesh.shape)}"
        ranks = tuple(mesh.mesh.flatten().tolist())
        contributions = _contributions(mesh, tensor.placements, where)
        memo = (mesh, tensor.placements, tuple(tensor.shape))
        pieces = self._pieces.get(memo)
        fresh = pieces is None
        if fresh:
            pieces = _pieces(mesh, tensor.placements, tuple(tensor.shape), where)
        layout = Layout(
            key, tuple(tensor.shape), tensor.dtype, ranks, pieces, source, contributions
        )
        if fresh:
            check_cover(layout)
            self._pieces[memo] = pieces
        mine = layout.shard_of(torch.distributed.get_rank())
        local = tensor._local_tensor
        if sum(region.numel for region in mine) != local.numel():
            raise ValueError(
                f"{where}: the local tensor has shape {tuple(local.shape)}, which the placements do not give"
            )
        return layout


def _contributions(
    mesh: DeviceMesh, placements: tuple[Placement, ...], where: str
) -> tuple[int, ...]:
    """For each rank of the flattened mesh, its coordinate along the Partial dimensions, flattened."""
    partial = [p.is_partial() for p in placements]
    if not any(partial):
        return ()
    if any(p.is_partial() and p.reduce_op != "sum" for p in placements):
        raise ValueError(
            f"{where}: of Partial parameters only Partial('sum') has a defined update; redistribute it first"
        )
    result = []
    for coordinate in product(*(range(size) for size in mesh.shape)):
        flat = 0
        for i, size, is_partial in zip(coordinate, mesh.shape, partial, strict=True):
            flat = flat * size + i if is_partial else flat
        result.append(flat)
    return tuple(result)


def _pieces(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    where: str,
) -> tuple[tuple[Region, ...], ...]:
    """For each rank of the flattened mesh, the rectangles that it holds."""
    by_dim = [
        _indices_by_coordinate(mesh, placements, shape, dim, where)
        for dim in range(len(shape))
    ]
    pieces = []
    for coordinate in product(*(range(size) for size in mesh.shape)):
        rows, columns = (runs[coordinate] for runs in by_dim)
        stride = sum(length for _, length in columns)
        pieces.append(tuple(_regions(rows, columns, stride)))
    return tuple(pieces)


def _indices_by_coordinate(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    dim: int,
    where: str,
) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Mesh coordinate -> the runs (start, length) of indices of tensor dimension ``dim`` held there.

    The placements themselves cut an index vector, mesh dimension by mesh dimension, so their rules
    for uneven, empty and strided shards are theirs alone.
    """
    vector = torch.arange(shape[dim], device="cpu").reshape(
        [-1 if d == dim else 1 for d in (0, 1)]
    )
    held: dict[tuple[int, ...], Tensor] = {(): vector}
    order = _order_of_cuts(placements, mesh.shape, dim)
    for mesh_dim, placement in order:
        finer: dict[tuple[int, ...], Tensor] = {}
        for coordinate, indices in held.items():
            cut = _cut(placement, indices, dim, mesh.shape[mesh_dim], where)
            for i, part in enumerate(cut):
                finer[(*coordinate, i)] = part
        held = finer
    # Coordinates that differ along a replicated dimension share one tensor, and so one search.
    runs = {id(indices): _runs(indices.flatten()) for indices in held.values()}
    place = {mesh_dim: at for at, (mesh_dim, _) in enumerate(order)}
    return {
        tuple(coordinate[place[i]] for i in range(mesh.ndim)): runs[id(indices)]
        for coordinate, indices in held.items()
    }


def _order_of_cuts(
    placements: tuple[Placement, ...], sizes: tuple[int, ...], dim: int
) -> list[tuple[int, Placement]]:
    """The mesh dimensions in the order in which they cut tensor dimension ``dim``, with what cuts.

    That is left to right, but for a strided shard whose split factor is the number of pieces that
    the dimensions to its right make: FSDP over TP. It says that those cut first and that it cuts
    each of their pieces, which for uneven sizes is not the same as cutting strides.
    """
    order: list[tuple[int, Placement]] = []
    pieces = 1
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        shards = getattr(placement, "dim", None) == dim
        if shards and pieces > 1 and getattr(placement, "split_factor", 0) == pieces:
            order.append((mesh_dim, Shard(dim)))
        else:
            order.insert(0, (mesh_dim, placement))
        pieces *= sizes[mesh_dim] if shards else 1
    return order


def _cut(
    placement: Placement, indices: Tensor, dim: int, size: int, where: str
) -> list[Tensor]:
    if placement.is_replicate() or placement.is_partial():
        return [indices] * size
    if not hasattr(placement, "dim") or not hasattr(placement, "_split_tensor"):
        raise ValueError(
            f"{where}: {placement} is neither a shard, a replica nor partial"
        )
    if placement.dim != dim:
        return [indices] * size
    parts, _ = placement._split_tensor(
        indices, size, with_padding=False, contiguous=False
    )
    return list(parts)


def _runs(indices: Tensor) -> list[tuple[int, int]]:
    """Maximal runs of consecutive integers, as (start, length), in order."""
    if indices.numel() == 0:
        return []
    breaks = (indices.diff() != 1).nonzero().flatten().add(1).tolist()
    starts = [0, *breaks]
    ends = [*breaks, indices.numel()]
    return [
        (int(indices[start]), end - start)
        for start, end in zip(starts, ends, strict=True)
    ]


def _regions(
    rows: list[tuple[int, int]], columns: list[tuple[int, int]], stride: int
) -> list[Region]:
    regions = []
    local_row = 0
    for row, height in rows:
        local_column = 0
        for column, width in columns:
            offset = local_row * stride + local_column
            regions.append(Region(row, column, height, width, offset, stride))
            local_column += width
        local_row += height
    return regions
