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


# Parameters that FSDP1 manages -> the matrices in them, and by kind ("fsdp" and "ddp") the groups that share
# these; no groups if only the module, which was not given, knows them.
FlatView = tuple[Sequence[FlatMatrix], Mapping[str, ProcessGroup]]
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
        by_param[flat] = matrices, groups
        for matrix, param in zip(matrices, flat._params or ()):
            # An original parameter is the slice itself, not the unit's storage that it is cut from.
            start, end, _ = matrix.interval
            by_param[param] = [matrix._replace(interval=(start, end, 0))], groups
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
        return _matrices(param), {}
    which = "an" if flat_views is None else "another"
    group = "fsdp_process_group=model.process_group, or " * is_flat
    raise ValueError(
        f"{described} is of {which} FSDP1 model, which alone knows its shape; give create_auto_config {group}module=model"
    )


def _matrices(flat: Any, prefix: str = "") -> list[FlatMatrix]:
    matrices = []
    for number, info in enumerate(flat._shard_param_infos):
        interval = (0, 0, 0)
        if info.in_shard:
            first, end = info.intra_param_start_idx, info.intra_param_end_idx + 1
            interval = first, end, info.offset_in_shard
        name, shape = prefix + flat._fqns[number], tuple(flat._shapes[number])
        tp, contiguous = flat._param_extensions[number], flat._contiguities[number]
        matrices.append(FlatMatrix(name, shape, tp, contiguous, interval))
    return matrices


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
    tensors: Sequence[FlatMatrix], described: str, takes_stacks: bool, flatten: bool
) -> Sequence[FlatMatrix]:
    """The matrices in ``tensors``: those of stacks one by one, or each tensor flattened.

    Raises:
        ValueError: one of them is no matrix, or was not contiguous.
    """
    matrices: list[FlatMatrix] = []
    for tensor in tensors:
        is_deep = len(tensor.shape) > 2
        if is_deep and flatten:
            matrices.append(tensor._replace(shape=matrix_shape(tensor.shape, flatten)))
        else:
            matrices += _unstacked(tensor) if is_deep and takes_stacks else [tensor]
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
            tensors, _ = flat_views[param]
            _others(tensors, f"parameter {name!r}")
            inside = [(tensor.name, tensor.shape) for tensor in tensors]
        yield name, param, inside
