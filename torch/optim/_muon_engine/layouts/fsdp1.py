"""FSDP1: the matrices inside its flat parameters, from their own metadata."""

import math
from collections.abc import Iterator, Sequence
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
    held: tuple[int, int, int] = (0, 0, 0)

    @property
    def regions(self) -> tuple[Region, ...]:
        """At most three rectangles: the end of one row, whole rows, the beginning of another."""
        start, end, offset = self.held
        columns, at, found = self.shape[1], start, []
        while at < end:
            row, column = divmod(at, columns)
            if column == 0 and end - at >= columns:
                height, width = (end - at) // columns, columns
            else:
                height, width = 1, min(columns - column, end - at)
            found.append(Region(row, column, height, width, offset + at - start, width))
            at += height * width
        return tuple(found)


class FlatView(NamedTuple):
    """The matrices in one parameter of an FSDP1 model, and the groups that share it.

    The groups are None if only the module, which was not given, knows them.
    """

    matrices: tuple[FlatMatrix, ...]
    shards: ProcessGroup | None = None
    replicas: ProcessGroup | None = None


# Parameters that FSDP1 manages -> the matrices in them.
Views = dict[Tensor, FlatView]


def views(module: nn.Module) -> Views:
    """The parameters of ``module`` that FSDP1 manages, with what is in them."""
    found: Views = {}
    for name, unit in module.named_modules():
        # A unit whose parameters all went to nested units has none of its own.
        if not isinstance(unit, FullyShardedDataParallel) or unit._handle is None:
            continue
        handle, flat = unit._handle, unit._handle.flat_param
        groups = handle.process_group, getattr(unit, "_inter_node_pg", None)
        matrices = _matrices(flat, clean_tensor_name(f"{name}." if name else ""))
        found[flat] = FlatView(matrices, *groups)
        for matrix, param in zip(matrices, flat._params or ()):
            # An original parameter is the slice itself, not the unit's storage that it is cut from.
            start, end, _ = matrix.held
            matrix = matrix._replace(held=(start, end, 0))
            found[param] = FlatView((matrix,), *groups)
    return found


def view_of(
    param: Tensor, described: str, known: Views | None, has_group: bool
) -> FlatView | None:
    """The view of ``param``; None if FSDP1 did not flatten it.

    Args:
        known: the :func:`views` of the user's module; None without a module.
        has_group: whether the user gave the group that shares flat parameters.

    Raises:
        ValueError: the user must say more about this parameter.
    """
    if not getattr(param, "_fsdp_flattened", False):
        return None
    if known and param in known:
        return known[param]
    if not getattr(param, "_is_flat_param", False):
        raise ValueError(
            f"{described} is an original parameter of an FSDP1 model, which does not say what it is a slice of. "
            "Give create_auto_config the wrapped model: module=model"
            if known is None
            else f"{described} is a parameter of another FSDP1 model than the one that module= names"
        )
    if not has_group:
        raise ValueError(
            f"{described} is a flat parameter of an FSDP1 model; give create_auto_config "
            "fsdp_process_group=model.process_group, or module=model"
        )
    return FlatView(_matrices(param))


def _matrices(flat: Any, prefix: str = "") -> tuple[FlatMatrix, ...]:
    found = []
    for number, info in enumerate(flat._shard_param_infos):
        held = (0, 0, 0)
        if info.in_shard:
            first, end = info.intra_param_start_idx, info.intra_param_end_idx + 1
            held = first, end, info.offset_in_shard
        name, shape = prefix + flat._fqns[number], tuple(flat._shapes[number])
        tp, contiguous = flat._param_extensions[number], flat._contiguities[number]
        found.append(FlatMatrix(name, shape, tp, contiguous, held))
    return tuple(found)


def _unstacked(stack: FlatMatrix) -> Iterator[FlatMatrix]:
    """The matrices of a stack, each with its part of the interval that this rank holds."""
    if stack.tp is not None:
        raise ValueError(
            f"{stack.name!r} of shape {stack.shape} is a stack of matrices that tensor parallelism has cut, which Muon does "
            "not take from FSDP1; use fully_shard"
        )
    start, end, offset = stack.held
    shape = stack.shape[-2:]
    numel = math.prod(shape)
    for sub in range(math.prod(stack.shape[:-2])):
        first, last = max(start, sub * numel), min(end, (sub + 1) * numel)
        held = first - sub * numel, last - sub * numel, offset + first - start
        yield stack._replace(shape=shape, held=held)


def matrices_only(
    view: FlatView, described: str, takes_stacks: bool, flatten: bool
) -> Sequence[FlatMatrix]:
    """The matrices of ``view``: those of stacks one by one, or each tensor flattened.

    Raises:
        ValueError: it also holds something else.
    """
    found: list[FlatMatrix] = []
    for tensor in view.matrices:
        if flatten and len(tensor.shape) > 2:
            tensor = tensor._replace(shape=matrix_shape(tensor.shape, flatten))
        is_stack = takes_stacks and len(tensor.shape) > 2
        found += _unstacked(tensor) if is_stack else [tensor]
    others = _others(found, described)
    if others:
        names = listed([m.name for m in others], 4)
        raise not_2d(f"{described}, which is {names} of shape {others[0].shape}")
    for matrix in found:
        if not matrix.contiguous:
            raise ValueError(
                f"FSDP1 flattened {matrix.name!r} of shape {matrix.shape} in the order of its memory, which is not "
                "contiguous; make it contiguous before wrapping"
            )
    return found


def _others(tensors: Sequence[FlatMatrix], described: str) -> list[FlatMatrix]:
    """Those of ``tensors`` that are no matrices. Raises ValueError if only some of them are."""
    others = [m for m in tensors if len(m.shape) != 2]
    if 0 < len(others) < len(tensors):
        matrices = listed([m.name for m in tensors if len(m.shape) == 2], 4)
        raise ValueError(
            f"{described} is a flat parameter that mixes matrices ({matrices}) with others "
            f"({listed([m.name for m in others], 4)}). Wrap with use_orig_params=True and give create_auto_config the "
            "model as module=, or wrap the others in units of their own"
        )
    return others


def logical_matrices(
    module: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, list[tuple[str, tuple[int, ...]]]]]:
    """Each parameter of ``module``: its name, itself, and the name and unsharded shape of all tensors in it."""
    known = views(module)
    for name, param in module.named_parameters():
        name = clean_tensor_name(name)
        inside = [(name, tuple(param.shape))]
        if param in known:
            _others(known[param].matrices, f"parameter {name!r}")
            inside = [(m.name, m.shape) for m in known[param].matrices]
        yield name, param, inside
