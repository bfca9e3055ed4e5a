"""Where the shards of DTensors are, by their placements."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .params import (
    checked,
    Matrix,
    matrix_shape,
    not_2d,
    Param,
    shared_name,
    whole_matrices,
)
from .process_groups import process_rank, Ranks, short_hash
from .regions import Layout, Region, Regions


# Consecutive indices: the first one of each run, and how many.
Runs = tuple[tuple[int, int], ...]


class Fact(NamedTuple):
    """A description of a parameter, or of a matrix in it, for ``ranks`` to compare: the value of each field, in words."""

    ranks: Ranks
    param: Param
    described: str
    fields: Mapping[str, str]


class Reader:
    """Asks DTensors where their shards are. A plain tensor is a whole matrix of each rank."""

    def __init__(self) -> None:
        # Index in the config -> the expert's id.
        self.experts: Mapping[int, int] = {}
        # Of the parameters that were read last: the facts that ranks compare, and the groups of several ranks in which they
        # meet, one after another. After an error, only some parameters have facts.
        self.facts: list[Fact] = []
        self.groups_of: dict[Ranks, Sequence[dist.ProcessGroup]] = {}
        # The groups that may be those of a grid's ranks, from the parameters that were read last.
        self.candidates: list[dist.ProcessGroup] = []
        self.layouts: Layouts = {}
        # Index -> the parameter that was read last, and its matrices on this rank. Parameters are in the order of all ranks:
        # experts last, by their ids.
        self.params: dict[int, Param] = {}
        self.by_param: dict[int, list[Matrix]] = {}

    def as_param(self, tensor: Tensor, index: int) -> Param:
        """``tensor`` in the place of parameter ``index``."""
        if index in self.params:
            return replace(self.params[index], tensor=tensor)
        return Param(index, tensor, expert=self.experts.get(index))

    def _begin(self, params: Sequence[Param]) -> None:
        """Forgets the parameters that were read before."""
        for param in params:
            param.expert = self.experts.get(param.config_index)
        ordered = sorted(params, key=lambda param: param.place_of_expert)
        self.params, self.by_param = {param.index: param for param in ordered}, {}
        # Another mesh may get the address of a former one.
        self.layouts = {}
        self.read_meshes(ordered)

    def read_meshes(self, params: Sequence[Param]) -> None:
        """Takes the facts about DTensors, and their meshes' groups. It reads no layout, so each rank has this even if it
        cannot read a parameter.
        """
        placed: list[tuple[Param, DeviceMesh]] = []
        for param in params:
            mesh = getattr(param.tensor, "device_mesh", None)
            if mesh is not None and mesh.get_coordinate() is not None:
                placed.append((param, mesh))
        # Ranks may list parameters in different orders, and must meet in one mesh of several that have the same ranks.
        meshes = sorted({mesh for _, mesh in placed}, key=_order_of_mesh)
        # The lists of thousands of ranks take long to make.
        ranks_of = {mesh: mesh_ranks(mesh) for mesh in meshes}
        arrangements = {mesh: short_hash(mesh.mesh.tolist()) for mesh in meshes}
        self.groups_of, self.candidates = {}, []
        for mesh in meshes:
            groups = mesh.get_all_groups()
            several = [group for group in groups if group.size() > 1]
            self.groups_of.setdefault(ranks_of[mesh], several)
            self.candidates += groups
        self.facts = []
        for param, mesh in placed:
            fields = {
                "name": shared_name(param, param.name),
                "shape": str(tuple(param.tensor.shape)),
                "placement": _in_words(param.tensor),
                "mesh": arrangements[mesh],
            }
            self.facts.append(Fact(ranks_of[mesh], param, param.described, fields))

    def read(
        self, params: Sequence[Param], check: Callable[[], None] = lambda: None
    ) -> list[Matrix]:
        """The matrices in ``params``, in an order that all ranks share. Raises the error of ``check``, or a ValueError for a
        parameter that cannot be read. The ranks agree later.
        """
        self._begin(params)
        check()
        matrices: list[Matrix] = []
        for param in self.params.values():
            matrices += self.matrices_of(param)
        return self._taken(checked(matrices))

    def _taken(self, matrices: Sequence[Matrix]) -> list[Matrix]:
        """The ``matrices`` that were read, by the ranks that compare them, and in the order of indices. Experts come last, by
        their ids. Ranks compare the order of what they all have, but matrices that other ranks compare may meet these in
        one grid.
        """
        for matrix in matrices:
            self.by_param.setdefault(matrix.index, []).append(matrix)
        ranks_of = {fact.param.index: fact.ranks for fact in self.facts}
        return sorted(
            matrices,
            key=lambda m: (m.param.place_of_expert, ranks_of.get(m.index, ())),
        )

    def check_tp_dim(self, param: Param) -> None:
        """Placements say what TP cuts."""

    def matrices_of(self, param: Param) -> list[Matrix]:
        """The matrices in a parameter."""
        if param.tensor.ndim < 2:
            raise not_2d(param.described)
        if param.is_dtensor:
            return matrices_of_dtensor(param, self.layouts)
        return whole_matrices(param)


def _order_of_mesh(mesh: DeviceMesh) -> tuple:
    names = [(group.group_desc, group.group_name) for group in mesh.get_all_groups()]
    return mesh.ndim, mesh.mesh.tolist(), names


def _in_words(tensor: Any) -> str:
    placements = tuple(map(str, tensor.placements))
    return f"placements {placements} on mesh {tuple(tensor.device_mesh.shape)}"


def mesh_ranks(mesh: DeviceMesh) -> Ranks:
    """The ranks of ``mesh`` in ascending order, among fake tensors, too."""
    with unset_fake_temporarily():
        return tuple(sorted(mesh.mesh.flatten().tolist()))


# Matrix in a tensor -> its layout, by everything that they depend on.
Layouts = dict[tuple, dict[int, Layout]]


def matrices_of_dtensor(
    param: Param, known: Layouts, for_whole_mesh: bool = False
) -> list[Matrix]:
    """The matrices of which this rank has a part, or ``for_whole_mesh`` all. Equal shapes on equal placements share one
    calculation, by what is ``known`` of those before. Raises ValueError for an unknown placement, a mesh without this
    rank, or a local tensor of another size.
    """
    tensor = cast(DTensor, param.tensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    local = tensor._local_tensor
    depends_on = mesh, placements, param.flatten, for_whole_mesh, *tensor.shape
    rank, numel = process_rank(), 0
    try:
        if mesh.get_coordinate() is None:
            raise ValueError(
                "this rank is not in the mesh; give this optimizer only the parameters that the rank holds"
            )
        if depends_on not in known:
            known[depends_on] = _calculated(tensor, param.flatten, for_whole_mesh)
        for layout in known[depends_on].values():
            if rank in layout.ranks:
                numel += layout.numel_of(rank)
        if numel != local.numel():
            raise ValueError(
                f"the local tensor has shape {tuple(local.shape)}, which the placements do not give"
            )
    except ValueError as problem:
        raise ValueError(
            f"{param.described}, placements {placements} on {mesh}: {problem}"
        ) from None
    shape, placement = matrix_shape(tensor.shape, param.flatten), _in_words(tensor)
    matrices: list[Matrix] = []
    for sub, layout in known[depends_on].items():
        matrices.append(Matrix(param, shape, layout, placement, sub))
    return matrices


def _calculated(
    tensor: DTensor, flatten: bool, for_whole_mesh: bool
) -> dict[int, Layout]:
    """Matrix in the tensor -> its layout: the matrices of this rank, or ``for_whole_mesh`` all. Replicas and contributions
    to a sum are the rows of the grid.
    """
    mesh_dims = range(tensor.device_mesh.ndim)
    cutting = [dim for dim in mesh_dims if _cuts(tensor.placements[dim])]
    replicating = [dim for dim in mesh_dims if dim not in cutting]
    mesh = tensor.device_mesh.mesh.permute(*replicating, *cutting)
    replicas = math.prod(mesh.shape[: len(replicating)])
    grid = mesh.reshape(replicas, -1).tolist()
    columns = _matrices_by_column(tensor, flatten, cutting)
    own = next(row for row in grid if process_rank() in row).index(process_rank())
    subs = sorted(set().union(*columns)) if for_whole_mesh else columns[own]
    layouts: dict[int, Layout] = {}
    for sub in subs:
        holding = [at for at, held in enumerate(columns) if sub in held]
        of_sub = tuple(tuple(row[at] for at in holding) for row in grid)
        layouts[sub] = Layout(of_sub, tuple(columns[at][sub] for at in holding))
    return layouts


def _cuts(placement: Any) -> bool:
    """Whether a placement cuts the tensor. Raises ValueError for one that Muon does not know."""
    if placement.is_replicate():
        return False
    if placement.is_partial():
        # Only a sum has a defined update.
        if not placement.is_partial("sum"):
            raise ValueError(
                f"Muon takes no parameter with {placement!r}; redistribute it first"
            )
        return False
    if not hasattr(placement, "dim") or not hasattr(placement, "_split_tensor"):
        raise ValueError(f"{placement} is neither a shard, a replica nor partial")
    return True


def _matrices_by_column(
    tensor: DTensor, flatten: bool, cutting: Sequence[int]
) -> list[dict[int, Regions]]:
    """For each combination of coordinates along the ``cutting`` mesh dimensions: the matrices, in the order of storage,
    and their regions.
    """
    dims = range(tensor.ndim)
    # The dimension of the rows. Those before it number the matrices of a stack, those after it are columns.
    row_dim = 0 if flatten else tensor.ndim - 2
    subs = _runs_by_column(dims[:row_dim], tensor, cutting)
    rows = _runs_by_column(dims[row_dim : row_dim + 1], tensor, cutting)
    columns = _runs_by_column(dims[row_dim + 1 :], tensor, cutting)
    by_column: list[dict[int, Regions]] = []
    for held_subs, held_rows, held_columns in zip(subs, rows, columns):
        held: dict[int, Regions] = {}
        for start, count in held_subs:
            for sub in range(start, start + count):
                held[sub] = _regions(held_rows, held_columns, len(held))
        by_column.append(held)
    return by_column


def _runs_by_column(dims: range, tensor: DTensor, cutting: Sequence[int]) -> list[Runs]:
    """For each combination of coordinates, the row-major indices that a rank holds along ``dims`` of a tensor. The
    placements themselves cut an index tensor, because they know the rules for uneven and strided shards.
    """
    mesh_sizes = tensor.device_mesh.shape
    shape = [size if dim in dims else 1 for dim, size in enumerate(tensor.shape)]
    indices = torch.arange(math.prod(shape), device="cpu").view(shape)
    cuts: list[tuple[int, Any]] = []
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
    order = [cutting.index(mesh_dim) for mesh_dim, _ in cuts]
    by_column: list[Runs] = []
    for of_column in product(*(range(mesh_sizes[dim]) for dim in cutting)):
        by_column.append(runs_of[tuple(of_column[place] for place in order)])
    return by_column


def _order_of_cuts(
    placements: tuple[Any, ...], sizes: tuple[int, ...], dim: int
) -> list[tuple[int, Any]]:
    """The mesh dimensions that cut tensor dimension ``dim``, in their order, with their placements. A strided
    shard whose split factor is the number of pieces of the dimensions to its right (FSDP over TP) cuts each of
    their pieces after them, which for uneven sizes differs from cutting strides.
    """
    order: list[tuple[int, Any]] = []
    pieces = 1
    for mesh_dim, placement in reversed([*enumerate(placements)]):
        if not _cuts(placement) or placement.dim != dim:
            continue
        if pieces > 1 and getattr(placement, "split_factor", 0) == pieces:
            order.append((mesh_dim, Shard(dim)))
        else:
            order.insert(0, (mesh_dim, placement))
        pieces *= sizes[mesh_dim]
    return order


def _runs(indices: Tensor) -> Runs:
    """The runs of ascending ``indices``."""
    # In a run, indices and their places ascend together. The first index is the difference and the first place.
    differences = indices - torch.arange(len(indices), device="cpu")
    of_runs, counts = differences.unique_consecutive(return_counts=True)
    firsts = of_runs + counts.cumsum(0) - counts
    return tuple(zip(firsts.tolist(), counts.tolist()))


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
