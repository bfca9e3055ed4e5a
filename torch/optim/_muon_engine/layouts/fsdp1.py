"""FSDP1: the matrices inside its flat parameters, from their own metadata."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple, TYPE_CHECKING

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim._muon_engine.layouts import Region


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn, Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


class FlatMatrix(NamedTuple):
    """One original parameter: its shape before FSDP cut it, and what this rank's storage holds of it."""

    name: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    # How tensor parallelism had cut it before; None where it had not.
    tp: DTensorSpec | None
    # Whether FSDP flattened it row by row, and not in another order of its memory.
    contiguous: bool
    # The elements of it that are held, counted row by row: first, one after the last, where they stand.
    held: tuple[int, int, int] = (0, 0, 0)


class FlatView(NamedTuple):
    """What is in one parameter of an FSDP1 model, and over which groups it is shared.

    The groups are None where only the module, which was not given, knows them.
    """

    matrices: tuple[FlatMatrix, ...]
    shards: ProcessGroup | None = None
    replicas: ProcessGroup | None = None


def is_flattened(param: Tensor) -> bool:
    """Whether FSDP1 manages ``param``: as a flat parameter, or as an original one that it slices."""
    return getattr(param, "_fsdp_flattened", False)


def is_flat_param(param: Tensor) -> bool:
    return getattr(param, "_is_flat_param", False)


def units(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Each FSDP1 unit in ``module`` that has parameters, with its flat parameter."""
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        # A unit all of whose parameters went to nested units has none of its own.
        if unit._handle is not None:
            yield unit, unit._handle.flat_param


def views(module: nn.Module) -> dict[Tensor, FlatView]:
    """The parameters of ``module`` that FSDP1 manages, with what is in them."""
    found: dict[Tensor, FlatView] = {}
    for unit, flat in units(module):
        handle = unit._handle
        groups = handle.process_group, getattr(unit, "_inter_node_pg", None)
        found[flat] = FlatView(_matrices(flat), *groups)
        for number, param in enumerate(flat._params or ()):
            # An original parameter is the slice itself, not the unit's storage that it is cut from.
            found[param] = FlatView((_matrix(flat, number, 0),), *groups)
    return found


def view_of_flat_param(param: Tensor) -> FlatView:
    """What a flat parameter knows without its module."""
    return FlatView(_matrices(param))


def _matrices(flat: Any) -> tuple[FlatMatrix, ...]:
    return tuple(
        _matrix(flat, number, info.offset_in_shard)
        for number, info in enumerate(flat._shard_param_infos)
    )


def _matrix(flat: Any, number: int, offset: int | None) -> FlatMatrix:
    info, shape = flat._shard_param_infos[number], tuple(flat._shapes[number])
    held = (0, 0, 0)
    if info.in_shard and offset is not None:
        held = info.intra_param_start_idx, info.intra_param_end_idx + 1, offset
    return FlatMatrix(
        flat._fqns[number],
        shape,
        _regions_of(held, shape) if len(shape) == 2 else (),
        flat._param_extensions[number],
        flat._contiguities[number],
        held,
    )


def _regions_of(
    held: tuple[int, int, int], shape: tuple[int, ...]
) -> tuple[Region, ...]:
    start, end, offset = held
    return tuple(interval_regions(start, end, shape[1], offset))


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
        held = (0, 0, 0)
        if last > first:
            held = first - sub * numel, last - sub * numel, offset + first - start
        yield stack._replace(shape=shape, held=held, regions=_regions_of(held, shape))


def interval_regions(
    start: int, end: int, columns: int, offset: int
) -> Iterator[Region]:
    """Elements ``start`` to ``end`` of a matrix, counted row by row, as at most three rectangles.

    They stand in a row from ``offset`` on: the end of one row, whole rows, the beginning of another.
    """
    at = start
    while at < end:
        row, column = divmod(at, columns)
        if column == 0 and end - at >= columns:
            height, width = (end - at) // columns, columns
        else:
            height, width = 1, min(columns - column, end - at)
        yield Region(row, column, height, width, offset + at - start, width)
        at += height * width


def matrices_only(
    view: FlatView, described: str, takes_stacks: bool
) -> Sequence[FlatMatrix]:
    """The matrices of ``view``, those of stacks one by one.

    Raises:
        ValueError: it holds something else, too.
    """
    if takes_stacks:
        each = [_unstacked(m) if len(m.shape) > 2 else (m,) for m in view.matrices]
        view = view._replace(matrices=tuple(itertools.chain(*each)))
    others = [m.name for m in view.matrices if len(m.shape) != 2]
    if others and len(others) < len(view.matrices):
        matrices = [m.name for m in view.matrices if len(m.shape) == 2]
        raise ValueError(
            f"{described} is a flat parameter that mixes matrices ({few(matrices)}) with others ({few(others)}). "
            "Wrap with use_orig_params=True and give create_auto_config the model as module=, or wrap the others in "
            "units of their own"
        )
    if others:
        shapes = [m.shape for m in view.matrices]
        raise ValueError(
            f"Muon only supports 2D parameters whereas we found {described}, which is {few(others)} of shape "
            f"{shapes[0] if len(shapes) == 1 else shapes}"
        )
    for matrix in view.matrices:
        if not matrix.contiguous:
            raise ValueError(
                f"FSDP1 flattened {matrix.name!r} of shape {matrix.shape} in the order of its memory, which is not "
                "contiguous; make it so before wrapping"
            )
    return view.matrices


def few(names: Sequence[str]) -> str:
    """The first of ``names``, for a message."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def split_by_shape(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of ``module`` that are matrices, and the others."""
    known = views(module)
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for param in module.parameters():
        view = known.get(param)
        named = (
            [(m.name, m.shape) for m in view.matrices] if view else [("", param.shape)]
        )
        are_matrices = [len(shape) == 2 for _, shape in named]
        if any(are_matrices) and not all(are_matrices):
            inside = [name for name, shape in named if len(shape) == 2]
            beside = [name for name, shape in named if len(shape) != 2]
            raise ValueError(
                f"a flat parameter holds matrices ({few(inside)}) together with other parameters ({few(beside)}). "
                "Wrap with use_orig_params=True, or wrap the others in units of their own"
            )
        (matrices if all(are_matrices) else others).append(param)
    return matrices, others
