"""Helpers for tests of Muon's layouts and schedules: made-up shards of matrices."""

import math

import torch
from torch.optim._muon_engine.layouts.layout import Key, Layout, Region, Shards


def rows_of(shape, start, stop):
    """One rank's regions: whole rows."""
    if stop <= start or not shape[1]:
        return ()
    return (Region(start, 0, stop - start, shape[1], 0, shape[1]),)


def cut(length, parts):
    """Start and end of each part, as FSDP cuts rows."""
    step = math.ceil(length / parts)
    found = []
    for part in range(parts):
        start = min(length, part * step)
        found.append((start, min(length, start + step)))
    return found


def shards_of(shapes, fsdp, tp=1, replicas=1):
    """Matrices whose columns TP cuts, and whose rows FSDP."""
    shards = {}
    ranks = tuple(range(fsdp * tp * replicas))
    for rows, columns in set(shapes):
        regions = []
        for row, last_row in cut(rows, fsdp):
            for column, last_column in cut(columns, tp):
                height, width = last_row - row, last_column - column
                if height and width:
                    region = Region(row, column, height, width, 0, width)
                    regions.append((region,))
                else:
                    regions.append(())
        shards[rows, columns] = Shards(ranks, tuple(regions) * replicas)
    layouts = []
    for index, shape in enumerate(shapes):
        layouts.append(Layout(Key(index), shape, torch.float32, shards[shape]))
    return layouts
