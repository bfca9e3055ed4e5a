"""Where the shards of DTensors are, by their placements."""

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from ..process_groups import current_device, device_of_group, process_rank, Ranks
from .layout import Key, Layout, matrix_shape, Region, Regions, Shards
from .local import gradient_dtype, is_frozen


# Ranks that share a matrix -> the framework's groups among them.
Sharing = dict[Ranks, list[ProcessGroup]]
# Consecutive indices: the first one of each run, and how many.
Runs = tuple[tuple[int, int], ...]


class DTensorLayouts:
    """Reads the layouts of DTensors. Equal shapes on equal placements share one calculation."""

    def __init__(self) -> None:
        # Matrix in a stack -> its shards, by everything that they depend on.
        self._shards: dict[tuple, dict[int, Shards]] = {}

    def of(
        self, key: Key, tensor: DTensor, flatten: bool = False, everywhere: bool = False
    ) -> list[Layout]:
        """The layouts of the matrices of ``tensor`` of which this rank has a part, or ``everywhere`` of all.
        Raises ValueError for an unknown placement, a mesh without this rank, or a local tensor of another size.
        """
        mesh, rank, local = tensor.device_mesh, process_rank(), tensor._local_tensor
        try:
            shards_of = self._shards_of(tensor, flatten, everywhere)
            own = [shards for shards in shards_of.values() if rank in shards.ranks]
            if sum(shards.numel_of(rank) for shards in own) != local.numel():
                raise ValueError(
                    f"the local tensor has shape {tuple(local.shape)}, which the placements do not give"
                )
        except ValueError as problem:
            raise ValueError(
                f"{key.describe(tensor.shape)}, placements {tensor.placements} on {mesh}: {problem}"
            ) from None
        placement = f"placements {tuple(map(str, tensor.placements))} on mesh {tuple(mesh.shape)}"
        shape = matrix_shape(tensor.shape, flatten)
        dtype = gradient_dtype(tensor) or tensor.dtype
        frozen = is_frozen(tensor)
        return [
            Layout(key._replace(sub=sub), shape, dtype, shards, placement, frozen)
            for sub, shards in shards_of.items()
        ]

    def _shards_of(
        self, tensor: DTensor, flatten: bool = False, everywhere: bool = False
    ) -> dict[int, Shards]:
        """Matrix in the tensor -> its shards. Raises ValueError as :meth:`of` does."""
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None:
            raise ValueError(
                "this rank is not in the mesh; give this optimizer only the parameters that the rank holds"
            )
        memo = (mesh, tensor.placements, flatten, everywhere, *tensor.shape)
        if memo not in self._shards:
            ranks, contributions = mesh.mesh.flatten().tolist(), _contributions(tensor)
            by_rank = _matrices_by_rank(tensor, flatten)
            subs = by_rank[ranks.index(process_rank())].keys()
            if everywhere:
                subs = sorted(set().union(*by_rank))
            shards = self._shards[memo] = {}
            for sub in subs:
                holders = [at for at, matrices in enumerate(by_rank) if sub in matrices]
                regions = tuple(by_rank[at][sub] for at in holders)
                of_sum = tuple(contributions[at] for at in holders if contributions)
                members = tuple(ranks[at] for at in holders)
                shards[sub] = Shards(members, regions, of_sum)
        return self._shards[memo]

    def sharing(self, params: Sequence[Tensor], flat: Collection[int] = ()) -> Sharing:
        """Sorted ranks that share one of ``params`` -> groups; the same on a mesh, even if one rank cannot
        read. Those with an index in ``flat`` are one matrix; others of three and more dimensions are stacks.
        """
        shared: Sharing = {}
        of_mesh: dict[DeviceMesh, list[ProcessGroup]] = {}
        meshes = [p.device_mesh for p in params if isinstance(p, DTensor)]
        for mesh in dict.fromkeys(m for m in meshes if m.get_coordinate()):
            of_mesh[mesh] = shared.setdefault(mesh_ranks(mesh), [])
            of_mesh[mesh] += [*mesh.get_all_groups(), *_flattened_groups(mesh)]
        for index, stack in enumerate(params):
            if not isinstance(stack, DTensor) or stack.ndim < 3 or index in flat:
                continue
            # A stack that cannot be read is an error on every rank of its mesh.
            with suppress(ValueError):
                for shards in self._shards_of(stack).values():
                    shared.setdefault(shards.holders, list(of_mesh[stack.device_mesh]))
        return shared


def mesh_ranks(mesh: DeviceMesh) -> Ranks:
    """The ranks of ``mesh`` in ascending order; in a dry run with fake tensors, too."""
    with unset_fake_temporarily():
        return tuple(sorted(mesh.mesh.flatten().tolist()))


def device_of(
    params: Sequence[Tensor], groups: Iterable[ProcessGroup] = ()
) -> torch.device:
    """The device of the communication buffers of the ranks that share ``params``, in ``groups`` of theirs."""
    dtensors = [param for param in params if isinstance(param, DTensor)]
    meshes = {p.device_mesh.device_type: p._local_tensor.device for p in dtensors}
    if len(meshes) > 1:
        raise ValueError(
            f"the parameters are on meshes of different device types: {sorted(meshes)}; give each type its own Muon"
        )
    device = params[0].device if len(params) else torch.device("cpu")
    for kind, local in meshes.items():
        # Offloaded parameters are on the CPU, but their mesh communicates between accelerators.
        device = local if local.type == kind else current_device(kind)
    for group in groups:
        kinds = [torch.device(kind).type for kind in group._device_types]
        if device.type in ("cpu", "meta") and device.type not in kinds:
            # Parameters on the CPU or on meta, in a group of accelerators only.
            return device_of_group(group)
    return device


