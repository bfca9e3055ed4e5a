"""FSDP1: the matrices inside its flat parameters, from their own metadata."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn, Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim._muon_engine.layouts import listed, matrix_shape, not_2d, Region


class FlatMatrix(NamedTuple):
    """One original parameter: its shape before FSDP cut it, and what this rank's storage holds of it."""

    name: str
    shape: tuple[int, ...]
    # How tensor parallelism had cut it before; None where it had not.
    tp: DTensorSpec | None
    # Whether FSDP flattened it row by row, and not in another order of its memory.
    contiguous: bool
    # The elements of it that are held, counted row by row: the first, the one after the last, and the
    # first one's offset in the local tensor.
    interval: tuple[int, int, int] = (0, 0, 0)

    @property
    def regions(self) -> tuple[Region, ...]:
        """At most three rectangles: the end of one row, whole rows, the beginning of another."""
        start, end, offset = self.interval
        columns, at, parts = self.shape[1], start, []
        while at < end:
            row, column = divmod(at, columns)
            if column == 0 and end - at >= columns:
                height, width = (end - at) // columns, columns
            else:
                height, width = 1, min(columns - column, end - at)
            parts.append(Region(row, column, height, width, offset + at - start, width))
            at += height * width
        return tuple(parts)


class FlatView(NamedTuple):
    """The matrices in one parameter of an FSDP1 model, and the groups that share it.

    By kind, these are "fsdp" and "ddp"; none if only the module, which was not given, knows them.
    """

    matrices: tuple[FlatMatrix, ...]
    groups: Mapping[str, ProcessGroup]


# Parameters that FSDP1 manages -> the matrices in them.
Views = dict[Tensor, FlatView]


def views(module: nn.Module) -> Views:
    """The parameters of ``module`` that FSDP1 manages, with what is in them."""
    by_param: Views = {}
    for name, unit in module.named_modules():
        # A unit whose parameters all went to nested units has none of its own.
        if not isinstance(unit, FullyShardedDataParallel) or unit._handle is None:
            continue
        handle, flat = unit._handle, unit._handle.flat_param
        groups = {"fsdp": handle.process_group}
        if getattr(unit, "_inter_node_pg", None) is not None:
            groups["ddp"] = unit._inter_node_pg
        matrices = _matrices(flat, clean_tensor_name(f"{name}." if name else ""))
        by_param[flat] = FlatView(matrices, groups)
        for matrix, param in zip(matrices, flat._params or ()):
            # An original parameter is the slice itself, not the unit's storage that it is cut from.
            start, end, _ = matrix.interval
            matrix = matrix._replace(interval=(start, end, 0))
            by_param[param] = FlatView((matrix,), groups)
    return by_param


def view_of(
    param: Tensor, described: str, flat_views: Views | None, has_group: bool
) -> FlatView | None:
    """The view of ``param``; None if FSDP1 did not flatten it.

    Args:
        flat_views: the :func:`views` of the user's module; None without a module.
        has_group: whether the user gave the group that shares flat parameters.

    Raises:
        ValueError: the user must say more about this parameter.
    """
    if not getattr(param, "_fsdp_flattened", False):
        return None
    if flat_views and param in flat_views:
        return flat_views[param]
    is_flat = getattr(param, "_is_flat_param", False)
    if is_flat and has_group:
        return FlatView(_matrices(param), {})
    which = "an" if flat_views is None else "another"
    group = "fsdp_process_group=model.process_group, or " * is_flat
    raise ValueError(
        f"{described} is of {which} FSDP1 model, which alone knows its shape; give create_auto_config {group}module=model"
    )


def _matrices(flat: Any, prefix: str = "") -> tuple[FlatMatrix, ...]:
    matrices = []
    for number, info in enumerate(flat._shard_param_infos):
        interval = (0, 0, 0)
        if info.in_shard:
            first, end = info.intra_param_start_idx, info.intra_param_end_idx + 1
            interval = first, end, info.offset_in_shard
        name, shape = prefix + flat._fqns[number], tuple(flat._shapes[number])
        tp, contiguous = flat._param_extensions[number], flat._contiguities[number]
        matrices.append(FlatMatrix(name, shape, tp, contiguous, interval))
    return tuple(matrices)


def _unstacked(stack: FlatMatrix) -> Iterator[FlatMatrix]:
    """The matrices of a stack, each with its part of the interval that this rank holds."""
    if stack.tp is not None:
        raise ValueError(
            f"{stack.name!r} of shape {stack.shape} is a stack that tensor parallelism has cut, too; use fully_shard"
        )
    start, end, offset = stack.interval
    shape = stack.shape[-2:]
    numel = math.prod(shape)
    for sub in range(math.prod(stack.shape[:-2])):
        first, last = max(start, sub * numel), min(end, (sub + 1) * numel)
        interval = first - sub * numel, last - sub * numel, offset + first - start
        yield stack._replace(shape=shape, interval=interval)


def matrices_only(
    view: FlatView, described: str, takes_stacks: bool, flatten: bool
) -> Sequence[FlatMatrix]:
    """The matrices of ``view``: those of stacks one by one, or each tensor flattened.

    Raises:
        ValueError: it also holds something else.
    """
    matrices: list[FlatMatrix] = []
    for tensor in view.matrices:
        if flatten and len(tensor.shape) > 2:
            tensor = tensor._replace(shape=matrix_shape(tensor.shape, flatten))
        is_stack = takes_stacks and len(tensor.shape) > 2
        matrices += _unstacked(tensor) if is_stack else [tensor]
    others = _others(matrices, described)
    if others:
        names = listed([m.name for m in others], 4)
        raise not_2d(f"{described}, which is {names} of shape {others[0].shape}")
    for matrix in matrices:
        if not matrix.contiguous:
            raise ValueError(
                f"{matrix.name!r} of shape {matrix.shape} was not contiguous; make it contiguous before FSDP1 flattens it"
            )
    return matrices


def _others(tensors: Sequence[FlatMatrix], described: str) -> list[FlatMatrix]:
    """Those of ``tensors`` that are no matrices. Raises ValueError if only some of them are."""
    others = [m for m in tensors if len(m.shape) != 2]
    if 0 < len(others) < len(tensors):
        matrices = listed([m.name for m in tensors if len(m.shape) == 2], 4)
        raise ValueError(
            f"{described} is a flat parameter that mixes matrices ({matrices}) with {listed([m.name for m in others], 4)}. Pass "
            "use_orig_params=True and module=model, or wrap the others in units of their own"
        )
    return others


def logical_matrices(
    module: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, list[tuple[str, tuple[int, ...]]]]]:
    """Each parameter of ``module``: its name, itself, and the name and unsharded shape of all tensors in it."""
    flat_views = views(module)
    for name, param in module.named_parameters():
        name = clean_tensor_name(name)
        inside = [(name, tuple(param.shape))]
        if param in flat_views:
            _others(flat_views[param].matrices, f"parameter {name!r}")
            inside = [(m.name, m.shape) for m in flat_views[param].matrices]
        yield name, param, inside
