"""Draws one matrix's way through a step: gather, Newton-Schulz on its owner, scatter.

    .venv/bin/python tools/figures/route.py --out docs/figures/route.png

Whatever is drawn is read from the engine's own layouts, owners and schedule, over a process group that
pretends: who holds which elements, who sends what to whom, and how much of it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib


matplotlib.use("Agg")

import torch
import torch.distributed as dist
from matplotlib import colors, pyplot
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import empty, Replicate, Shard
from torch.optim import _muon
from torch.optim._muon_engine.layouts.dtensor import DTensorReader
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners
from torch.testing._internal.distributed.fake_pg import FakeStore


if TYPE_CHECKING:
    from torch.optim._muon_engine.layouts import Region
    from torch.optim._muon_engine.schedule.specs import PackSpec, Schedule


RANKS = (0, 1, 2, 3)
# Neither side divides by the mesh: shards differ in size, and nothing is padded.
SHAPE = (7, 10)
# Four of one shape, so that each rank owns one; the drawn one is not rank 0's.
COPIES, OWNER = 4, 2
PANELS = (
    ("FSDP x TP:  (Shard(0), Shard(1))", (Shard(0), Shard(1))),
    ("HSDP:  (Replicate(), Shard(0))", (Replicate(), Shard(0))),
)

INK, FAINT = "#24292f", "#8c959f"
HUES = ("#2f6fb5", "#d9822b", "#3d9a5f", "#a14fb0")
CELL = 0.17
ROW_HEIGHT = 1.55


@dataclass(frozen=True)
class Trip:
    """What one rank sends another of the drawn matrix."""

    sender: int
    receiver: int
    elements: int
    flags: int

    @property
    def label(self) -> str:
        flag = "1 flag" if self.flags == 1 else f"{self.flags} flags"
        return f"{self.elements} + {flag}" if self.elements else f"{flag} only"


@dataclass(frozen=True)
class Route:
    schedule: Schedule
    matrix: int
    coordinates: dict[int, tuple[int, int]]
    gather: tuple[Trip, ...]
    scatter: tuple[Trip, ...]


def route(placements: tuple) -> Route:
    """The drawn matrix's route over a 2x2 mesh, as every rank would compute it."""
    mesh = init_device_mesh("cpu", (2, 2))
    params = [
        empty(SHAPE, device_mesh=mesh, placements=list(placements))
        for _ in range(COPIES)
    ]
    layouts = DTensorReader().read(params, [None] * COPIES)
    schedule = make_schedule(layouts, assign_owners(layouts), _muon._NS_DTYPE)
    matrix = schedule.owners.index(OWNER)
    gather, scatter = [], []
    for bucket in schedule.buckets:
        if matrix not in bucket.matrices:
            continue
        for rank in RANKS:
            spec = schedule.spec(bucket, rank, RANKS)
            gather += trips(spec.gather_send, matrix, rank)
            scatter += trips(spec.scatter_send, matrix, rank)
    coordinates = {int(mesh.mesh[i, j]): (i, j) for i in (0, 1) for j in (0, 1)}
    return Route(schedule, matrix, coordinates, tuple(gather), tuple(scatter))


def trips(sent: PackSpec, matrix: int, sender: int) -> list[Trip]:
    """What ``sender`` sends of ``matrix`` in a gather or scatter, by receiver."""
    result = []
    start = 0
    for receiver, split in zip(RANKS, sent.splits, strict=True):
        here = range(start, start + split)
        start += split
        elements = sum(
            packed.region.numel
            for packed in sent.regions
            if packed.matrix == matrix and packed.offset in here
        )
        flags = sum(f.matrix == matrix and f.offset in here for f in sent.flags)
        if flags:
            result.append(Trip(sender, receiver, elements, flags))
    return result


