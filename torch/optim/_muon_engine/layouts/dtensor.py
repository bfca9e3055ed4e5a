"""Where the shards of DTensors are, by their placements."""

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from ..process_groups import current_device, device_of_group, process_rank, Ranks
from .layout import Key, Layout, matrix_shape, Region, Regions, Shards
from .local import traits_of


# Ranks that share a matrix -> the framework's groups among them.
Sharing = dict[Ranks, list[ProcessGroup]]
# Consecutive indices: the first one of each run, and how many.
Runs = tuple[tuple[int, int], ...]


class _Held(NamedTuple):
    """A rank's part of a tensor: matrices of a stack, and rows and columns of each of them."""

    subs: Runs
    rows: Runs
    columns: Runs


class _DimCut(NamedTuple):
    """A mesh dimension that cuts a dimension of a tensor, and its placement."""

    mesh_dim: int
    placement: Any


class DTensorLayouts:
    """Reads the layouts of DTensors. Equal shapes on equal placements share one calculation."""

    def __init__(self) -> None:
        # Matrix in a stack -> its shards, by everything that they depend on.
        self._shards: dict[tuple, dict[int, Shards]] = {}

    def of(
        self,
        key: Key,
        tensor: DTensor,
        flatten: bool = False,
        for_whole_mesh: bool = False,
    ) -> list[Layout]:
        """The layouts of the matrices of ``tensor`` of which this rank has a part, or ``for_whole_mesh`` of all.
        Raises ValueError for an unknown placement, a mesh without this rank, or a local tensor of another size.
        """
        mesh, placements = tensor.device_mesh, tensor.placements
        rank = process_rank()
        local = tensor._local_tensor
        try:
            shards_of = self._shards_of(tensor, flatten, for_whole_mesh)
            numel = 0
            for shards in shards_of.values():
                if rank in shards.ranks:
                    numel += shards.numel_of(rank)
            if numel != local.numel():
                raise ValueError(
                    f"the local tensor has shape {tuple(local.shape)}, which the placements do not give"
                )
        except ValueError as problem:
            raise ValueError(
                f"{key.describe(tensor.shape)}, placements {placements} on {mesh}: {problem}"
            ) from None
        placement = (
            f"placements {tuple(map(str, placements))} on mesh {tuple(mesh.shape)}"
        )
        shape = matrix_shape(tensor.shape, flatten)
        traits = traits_of(tensor)
        dtype = traits.grad_dtype or traits.dtype
        layouts: list[Layout] = []
        for sub, shards in shards_of.items():
            matrix_key = key._replace(sub=sub)
            layouts.append(
                Layout(matrix_key, shape, dtype, shards, placement, traits.frozen)
            )
        return layouts

    def _shards_of(
        self, tensor: DTensor, flatten: bool = False, for_whole_mesh: bool = False
    ) -> dict[int, Shards]:
        """Matrix in the tensor -> its shards. Raises ValueError as :meth:`of` does."""
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None:
            raise ValueError(
                "this rank is not in the mesh; give this optimizer only the parameters that the rank holds"
            )
        depends_on = (mesh, tensor.placements, flatten, for_whole_mesh, *tensor.shape)
        if depends_on not in self._shards:
            self._shards[depends_on] = _calculated_shards(
                tensor, flatten, for_whole_mesh
            )
        return self._shards[depends_on]

    def sharing(
        self, params: Sequence[Tensor], flattened_params: Collection[int] = ()
    ) -> Sharing:
        """Sorted ranks that share one of ``params`` -> groups; the same on a mesh, even if one rank cannot
        read. Those with an index in ``flattened_params`` are one matrix. Others of three and more dimensions are stacks.
        """
        shared: Sharing = {}
        # Meshes over the same ranks have one list.
        groups_of: dict[DeviceMesh, list[ProcessGroup]] = {}
        stacks: list[DTensor] = []
        for index, param in enumerate(params):
            if not isinstance(param, DTensor):
                continue
            mesh = param.device_mesh
            if mesh not in groups_of and mesh.get_coordinate():
                groups = shared.setdefault(mesh_ranks(mesh), [])
                groups += mesh.get_all_groups()
                groups += _flattened_groups(mesh)
                groups_of[mesh] = groups
            if param.ndim > 2 and index not in flattened_params:
                stacks.append(param)
        for stack in stacks:
            # A stack that cannot be read is an error on every rank of its mesh.
            with suppress(ValueError):
                for shards in self._shards_of(stack).values():
                    groups = groups_of[stack.device_mesh]
                    shared.setdefault(shards.holders, list(groups))
        return shared


