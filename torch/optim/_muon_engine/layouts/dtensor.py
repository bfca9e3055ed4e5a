"""DTensors: where their shards are, and this rank's part of them as plain tensors.

A plain tensor comes through the same functions: it is its own local tensor.
"""

from __future__ import annotations

import warnings
from itertools import accumulate, product
from typing import Any, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim._muon_engine.layouts import (
    check_cover,
    Key,
    Layout,
    listed,
    moved,
    process_rank,
    Region,
    Shards,
    whole_layouts,
)


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


class DTensorReader:
    """Reads the layouts of DTensors. A plain tensor is whole, and each rank's own.

    Equal shapes on equal placements share one calculation.
    """

    takes_flat_params = False
    takes_stacks = False

    def __init__(self) -> None:
        self._shards: dict[Any, dict[int, Shards]] = {}
        self._ranks: dict[DeviceMesh, tuple[int, ...]] = {}
        # By index, what a piece outside of step() is cut into: as it was read or last gathered.
        self._placed: dict[int, tuple[list[Layout], DTensor]] = {}
        self._plain: set[int] = set()

    def read(
        self,
        params: Sequence[Tensor],
        names: Sequence[str | None],
        error: BaseException | None = None,
    ) -> list[Layout]:
        """The layouts of all matrices in ``params``; see :class:`Reader`."""
        self.forget()
        layouts = []
        for index, (param, name) in enumerate(zip(params, names, strict=True)):
            key = Key(index, 0, name)
            if isinstance(param, DTensor):
                layouts += self.read_all(key, param)
            else:
                self._plain.add(index)
                layouts += whole_layouts(key, param)
        cut = [
            Key(index, 0, name).describe(param.shape)
            for index, (param, name) in enumerate(zip(params, names, strict=True))
            if not isinstance(param, DTensor) and tp_mark_of(param) in (0, 1)
        ]
        if (
            cut
            and process_rank() == 0
            and dist.is_initialized()
            and dist.get_world_size() > 1
        ):
            warnings.warn(
                "these are marked as cut by tensor parallelism (tp_dim, partition_dim), but they are plain tensors, which "
                "create_dtensor_config takes for whole matrices. Use create_auto_config(tp_process_group=...), which "
                f"reads the marks: {listed(cut)}",
                stacklevel=2,
            )
        return layouts

    def forget(self) -> None:
        # Another mesh may come to stand at a former one's address.
        self._shards, self._ranks, self._placed = {}, {}, {}
        self._plain = set()

    def read_dtensor(self, key: Key, tensor: DTensor) -> Layout:
        """The layout of ``tensor``, which is one matrix; see :meth:`read_all`."""
        (layout,) = self.read_all(key, tensor)
        return layout

    def read_all(self, key: Key, tensor: DTensor) -> list[Layout]:
        """The layouts of the matrices of ``tensor`` of which this rank has a part.

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
        if tensor.ndim < 2:
            raise ValueError(f"{where}: Muon only supports 2D parameters")
        memo = (mesh, tensor.placements, *tensor.shape)
        fresh = memo not in self._shards
        if fresh:
            self._shards[memo] = self._read_shards(tensor, where)
        rows, columns = tensor.shape[-2:]
        layouts = []
        for sub, shards in self._shards[memo].items():
            one = key._replace(sub=sub) if sub else key
            layout = Layout(one, (rows, columns), tensor.dtype, shards, source)
            if fresh:
                check_cover(layout)
            layouts.append(layout)
        local, rank = tensor._local_tensor, dist.get_rank()
        held = sum(r.numel for layout in layouts for r in layout.shards.of(rank))
        if held != local.numel():
            raise ValueError(
                f"{where}: the local tensor has shape {tuple(local.shape)}, which the placements do not give"
            )
        self._placed[key.index] = (layouts, tensor)
        return layouts

    def _read_shards(self, tensor: DTensor, where: str) -> dict[int, Shards]:
        """Matrix of the stack -> its shards, as far as this rank is among their ranks."""
        mesh, placements, shape = (
            tensor.device_mesh,
            tensor.placements,
            tuple(tensor.shape),
        )
        ranks = self._ranks_of(mesh)
        contributions = _contributions(mesh, placements, where)
        if len(shape) == 2:
            regions = _regions_by_rank(mesh, placements, shape, where)
            return {0: Shards(ranks, regions, contributions)}
        held = _stacks_by_rank(mesh, placements, shape, where)
        mine = held[ranks.index(dist.get_rank())]
        return {
            sub: Shards(
                tuple(rank for rank, has in zip(ranks, held) if sub in has),
                tuple(has[sub] for has in held if sub in has),
                tuple(c for c, has in zip(contributions, held) if sub in has),
            )
            for sub in mine
        }

    def _ranks_of(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """The ranks of ``mesh``, flattened; one tuple for all matrices on it."""
        if mesh not in self._ranks:
            self._ranks[mesh] = tuple(mesh.mesh.flatten().tolist())
        return self._ranks[mesh]

    def sharing(
        self, params: Sequence[Tensor]
    ) -> dict[tuple[int, ...], list[ProcessGroup]]:
        """Sorted ranks that share one of ``params`` -> the mesh's groups for it."""
        shared: dict[tuple[int, ...], list[ProcessGroup]] = {}
        # By address: many parameters are on one mesh object.
        meshes: dict[int, DeviceMesh] = {}
        for param in params:
            mesh = param.device_mesh if isinstance(param, DTensor) else None
            if mesh is None or mesh.get_coordinate() is None:
                shared.setdefault((process_rank(),), [])
            else:
                meshes[id(mesh)] = mesh
        for mesh in meshes.values():
            groups = shared.setdefault(tuple(sorted(self._ranks_of(mesh))), [])
            found = [*mesh.get_all_groups(), *_flattened_groups(mesh)]
            groups += [group for group in found if group not in groups]
        for param in params:
            if isinstance(param, DTensor) and param.ndim > 2:
                of_mesh = shared.get(tuple(sorted(self._ranks_of(param.device_mesh))))
                for ranks in self._ranks_of_stack(param):
                    shared.setdefault(ranks, list(of_mesh or ()))
        return shared

    def _ranks_of_stack(self, tensor: DTensor) -> set[tuple[int, ...]]:
        """The sorted ranks of each matrix of a stack; none where it cannot be read, on all ranks alike."""
        mesh, placements = tensor.device_mesh, tensor.placements
        memo = (mesh, placements, *tensor.shape)
        if mesh.get_coordinate() is None:
            return set()
        try:
            if memo not in self._shards:
                self._shards[memo] = self._read_shards(tensor, "")
        except ValueError:
            return set()
        return {shards.group for shards in self._shards[memo].values()}

    meeting = sharing

    def device_of(self, params: Sequence[Tensor]) -> torch.device:
        """Where collectives take their buffers."""
        kinds: dict[str, torch.device] = {}
        for param in params:
            if isinstance(param, DTensor):
                kind = param.device_mesh.device_type
                kinds.setdefault(kind, param._local_tensor.device)
        if len(kinds) > 1:
            raise ValueError(
                f"the parameters are on meshes of different device types: {sorted(kinds)}; give each type its own Muon"
            )
        for kind, device in kinds.items():
            # Offloaded parameters live on the CPU, but their mesh talks between accelerators.
            return device if device.type == kind else current_device(kind)
        return params[0].device if len(params) else torch.device("cpu")

    def describe_state(self, state: dict[str, Any]) -> None:
        """Writes into a config's ``state`` what users are promised to find there."""
        state["param_metadata"] = {
            index: {
                "device_mesh": dtensor.device_mesh,
                "placements": dtensor.placements,
                "shape": dtensor.shape,
                "stride": dtensor.stride(),
                "local_shape": dtensor._local_tensor.shape,
            }
            for index, (_, dtensor) in self._placed.items()
        }

    def check_index(self, tensor: Tensor, index: int) -> None:
        """The user says nothing of single parameters here."""

    # The round trip outside of step()

    def whole(self, tensor: Tensor, index: int) -> Tensor:
        """The full matrix of ``tensor``, on every caller."""
        if not isinstance(tensor, DTensor):
            self._plain.add(index)
            return tensor
        self.read_all(Key(index), tensor)
        return tensor.full_tensor()

    def piece(self, full: Tensor, index: int) -> Tensor:
        """This rank's piece of ``full``, cut without communication."""
        if index in self._plain or not dist.is_initialized():
            return full
        if index not in self._placed:
            raise ValueError(
                f"nothing is known of parameter {index} yet, so redistribute_fn cannot tell which piece of the matrix is this "
                "rank's: call assign_fn or gather_fn before"
            )
        layouts, like = self._placed[index]
        local = full.new_zeros(like._local_tensor.shape)
        return like_param(like, cut_out(layouts, full, local))