class Panel:
    """One route, drawn from left to right; rows are ranks."""

    WIDTH = 14.0
    HEIGHT = ROW_HEIGHT * len(RANKS)
    BEFORE, BEFORE_NS, AFTER_NS, AFTER = 2.0, 5.65, 8.35, 12.0

    def __init__(self, axes, title: str, found: Route) -> None:
        self.axes = axes
        self.found = found
        self.layout = found.schedule.layouts[found.matrix]
        self.owner = found.schedule.owners[found.matrix]
        # Replicas hold equal shards, and have one colour.
        shards = dict.fromkeys(self.layout.shards.regions)
        self.hue_of = dict(zip(shards, HUES, strict=False))
        torch.manual_seed(3)
        self.momentum = torch.randn(SHAPE)
        self.update = _muon._zeropower_via_newtonschulz(
            self.momentum,
            (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C),
            _muon.DEFAULT_NS_STEPS,
            _muon.EPS,
        ).float()
        self.draw(title)

    def draw(self, title: str) -> None:
        axes = self.axes
        axes.set_xlim(0, self.WIDTH)
        axes.set_ylim(-0.75, self.HEIGHT + 1.0)
        axes.set_aspect("equal")
        axes.axis("off")
        axes.text(0.05, self.HEIGHT + 0.62, title, size=14, weight="bold", color=INK)
        for x, words in (
            (self.BEFORE, "momentum"),
            ((self.BEFORE_NS + self.AFTER_NS) / 2, f"on the owner, rank {self.owner}"),
            (self.AFTER, "update"),
        ):
            axes.text(x, self.HEIGHT + 0.02, words, size=11.5, color=FAINT, ha="center")
        for rank in RANKS:
            self.name(rank)
            self.matrix(self.BEFORE, self.y(rank), self.momentum, rank)
            self.matrix(self.AFTER, self.y(rank), self.update, rank)
        y = self.y(self.owner)
        self.frame(y)
        self.matrix(self.BEFORE_NS, y, self.momentum)
        self.matrix(self.AFTER_NS, y, self.update)
        self.arrow((self.BEFORE_NS + 0.95, y), (self.AFTER_NS - 0.95, y), INK, 2.0)
        middle = (self.BEFORE_NS + self.AFTER_NS) / 2
        axes.text(middle, y + 0.14, "NS", size=11, ha="center", color=INK)
        self.own_shard(self.BEFORE, self.BEFORE_NS)
        self.own_shard(self.AFTER_NS, self.AFTER)
        for trip in self.found.gather:
            self.trip(trip, trip.sender, self.BEFORE, self.BEFORE_NS, into_owner=True)
        for trip in self.found.scatter:
            self.trip(trip, trip.receiver, self.AFTER_NS, self.AFTER, into_owner=False)
        self.totals()

    def y(self, rank: int) -> float:
        return self.HEIGHT - ROW_HEIGHT * (rank + 0.5) - 0.2

    def name(self, rank: int) -> None:
        mark = "bold" if rank == self.owner else "normal"
        where = self.found.coordinates[rank]
        y = self.y(rank)
        for x, side in ((self.BEFORE - 1.0, "right"), (self.AFTER + 1.0, "left")):
            self.axes.text(
                x, y + 0.06, f"rank {rank}", size=12, weight=mark, color=INK, ha=side
            )
            self.axes.text(x, y - 0.3, f"{where}", size=10.5, color=FAINT, ha=side)

    def matrix(self, x: float, y: float, values, holder: int | None = None) -> None:
        """The whole matrix around (x, y); coloured is what ``holder`` has of it, by default all."""
        rows, columns = SHAPE
        left, top = x - columns * CELL / 2, y + rows * CELL / 2
        self.axes.add_patch(
            Rectangle(
                (left, top - rows * CELL),
                columns * CELL,
                rows * CELL,
                facecolor="#f6f8fa",
                edgecolor="#d0d7de",
                linewidth=0.8,
                zorder=2,
            )
        )
        shown = self.hue_of if holder is None else {self.layout.shards.of(holder): None}
        for shard in shown:
            for region in shard:
                self.cells(left, top, region, values, self.hue_of[shard])

    def cells(self, left: float, top: float, region: Region, values, hue: str) -> None:
        largest = values.abs().max()
        for i in range(region.row, region.row + region.height):
            for j in range(region.column, region.column + region.width):
                strength = 0.25 + 0.75 * float(values[i, j].abs() / largest)
                self.axes.add_patch(
                    Rectangle(
                        (left + j * CELL, top - (i + 1) * CELL),
                        CELL,
                        CELL,
                        facecolor=blend(hue, strength),
                        edgecolor="white",
                        linewidth=0.5,
                        zorder=3,
                    )
                )

    def frame(self, y: float) -> None:
        left, right = self.BEFORE_NS - 1.08, self.AFTER_NS + 1.08
        self.axes.add_patch(
            Rectangle(
                (left, y - 0.8),
                right - left,
                1.6,
                facecolor="#fff8e6",
                edgecolor="#e3c98a",
                linewidth=1.0,
                zorder=1,
            )
        )

    def own_shard(self, start: float, end: float) -> None:
        y = self.y(self.owner)
        hue = self.hue_of[self.layout.shards.of(self.owner)]
        into_owner = end == self.BEFORE_NS
        left = start + (0.95 if into_owner else 1.1)
        right = end - (1.1 if into_owner else 0.95)
        self.arrow((left, y), (right, y), hue, 1.4, dashed=True)
        elements = sum(r.numel for r in self.layout.shards.of(self.owner))
        self.label(((left + right) / 2, y + 0.2), f"{elements} stay", hue)

    def trip(
        self, trip: Trip, rank: int, start: float, end: float, *, into_owner: bool
    ) -> None:
        rank_y, owner_y = self.y(rank), self.y(self.owner)
        # Ranks next to the owner meet its edge further out than ranks beyond them.
        above = rank_y > owner_y
        lean = 0.4 if abs(rank - self.owner) == 1 else 0.68
        edge = owner_y + (lean if above else -lean)
        left, right = start + 0.95, end - 1.1
        a, b = (rank_y, edge) if into_owner else (edge, rank_y)
        if not into_owner:
            left, right = start + 1.1, end - 0.95
        hue = self.hue_of[self.layout.shards.of(rank)]
        width = 1.2 + 0.09 * trip.elements if trip.elements else 0.9
        colour = hue if trip.elements else FAINT
        self.arrow((left, a), (right, b), colour, width, dotted=not trip.elements)
        # The labels of arrows that meet keep away from each other.
        share = 0.45 if abs(rank - self.owner) == 1 else 0.33
        share = share if into_owner else 1 - share
        at = (left + (right - left) * share, a + (b - a) * share)
        self.label(at, trip.label, colour)

    def arrow(
        self, start, end, colour, width, dashed: bool = False, dotted: bool = False
    ) -> None:
        style = "dashed" if dashed else "dotted" if dotted else "solid"
        self.axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="-|>",
                mutation_scale=12,
                linestyle=style,
                linewidth=width,
                color=colour,
                shrinkA=0,
                shrinkB=0,
                zorder=4,
            )
        )

    def label(self, at, words: str, colour: str) -> None:
        self.axes.text(
            *at,
            words,
            size=10.5,
            color=blend(colour, 1.0, towards="black"),
            ha="center",
            va="center",
            zorder=6,
            bbox={
                "boxstyle": "round,pad=0.18",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.92,
            },
        )

    def totals(self) -> None:
        y = -0.5
        for x, name, found in (
            (0.05, "gather", self.found.gather),
            (self.WIDTH / 2 + 0.2, "scatter", self.found.scatter),
        ):
            self.axes.text(x, y, total(name, found), size=11.5, color=INK)


