"""The models, meshes and numbers of ranks of the table, and the layouts that DTensor would make of them."""

import itertools
from functools import cache
from typing import NamedTuple

import torch
from torch.optim._muon_engine.layouts.layout import Key, Layout, Region, Shards
from torch.optim._muon_engine.layouts.divide import split_fused
from torch.optim._muon_split import Split
from tools.bench.models import Model, MODELS, Shape


class Rectangle(NamedTuple):
    """A part of a matrix; ``row`` and ``column`` are those of its first element."""

    row: int
    column: int
    height: int
    width: int


def cut(length: int, parts: int, part: int) -> tuple[int, int]:
    """The start and length of ``part`` as ``torch.chunk`` cuts; the last parts may be short or empty."""
    step = -(-length // parts)
    start = min(length, part * step)
    return start, min(step, length - start)


def rows_cut(rectangle: Rectangle, parts: int) -> tuple[tuple[Region, ...], ...]:
    """The shards of FSDP: the rows of ``rectangle`` over ``parts`` ranks."""
    _, column, _, width = rectangle
    shards: list[tuple[Region, ...]] = []
    for part in range(parts):
        start, height = cut(rectangle.height, parts, part)
        regions = []
        if height:
            row = rectangle.row + start
            regions.append(Region(row, column, height, width, 0, width))
        shards.append(tuple(regions))
    return tuple(shards)


class Placement:
    """How ``kind`` places the matrices of a model over ``outer`` x ``inner`` ranks, as in :func:`layouts_of`.

    All matrices of one placement and shape share one ``Shards``.
    """

    def __init__(self, model: Model, kind: str, outer: int, inner: int) -> None:
        self.kind = kind
        self.outer = outer
        self.inner = inner
        self.world = outer * inner
        self.n_experts = model.n_experts
        self.is_stacked = model.stacked and kind in ("fsdp", "hsdp")
        # Whether a rank has other experts than the next one.
        self.places_experts = self.is_stacked or kind == "ep"
        # How many ranks have different experts.
        self.expert_places = self.world if kind == "fsdp" else inner
        self.dense = cache(self._dense)
        self.of_expert_place = cache(self._of_expert_place)

    def _dense(self, shape: Shape, by_columns: bool) -> Shards:
        """The shards of a matrix outside of experts; TP cuts its columns if ``by_columns``."""
        ranks = tuple(range(self.world))
        whole = Rectangle(0, 0, *shape)
        if self.kind in ("hsdp", "ddp"):
            return Shards(ranks, rows_cut(whole, self.inner) * self.outer)
        if self.kind != "tp":
            return Shards(ranks, rows_cut(whole, self.world))
        rows, columns = shape
        by_tp_rank = []
        for tp_rank in range(self.inner):
            if by_columns:
                column, width = cut(columns, self.inner, tp_rank)
                piece = Rectangle(0, column, rows, width)
            else:
                row, height = cut(rows, self.inner, tp_rank)
                piece = Rectangle(row, 0, height, columns)
            by_tp_rank.append(rows_cut(piece, self.outer))
        # Ranks of one TP group are neighbours.
        by_fsdp_rank = zip(*by_tp_rank, strict=True)
        shards = tuple(itertools.chain.from_iterable(by_fsdp_rank))
        return Shards(ranks, shards)

    def expert(self, shape: Shape, expert: int) -> Shards:
        """The shards of a matrix of ``expert``."""
        place = expert * self.expert_places // self.n_experts
        if self.is_stacked:
            experts_of_rank = -(-self.n_experts // self.expert_places)
            place = expert // experts_of_rank
        return self.of_expert_place(shape, place)

    def _of_expert_place(self, shape: Shape, place: int) -> Shards:
        ranks = tuple(range(place, self.world, self.expert_places))
        parts = 1 if self.is_stacked else self.outer
        replicas = len(ranks) // parts
        return Shards(ranks, rows_cut(Rectangle(0, 0, *shape), parts) * replicas)


def layouts_of(model: Model, kind: str, outer: int, inner: int = 1) -> list[Layout]:
    """The layouts of a model over ``outer`` x ``inner`` ranks, of which ``inner`` are neighbours.

    - fsdp: rows over all ranks;
    - hsdp: rows over the inner ranks, with ``outer`` replicas; ddp: replicas alone;
    - tp: TP over the inner ranks, column- and row-parallel in turn; FSDP cuts the rows of each piece;
    - ep: experts over the inner ranks, and the rows of each over the outer ranks; the rest as in fsdp.

    Under fsdp and hsdp, each rank has other experts of a stack, because FSDP2 cuts dimension 0.
    """
    placement = Placement(model, kind, outer, inner)
    names = model.names or [None] * len(model.shapes)
    dense, n_experts = model.shapes, 0
    if placement.places_experts:
        dense, n_experts = model.dense, model.n_experts
    layouts: list[Layout] = []
    for index, shape in enumerate(dense):
        by_columns = kind == "tp" and index % 2 == 1
        shards = placement.dense(shape, by_columns)
        key = Key(index, name=names[index])
        layouts.append(Layout(key, shape, torch.float32, shards))
    for expert in range(n_experts):
        for shape in model.expert:
            index = len(layouts)
            shards = placement.expert(shape, expert)
            key = Key(index, name=names[index], expert=expert)
            layouts.append(Layout(key, shape, torch.float32, shards))
    if not model.is_split:
        return layouts
    return _split(layouts, model)


def _split(layouts: list[Layout], model: Model) -> list[Layout]:
    """The layouts with those of the parts in place of each fused weight."""
    found = []
    for layout in layouts:
        split = model.fused.get(layout.key.name, Split())
        if split.sizes:
            found.extend(split_fused(layout, split))
        else:
            found.append(layout)
    return found


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
    def mesh(self) -> str:
        two_dimensions = {"hsdp": "HSDP", "tp": "FSDP x TP", "ep": "FSDP x EP"}
        if self.kind in two_dimensions:
            return f"{two_dimensions[self.kind]} {self.outer} x {self.inner}"
        return self.kind.upper()

    @property
    def title(self) -> str:
        return f"{self.name}, {self.mesh}, {self.world} ranks"

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