def _flattened_groups(mesh: DeviceMesh) -> list[ProcessGroup]:
    """The groups of meshes that somebody flattened out of the same root as ``mesh``."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    flattened = getattr(root, "_flatten_mapping", {}).values()
    return [one.get_group() for one in flattened if one.get_coordinate() is not None]


def current_device(kind: str) -> torch.device:
    """This process's device of type ``kind``."""
    if kind == "cpu" or not torch.accelerator.is_available():
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def cut_out(layouts: Sequence[Layout], full: Tensor, local: Tensor) -> Tensor:
    """Fills ``local`` with this rank's shards of ``full``; of contributions to a sum, the first has them."""
    rank = process_rank()
    stack = full.reshape(-1, *full.shape[-2:])
    for layout in layouts:
        if layout.shards.contribution_of(rank) == 0:
            matrix = stack[layout.key.sub]
            for region in layout.shards.of(rank):
                region.of_local(local).copy_(region.of_matrix(matrix))
    return local


def local_part(tensor: Tensor) -> Tensor:
    """The storage behind ``tensor`` on this rank, to be read or written in place."""
    local = tensor
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        # A functional collective's result is a wrapper until somebody waits for it.
        wait = getattr(local, "wait", None)
        local = wait() if wait is not None else local
    return local.detach() if local.requires_grad else local


