"""Draws route.png: one matrix in a step, whose shards are gathered by its owner and scattered by it.

    .venv/bin/python docs/figures/route.py [FILE.png]

All that is drawn is read from the engine's own layouts, owners and schedule, over a process group that
pretends: which rank holds which region, what ranks send each other in the matrix's bucket, and how much.
With two replicas no shard goes by a relay.
"""

import sys
from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from pathlib import Path

import matplotlib


matplotlib.use("Agg")

import torch
import torch.distributed as dist
from matplotlib import colors, pyplot
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import empty, Replicate, Shard
from torch.optim import _newton_schulz as ns
from torch.optim._muon_engine.layouts.layout import Key
from torch.optim._muon_engine.layouts.dtensor import DTensorLayouts
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners
from torch.testing._internal.distributed.fake_pg import FakeStore


RANKS = (0, 1, 2, 3)
# Neither side divides by the mesh: shards differ in size, and nothing is padded.
SHAPE = ROWS, COLUMNS = 7, 10
# Four of one shape, so that each rank owns one; the drawn one is not rank 0's.
COPIES, OWNER = 4, 2
PANELS = {
    "FSDP x TP:  (Shard(0), Shard(1))": (Shard(0), Shard(1)),
    "HSDP:  (Replicate(), Shard(0))": (Replicate(), Shard(0)),
}
INK, FAINT, PAPER = "#24292f", "#8c959f", "#f6f8fa"
HUES = ("#2f6fb5", "#d9822b", "#3d9a5f", "#a14fb0")
CELL, ROW_HEIGHT, WIDTH = 0.17, 1.55, 14.0
HEIGHT = ROW_HEIGHT * len(RANKS)
# From left to right: the momentum's shards, the matrix on its owner, the update's shards.
BEFORE, BEFORE_NS, AFTER_NS, AFTER = 2.0, 5.65, 8.35, 12.0


