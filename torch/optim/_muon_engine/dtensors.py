"""Where the shards of DTensors are, by their placements."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .._muon_split import Split
from .local import traits_of
from .process_groups import process_rank, Ranks, short_name
from .regions import (
    checked,
    describe,
    Grid,
    Layout,
    Matrix,
    matrix_shape,
    not_2d,
    Region,
    Regions,
)


# Consecutive indices: the first one of each run, and how many.
Runs = tuple[tuple[int, int], ...]


class ParamInfo(NamedTuple):
    """A parameter's index in the dicts of the config, and its name. ``form`` has its options ``split`` and ``flatten``."""

    config_index: int
    name: str | None = None
    form: tuple[Split, bool] = (Split(), False)


class Fact(NamedTuple):
    """What the ranks of ``groups``, in whose order they meet, compare of a parameter or matrix."""

    ranks: Ranks
    groups: Sequence[ProcessGroup]
    # pyrefly: ignore [bad-override]
    index: int
    described: str
    # The value of each field, in words.
    fields: Mapping[str, str]


class Reader:
    """Asks DTensors where their shards are. A plain tensor is a whole matrix of each rank."""

    def __init__(self) -> None:
        # Index in the config -> the expert's id.
        self.experts: Mapping[int, int] = {}
        # What ranks compare of the parameters that were read last; after an error, of those that can be compared.
        self.facts: list[Fact] = []
        # The groups that may be those of a grid's ranks, from the parameters that were read last.
        self.candidates: list[ProcessGroup] = []
        self.dtensors = DTensorLayouts()
        # Index -> the matrices in a parameter, and a tensor with its type and local shape.
        self.by_param: dict[int, tuple[list[Matrix], Tensor]] = {}
        self._infos: Sequence[ParamInfo] = ()

    def info(self, index: int) -> ParamInfo:
        """The info with which parameter ``index`` was read, or its default."""
        return self._infos[index] if index < len(self._infos) else ParamInfo(index)

    def _begin(self, params: Sequence[Tensor], infos: Sequence[ParamInfo]) -> None:
        """Forgets the parameters that were read before."""
        self._infos, self.by_param = infos, {}
        # Another mesh may get the address of a former one.
        self.dtensors = DTensorLayouts()
        names = [self.info(index).name for index in range(len(params))]
        self.facts, self.candidates = facts_of(params, names)

    def read(
        self,
        params: Sequence[Tensor],
        infos: Sequence[ParamInfo] = (),
        check: Callable[[], None] = lambda: None,
    ) -> list[Matrix]:
        """The matrices in ``params``, in an order that all ranks share. Raises the error of ``check``, or a ValueError for a
        parameter that cannot be read. The ranks agree later. ``infos`` are about each parameter (default: its index is
        its config index).
        """
        self._begin(params, infos)
        check()
        matrices: list[Matrix] = []
        for index, param in enumerate(params):
            of_param = self.matrices_of(param, index)
            # This rank may have no matrix of a stack.
            if of_param:
                self.by_param[index] = of_param, param
                matrices += of_param
        return in_common_order(checked(matrices), self.facts)

    def check_tp_dim(self, tensor: Tensor, index: int) -> None:
        """Placements say what TP cuts."""

    def matrices_of(self, tensor: Tensor, index: int) -> list[Matrix]:
        """The matrices in parameter ``index``, or in a ``tensor`` in its place."""
        _, name, form = self.info(index)
        if tensor.ndim < 2:
            raise not_2d(describe(index, tensor.shape, name))
        if isinstance(tensor, DTensor):
            return self.dtensors.of(index, name, tensor, form)
        return whole_matrices(index, name, tensor, form)


def whole_matrices(
    index: int, name: str | None, tensor: Tensor, form: tuple[Split, bool]
) -> list[Matrix]:
    """The matrices of a plain ``tensor`` that this rank has alone."""
    split, flatten = form
    rows, columns = matrix_shape(tensor.shape, flatten)
    count = 1 if flatten else math.prod(tensor.shape[:-2])
    traits = traits_of(tensor)
    matrices: list[Matrix] = []
    for sub in range(count):
        region = Region(0, 0, rows, columns, sub * rows * columns, columns)
        regions = (region,) if region.numel else ()
        layout = Layout(((process_rank(),),), (regions,))
        matrices.append(
            Matrix(
                index,
                (rows, columns),
                traits.momentum_dtype,
                layout,
                "no process groups",
                traits.frozen,
                sub,
                name,
                split=split,
            )
        )
    return matrices