def provenance(param: Tensor) -> tuple:
    """What the layout of ``param`` is read from; where it differs later, the layout may be another."""
    if not isinstance(param, DTensor):
        return (is_frozen(param), param.shape, param.dtype, param.device)
    local = param._local_tensor
    return (
        is_frozen(param),
        param.device_mesh,
        param.placements,
        param.shape,
        param.dtype,
        local.shape,
        local.device,
    )


def tp_mark_of(param: Tensor) -> int | None:
    """The dimension that a framework has marked ``param`` as cut along by TP; -1 for not cut at all."""
    for mark in ("tp_dim", "partition_dim"):
        dim = getattr(param, mark, None)
        if isinstance(dim, int):
            return max(dim, -1)
    return None


def is_frozen(param: Tensor) -> bool:
    """A Parameter that takes no gradients. A plain tensor here is given its gradient by hand."""
    # Not a word of param.grad: what decides about the schedule must be the same on all ranks.
    return isinstance(param, torch.nn.Parameter) and not param.requires_grad


def local_gradient(param: Tensor, grad: Tensor) -> Tensor:
    """``grad`` on this rank, placed and typed as ``param`` is.

    Placing it otherwise is the framework's collective: every rank has to have the gradient.
    """
    counts = True
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        if grad.placements != param.placements:
            placements, counts = _target(param, grad)
            grad = grad.redistribute(param.device_mesh, placements)
    local = local_part(grad)
    if local.dtype != param.dtype:
        local = local.to(param.dtype)
    return local if counts else torch.zeros_like(local)


