"""Draws route.png: one matrix in a step, whose shards are gathered by its owner and scattered by it.

    .venv/bin/python docs/figures/route.py [FILE.png]

Four ranks are a mesh of 2 x 2. Each arrow has the number of elements that it stands for. A matrix of 7 x 10 does not
divide by the mesh, so shards differ in size, and nothing is padded.
"""

import sys
from pathlib import Path

import matplotlib


matplotlib.use("Agg")

import torch
from matplotlib import pyplot
from matplotlib.colors import ListedColormap


RANKS, OWNER = range(4), 2
ROWS, COLUMNS = 7, 10
# Title -> the dimension of the matrix that each dimension of the mesh cuts. None has replicas.
PANELS = {
    "FSDP x TP:  (Shard(0), Shard(1))": (0, 1),
    "HSDP:  (Replicate(), Shard(0))": (None, 0),
}
COLOURS = ["#2f6fb5", "#d9822b", "#3d9a5f", "#a14fb0"]
# Where a rank holds nothing, a matrix is grey.
CELLS = ListedColormap(COLOURS).with_extremes(bad="#e9ecf0")
CELL, ROW_HEIGHT = 0.17, 1.55
# From left to right: the momentum's shards, the matrix on its owner before and after Newton-Schulz, the update's shards.
BEFORE, BEFORE_NS, AFTER_NS, AFTER = 2.0, 5.65, 8.35, 12.0
EDGE = 0.95  # from the middle of a matrix to an arrow


def shard_of(rank, cuts):
    """The numbers of the elements that a rank holds."""
    shard = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
    for place, dim in zip(divmod(rank, 2), cuts):
        if dim is not None:
            shard = shard.chunk(2, dim)[place]
    return shard


def transfers(cuts):
    """Rank -> the elements that it sends to the owner, and those that it receives."""
    gather, scatter = {}, {}
    for rank in RANKS:
        if rank == OWNER:
            continue
        scatter[rank] = shard_of(rank, cuts).numel()
        places = zip(divmod(rank, 2), divmod(OWNER, 2), cuts)
        # Of replicas, only those of the owner's own row of the mesh send.
        if all(mine == its for mine, its, dim in places if dim is None):
            gather[rank] = scatter[rank]
    return gather, scatter


def height_of(rank):
    return -ROW_HEIGHT * rank


def draw_matrix(axes, x, rank, shards, colours):
    """A whole matrix, in which the elements of ``shards`` are coloured."""
    grid = torch.full((ROWS * COLUMNS,), torch.nan)
    for shard in shards:
        grid[shard.flatten()] = float(colours[shard[0, 0].item()])
    left, top = x - COLUMNS * CELL / 2, height_of(rank) + ROWS * CELL / 2
    columns = [left + CELL * column for column in range(COLUMNS + 1)]
    rows = [top - CELL * row for row in range(ROWS + 1)]
    options = {"cmap": CELLS, "vmin": 0, "vmax": len(COLOURS), "linewidth": 0.7}
    grid = grid.view(ROWS, COLUMNS)
    axes.pcolormesh(columns, rows, grid, edgecolors="white", **options)


def draw_arrow(axes, start, end, text, colour, style="solid"):
    (x, y), (other_x, other_y) = start, end
    options = {"arrowstyle": "-|>", "color": colour, "linestyle": style, "lw": 2}
    axes.annotate("", xy=end, xytext=start, arrowprops=options)
    box = {"boxstyle": "round,pad=0.18", "facecolor": "white", "edgecolor": "none"}
    middle = (x + other_x) / 2, (y + other_y) / 2
    axes.text(*middle, text, color=colour, ha="center", va="center", bbox=box)


def draw(axes, title, cuts):
    shards = [shard_of(rank, cuts) for rank in RANKS]
    firsts = dict.fromkeys(shard[0, 0].item() for shard in shards)
    # Replicas hold equal shards, and have one colour.
    colours = {first: number for number, first in enumerate(firsts)}
    axes.set(xlim=(0, 14), ylim=(height_of(3.9), 1.5), aspect="equal")
    axes.axis("off")
    axes.text(0, 1.3, title, size=14, weight="bold")
    middle = (BEFORE_NS + AFTER_NS) / 2
    heads = {BEFORE: "momentum", AFTER: "update", middle: f"owner, rank {OWNER}"}
    for x, text in heads.items():
        axes.text(x, 0.8, text, size=12, color="#8c959f", ha="center")
    frame = (BEFORE_NS - 1, height_of(OWNER) - 0.75), AFTER_NS - BEFORE_NS + 2, 1.5
    axes.add_patch(pyplot.Rectangle(*frame, facecolor="#fff8e6", edgecolor="#e3c98a"))
    for x in (BEFORE_NS, AFTER_NS):
        draw_matrix(axes, x, OWNER, shards, colours)
    y = height_of(OWNER)
    draw_arrow(axes, (BEFORE_NS + EDGE, y), (AFTER_NS - EDGE, y), "NS", "#24292f")

    gather, scatter = transfers(cuts)
    for rank, shard in enumerate(shards):
        place = f"rank {rank}\n{divmod(rank, 2)}"
        axes.text(BEFORE - 1, height_of(rank), place, ha="right", va="center")
        axes.text(AFTER + 1, height_of(rank), place, va="center")
        colour = COLOURS[colours[shard[0, 0].item()]]
        # Arrows from above and below meet the owner's frame at different heights.
        meeting = height_of(OWNER) + 0.25 * (OWNER - rank)
        for x, inner, sent in (
            (BEFORE, BEFORE_NS - 0.1, gather),
            (AFTER, AFTER_NS + 0.1, scatter),
        ):
            draw_matrix(axes, x, rank, [shard], colours)
            towards = 1 if x < inner else -1
            outside = x + towards * EDGE, height_of(rank)
            inside = inner - towards * EDGE, meeting
            ends = (outside, inside) if sent is gather else (inside, outside)
            if rank == OWNER:
                draw_arrow(axes, *ends, f"{shard.numel()} stay", colour, "dashed")
            elif rank in sent:
                draw_arrow(axes, *ends, sent[rank], colour)
    print(title)
    for x, kind, sent in ((0, "gather", gather), (7.2, "scatter", scatter)):
        elements = sum(sent.values())
        total = f"{kind}: {elements} elements = {2 * elements} bytes in bf16"
        axes.text(x, height_of(3.75), total, size=12)
        print(f"  {total}")


def main(out):
    figure, all_axes = pyplot.subplots(2, 1, figsize=(10, 10))
    for axes, (title, cuts) in zip(all_axes, PANELS.items()):
        draw(axes, title, cuts)
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.01, top=0.99, hspace=0.03)
    # No version of matplotlib in the file, so that equal pictures are equal files.
    figure.savefig(out, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    beside = Path(__file__).with_suffix(".png")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else beside)
