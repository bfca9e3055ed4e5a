"""The losses of both algorithms on one process, and what rounding alone does to them."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import matplotlib


matplotlib.use("Agg")
from matplotlib import pyplot


if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def draw(path: Path, found: Sequence[dict[str, Any]]) -> None:
    runs = {
        (one["algorithm"], one["world"] > 1): one["losses"]
        for one in found
        if one["seed"] == found[0]["seed"]
    }
    quintic, gram = runs["quintic", False], runs["gram", False]
    figure, (curves, gap) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, len(quintic) + 1)
    # The curves lie on each other, so the lower one is wide and pale.
    curves.plot(steps, quintic, color="#9ecae1", linewidth=5, label="quintic")
    curves.plot(steps, gram, color="#08306b", linewidth=1.2, label="gram")
    curves.set_ylabel("loss (nats per byte)")
    curves.legend(frameon=False)
    others = [("gram", gram, "#a63603")]
    if ("quintic", True) in runs:
        many = runs["quintic", True]
        others.append(("quintic on several processes", many, "#999999"))
    for name, other, color in others:
        away = [abs(a - b) for a, b in zip(quintic, other, strict=True)]
        gap.semilogy(steps, away, color=color, linewidth=1.2, label=name)
    gap.set_ylabel("from the quintic\non one process")
    gap.set_xlabel("step")
    gap.legend(frameon=False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