def _calculated_shards(
    tensor: DTensor, flatten: bool, for_whole_mesh: bool
) -> dict[int, Shards]:
    """Matrix in the tensor -> its shards: the matrices of this rank, or ``for_whole_mesh`` of all."""
    ranks = tensor.device_mesh.mesh.flatten().tolist()
    _check_sums(tensor)
    by_rank = _matrices_by_rank(tensor, flatten)
    subs: Collection[int] = by_rank[ranks.index(process_rank())].keys()
    if for_whole_mesh:
        subs = sorted(set().union(*by_rank))
    shards: dict[int, Shards] = {}
    for sub in subs:
        holders: list[int] = []
        regions: list[Regions] = []
        for place, matrices in enumerate(by_rank):
            if sub not in matrices:
                continue
            holders.append(ranks[place])
            regions.append(matrices[sub])
        shards[sub] = Shards(tuple(holders), tuple(regions))
    return shards


def mesh_ranks(mesh: DeviceMesh) -> Ranks:
    """The ranks of ``mesh`` in ascending order; in a dry run with fake tensors, too."""
    with unset_fake_temporarily():
        return tuple(sorted(mesh.mesh.flatten().tolist()))


def device_of(
    params: Sequence[Tensor], groups: Iterable[ProcessGroup] = ()
) -> torch.device:
    """The device of the communication buffers of the ranks that share ``params``, in ``groups`` of theirs."""
    # Device type of a mesh -> the device of a local tensor.
    local_devices: dict[str, torch.device] = {}
    for param in params:
        if isinstance(param, DTensor):
            device_type = param.device_mesh.device_type
            local_devices[device_type] = param._local_tensor.device
    if len(local_devices) > 1:
        raise ValueError(
            f"the parameters are on meshes of different device types: {sorted(local_devices)}; give each type its own Muon"
        )
    device = torch.device("cpu")
    if len(params):
        device = params[0].device
    for device_type, local_device in local_devices.items():
        device = local_device
        if local_device.type != device_type:
            # Offloaded parameters are on the CPU, but their mesh communicates between accelerators.
            device = current_device(device_type)
    for group in groups:
        device_types = [torch.device(kind).type for kind in group._device_types]
        if device.type in ("cpu", "meta") and device.type not in device_types:
            # Parameters on the CPU or on meta, in a group of accelerators only.
            return device_of_group(group)
    return device


def _flattened_groups(mesh: DeviceMesh) -> list[ProcessGroup]:
    """The groups of meshes that were flattened out of the same root as ``mesh``."""
    root = mesh
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh()
    groups: list[ProcessGroup] = []
    for flattened in getattr(root, "_flatten_mapping", {}).values():
        if flattened.get_coordinate() is not None:
            groups.append(flattened.get_group())
    return groups


def _check_sums(tensor: DTensor) -> None:
    """Raises ValueError for a Partial placement that is no sum. Only a sum has a defined update."""
    for placement in tensor.placements:
        if placement.is_partial() and not placement.is_partial("sum"):
            raise ValueError(
                f"Muon takes no parameter with {placement!r}; redistribute it first"
            )


def _matrices_by_rank(tensor: DTensor, flatten: bool) -> list[dict[int, Regions]]:
    """For each rank of the flattened mesh, the matrices that it holds a part of, and their regions."""
    dims = range(tensor.ndim)
    # The dimension of the rows. Those before it number the matrices of a stack, those after it are columns.
    row_dim = 0 if flatten else tensor.ndim - 2
    subs = _runs_by_rank(dims[:row_dim], tensor)
    rows = _runs_by_rank(dims[row_dim : row_dim + 1], tensor)
    columns = _runs_by_rank(dims[row_dim + 1 :], tensor)
    by_rank: list[dict[int, Regions]] = []
    # Replicas share one dict.
    matrices_of: dict[_Held, dict[int, Regions]] = {}
    for held in map(_Held, subs, rows, columns):
        if held not in matrices_of:
            matrices_of[held] = _matrices(held)
        by_rank.append(matrices_of[held])
    return by_rank


