"""The models, meshes and numbers of ranks of the table, and the layouts that DTensor would make of them."""

import itertools
from functools import cache
from typing import NamedTuple

import torch
from torch.optim._muon_engine.layouts.layout import Key, Layout, Region, Shards
from torch.optim._muon_engine.layouts.divide import split_fused
from torch.optim._muon_split import Split
from tools.bench.models import Model, MODELS, Shape


def cut(length: int, parts: int, part: int) -> tuple[int, int]:
    """The start and length of ``part`` as ``torch.chunk`` cuts; the last parts may be short or empty."""
    step = -(-length // parts)
    start = min(length, part * step)
    return start, min(step, length - start)


def rows_cut(
    piece: tuple[int, int, int, int], parts: int
) -> tuple[tuple[Region, ...], ...]:
    """The shards of FSDP: the rows of ``piece`` (row, column, height, width) over ``parts`` ranks."""
    row, column, height, width = piece
    found = [cut(height, parts, part) for part in range(parts)]
    return tuple(
        (Region(row + start, column, kept, width, 0, width),) if kept else ()
        for start, kept in found
    )


def layouts_of(model: Model, kind: str, outer: int, inner: int = 1) -> list[Layout]:
    """The layouts of a model over ``outer`` x ``inner`` ranks, of which ``inner`` are neighbours.

    - fsdp: rows over all ranks;
    - hsdp: rows over the inner ranks, with ``outer`` replicas; ddp: replicas alone;
    - tp: TP over the inner ranks, column- and row-parallel in turn; FSDP cuts the rows of each piece;
    - ep: experts over the inner ranks, and the rows of each over the outer ranks; the rest as in fsdp.

    Under fsdp and hsdp, each rank has other experts of a stack, because FSDP2 cuts dimension 0.
    All matrices of one placement and shape share one ``Shards``.
    """
    world = outer * inner
    everyone = tuple(range(world))

    @cache
    def dense(shape: Shape, by_columns: bool) -> Shards:
        rows, columns = shape
        if kind in ("hsdp", "ddp"):
            return Shards(everyone, rows_cut((0, 0, *shape), inner) * outer)
        if kind != "tp":
            return Shards(everyone, rows_cut((0, 0, *shape), world))
        pieces = []
        for at in range(inner):
            start, kept = cut(columns if by_columns else rows, inner, at)
            piece = (0, start, rows, kept) if by_columns else (start, 0, kept, columns)
            pieces.append(rows_cut(piece, outer))
        regions = tuple(shard for at in zip(*pieces, strict=True) for shard in at)
        return Shards(everyone, regions)

    @cache
    def of_expert(shape: Shape, at: int) -> Shards:
        ranks = tuple(range(at, world, places))
        parts = 1 if stacked else outer
        return Shards(ranks, rows_cut((0, 0, *shape), parts) * (len(ranks) // parts))

    stacked = model.stacked and kind in ("fsdp", "hsdp")
    places = world if kind == "fsdp" else inner
    apart = stacked or kind == "ep"
    names = model.names or [None] * len(model.shapes)
    found: list[Layout] = []
    for i, shape in enumerate(model.dense if apart else model.shapes):
        shards = dense(shape, kind == "tp" and i % 2 == 1)
        found.append(Layout(Key(i, name=names[i]), shape, torch.float32, shards))
    for expert in range(model.n_experts if apart else 0):
        at = expert * places // model.n_experts
        if stacked:
            at = expert // -(-model.n_experts // places)
        for shape in model.expert:
            shards = of_expert(shape, at)
            key = Key(len(found), name=names[len(found)], expert=expert)
            found.append(Layout(key, shape, torch.float32, shards))
    fused = model.fused if model.is_split else {}
    splits = [fused.get(layout.key.name, Split()) for layout in found]
    cut_up = [split_fused(l, s) if s.sizes else [l] for l, s in zip(found, splits)]
    return list(itertools.chain.from_iterable(cut_up))


class Case(NamedTuple):
    """A row of the table; ``kind``, ``outer`` and ``inner`` as in :func:`layouts_of`."""

    name: str
    kind: str
    outer: int
    inner: int = 1
    own: Model | None = None  # if MODELS lacks it

    @property
    def model(self) -> Model:
        return self.own or MODELS[self.name]

    @property
    def world(self) -> int:
        return self.outer * self.inner

    @property
    def title(self) -> str:
        mesh = {"hsdp": "HSDP", "tp": "FSDP x TP", "ep": "FSDP x EP"}.get(self.kind)
        mesh = f"{mesh} {self.outer} x {self.inner}" if mesh else self.kind.upper()
        return f"{self.name}, {mesh}, {self.world} ranks"

    def layouts(self) -> list[Layout]:
        return layouts_of(self.model, self.kind, self.outer, self.inner)


CASES = (
    Case("GPT-2 124M", "fsdp", 8),
    Case("GPT-2 124M", "hsdp", 8, 8),
    Case("Llama 3 8B", "fsdp", 64),
    Case("Llama 3 8B", "hsdp", 64, 8),
    Case("Llama 3 8B", "tp", 16, 8),
    Case("Llama 3 70B", "fsdp", 64),
    Case("Llama 3 70B", "fsdp", 256),
    Case("Llama 3 70B", "fsdp", 1024),
    Case("Llama 3 70B", "fsdp", 2048),
    Case("Llama 3 70B", "hsdp", 4, 64),
    Case("Llama 3 70B", "tp", 256, 8),
    Case("Llama 3 405B", "fsdp", 512),
    Case("Llama 3 405B", "tp", 2048, 8),
    Case("Qwen3-235B-A22B", "fsdp", 256),
    Case("Qwen3-235B-A22B", "ep", 4, 64),
    Case("Qwen3-235B-A22B", "ep", 32, 64),
    Case("DeepSeek-V3", "fsdp", 512),
    Case("DeepSeek-V3", "ep", 8, 64),
    Case("DeepSeek-V3", "ep", 32, 64),
    Case("Kimi K2", "ep", 256, 64),
)