class Panel:
    """One matrix under one placement; rows are ranks."""

    def __init__(self, axes, title, placements):
        self.axes = axes
        mesh = init_device_mesh("cpu", (2, 2))
        param = empty(SHAPE, device_mesh=mesh, placements=list(placements))
        reader = DTensorLayouts()
        layouts = []
        for index in range(COPIES):
            layouts.extend(reader.of(Key(index), param))
        self.schedule = make_schedule(layouts, assign_owners(layouts))
        self.matrix = self.schedule.owners.index(OWNER)
        self.shards = layouts[self.matrix].shards
        # Replicas hold equal shards, and have one colour.
        different_shards = dict.fromkeys(self.shards.regions)
        self.hues = dict(zip(different_shards, HUES))
        self.coordinates = {}
        for outer, ranks in enumerate(mesh.mesh.tolist()):
            for inner, rank in enumerate(ranks):
                self.coordinates[rank] = outer, inner
        self.draw(title)

    def sent(self, kind):
        """Elements that ranks send each other in ``kind``, gather or scatter."""
        elements = Counter()
        for bucket in self.schedule.buckets:
            if self.matrix not in bucket.matrices:
                continue
            for rank in RANKS:
                packs = self.schedule.packs(bucket, rank)
                pack = getattr(packs, f"{kind}_send")
                ends = list(accumulate(pack.split_sizes))
                for packed in pack.regions:
                    if packed.matrix == self.matrix:
                        receiver = bisect_right(ends, packed.offset)
                        elements[rank, receiver] += packed.region.numel
        return elements

    def draw(self, title):
        axes = self.axes
        axes.set(xlim=(0, WIDTH), ylim=(-0.75, HEIGHT + 1.0), aspect="equal")
        axes.axis("off")
        self.words(0.05, HEIGHT + 0.62, title, 14, ha="left", weight="bold")
        middle = (BEFORE_NS + AFTER_NS) / 2
        heads = {
            BEFORE: "momentum",
            middle: f"on the owner, rank {OWNER}",
            AFTER: "update",
        }
        for x, words in heads.items():
            self.words(x, HEIGHT + 0.02, words, 11.5, FAINT)
        momentum, update = momentum_and_update()
        for rank in RANKS:
            y = y_of(rank)
            shard = self.shards.of(rank)
            self.name(rank)
            self.draw_matrix(BEFORE, y, momentum, [shard])
            self.draw_matrix(AFTER, y, update, [shard])
        self.draw_owner(momentum, update)
        self.draw_exchange("gather", BEFORE + 0.95, BEFORE_NS - 1.1)
        self.words(0.05, -0.5, self.total("gather"), 11.5, ha="left")
        self.draw_exchange("scatter", AFTER_NS + 1.1, AFTER - 0.95)
        self.words(WIDTH / 2 + 0.2, -0.5, self.total("scatter"), 11.5, ha="left")

    def draw_owner(self, momentum, update):
        """The whole matrix, before and after Newton-Schulz, in a frame."""
        y = y_of(OWNER)
        width = AFTER_NS - BEFORE_NS
        left, bottom = BEFORE_NS - 1.08, y - 0.8
        self.box(left, bottom, width + 2.16, 1.6, "#fff8e6", "#e3c98a", zorder=1)
        self.draw_matrix(BEFORE_NS, y, momentum, self.hues)
        self.draw_matrix(AFTER_NS, y, update, self.hues)
        start, end = (BEFORE_NS + 0.95, y), (AFTER_NS - 0.95, y)
        self.arrow(start, end, INK, 2.0)
        middle = (BEFORE_NS + AFTER_NS) / 2
        self.words(middle, y + 0.14, "NS", 11)

    def total(self, kind):
        elements = self.sent(kind).total()
        size = elements * ns.NS_DTYPE.itemsize
        return f"{kind}: {elements} elements = {size} bytes in bf16"

    def draw_exchange(self, kind, left, right):
        """Arrows between the ranks' rows and the owner's; the owner's own shard stays."""
        own_shard = self.shards.of(OWNER)
        own_elements = sum(region.numel for region in own_shard)
        y, hue = y_of(OWNER), self.hues[own_shard]
        middle = (left + right) / 2
        self.arrow((left, y), (right, y), hue, 1.4, "dashed")
        self.label(middle, y + 0.2, f"{own_elements} stay", hue)
        for (sender, receiver), elements in self.sent(kind).items():
            rank = sender if kind == "gather" else receiver
            is_near = abs(rank - OWNER) == 1
            # Ranks next to the owner meet its edge further out than ranks beyond them.
            distance = 0.4 if is_near else 0.68
            edge = y + distance if rank < OWNER else y - distance
            # The labels of arrows that meet keep away from each other.
            share = 0.45 if is_near else 0.33
            start, end = (left, y_of(rank)), (right, edge)
            if kind == "scatter":
                start, end = (left, edge), (right, y_of(rank))
                share = 1 - share
            hue = self.hues[self.shards.of(rank)]
            self.arrow(start, end, hue, 1.2 + 0.09 * elements)
            label_x = start[0] + (end[0] - start[0]) * share
            label_y = start[1] + (end[1] - start[1]) * share
            self.label(label_x, label_y, str(elements), hue)

    def name(self, rank):
        y = y_of(rank)
        weight = "bold" if rank == OWNER else "normal"
        for x, side in ((BEFORE - 1.0, "right"), (AFTER + 1.0, "left")):
            self.words(x, y + 0.06, f"rank {rank}", 12, ha=side, weight=weight)
            where = str(self.coordinates[rank])
            self.words(x, y - 0.3, where, 10.5, FAINT, ha=side)

    def draw_matrix(self, x, y, values, shards):
        """The whole matrix around (x, y); ``shards`` of it are coloured."""
        width, height = COLUMNS * CELL, ROWS * CELL
        left, top = x - width / 2, y + height / 2
        self.box(left, top - height, width, height, PAPER, "#d0d7de", zorder=2)
        magnitudes = values.abs()
        strengths = 0.25 + 0.75 * magnitudes / magnitudes.max()
        for shard in shards:
            for region in shard:
                for row in range(region.row, region.row + region.height):
                    for column in range(region.column, region.column + region.width):
                        strength = float(strengths[row, column])
                        hue = blend(self.hues[shard], "white", strength)
                        cell_x = left + column * CELL
                        cell_y = top - (row + 1) * CELL
                        self.box(cell_x, cell_y, CELL, CELL, hue, "white", zorder=3)

    def box(self, x, y, width, height, face, edge, zorder):
        rectangle = Rectangle(
            (x, y),
            width,
            height,
            facecolor=face,
            edgecolor=edge,
            linewidth=0.7,
            zorder=zorder,
        )
        self.axes.add_patch(rectangle)

    def arrow(self, start, end, colour, width, style="solid"):
        patch = FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=12,
            shrinkA=0,
            shrinkB=0,
            linestyle=style,
            linewidth=width,
            color=colour,
            zorder=4,
        )
        self.axes.add_patch(patch)

    def words(self, x, y, text, size, color=INK, ha="center", **style):
        self.axes.text(x, y, text, size=size, color=color, ha=ha, **style)

    def label(self, x, y, text, colour):
        box = {"boxstyle": "round,pad=0.18", "facecolor": "white", "edgecolor": "none"}
        dark = blend(colour, "black", 0.72)
        self.words(x, y, text, 10.5, dark, va="center", zorder=6, bbox=box)


def y_of(rank):
    return HEIGHT - ROW_HEIGHT * (rank + 0.5) - 0.2


def blend(hue, other, share):
    mixed = []
    for one_part, other_part in zip(colors.to_rgb(hue), colors.to_rgb(other)):
        mixed.append(share * one_part + (1 - share) * other_part)
    return tuple(mixed)


def momentum_and_update():
    torch.manual_seed(3)
    momentum = torch.randn(SHAPE)
    coefficients = ns.DEFAULT_A, ns.DEFAULT_B, ns.DEFAULT_C
    matrix = momentum.to(ns.NS_DTYPE)
    update = ns.newton_schulz(matrix, coefficients, ns.DEFAULT_NS_STEPS, ns.EPS)
    return momentum, update.float()


def main(out):
    dist.init_process_group("fake", rank=0, world_size=len(RANKS), store=FakeStore())
    figure, all_axes = pyplot.subplots(2, 1, figsize=(10, 11.6))
    for axes, (title, placements) in zip(all_axes, PANELS.items()):
        panel = Panel(axes, title, placements)
        print(f"{title}\n  {panel.total('gather')}\n  {panel.total('scatter')}")
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.01, top=0.99, hspace=0.03)
    # No version of matplotlib in the file, so that equal pictures are equal files.
    figure.savefig(out, dpi=150, metadata={"Software": None})
    dist.destroy_process_group()


if __name__ == "__main__":
    beside = Path(__file__).with_suffix(".png")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else beside)