def _flattened_groups(mesh: DeviceMesh) -> list[ProcessGroup]:
    """The groups of meshes that were flattened out of the same root as ``mesh``."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    flattened = getattr(root, "_flatten_mapping", {}).values()
    return [flat.get_group() for flat in flattened if flat.get_coordinate() is not None]


def _contributions(tensor: DTensor) -> tuple[int, ...]:
    """For each rank of the flattened mesh, its coordinate along the Partial dimensions, flattened."""
    shape, placements = tensor.device_mesh.shape, tensor.placements
    partial = [p.is_partial() for p in placements]
    if not any(partial):
        return ()
    if any(p.is_partial() and not p.is_partial("sum") for p in placements):
        raise ValueError(
            "of Partial parameters only Partial('sum') has a defined update; redistribute it first"
        )
    sizes = [n if is_partial else 1 for n, is_partial in zip(shape, partial)]
    terms = torch.arange(math.prod(sizes), device="cpu").view(sizes)
    return tuple(terms.expand(shape).flatten().tolist())


def _matrices_by_rank(tensor: DTensor, flatten: bool) -> list[dict[int, Regions]]:
    """For each rank of the flattened mesh, the matrices that it holds a part of, and their regions."""
    # The dimension of the rows. Those before it number the matrices of a stack, those after it are columns.
    first, dims = 0 if flatten else tensor.ndim - 2, range(tensor.ndim)
    axes = dims[:first], dims[first : first + 1], dims[first + 1 :]
    by_rank = list(zip(*(_runs_by_rank(axis, tensor) for axis in axes)))
    matrices: dict[tuple[Runs, ...], dict[int, Regions]] = {}
    for runs in set(by_rank):
        subs, rows, columns = runs
        stored = chain.from_iterable(range(start, start + n) for start, n in subs)
        matrices[runs] = {m: _regions(rows, columns, n) for n, m in enumerate(stored)}
    return [matrices[runs] for runs in by_rank]


def _runs_by_rank(dims: range, tensor: DTensor) -> list[Runs]:
    """For each rank of the flattened mesh, the row-major indices that it holds along ``dims`` of a tensor. The
    placements themselves cut an index tensor, because they know the rules for uneven and strided shards.
    """
    placements, sizes = tensor.placements, tensor.device_mesh.shape
    shape = [size if dim in dims else 1 for dim, size in enumerate(tensor.shape)]
    indices_at = {(): torch.arange(math.prod(shape), device="cpu").view(shape)}
    cuts = [cut for dim in dims for cut in _order_of_cuts(placements, sizes, dim)]
    for mesh_dim, placement in cuts:
        finer = {}
        for at, indices in indices_at.items():
            parts, _ = placement._split_tensor(
                indices, sizes[mesh_dim], with_padding=False, contiguous=False
            )
            finer |= {(*at, i): part for i, part in enumerate(parts)}
        indices_at = finer
    runs = {at: _runs(indices.flatten()) for at, indices in indices_at.items()}
    coordinates = product(*map(range, sizes))
    return [runs[tuple(at[mesh_dim] for mesh_dim, _ in cuts)] for at in coordinates]


def _order_of_cuts(
    placements: tuple[Placement, ...], sizes: tuple[int, ...], dim: int
) -> list[tuple[int, Any]]:
    """The mesh dimensions that cut tensor dimension ``dim``, in their order, with their placements. A strided
    shard whose split factor is the number of pieces of the dimensions to its right (FSDP over TP) cuts each of
    their pieces after them, which for uneven sizes differs from cutting strides.
    """
    order: list[tuple[int, Any]] = []
    pieces = 1
    for mesh_dim, placement in reversed([*enumerate(placements)]):
        if placement.is_replicate() or placement.is_partial():
            continue
        if not hasattr(placement, "dim") or not hasattr(placement, "_split_tensor"):
            raise ValueError(f"{placement} is neither a shard, a replica nor partial")
        if placement.dim != dim:
            continue
        if pieces > 1 and getattr(placement, "split_factor", 0) == pieces:
            order.append((mesh_dim, Shard(dim)))
        else:
            order.insert(0, (mesh_dim, placement))
        pieces *= sizes[mesh_dim]
    return order


def _runs(indices: Tensor) -> Runs:
    if not indices.numel():
        return ()
    starts = [0, *(indices.diff() != 1).nonzero().flatten().add(1).tolist()]
    ends = [*starts[1:], len(indices)]
    firsts = indices[starts].tolist()
    return tuple((v, e - s) for v, s, e in zip(firsts, starts, ends))


def _regions(rows: Runs, columns: Runs, place: int) -> Regions:
    """The regions of the ``place``-th matrix that a rank holds."""
    stride = sum(width for _, width in columns)
    regions, offset = [], place * stride * sum(height for _, height in rows)
    for row, height in rows:
        at = offset
        for column, width in columns:
            regions.append(Region(row, column, height, width, at, stride))
            at += width
        offset += height * stride
    return tuple(regions)