def total(name: str, found: tuple[Trip, ...]) -> str:
    elements = sum(trip.elements for trip in found)
    flags = sum(trip.flags for trip in found)
    size = _muon._NS_DTYPE.itemsize
    return (
        f"{name}: {elements} elements + {flags} flags = "
        f"{(elements + flags) * size} bytes in bf16"
    )


def blend(hue: str, strength: float, towards: str = "white") -> tuple:
    """``hue`` over white; at full strength, towards black, the darker ink of a label."""
    one, other = colors.to_rgb(hue), colors.to_rgb(towards)
    share = 0.72 if towards == "black" else strength
    return tuple(share * a + (1 - share) * b for a, b in zip(one, other, strict=True))


def draw(out: Path) -> None:
    figure, panels = pyplot.subplots(2, 1, figsize=(10, 11.6))
    for axes, (title, placements) in zip(panels, PANELS, strict=True):
        found = route(placements)
        Panel(axes, title, found)
        print(title)
        print(f"  {total('gather', found.gather)}")
        print(f"  {total('scatter', found.scatter)}")
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.01, top=0.99, hspace=0.03)
    out.parent.mkdir(parents=True, exist_ok=True)
    # No version of matplotlib in the file, so that equal pictures are equal files.
    figure.savefig(out, dpi=150, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/figures/route.png"))
    arguments = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=len(RANKS), store=FakeStore())
    try:
        draw(arguments.out)
    finally:
        dist.destroy_process_group()
    print(arguments.out)


if __name__ == "__main__":
    main()
