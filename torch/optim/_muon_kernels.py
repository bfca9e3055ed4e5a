# mypy: allow-untyped-defs
"""Muon's kernels in Triton, for NVIDIA GPUs. Only code that is about to use them imports this file.

- A product whose result is symmetric needs little more than half of the multiplications: each program makes one tile on
  or above the diagonal, and writes it twice. Torch has no such product.
- What surrounds Newton-Schulz is bound by memory. One pass before it reads gradients and momentum, and writes momentum
  and what is orthogonalized. One pass after it reads updates and writes parameters.

Triton's documentation describes the means: tensor descriptors (https://triton-lang.org/main/python-api/triton.language.html)
and counters that order programs (https://triton-lang.org/main/getting-started/tutorials/05-layer-norm.html).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Tiles(NamedTuple):
    """How programs go through a symmetric product."""

    # Rows and columns of a tile of the result.
    side: int
    # Columns of the factors that a program loads at once.
    inner: int
    # How many such loads are in flight.
    stages: int
    # Warps of a program.
    warps: int
    # Whether the GPU loads blocks by descriptors.
    by_descriptor: bool


# For GPUs of at least this major compute capability, and by whether a factor is larger than the L2 cache. These are
# constants, because autotuning takes seconds for each shape, and ranks could choose different ones. Those for 9 were
# measured on an H100. GPUs of later generations, and of desktops, also have the memory for them.
TILES = {
    (9, False): Tiles(side=128, inner=64, stages=3, warps=8, by_descriptor=True),
    (9, True): Tiles(side=128, inner=64, stages=4, warps=8, by_descriptor=True),
    (8, False): Tiles(side=128, inner=32, stages=4, warps=8, by_descriptor=False),
    (8, True): Tiles(side=128, inner=32, stages=4, warps=8, by_descriptor=False),
}
_CACHE_BYTES = 40 * 1024**2
# In a product of at least ``_MANY_LOADS`` for a tile, the tiles that remain after the last full wave of programs are cut
# into at most ``_MAX_PARTS``. In shorter ones, adding the parts costs more than it saves.
_MANY_LOADS = 64
_MAX_PARTS = 4


@triton.jit
def _upper_tile(index):
    """The row and the column of a tile, counted column by column on and above the diagonal: (0, 0), (0, 1), (1, 1), ..."""
    column = ((tl.sqrt(8.0 * index + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The square root is rounded.
    column = tl.where(column * (column + 1) // 2 > index, column - 1, column)
    column = tl.where((column + 1) * (column + 2) // 2 <= index, column + 1, column)
    return index - column * (column + 1) // 2, column


@triton.jit
def _block(
    factor,
    matrix,
    first_row,
    first_column,
    row_count,
    column_count,
    matrix_stride,
    row_stride,
    column_stride,
    BY_DESCRIPTOR: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some rows and columns of a factor, with zeros beyond its end. A descriptor is of (matrices, rows, columns), or of
    (matrices, columns, rows) if the columns of a matrix follow each other in memory. Without one, ``factor`` is a
    pointer to the first element.
    """
    if BY_DESCRIPTOR:
        if BY_COLUMNS:
            block = factor.load([matrix, first_column, first_row])
            return block.reshape(COLUMNS, ROWS).T
        else:
            block = factor.load([matrix, first_row, first_column])
            return block.reshape(ROWS, COLUMNS)
    else:
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        is_inside = (row < row_count)[:, None] & (column < column_count)[None, :]
        offsets = (
            row.to(tl.int64)[:, None] * row_stride
            + column.to(tl.int64)[None, :] * column_stride
        )
        pointers = factor + matrix.to(tl.int64) * matrix_stride + offsets
        return tl.load(pointers, mask=is_inside, other=0.0)