def _target(param: DTensor, grad: DTensor) -> tuple[tuple[Placement, ...], bool]:
    """Where a gradient is to be placed, and whether this rank's part of it counts.

    Autograd gives the terms of a sum (a Partial parameter) one replicated gradient. It is the sum's,
    so one of the terms takes it and the others take zeros; DTensor has no redistribution for that.
    """
    placements = list(param.placements)
    counts = True
    coordinate = param.device_mesh.get_coordinate()
    pairs = zip(placements, grad.placements, strict=True)
    for dim, (wanted, found) in enumerate(list(pairs)):
        if wanted.is_partial() and not found.is_partial():
            placements[dim] = Replicate()
            counts = counts and coordinate is not None and coordinate[dim] == 0
    return tuple(placements), counts


def problem_with_gradient(param: Tensor, grad: Tensor) -> str:
    """Why ``grad`` cannot be used for ``param``; "" where it can."""
    if grad.is_sparse or grad.layout != torch.strided:
        return "Muon does not support sparse gradients"
    if grad.is_complex() and not param.is_complex():
        return f"the parameter is of {param.dtype} and its gradient of {grad.dtype}"
    shapes = (param.shape, grad.shape)
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        if param.device_mesh != grad.device_mesh:
            return f"the parameter is on {param.device_mesh} and its gradient on {grad.device_mesh}"
        if param.placements == grad.placements:
            shapes = (param._local_tensor.shape, grad._local_tensor.shape)
    elif isinstance(param, DTensor) or isinstance(grad, DTensor):
        return (
            f"the parameter is a {type(param).__name__} and its gradient a {type(grad).__name__}; both or none have to "
            "be DTensors"
        )
    devices = local_part(param).device, local_part(grad).device
    if devices[0] != devices[1]:
        return f"the parameter is on {devices[0]} and its gradient on {devices[1]}"
    if shapes[0] != shapes[1]:
        return f"the parameter has shape {tuple(shapes[0])} on this rank and its gradient {tuple(shapes[1])}"
    return ""


def like_param(param: Tensor, local: Tensor) -> Tensor:
    """``local`` as a tensor of ``param``'s own type and placement."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def new_momentum_buffer(param: Tensor) -> Tensor:
    """Zeros of ``param``'s type, placement and dtype."""
    return like_param(param, torch.zeros_like(local_part(param)))


def placed_like(param: Tensor, buffer: Tensor) -> bool:
    """Whether ``buffer`` is of ``param``'s own type and placement."""
    if isinstance(param, DTensor) and isinstance(buffer, DTensor):
        return (
            param.placements == buffer.placements
            and param.device_mesh == buffer.device_mesh
            and param.shape == buffer.shape
        )
    either = isinstance(param, DTensor) or isinstance(buffer, DTensor)
    return not either and param.shape == buffer.shape


def place_like(param: Tensor, buffer: Tensor, description: str) -> Tensor:
    """A momentum ``buffer`` of another placement in ``param``'s own type and placement.

    Every rank has loaded the same kind of state, or changed its parameters alike, so all of them come
    here, or none.
    """
    if param.shape != buffer.shape:
        raise ValueError(
            f"the momentum buffer of {description} has shape {tuple(buffer.shape)}: load the whole one, or a DTensor "
            "of it"
        )
    if isinstance(param, DTensor) and isinstance(buffer, DTensor):
        if param.device_mesh == buffer.device_mesh:
            return buffer.redistribute(param.device_mesh, param.placements)
    if isinstance(buffer, DTensor):
        buffer = buffer.full_tensor()
    if not isinstance(param, DTensor):
        return buffer
    layouts = DTensorReader().read_all(Key(0), param)
    local = torch.zeros_like(local_part(param), dtype=buffer.dtype)
    return like_param(param, cut_out(layouts, buffer, local))


def _contributions(
    mesh: DeviceMesh, placements: tuple[Placement, ...], where: str
) -> tuple[int, ...]:
    """For each rank of the flattened mesh, its coordinate along the Partial dimensions, flattened."""
    partial = [p.is_partial() for p in placements]
    if not any(partial):
        return ()
    if any(p.is_partial() and not p.is_partial("sum") for p in placements):
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


