"""Applies a rectangle of an update as the single process applies the whole."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _apply_update, _Hyper


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim._muon_engine.layouts import Region


# Elements that decay and move together: few enough to still be in a core's cache for the second pass.
_CACHED_ELEMENTS = 2**16
# Elementwise operations of PyTorch use another thread for each so many (at::internal::GRAIN_SIZE).
_ELEMENTS_PER_THREAD = 2**15


class Move(NamedTuple):
    """Rectangle ``region`` of a parameter of the global ``shape``, with its update, if it gets one."""

    param: Tensor
    update: Tensor | None
    hyper: _Hyper
    shape: tuple[int, int]
    region: Region


def apply_moves(moves: Sequence[Move], *, foreach: bool) -> None:
    """Decays and moves each of several pieces; with ``foreach`` in few launches, as suits a GPU."""
    together: dict[tuple, list[Move]] = {}
    for move in moves:
        if not foreach or isinstance(move.hyper.lr, Tensor):
            apply_piece(*move)
        else:
            shares = (move.hyper, move.shape, move.update is None)
            together.setdefault(shares, []).append(move)
    for (hyper, shape, is_still), same in together.items():
        params = [move.param for move in same]
        torch._foreach_mul_(params, 1 - hyper.lr * hyper.weight_decay)
        if not is_still:
            updates = [move.update.to(move.param.device) for move in same]
            alpha = -_adjust_lr(hyper.lr, hyper.adjust_lr_fn, shape)
            torch._foreach_add_(params, updates, alpha=alpha)


def apply_piece(
    param: Tensor,
    update: Tensor | None,
    hyper: _Hyper,
    shape: tuple[int, int],
    region: Region,
) -> None:
    """Decays and moves ``param``, which is rectangle ``region`` of a matrix of the global ``shape``.

    On a CPU, ``add_`` of two bfloat16 tensors rounds once in its vector loop and twice in the scalar
    loop that does the remainder, so its bits depend on where an element stands. The piece gets the
    rounding that its elements would have got in the whole, contiguous matrix, on as many threads. (No
    other dtype, and none of the other elementwise operations of a step, depends on position.)
    """
    if update is not None:
        # Offloaded parameters: the exchange was between accelerators.
        update = update.to(param.device)
    if update is None or param.device.type != "cpu":
        _apply_update(param, update, hyper, shape)
        return
    if param.dtype != update.dtype:
        rows = max(1, _CACHED_ELEMENTS // max(1, region.width))
        for part, move in zip(param.split(rows), update.split(rows), strict=True):
            _apply_update(part, move, hyper, shape)
        return
    _apply_update(param, None, hyper, shape)
    alpha = torch.tensor(
        float(-_adjust_lr(hyper.lr, hyper.adjust_lr_fn, shape)),
        dtype=param.dtype,
        device=param.device,
    )
    rows, columns = shape
    if rows > columns > 1 and hyper.ns_steps > 0:
        # The update of a tall matrix is a transpose, which the vector loop does not take.
        param.add_(update * alpha)
        return
    twice = _remainders(rows * columns, torch.get_num_threads())
    row, column = twice // columns - region.row, twice % columns - region.column
    here = (row >= 0) & (row < region.height) & (column >= 0) & (column < region.width)
    row, column = row[here], column[here]
    remainder = param[row, column] + update[row, column] * alpha
    height = max(1, _CACHED_ELEMENTS // max(1, region.width))
    for part, move in zip(param.split(height), update.split(height), strict=True):
        part.copy_(_rounded_once(part, move, alpha))
    param[row, column] = remainder


def _rounded_once(param: Tensor, update: Tensor, alpha: Tensor) -> Tensor:
    return param.float().add_(update.float(), alpha=alpha.item())


@cache
def _remainders(numel: int, threads: int) -> Tensor:
    """The elements, in row-major order, that a vector loop over ``numel`` leaves to the scalar loop.

    Each thread has a run of them, of which it takes whole vectors first.
    """
    step = _vector_step()
    busy = max(1, min(threads, -(-numel // _ELEMENTS_PER_THREAD)))
    run = max(1, -(-numel // busy))
    ends = [min(start + run, numel) for start in range(0, numel, run)]
    starts = [end - (end - i * run) % step for i, end in enumerate(ends)]
    left = [torch.arange(a, b, device="cpu") for a, b in zip(starts, ends, strict=True)]
    return torch.cat(left) if left else torch.arange(0, device="cpu")


@cache
def _vector_step() -> int:
    """Elements per turn of this CPU's vector loop, found by watching where its rounding ends."""
    alpha = torch.tensor(-0.034, dtype=torch.bfloat16, device="cpu")
    a = torch.linspace(0.5, 2.0, 1023, device="cpu").bfloat16()
    b = torch.linspace(0.1, 1.0, 1023, device="cpu").bfloat16()
    differs = _rounded_once(a, b, alpha).bfloat16() != a + b * alpha
    if not differs.any():
        return 1
    # One pair that tells the two roundings apart, in every place.
    pair = int(differs.nonzero()[0])
    a, b = a[pair].repeat(1023), b[pair].repeat(1023)
    summed = torch.add(a, b, alpha=alpha.item())
    by_vector = int((summed != a + b * alpha).sum())
    return 1024 - by_vector