def facts_of(
    params: Sequence[Tensor], names: Sequence[str | None]
) -> tuple[list[Fact], list[ProcessGroup]]:
    """What the ranks of each mesh compare of DTensors, and the groups among these ranks. It reads no layout, so each rank
    has this even if it cannot read a parameter.
    """
    placed: list[tuple[int, DTensor]] = []
    for index, param in enumerate(params):
        if (
            isinstance(param, DTensor)
            and param.device_mesh.get_coordinate() is not None
        ):
            placed.append((index, param))
    # Ranks may list parameters in different orders, and must meet in one mesh of several that have the same ranks.
    meshes = sorted({param.device_mesh for _, param in placed}, key=_order_of_mesh)
    # The lists of thousands of ranks take long to make.
    ranks_of = {mesh: mesh_ranks(mesh) for mesh in meshes}
    arrangements = {mesh: short_name(mesh.mesh.tolist()) for mesh in meshes}
    groups_of: dict[Ranks, Sequence[ProcessGroup]] = {}
    candidates: list[ProcessGroup] = []
    for mesh in meshes:
        groups = mesh.get_all_groups()
        groups_of.setdefault(ranks_of[mesh], groups)
        candidates += [*groups, *_flattened_groups(mesh)]
    facts: list[Fact] = []
    for index, param in placed:
        ranks, name = ranks_of[param.device_mesh], names[index]
        fields = {
            "name": str(name),
            "shape": str(tuple(param.shape)),
            "placement": _in_words(param),
            "mesh": arrangements[param.device_mesh],
        }
        described = describe(index, param.shape, name)
        facts.append(Fact(ranks, groups_of[ranks], index, described, fields))
    return facts, candidates


def in_common_order(
    matrices: Sequence[Matrix], facts: Sequence[Fact] = ()
) -> list[Matrix]:
    """The ``matrices`` by the ranks that compare them, and in the order of indices. Experts come last, by their ids. Ranks
    compare the order of what they all have, but matrices that other ranks compare may meet these in one grid.
    """
    ranks_of = {fact.index: fact.ranks for fact in facts}

    def place(matrix: Matrix) -> tuple[int, Ranks]:
        expert = -1 if matrix.expert is None else matrix.expert
        return expert, ranks_of.get(matrix.index, ())

    return sorted(matrices, key=place)


def _order_of_mesh(mesh: DeviceMesh) -> tuple:
    names = [(group.group_desc, group.group_name) for group in mesh.get_all_groups()]
    return mesh.ndim, mesh.mesh.tolist(), names


def _in_words(tensor: DTensor) -> str:
    placements = tuple(map(str, tensor.placements))
    return f"placements {placements} on mesh {tuple(tensor.device_mesh.shape)}"


def mesh_ranks(mesh: DeviceMesh) -> Ranks:
    """The ranks of ``mesh`` in ascending order; in a dry run with fake tensors, too."""
    with unset_fake_temporarily():
        return tuple(sorted(mesh.mesh.flatten().tolist()))


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


class DTensorLayouts:
    """Reads the layouts of DTensors. Equal shapes on equal placements share one calculation."""

    def __init__(self) -> None:
        # Matrix in a stack -> its layout, by everything that they depend on.
        self._layouts: dict[tuple, dict[int, Layout]] = {}

    def of(
        self,
        index: int,
        name: str | None,
        tensor: DTensor,
        form: tuple[Split, bool] = (Split(), False),
        for_whole_mesh: bool = False,
    ) -> list[Matrix]:
        """The matrices of ``tensor`` of which this rank has a part, or ``for_whole_mesh`` all. Raises ValueError for an
        unknown placement, a mesh without this rank, or a local tensor of another size.
        """
        split, flatten = form
        rank, local = process_rank(), tensor._local_tensor
        try:
            layouts = self._layouts_of(tensor, flatten, for_whole_mesh)
            numel = 0
            for layout in layouts.values():
                if rank in layout.ranks:
                    numel += layout.numel_of(rank)
            if numel != local.numel():
                raise ValueError(
                    f"the local tensor has shape {tuple(local.shape)}, which the placements do not give"
                )
        except ValueError as problem:
            described = describe(index, tensor.shape, name)
            raise ValueError(
                f"{described}, placements {tensor.placements} on {tensor.device_mesh}: {problem}"
            ) from None
        shape, traits = matrix_shape(tensor.shape, flatten), traits_of(tensor)
        placement = _in_words(tensor)
        matrices: list[Matrix] = []
        for sub, layout in layouts.items():
            matrices.append(
                Matrix(
                    index,
                    shape,
                    traits.momentum_dtype,
                    layout,
                    placement,
                    traits.frozen,
                    sub,
                    name,
                    split=split,
                )
            )
        return matrices

    def _layouts_of(
        self, tensor: DTensor, flatten: bool, for_whole_mesh: bool
    ) -> dict[int, Layout]:
        """Matrix in the tensor -> its layout. Raises ValueError as :meth:`of` does."""
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None:
            raise ValueError(
                "this rank is not in the mesh; give this optimizer only the parameters that the rank holds"
            )
        depends_on = (mesh, tensor.placements, flatten, for_whole_mesh, *tensor.shape)
        if depends_on not in self._layouts:
            self._layouts[depends_on] = _calculated(tensor, flatten, for_whole_mesh)
        return self._layouts[depends_on]


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
    # The matrices of a stack that the same ranks hold have one layout each, but few grids.
    grids: dict[tuple[int, ...], Grid] = {}
    for sub in subs:
        holding = tuple(at for at, held in enumerate(columns) if sub in held)
        if holding not in grids:
            grids[holding] = tuple(tuple(row[at] for at in holding) for row in grid)
        shards = tuple(columns[at][sub] for at in holding)
        layouts[sub] = Layout(grids[holding], shards)
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