def _regions_by_rank(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    where: str,
) -> tuple[tuple[Region, ...], ...]:
    """For each rank of the flattened mesh, the regions that it holds."""
    rows, columns = (
        _runs_by_coordinate(mesh, placements, shape, dim, where) for dim in (0, 1)
    )
    # Replicas hold the same runs, and share what comes of them.
    known: dict[tuple[int, int], tuple[Region, ...]] = {}
    regions = []
    for coordinate in product(*(range(size) for size in mesh.shape)):
        of_rows, of_columns = rows[coordinate], columns[coordinate]
        pair = id(of_rows), id(of_columns)
        if pair not in known:
            known[pair] = _regions(of_rows, of_columns)
        regions.append(known[pair])
    return tuple(regions)


def _stacks_by_rank(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    where: str,
) -> list[dict[int, tuple[Region, ...]]]:
    """For each rank of the flattened mesh, the matrices of a stack that it holds, and their regions.

    A stack of three and more dimensions has matrices of its last two, numbered row-major.
    """
    runs = [
        _runs_by_coordinate(mesh, placements, shape, dim, where)
        for dim in range(len(shape))
    ]
    found = []
    for coordinate in product(*(range(size) for size in mesh.shape)):
        *leading, rows, columns = (of_dim[coordinate] for of_dim in runs)
        regions = _regions(rows, columns)
        numel = sum(region.numel for region in regions)
        indices = [
            [i for start, length in of_dim for i in range(start, start + length)]
            for of_dim in leading
        ]
        held: dict[int, tuple[Region, ...]] = {}
        for at, index in enumerate(product(*indices)):
            sub = 0
            for i, size in zip(index, shape):
                sub = sub * size + i
            held[sub] = moved(regions, at * numel)
        found.append(held)
    return found


def _runs_by_coordinate(
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
        [-1 if d == dim else 1 for d in range(len(shape))]
    )
    held: dict[tuple[int, ...], Tensor] = {(): vector}
    order = _order_of_cuts(placements, mesh.shape, dim)
    for mesh_dim, placement in order:
        finer: dict[tuple[int, ...], Tensor] = {}
        cuts: dict[int, list[Tensor]] = {}
        for coordinate, indices in held.items():
            if id(indices) not in cuts:
                size = mesh.shape[mesh_dim]
                cuts[id(indices)] = _cut(placement, indices, dim, size, where)
            for i, part in enumerate(cuts[id(indices)]):
                finer[(*coordinate, i)] = part
        held = finer
    # Coordinates that differ along a replicated dimension share one tensor, and so one search.
    distinct = {id(indices): indices.flatten() for indices in held.values()}
    runs = dict(zip(distinct, _runs(list(distinct.values())), strict=True))
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


def _runs(parts: list[Tensor]) -> list[list[tuple[int, int]]]:
    """For each of ``parts`` its maximal runs of consecutive integers, as (start, length), in order."""
    together = torch.cat(parts)
    lengths = [part.numel() for part in parts]
    breaks = (together.diff() != 1).nonzero().flatten().add(1).tolist()
    ends = list(accumulate(lengths))
    # A run ends where a part does, too, even if the next one goes on with the next integer.
    edges = sorted({0, *breaks, *ends})
    values = together[torch.tensor(edges[:-1], dtype=torch.long, device="cpu")].tolist()
    found = zip(edges, edges[1:], values)
    runs: list[list[tuple[int, int]]] = []
    start, stop, value = next(found, (0, 0, 0))
    for end in ends:
        runs.append([])
        while start < stop <= end:
            runs[-1].append((value, stop - start))
            start, stop, value = next(found, (end, end, 0))
    return runs


def _regions(
    rows: list[tuple[int, int]], columns: list[tuple[int, int]]
) -> tuple[Region, ...]:
    stride = sum(width for _, width in columns)
    regions = []
    local_row = 0
    for row, height in rows:
        local_column = 0
        for column, width in columns:
            offset = local_row * stride + local_column
            regions.append(Region(row, column, height, width, offset, stride))
            local_column += width
        local_row += height
    return tuple(regions)
