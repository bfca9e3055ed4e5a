"""Layouts of a model's matrices over a mesh, as DTensor would place them, without process groups.

Neighbouring ranks share a node. All matrices of one placement and shape have one ``Shards``.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.optim._muon_engine.layouts import Key, Layout, Region, Shards


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.testing._internal.distributed._muon.model_shapes import Model, Shape

    Place = Callable[[Shape], Shards]


TP_RANKS = 8


def cut(length: int, parts: int, part: int) -> tuple[int, int]:
    """Start and length of ``part`` as ``torch.chunk`` cuts, which leaves the last ones short or empty."""
    step = -(-length // parts)
    start = min(length, part * step)
    return start, min(step, length - start)


def rows_cut(
    parts: int, piece: tuple[int, int, int, int]
) -> Iterator[tuple[Region, ...]]:
    """FSDP: the rows of ``piece`` (row, column, height, width) over ``parts`` ranks."""
    row, column, height, width = piece
    for part in range(parts):
        start, kept = cut(height, parts, part)
        yield (Region(row + start, column, kept, width, 0, width),) if kept else ()


def fsdp(model: Model, world: int) -> list[Layout]:
    """Rows over all ranks."""
    return hsdp(model, 1, world)


def hsdp(model: Model, replicas: int, shards: int) -> list[Layout]:
    """Rows over ``shards`` neighbours, again on each of ``replicas`` such groups."""

    @cache
    def place(shape: Shape) -> Shards:
        of_one = tuple(rows_cut(shards, (0, 0, *shape)))
        return Shards(tuple(range(replicas * shards)), of_one * replicas)

    return _layouts(model.shapes, place)


def fsdp_tp(model: Model, world: int) -> list[Layout]:
    """TP within a node, column- and row-parallel by turns; FSDP cuts the rows of each TP piece."""

    @cache
    def place(shape: Shape, by_rows: bool) -> Shards:
        rows, columns = shape
        pieces = []
        for tp in range(TP_RANKS):
            # Column-parallel is by the weight's rows: a Linear's weight is (out, in).
            start, kept = cut(rows if by_rows else columns, TP_RANKS, tp)
            piece = (start, 0, kept, columns) if by_rows else (0, start, rows, kept)
            pieces.append(list(rows_cut(world // TP_RANKS, piece)))
        # TP is the inner dimension of the mesh.
        regions = tuple(shard for at in zip(*pieces, strict=True) for shard in at)
        return Shards(tuple(range(world)), regions)

    return [
        Layout(Key(i), shape, torch.float32, place(shape, i % 2 == 0))
        for i, shape in enumerate(model.shapes)
    ]


def ep_fsdp(model: Model, world: int, ep: int) -> list[Layout]:
    """Experts over ``ep`` neighbours, each one's rows over the ranks at its place; the rest as FSDP."""

    @cache
    def place(shape: Shape, at: int) -> Shards:
        parts = world // ep
        regions = tuple(rows_cut(parts, (0, 0, *shape)))
        return Shards(tuple(range(at, world, ep)), regions)

    layouts = _layouts(model.dense, _of_all(world))
    for expert in range(model.n_experts):
        at = expert * ep // model.n_experts
        for shape in model.expert:
            key = Key(len(layouts), expert=expert)
            layouts.append(Layout(key, shape, torch.float32, place(shape, at)))
    return layouts


def _of_all(world: int) -> Place:
    ranks = tuple(range(world))
    return cache(lambda shape: Shards(ranks, tuple(rows_cut(world, (0, 0, *shape)))))


def _layouts(shapes: list[Shape], place: Place) -> list[Layout]:
    return [
        Layout(Key(i), shape, torch.float32, place(shape))
        for i, shape in enumerate(shapes)
    ]