@triton.jit
def _store_symmetric(
    total,
    base,
    out,
    beta,
    diagonal,
    side,
    base_row_stride,
    row_tile,
    column_tile,
    HAS_BASE: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Writes a tile of a matrix to ``out``, with ``beta * base`` and ``diagonal`` added; and its mirror image."""
    row = row_tile * SIDE + tl.arange(0, SIDE)
    column = column_tile * SIDE + tl.arange(0, SIDE)
    is_inside = (row < side)[:, None] & (column < side)[None, :]
    if HAS_BASE:
        at = row[:, None] * base_row_stride + column[None, :]
        total += beta * tl.load(base + at, mask=is_inside, other=0.0).to(tl.float32)
    total += tl.where(row[:, None] == column[None, :], diagonal, 0.0)
    result = total.to(out.dtype.element_ty)
    at = row[:, None] * side + column[None, :]
    tl.store(out + at, result, mask=is_inside)
    if row_tile != column_tile:
        is_inside = (column < side)[:, None] & (row < side)[None, :]
        at = column[:, None] * side + row[None, :]
        tl.store(out + at, result.T, mask=is_inside)


# A kernel is compiled again for an argument that is 1, a multiple of 16 or beyond 32 bits, unless it is listed.
@triton.jit(do_not_specialize=["tiles_of_matrix", "whole_tiles", "parts"])
def symmetric_product_kernel(
    left,
    right,
    base,
    out,
    partial,
    arrivals,
    alpha,
    beta,
    diagonal,
    side,
    inner,
    left_matrix_stride,
    left_row_stride,
    left_column_stride,
    right_matrix_stride,
    right_row_stride,
    right_column_stride,
    base_matrix_stride,
    base_row_stride,
    tiles_of_matrix,
    whole_tiles,
    parts,
    HAS_BASE: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    LEFT_BY_COLUMNS: tl.constexpr,
    RIGHT_BY_COLUMNS: tl.constexpr,
    SIDE: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile of ``alpha * left @ right.mT + beta * base``, with ``diagonal`` added to the diagonal, for each matrix
    of a batch. The result, of (side, side), is symmetric.

    ``left`` and ``right``, of (matrices, side, inner), are descriptors or pointers, as :func:`_block` takes them.

    The first ``whole_tiles`` programs make a tile each. The sums of the other tiles are cut: ``parts`` programs make a
    part of one. They leave it in ``partial``, and the last one of them to arrive adds the parts, in their order. An
    example with three whole tiles, two others and two parts: programs 0 to 2 make the tiles 0 to 2, programs 3 and 4 the
    halves of tile 3, and programs 5 and 6 those of tile 4.
    """
    program = tl.program_id(0)
    tile = program
    loads = tl.cdiv(inner, INNER)
    first_load = 0
    last_load = loads
    cut_program = program - whole_tiles
    if HAS_PARTS:
        if cut_program >= 0:
            tile = whole_tiles + cut_program // parts
            loads_of_part = tl.cdiv(loads, parts)
            first_load = cut_program % parts * loads_of_part
            last_load = min(loads, first_load + loads_of_part)
    matrix = tile // tiles_of_matrix
    row_tile, column_tile = _upper_tile(tile % tiles_of_matrix)
    first_row = row_tile * SIDE
    first_column = column_tile * SIDE

    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for load in range(first_load, last_load):
        start = load * INNER
        left_block = _block(
            left,
            matrix,
            first_row,
            start,
            side,
            inner,
            left_matrix_stride,
            left_row_stride,
            left_column_stride,
            BY_DESCRIPTOR,
            LEFT_BY_COLUMNS,
            SIDE,
            INNER,
        )
        right_block = _block(
            right,
            matrix,
            first_column,
            start,
            side,
            inner,
            right_matrix_stride,
            right_row_stride,
            right_column_stride,
            BY_DESCRIPTOR,
            RIGHT_BY_COLUMNS,
            SIDE,
            INNER,
        )
        total = tl.dot(left_block, right_block.T, total)

    writes_tile = True
    if HAS_PARTS:
        if cut_program >= 0:
            in_tile = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
            tl.store(partial + cut_program.to(tl.int64) * SIDE * SIDE + in_tile, total)
            # All threads have stored their elements before one of them tells so.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + cut_program // parts, 1, sem="acq_rel")
            writes_tile = arrived == parts - 1
            if writes_tile:
                first_part = (cut_program - cut_program % parts).to(tl.int64)
                total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
                for part in range(parts):
                    at = partial + (first_part + part) * SIDE * SIDE + in_tile
                    # Nothing reads them again, so they need no place in the multiprocessor's own cache.
                    total += tl.load(at, cache_modifier=".cg")

    if writes_tile:
        total *= alpha
        _store_symmetric(
            total,
            base + matrix.to(tl.int64) * base_matrix_stride,
            out + matrix.to(tl.int64) * side * side,
            beta,
            diagonal,
            side,
            base_row_stride,
            row_tile,
            column_tile,
            HAS_BASE,
            SIDE,
        )


def symmetric_product(
    left: Tensor,
    right: Tensor,
    base: Tensor | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    diagonal: float = 0,
    tiles: Tiles | None = None,
) -> Tensor:
    """Returns ``beta * base + alpha * left @ right.mT``, with ``diagonal`` added to its diagonal. This must be symmetric:
    the factors are the same matrix, or symmetric ones that commute.

    Args:
        left, right (Tensor): bfloat16 or float16, of shape (side, inner), or (matrices, side, inner) for a batch. Rows or
            columns are contiguous and start at multiples of 16 bytes. A side is at most 46,340. Sums are in float32.
        base (Tensor, optional): symmetric, of shape (..., side, side), with contiguous rows (default: None)
        beta (float, optional): factor of ``base`` (default: 1)
        alpha (float, optional): factor of the product (default: 1)
        diagonal (float, optional): added in float32 (default: 0)
        tiles (Tiles, optional): None means those for the GPU and the shape (default: None)
    """
    *_, side, inner = left.shape
    matrices = len(left) if left.ndim == 3 else 1
    if tiles is None:
        tiles = _tiles_for(left.device, side * inner * left.itemsize)
    tiles_of_side = triton.cdiv(side, tiles.side)
    tiles_of_matrix = tiles_of_side * (tiles_of_side + 1) // 2
    whole, parts = _whole_tiles_and_parts(
        matrices * tiles_of_matrix,
        triton.cdiv(inner, tiles.inner),
        _multiprocessors(left.device),
    )
    # None, if there is one part.
    cut = matrices * tiles_of_matrix - whole
    out = left.new_empty(*left.shape[:-1], side)
    partial, arrivals = out, out
    if parts > 1:
        elements = cut * parts * tiles.side**2
        partial = torch.empty(elements, dtype=torch.float32, device=left.device)
        arrivals = torch.zeros(cut, dtype=torch.int32, device=left.device)
    base_argument = out if base is None else base
    left_argument: Any = left
    right_argument: Any = right
    if tiles.by_descriptor:
        left_argument = _descriptor(left, tiles)
        right_argument = left_argument if right is left else _descriptor(right, tiles)
    # Unused pointers are those of the result.
    kernel: Any = symmetric_product_kernel
    kernel[(whole + cut * parts,)](
        left_argument,
        right_argument,
        base_argument,
        out,
        partial,
        arrivals,
        float(alpha),
        float(beta),
        float(diagonal),
        side,
        inner,
        *_strides(left),
        *_strides(right),
        *_strides(base_argument)[:2],
        tiles_of_matrix,
        whole,
        parts,
        HAS_BASE=base is not None,
        HAS_PARTS=parts > 1,
        BY_DESCRIPTOR=tiles.by_descriptor,
        LEFT_BY_COLUMNS=left.stride(-1) != 1,
        RIGHT_BY_COLUMNS=right.stride(-1) != 1,
        SIDE=tiles.side,
        INNER=tiles.inner,
        num_stages=tiles.stages,
        num_warps=tiles.warps,
    )
    return out


@functools.cache
def _capability(device: torch.device) -> int:
    major, _ = torch.cuda.get_device_capability(device)
    return major


def _tiles_for(device: torch.device, nbytes: int) -> Tiles:
    """The tiles for a factor of ``nbytes`` bytes."""
    return TILES[min(_capability(device), 9), nbytes > _CACHE_BYTES]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _whole_tiles_and_parts(
    tiles: int, loads: int, multiprocessors: int
) -> tuple[int, int]:
    """How many of ``tiles`` are made by one program each, in full waves, and into how many parts the others are cut."""
    remaining = tiles % multiprocessors
    if not remaining or loads < _MANY_LOADS:
        return tiles, 1
    parts = min(multiprocessors // remaining, _MAX_PARTS)
    return (tiles - remaining, parts) if parts > 1 else (tiles, 1)


def _strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a batch. A matrix is a batch of one."""
    return x.stride() if x.ndim == 3 else (0, *x.stride())


def _descriptor(x: Tensor, tiles: Tiles) -> TensorDescriptor:
    if x.ndim == 2:
        x = x[None]
    block = [1, tiles.side, tiles.inner]
    if x.stride(-1) != 1:
        x, block = x.mT, [1, tiles.inner, tiles.side]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


@triton.jit
def scale_kernel(x, factors, out, numel, TILE: tl.constexpr):
    """``x`` times the factor of its matrix, for matrices of ``numel`` elements."""
    matrix = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_inside = at < numel
    factor = tl.load(factors + matrix)
    elements = tl.load(x + matrix * numel + at, mask=is_inside).to(tl.float32)
    tl.store(out + matrix * numel + at, elements * factor, mask=is_inside)


def scaled(x: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Each matrix of ``x`` times its factor, in ``dtype`` and rounded once. ``x``, a matrix or a batch without gaps in
    memory, keeps its strides. ``factors`` are float32.
    """
    out = torch.empty_like(x, dtype=dtype)
    matrices = len(x) if x.ndim == 3 else 1
    numel, tile = x.numel() // matrices, 4096
    kernel: Any = scale_kernel
    kernel[(triton.cdiv(numel, tile), matrices)](x, factors, out, numel, TILE=tile)
    return out


# The number of elements that a program of the passes takes, and that it loads at once.
_CHUNK = 65536
_AT_ONCE = 4096
_WARPS = 8


# A job is the work on one region. A table has a row for each: three addresses, the number of elements, and the first of
# its programs.
_COLUMNS = tl.constexpr(5)
_NUMEL = tl.constexpr(3)
_FIRST_PROGRAM = tl.constexpr(4)


@triton.jit
def _job_of(jobs, count, program):
    """The row of the job to which a program belongs, by bisection among ``count`` rows."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(jobs + _COLUMNS * middle + _FIRST_PROGRAM) <= program:
            low = middle
        else:
            high = middle
    return jobs + _COLUMNS * low


@triton.jit
def _pointer(address, TYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """A pointer to elements of ``TYPE``. If it is aligned, each thread loads and stores several elements at once."""
    pointer = address.to(tl.pointer_type(TYPE))  # pyrefly: ignore
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _lerp(start, end, weight, IS_BELOW_HALF: tl.constexpr):
    """With the bits of torch.lerp on a GPU, which has two formulas, and does not round their products."""
    if IS_BELOW_HALF:
        return tl.fma(weight, end - start, start)
    else:
        return tl.fma(start - end, 1.0 - weight, end)


@triton.jit(do_not_specialize=["count"])
def accumulate_and_blend_kernel(
    jobs,
    count,
    gradient_weight,
    momentum_weight,
    NESTEROV: tl.constexpr,
    GRADIENT_WEIGHT_IS_BELOW_HALF: tl.constexpr,
    MOMENTUM_WEIGHT_IS_BELOW_HALF: tl.constexpr,
    MOMENTUM: tl.constexpr,
    GRADIENT: tl.constexpr,
    TARGET: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """A chunk of the pass before. The addresses of a job are those of momentum, gradient (0 if there is none) and target.
    ``MOMENTUM`` and the like are types of elements. The two weights add up to one.
    """
    program = tl.program_id(0)
    job = _job_of(jobs, count, program)
    momentum = _pointer(tl.load(job), MOMENTUM, IS_ALIGNED)
    gradient_address = tl.load(job + 1)
    has_gradient = gradient_address != 0
    gradient = _pointer(gradient_address, GRADIENT, IS_ALIGNED)
    target = _pointer(tl.load(job + 2), TARGET, IS_ALIGNED)
    numel = tl.load(job + _NUMEL)
    first = (program - tl.load(job + _FIRST_PROGRAM)) * CHUNK
    gradient_numel = tl.where(has_gradient, numel, 0)
    if IS_ALIGNED:
        numel = tl.multiple_of(numel, 16)
        gradient_numel = tl.multiple_of(gradient_numel, 16)
    for start in range(0, CHUNK, AT_ONCE):
        at = first + start + tl.arange(0, AT_ONCE)
        is_inside = at < numel
        has_elements = at < gradient_numel
        old = tl.load(momentum + at, mask=is_inside, other=0.0).to(tl.float32)
        grad = tl.load(gradient + at, mask=has_elements, other=0.0).to(tl.float32)
        new = _lerp(old, grad, gradient_weight, GRADIENT_WEIGHT_IS_BELOW_HALF)
        # The blend takes the momentum as it was rounded.
        stored = new.to(MOMENTUM)
        tl.store(momentum + at, stored, mask=has_elements)
        blended = stored.to(tl.float32)
        if NESTEROV:
            blended = _lerp(
                grad, blended, momentum_weight, MOMENTUM_WEIGHT_IS_BELOW_HALF
            )
        blended = tl.where(has_gradient, blended, old)
        tl.store(target + at, blended.to(TARGET), mask=is_inside)


@triton.jit(do_not_specialize=["count"])
def apply_updates_kernel(
    jobs,
    count,
    decay,
    alpha,
    ON_DEVICE: tl.constexpr,
    PARAM: tl.constexpr,
    UPDATE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """A chunk of the pass after: ``param * decay + alpha * update``. The addresses of a job are those of parameter and
    update, and an unused one. With ``ON_DEVICE``, ``decay`` and ``alpha`` are pointers.
    """
    program = tl.program_id(0)
    job = _job_of(jobs, count, program)
    param = _pointer(tl.load(job), PARAM, IS_ALIGNED)
    update = _pointer(tl.load(job + 1), UPDATE, IS_ALIGNED)
    numel = tl.load(job + _NUMEL)
    first = (program - tl.load(job + _FIRST_PROGRAM)) * CHUNK
    if ON_DEVICE:
        decay = tl.load(decay)
        alpha = tl.load(alpha)
    if IS_ALIGNED:
        numel = tl.multiple_of(numel, 16)
    for start in range(0, CHUNK, AT_ONCE):
        at = first + start + tl.arange(0, AT_ONCE)
        is_inside = at < numel
        elements = tl.load(param + at, mask=is_inside, other=0.0).to(tl.float32)
        updates = tl.load(update + at, mask=is_inside, other=0.0).to(tl.float32)
        # One rounding of the sum, as torch.add has on a GPU.
        result = tl.fma(updates, alpha, elements * decay)
        tl.store(param + at, result.to(PARAM), mask=is_inside)


def accumulate_and_blend(
    momenta: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    targets: Sequence[Tensor],
    momentum: float,
    *,
    nesterov: bool,
) -> None:
    """Takes each gradient into its momentum, and writes what is to be orthogonalized to its target, in one pass. Where
    there is no gradient, that is the momentum.

    Args:
        momenta (sequence of Tensor): of one dtype and device, and contiguous, as all others.
        gradients (sequence of Tensor or None): of one dtype. Each has the shape of its momentum, as its target has.
        targets (sequence of Tensor): of one dtype, usually bfloat16.
        momentum (float): the momentum factor.
        nesterov (bool): whether momentum is blended with the gradient once more.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    like_gradients = present[0] if present else momenta[0]
    rows: list[tuple[int, int, int, int]] = []
    for of_job in zip(momenta, gradients, targets, strict=True):
        _check_shapes(of_job)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in of_job]
        rows.append((*addresses, of_job[0].numel()))  # type: ignore[arg-type]
    gradient_weight = 1 - float(momentum)
    _run_pass(
        accumulate_and_blend_kernel,
        rows,
        momenta[0].device,
        gradient_weight,
        float(momentum),
        NESTEROV=nesterov,
        GRADIENT_WEIGHT_IS_BELOW_HALF=gradient_weight < 0.5,
        MOMENTUM_WEIGHT_IS_BELOW_HALF=momentum < 0.5,
        MOMENTUM=_TYPES[momenta[0].dtype],
        GRADIENT=_TYPES[like_gradients.dtype],
        TARGET=_TYPES[targets[0].dtype],
    )
    # Autograd does not see what a kernel writes.
    torch.autograd.graph.increment_version(targets)
    if present:
        torch.autograd.graph.increment_version(momenta)


def apply_updates(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    decay: float | Tensor,
    alpha: float | Tensor,
) -> None:
    """Writes ``param * decay + alpha * update`` to each parameter, in one pass.

    Args:
        params (sequence of Tensor): of one dtype and device, and contiguous, as the updates.
        updates (sequence of Tensor): of one dtype. Each has the shape of its parameter.
        decay, alpha (float or Tensor): both of one kind; Tensors have one element, on the device.
    """
    rows: list[tuple[int, int, int, int]] = []
    for param, update in zip(params, updates, strict=True):
        _check_shapes((param, update))
        rows.append((param.data_ptr(), update.data_ptr(), 0, param.numel()))
    device = params[0].device
    on_device = isinstance(alpha, Tensor)
    if on_device:
        decay = torch.as_tensor(decay, device=device).float()
        alpha = alpha.float()
    _run_pass(
        apply_updates_kernel,
        rows,
        device,
        decay,
        alpha,
        ON_DEVICE=on_device,
        PARAM=_TYPES[params[0].dtype],
        UPDATE=_TYPES[updates[0].dtype],
    )
    torch.autograd.graph.increment_version(params)


def _check_shapes(of_job: Sequence[Tensor | None]) -> None:
    """Raises ValueError for tensors that do not have the shape of the first, beyond whose ends a kernel would write."""
    shape = of_job[0].shape  # type: ignore[union-attr]
    for tensor in of_job:
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"expected a tensor of shape {tuple(shape)} but got {tuple(tensor.shape)}"
            )


_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def _run_pass(
    kernel: Any,
    rows: Sequence[tuple[int, int, int, int]],
    device: torch.device,
    *numbers: float | Tensor,
    **constants: Any,
) -> None:
    """Launches the ``kernel`` of a pass. ``rows`` are three addresses and the number of elements of each job."""
    table: list[int] = []
    programs = 0
    low_bits = 0
    for row in rows:
        first, second, third, numel = row
        low_bits |= first | second | third | numel
        table += [*row, programs]
        programs += triton.cdiv(numel, _CHUNK)
    jobs = torch.tensor(table, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        # From pinned memory, the host does not wait for the copy.
        jobs = jobs.pin_memory().to(device, non_blocking=True)
    # Triton launches on the current device.
    with torch.cuda.device_of(jobs):
        kernel[(programs,)](
            jobs,
            len(rows),
            *numbers,
            **constants,
            IS_ALIGNED=low_bits % 16 == 0,
            CHUNK=_CHUNK,
            AT_ONCE=_AT_ONCE,
            num_warps=_WARPS,
        )