def _matrices(held: _Held) -> dict[int, Regions]:
    """The matrices that a rank holds, in the order of its storage, and their regions."""
    regions: dict[int, Regions] = {}
    for start, count in held.subs:
        for sub in range(start, start + count):
            place = len(regions)
            regions[sub] = _regions(held.rows, held.columns, place)
    return regions


def _runs_by_rank(dims: range, tensor: DTensor) -> list[Runs]:
    """For each rank of the flattened mesh, the row-major indices that it holds along ``dims`` of a tensor. The
    placements themselves cut an index tensor, because they know the rules for uneven and strided shards.
    """
    mesh_sizes = tensor.device_mesh.shape
    shape = [size if dim in dims else 1 for dim, size in enumerate(tensor.shape)]
    indices = torch.arange(math.prod(shape), device="cpu").view(shape)
    cuts: list[_DimCut] = []
    for dim in dims:
        cuts += _order_of_cuts(tensor.placements, mesh_sizes, dim)
    # Coordinates along the mesh dimensions that have cut so far -> the indices there.
    pieces: dict[tuple[int, ...], Tensor] = {(): indices}
    for mesh_dim, placement in cuts:
        finer: dict[tuple[int, ...], Tensor] = {}
        for coordinates, piece in pieces.items():
            parts, _ = placement._split_tensor(
                piece, mesh_sizes[mesh_dim], with_padding=False, contiguous=False
            )
            for coordinate, part in enumerate(parts):
                finer[(*coordinates, coordinate)] = part
        pieces = finer
    runs_of: dict[tuple[int, ...], Runs] = {}
    for coordinates, piece in pieces.items():
        runs_of[coordinates] = _runs(piece.flatten())
    by_rank: list[Runs] = []
    for of_rank in product(*map(range, mesh_sizes)):
        coordinates = tuple(of_rank[mesh_dim] for mesh_dim, _ in cuts)
        by_rank.append(runs_of[coordinates])
    return by_rank


def _order_of_cuts(
    placements: tuple[Placement, ...], sizes: tuple[int, ...], dim: int
) -> list[_DimCut]:
    """The mesh dimensions that cut tensor dimension ``dim``, in their order, with their placements. A strided
    shard whose split factor is the number of pieces of the dimensions to its right (FSDP over TP) cuts each of
    their pieces after them, which for uneven sizes differs from cutting strides.
    """
    order: list[_DimCut] = []
    pieces = 1
    for mesh_dim, placement in reversed([*enumerate(placements)]):
        if placement.is_replicate() or placement.is_partial():
            continue
        if not hasattr(placement, "dim") or not hasattr(placement, "_split_tensor"):
            raise ValueError(f"{placement} is neither a shard, a replica nor partial")
        if placement.dim != dim:
            continue
        if pieces > 1 and getattr(placement, "split_factor", 0) == pieces:
            order.append(_DimCut(mesh_dim, Shard(dim)))
        else:
            order.insert(0, _DimCut(mesh_dim, placement))
        pieces *= sizes[mesh_dim]
    return order


def _runs(indices: Tensor) -> Runs:
    """The runs of ascending ``indices``."""
    if not indices.numel():
        return ()
    is_start = indices.diff() != 1
    starts = [0, *is_start.nonzero().flatten().add(1).tolist()]
    ends = [*starts[1:], len(indices)]
    runs: list[tuple[int, int]] = []
    for index, start, end in zip(indices[starts].tolist(), starts, ends):
        runs.append((index, end - start))
    return tuple(runs)


def _regions(rows: Runs, columns: Runs, place: int) -> Regions:
    """The regions of the ``place``-th matrix that a rank holds."""
    stride = sum(width for _, width in columns)
    all_rows = sum(height for _, height in rows)
    regions: list[Region] = []
    offset = place * stride * all_rows
    for row, height in rows:
        offset_in_row = offset
        for column, width in columns:
            regions.append(Region(row, column, height, width, offset_in_row, stride))
            offset_in_row += width
        offset += height * stride
    return tuple(regions)
